"""`python -m tests.trainer.rollout.vllm_support`: compare vLLM's sets of kept tokens with numpy's.

A process of its own, for its Triton is interpreted. Prints a line of JSON for each case.
"""

import json
import math
from dataclasses import replace
from typing import Any

import torch

from abrun.recipe.run import OwnRunConfig
from abrun.trainer.models.weights import load_network
from abrun.trainer.rl.batch import scatter_support
from abrun.trainer.rl.sampling import unpack_bits
from abrun.trainer.rollout import Completion
from tests.trainer.loop.runs import single_rank
from tests.trainer.rollout import vllm_sampling
from tests.trainer.rollout.test_torch_engine_oracle import judged
from tests.trainer.rollout.vllm_sampling import PROMPTS, Sampling, backend_of, batch_of, config_of, draws

MAX_NEW_TOKENS = 8
CASES = {
    "top_p": "top_p: 0.8",
    "all": "temperature: 1.6, min_p: 0.05, top_k: 7, top_p: 0.8",
    "wide": "temperature: 1.6, top_p: 0.999",
}


def sets_of(config: OwnRunConfig, sampling: Sampling, completions: list[Completion]) -> dict[str, Any]:
    """Count the sets that equal numpy's, that differ, and of which rounding may decide."""
    network: Any = load_network(config.model, weights=None, seed=0).double().eval()
    network.load_state_dict(
        {name: tensor.double() for name, tensor in sampling.backend.gather_weights()}, strict=False
    )
    network.tie_weights()
    counts = {"equal": 0, "different": 0, "undecided": 0, "sizes": list[int]()}
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert completion.support is not None and completion.support.dtype == torch.uint8
        found = unpack_bits(completion.support, logits.shape[1])
        assert len(found) == len(completion.token_ids)
        for row, of_token, token in zip(logits, found, completion.token_ids, strict=True):
            drawn = judged(row.numpy(), config.rollout)
            expected = set((drawn.logprobs > -math.inf).nonzero()[0].tolist())
            chosen = set(of_token.nonzero()[:, 0].tolist())
            assert token in chosen
            counts["sizes"].append(len(chosen))
            counts["undecided" if drawn.is_near else "equal" if expected == chosen else "different"] += 1
    return counts


def errors_of(sampling: Sampling, completions: list[Completion]) -> dict[str, float]:
    """Return the mean of exp |trainer's log-prob - engine's|, with the engine's sets and without."""
    without = batch_of(completions)
    sets = [completion.support for completion in completions if completion.support is not None]
    exact = replace(without, support=scatter_support(sets, without.token_mask))
    return {
        name: float(
            (sampling.backend.compute_logprobs(batch) - batch.inference_logprobs)
            .abs()
            .exp()[batch.token_mask]
            .mean()
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
        from abrun.trainer.rollout.torch_engine import TorchEngine

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
