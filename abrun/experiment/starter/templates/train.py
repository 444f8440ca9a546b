"""A stand-in for a trainer: REINFORCE on a bandit of ten arms, into a CSV file. Put your own in its place."""

import argparse
import csv
import math
import random

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--learning-rate", type=float, required=True)
parser.add_argument(
    "--output", required=True, help="CSV file with a column for the step and one for each metric"
)
arguments = parser.parse_args()

draw = random.Random(arguments.seed)  # the same numbers for every arm of a seed
logits = [0.0] * 10
with open(arguments.output, "w", newline="", encoding="utf-8") as file:
    rows = csv.writer(file)
    rows.writerow(["step", "reward", "entropy"])
    for step in range(1, arguments.steps + 1):
        largest = max(logits)
        weights = [math.exp(logit - largest) for logit in logits]
        policy = [weight / sum(weights) for weight in weights]
        actions = draw.choices(range(10), policy, k=64)
        rewards = [action / 9 + draw.gauss(0, 0.1) for action in actions]
        mean = sum(rewards) / len(rewards)
        for action, reward in zip(actions, rewards, strict=True):
            for index, probability in enumerate(policy):
                gradient = (index == action) - probability
                logits[index] += arguments.learning_rate * (reward - mean) * gradient / len(actions) * 10
        rows.writerow([step, mean, -sum(one * math.log(one) for one in policy if one > 0)])
        file.flush()
