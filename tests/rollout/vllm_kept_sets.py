"""`python -m tests.rollout.vllm_kept_sets`: compare vLLM's sets of kept tokens with those of plain loops.

A process of its own, for its Triton is interpreted. Prints a line of JSON for each case.
"""

import json
import math
from dataclasses import replace
from typing import Any

import torch

from abrun.models import load_network
from abrun.recipe.run import OwnRunConfig
from abrun.rl.batch import support_on_completions
from abrun.rl.sampling import unpacked
from abrun.rollout import Completion
from tests.rollout import vllm_sampling
from tests.rollout.vllm_sampling import PROMPTS, Sampling, backend_of, batch_of, config_of, draws
from tests.train.runs import single_rank

MAX_NEW_TOKENS = 8
ROUNDING = 1e-4  # of log-probs and probabilities: nearer to a border, rounding decides
CASES = {
    "top_p": "top_p: 0.8",
    "all": "temperature: 1.6, min_p: 0.05, top_k: 7, top_p: 0.8",
    "wide": "temperature: 1.6, top_p: 0.999",
}


def kept(logits: list[float], rollout: Any) -> set[int] | None:
    """Return the tokens that filters keep, by loops; None if rounding may decide of one."""
    scaled = [value / rollout.temperature for value in logits]
    tokens = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    least = scaled[tokens[0]] + math.log(rollout.min_p) if rollout.min_p else -math.inf
    if any(abs(scaled[token] - least) < ROUNDING for token in tokens):
        return None
    tokens = [token for token in tokens if scaled[token] >= least]
    if rollout.top_k and rollout.top_k < len(tokens):
        if scaled[tokens[rollout.top_k - 1]] - scaled[tokens[rollout.top_k]] < ROUNDING:
            return None
        tokens = tokens[: rollout.top_k]
    weights = [math.exp(scaled[token] - scaled[tokens[0]]) for token in tokens]
    total, before, chosen = sum(weights), 0.0, set[int]()
    for place, (token, weight) in enumerate(zip(tokens, weights, strict=True)):
        if abs(before / total - rollout.top_p) < ROUNDING and rollout.top_p < 1:
            return None
        if before / total >= rollout.top_p:
            if scaled[tokens[place - 1]] - scaled[token] < ROUNDING:
                return None
            break
        chosen.add(token)
        before += weight
    return chosen


def sets_of(config: OwnRunConfig, sampling: Sampling, completions: list[Completion]) -> dict[str, Any]:
    """Count the sets that equal those of the loops, that differ, and of which rounding may decide."""
    network: Any = load_network(config.model, weights=None, seed=0).double().eval()
    network.load_state_dict(
        {name: tensor.double() for name, tensor in sampling.backend.weights()}, strict=False
    )
    network.tie_weights()
    counts = {"equal": 0, "different": 0, "undecided": 0, "sizes": list[int]()}
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert completion.support is not None and completion.support.dtype == torch.uint8
        found = unpacked(completion.support, logits.shape[1])
        assert len(found) == len(completion.token_ids)
        for row, of_token, token in zip(logits, found, completion.token_ids, strict=True):
            expected = kept(row.tolist(), config.rollout)
            chosen = set(of_token.nonzero()[:, 0].tolist())
            assert token in chosen
            counts["sizes"].append(len(chosen))
            counts["undecided" if expected is None else "equal" if expected == chosen else "different"] += 1
    return counts


def errors_of(sampling: Sampling, completions: list[Completion]) -> dict[str, float]:
    """Return the mean of exp |trainer's log-prob - engine's|, with the engine's sets and without."""
    without = batch_of(completions)
    sets = [completion.support for completion in completions if completion.support is not None]
    exact = replace(without, support=support_on_completions(sets, without.token_mask))
    return {
        name: float(
            (sampling.backend.logprobs(batch) - batch.inference_logprobs).abs().exp()[batch.token_mask].mean()
        )
        for name, batch in (("with", exact), ("without", without))
    }


def main() -> None:
    with single_rank():
        sampling = None
        for name, filters in CASES.items():
            config = config_of(f"rollout={{engine: vllm, max_new_tokens: {MAX_NEW_TOKENS}, {filters}}}")
            sampling = sampling or Sampling(config)
            sampling.sync(config)
            completions = sampling.generate()
            row = {"case": name, "errors": errors_of(sampling, completions)}
            print(json.dumps(row | sets_of(config, sampling, completions)), flush=True)
        assert sampling is not None
        from abrun.rollout.torch_engine import TorchEngine

        config = config_of("rollout.top_p=0.8", f"rollout.max_new_tokens={MAX_NEW_TOKENS}")
        sampling.sync(config)
        embedded = TorchEngine(config.rollout, backend_of(config), vllm_sampling.TEXT)
        greedy = sampling.generate(temperature=0.0)
        assert greedy == embedded.generate(PROMPTS, draws(), temperature=0.0)
        assert not any(completion.support is not None for completion in greedy)
        assert sampling.generate()[0].support is not None, "after validation it reports sets again"
        sampling.engine.close()
        print(json.dumps({"case": "greedy"}))


if __name__ == "__main__":
    main()
