"""`python -m abrun.memory.heads JOB_DIR`: the log-prob head alone.

A job measures one kernel at one number of tokens, or predicts several `kernels` at several `lengths`.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abrun.backends.ranks import join_ranks
from abrun.experiment.probe import read_job, row_writer
from abrun.kernels import linear_logprobs, linear_policy_loss
from abrun.memory.fake_device import LOGPROBS, hollow_gpu
from abrun.memory.measure import OUT_OF_MEMORY, Budget
from abrun.memory.peak import SNAPSHOT, PeakHistory
from abrun.memory.trace import HollowPhases
from abrun.messages import sentence
from abrun.processes import progress
from abrun.train.__main__ import ran_out
from abrun.train.phases import Phases


def main() -> int:
    progress.join()
    directory = Path(sys.argv[1])
    job = read_job(directory)
    if "kernels" in job:
        del job["config"]
        writer = row_writer(directory)
        for row in predicted(**job):
            writer.write(row)
        return 0
    row = measured(join_ranks(job.pop("config")["cluster"]), directory / SNAPSHOT, **job)
    row_writer(directory).write(row)
    if row["out_of_memory"]:
        os._exit(OUT_OF_MEMORY)
    return 0


def measured(
    device: torch.device,
    snapshot: Path,
    *,
    impl: str,
    one_pass: bool,
    hidden_size: int,
    vocab_size: int,
    length: int,
    budget_bytes: int | None = None,
) -> dict[str, Any]:
    """A row, as abrun.memory.measure has them: forward and backward of a loss of log-probs.

    In bfloat16 on a GPU, in float32 on CPU cores. The first pass, which compiles kernels, is not reported.
    """
    budget = Budget(device, budget_bytes)
    resident: list[Tensor] = []
    phases, history = Phases(device, lambda: resident), None
    budget.hold(phases.tracker)
    ran_out_in = reason = None
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with phases("inputs"):
            inputs = _inputs(length, hidden_size, vocab_size, dtype, device)
        resident += inputs
        for _ in range(2):
            phases.collect()
            history = PeakHistory(phases, snapshot)
            with history:
                _pass(phases, *inputs, impl=impl, one_pass=one_pass)
    except (RuntimeError, MemoryError) as error:
        reason = ran_out(error)
        if reason is None:
            raise
        ran_out_in = phases.interrupted
    return {
        "out_of_memory": ran_out_in,
        "said": reason and sentence(reason),
        "total_bytes": budget.total_bytes,
        "held": {"inputs": sum(tensor.untyped_storage().nbytes() for tensor in resident)},
        "device_used": {},
        "metrics": phases.collect()[1],
        "peak": history.peak() if history else None,
    }


def predicted(
    *,
    kernels: Mapping[str, Mapping[str, Any]],  # by name the arguments of `_pass`
    hidden_size: int,
    vocab_size: int,
    lengths: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and kernel: `by_phase`, as abrun.memory.trace has it, in bfloat16."""
    with hollow_gpu(1) as account:
        for length in lengths:
            with account.kind("inputs"):
                inputs = _inputs(length, hidden_size, vocab_size, torch.bfloat16, torch.device("cpu"))
            for kernel, settings in kernels.items():
                phases: Any = HollowPhases(account)
                with account.kind(LOGPROBS):
                    _pass(phases, *inputs, **settings)
                yield {"kernel": kernel, "length": length, "by_phase": phases.collect()}
            del inputs


def _inputs(
    length: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:  # hidden [N, H], weight [V, H], target [N]
    hidden = torch.randn(length, hidden_size, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, dtype=dtype, device=device)
    weight = weight.mul_(hidden_size**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocab_size, (length,), device=device)


def _pass(
    phases: Phases, hidden: Tensor, weight: Tensor, target: Tensor, *, impl: str, one_pass: bool
) -> None:
    """A loss of log-probs without entropies, as stacks without an entropy bonus have it."""
    with phases("forward"):
        if one_pass:
            loss, *_ = linear_policy_loss(hidden, weight, target, lambda logprobs, *_: -logprobs, impl=impl)
        else:
            logprobs, _ = linear_logprobs(hidden, weight, target, impl=impl)
            loss = -logprobs.sum()
    with phases("backward"):
        loss.backward()
    hidden.grad = weight.grad = None


if __name__ == "__main__":
    sys.exit(main())
