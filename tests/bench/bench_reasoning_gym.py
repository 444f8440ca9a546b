"""What a model earns on reasoning-gym's tasks at temperature 1: as it is, and after some supervised steps.

    python -m tests.bench.bench_reasoning_gym --model FOLDER                 # one GPU
    python -m tests.bench.bench_reasoning_gym --device cpu --only gcd lcm    # a tiny model without --model

Every task starts from the same weights. Rewards are the scorer's of the whole completion, the mean over so
many problems with four completions of at most 24 tokens each; supervised steps have 32 problems each.
"""

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tests.bench.common import make_parser

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"max_terms": 2, "max_digits": 2},
    "basic_arithmetic": {"max_terms": 3, "max_digits": 1, "allow_parentheses": False},
    "bitwise_arithmetic": {},
    "calendar_arithmetic": {},
    "complex_arithmetic": {},
    "count_bits": {"max_n": 255},
    "count_primes": {"max_n": 100},
    "decimal_chain_sum": {"max_terms": 2, "max_digits": 2},
    "family_relationships": {},
    "fraction_simplification": {},
    "gcd": {"max_value": 99},
    "lcm": {"max_value": 30},
    "leg_counting": {"max_animals": 3},
    "letter_counting": {"max_words": 5},
    "number_sequence": {},
    "prime_factorization": {"max_value": 99},
    "products": {"max_digits": 1},
    "simple_equations": {},
    "spell_backward": {"max_word_len": 5},
    "syllogism": {},
}
GROUP = 4


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", help="a checkpoint's folder")
    parser.add_argument("--only", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--steps", type=int, default=20, help="supervised")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--problems", type=int, default=64)
    asked = parser.parse_args()

    from abrun.recipe.run import OwnRunConfig
    from abrun.recipe.tasks import ReasoningGym
    from abrun.rollout.draws import Draws
    from abrun.tasks import TrainingTask, make_task
    from abrun.train.setup import make_setup
    from abrun.train.sft import SupervisedObjective

    dist.init_process_group(
        "nccl" if asked.device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1
    )
    config = OwnRunConfig.model_validate(
        {
            "algorithm": {"type": "grpo"},
            "model": {"path": asked.model} if asked.model else {"preset": "qwen2-tiny"},
            "policy": {
                "dtype": asked.dtype,
                "packing": True,
                "optimizer": {"learning_rate": asked.learning_rate},
            },
            "rollout": {"max_new_tokens": 24},
            "task": {"type": "arithmetic"},
            "steps": asked.steps,
        }
    )
    setup = make_setup(config, 0, None, torch.device(asked.device))
    learner, text = setup.learner, setup.data.text
    start = {name: tensor.clone() for name, tensor in learner.local_state().items()}

    def earned(task: TrainingTask) -> float:
        examples = [one for one in task.examples(1, 0, asked.problems) for _ in range(GROUP)]
        draws = Draws(seed=0, stream="sampling", step=1, rows=range(len(examples)))
        with setup.sampler.awake() as engine:
            completions = engine.generate(text.encode_prompts([one.prompt for one in examples]), draws)
        said = text.decode([completion.token_ids for completion in completions])
        return sum(map(task.reward, examples, said)) / len(examples)

    print(f"{'task':24s} as it is   after {asked.steps} steps", flush=True)
    for name in asked.only:
        began = time.perf_counter()
        fields = {"type": "reasoning_gym", "name": name, "parameters": TASKS[name]}
        task = make_task(ReasoningGym.model_validate(fields))
        learner.load_local_state(start)
        learner.num_updates += 1  # the engine's weights are others
        before = earned(task)
        for step in range(1, asked.steps + 1):
            examples = task.examples(0, 32 * step, 32)
            batch = setup.data.encode([(one.prompt, one.completion) for one in examples])
            learner.update(batch, SupervisedObjective(num_tokens=float(batch.token_mask.sum())), step)
        after = earned(task)
        took = time.perf_counter() - began
        print(
            f"{name:24s} {before:8.3f}   {after:8.3f}   {took:5.1f} s  {json.dumps(TASKS[name])}", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
