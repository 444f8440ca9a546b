"""Validation: what the policy makes of prompts that no training sees, the same for every arm and seed.

At step k it judges the policy after k updates; at step 0 the initial one, before any arm was treated. It
leaves training's numbers as they are: its draws come from a stream of its own, its time is not in the step's.
"""

import math

import torch
import torch.distributed as dist

from abrun.backends.dtensor import DtensorBackend
from abrun.recipe import Validation
from abrun.rollout.torch_engine import TorchEngine
from abrun.train.recorder import Recorder
from abrun.train.seeds import sampling_uniforms
from abrun.train.setup import Setup, check_length


class Validator:
    """Completes and judges a run's held-out prompts, spread over its ranks."""

    def __init__(self, setup: Setup, settings: Validation, recorder: Recorder) -> None:
        self._setup = setup
        self._settings = settings
        self._recorder = recorder
        assert isinstance(setup.backend, DtensorBackend)  # whose modules the embedded engine runs
        self._engine = TorchEngine(setup.backend, setup.model, setup.config.rollout)
        encoded = [setup.model.encode_prompt(example.prompt) for example in setup.validation_examples]
        max_new_tokens = setup.config.rollout.max_new_tokens
        longest = max(map(len, encoded)) + max_new_tokens
        check_length(setup.model, longest, f"rollout.max_new_tokens: got {max_new_tokens} for validation")
        self._mine = setup.share(len(encoded))
        self._prompts = encoded[self._mine]

    def is_due(self, step: int) -> bool:
        """Every k steps, and after the last one."""
        return step % self._settings.every == 0 or step == self._setup.config.steps

    def validate(self, step: int) -> dict[str, float]:
        """Record the rewards of all prompts, and return their metrics, the same on every rank. Collective.

        `validation/accuracy` is the mean reward (with a verifier of 0 and 1: the share that is right),
        `validation/avg_length` the mean number of completion tokens.
        """
        setup, examples = self._setup, self._setup.validation_examples
        max_new_tokens = setup.config.rollout.max_new_tokens
        uniforms = sampling_uniforms(setup.seed, step, len(examples), max_new_tokens, stream="validation")
        completions = self._engine.generate(
            self._prompts, uniforms[self._mine], temperature=self._settings.temperature
        )
        results = torch.zeros(3, len(examples), dtype=torch.float64, device=setup.device)
        rows = (
            setup.rewards(examples[self._mine], completions),
            [len(completion.token_ids) for completion in completions],
            [completion.truncated for completion in completions],
        )
        results[:, self._mine] = torch.tensor(rows, dtype=torch.float64, device=setup.device)
        dist.all_reduce(results, group=setup.backend.group)  # every column has one rank's numbers, and zeros
        rewards, lengths, truncated = results.tolist()
        prompts = [example.prompt for example in examples]
        self._recorder.validation(step, prompts, rewards, [int(length) for length in lengths])
        seconds, _ = setup.phases.collect()
        return {
            "validation/accuracy": math.fsum(rewards) / len(rewards),
            "validation/avg_length": sum(lengths) / len(lengths),
            "validation/truncation_rate": sum(truncated) / len(truncated),
            "timing/validation/total_s": seconds["timing/train/total_step_time_s"],
        }
