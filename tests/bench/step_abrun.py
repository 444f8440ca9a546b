"""A run of abrun that tells of its steps: `bench_step.py` starts it as a rank of its own, or as several.

What trains is `python -m abrun.trainer RUN_DIR`, with some methods followed from outside.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from abrun.trainer import __main__ as entry
from abrun.trainer.loop import startup
from tests.bench.step_parts import STEPS, Steps

PART_OF = {  # a phase; the others are parts of these, or hold them
    "generation": "generation",
    "engine_sleep": "generation",  # as TRL's is
    "reward": "rewards",
    "logprobs": "log-probs",
    "values": "log-probs",
    "forward_backward": "forward",
    "value_forward_backward": "forward",
    "optimizer": "optimizer",
    "value_optimizer": "optimizer",
    "weight_sync": "sync",
}
TRAINING = (
    "logprobs",
    "values",
    "forward_backward",
    "value_forward_backward",
    "optimizer",
    "value_optimizer",
)


class Watch:
    """What is known of a run from outside."""

    def __init__(self, device: str) -> None:
        self.steps = Steps(device)
        self._peak, self._tokens, self._through = 0.0, 0, 0
        self._setup: Any = None

    def follow_imports(self) -> None:
        finish = startup.finish

        def finished(driver: Any) -> None:
            self._follow_run()
            finish(driver)

        startup.finish = finished

    def _follow_run(self) -> None:
        import torch

        from abrun.trainer import training as loop
        from abrun.trainer.backends.head import LmHead
        from abrun.trainer.loop import phases

        steps, make_setup, make_algorithm = self.steps, loop.make_setup, loop.make_algorithm
        timed, collect = phases.Phases.__call__, phases.Phases.collect

        def set_up(*args: Any) -> Any:
            self._setup = make_setup(*args)
            return self._setup

        def algorithm_made(built: Any) -> Any:
            algorithm = make_algorithm(built)
            self._follow_steps(algorithm, built.policy)
            return algorithm

        @contextlib.contextmanager
        def phase(of: Any, name: str, **settings: Any) -> Iterator[None]:
            with steps.part(PART_OF.get(name)), timed(of, name, **settings):
                yield

        def collected(of: Any) -> Any:
            seconds, peaks = collect(of)
            keys = [f"memory/{name}/peak_allocated_bytes" for name in TRAINING]
            self._peak = max(self._peak, *(peaks.get(key, 0.0) for key in keys))
            return seconds, peaks

        loop.make_setup, loop.make_algorithm = set_up, algorithm_made
        of_all: Any = phases.Phases
        of_all.__call__, of_all.collect = phase, collected
        steps.follow(LmHead, "compute_logprobs", "head", inner=True, when=lambda: steps.runs == "forward")
        steps.follow(torch.Tensor, "backward", "backward", inner=True)

    def _follow_steps(self, algorithm: Any, policy: Any) -> None:
        import torch

        from abrun.trainer.rl.batch import sequence_lengths

        step, forward_backward, forward = algorithm.step, policy.forward_backward, policy._forward

        def stepped(number: int) -> Any:
            self.steps.begin()
            found = step(number)
            self.steps.end()
            if len(self.steps.rows) == STEPS:
                self._tell()
            return found

        def went_back(batch: Any, objective: Any) -> Any:
            if self.steps.looks:
                self._tokens += int(sequence_lengths(batch.token_mask).sum())
            return forward_backward(batch, objective)

        def went_forward(batch: Any, packing: Any, *settings: Any) -> Any:
            if self.steps.looks and torch.is_grad_enabled():  # not a pass for old log-probs
                lengths = sequence_lengths(batch.token_mask)
                self._through += packing.num_local_tokens if packing else int(lengths.sum())
            return forward(batch, packing, *settings)

        algorithm.step, policy.forward_backward, policy._forward = stepped, went_back, went_forward

    def _tell(self) -> None:
        """Of all ranks together; collective."""
        ranks = self._setup.ranks
        tokens, through = ranks.all_reduce_sum_data(self._tokens, self._through)
        row = self.steps.row() | {
            "tokens": tokens,
            "through": through,
            "parameters": num_parameters(self._setup.policy, self._setup.value_model),
            "peak": ranks.all_reduce_max_world([self._peak])[0],
        }
        if ranks.is_first:
            print("ROW " + json.dumps(row), flush=True)


def num_parameters(policy: Any, value_model: Any) -> int:
    """That a token is multiplied with: of a tied embedding, and of none that only a value model looks up."""
    count = sum(parameter.numel() for parameter in policy._network.parameters())
    if value_model is None:
        return count
    backbone = value_model._hidden_states
    looked_up = backbone.base_model.get_input_embeddings().weight.numel()
    return count + sum(parameter.numel() for parameter in backbone.parameters()) - looked_up


def main() -> None:
    run, device = json.loads(sys.argv[1])
    Watch(device).follow_imports()
    sys.argv = ["abrun.trainer", run]
    sys.exit(entry.main())


if __name__ == "__main__":
    main()
