"""`python -m abrun.memory.heads JOB_DIR`: the log-prob head alone, one kernel at one number of tokens."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abrun import progress
from abrun.backends.ranks import join_ranks
from abrun.kernels import linear_logprobs, linear_policy_loss
from abrun.launch.probe import await_turn, read_job, row_writer
from abrun.memory.budget import Budget
from abrun.memory.history import History
from abrun.memory.measure import OUT_OF_MEMORY
from abrun.train.__main__ import ran_out
from abrun.train.phases import Phases


def main() -> int:
    progress.join()
    directory = Path(sys.argv[1])
    job = read_job(directory)
    await_turn(directory, job)
    row = measured(join_ranks(job.pop("config")["cluster"]), **job)
    row_writer(directory).write(row)
    if row["out_of_memory"]:
        os._exit(OUT_OF_MEMORY)
    return 0


def measured(
    device: torch.device,
    *,
    impl: str,
    one_pass: bool,
    hidden_size: int,
    vocab_size: int,
    length: int,
    budget_bytes: int | None = None,
) -> dict[str, Any]:
    """A row, as abrun.memory.measure has them: forward and backward of a loss of log-probs and entropies.

    In bfloat16 on a GPU, in float32 on CPU cores. The first pass, which compiles kernels, is not reported.
    """
    budget = Budget(device, budget_bytes)
    resident: list[Tensor] = []
    phases, history = Phases(device, lambda: resident), None
    budget.hold(phases.tracker)
    ran_out_in = said = None
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with phases("inputs"):
            hidden = torch.randn(length, hidden_size, dtype=dtype, device=device, requires_grad=True)
            weight = torch.randn(vocab_size, hidden_size, dtype=dtype, device=device)
            weight = weight.mul_(hidden_size**-0.5).requires_grad_()
            target = torch.randint(vocab_size, (length,), device=device)
        resident += [hidden, weight, target]
        for _ in range(2):
            phases.collect()
            history = History(phases, by_module=False)
            with history:
                _pass(phases, hidden, weight, target, impl=impl, one_pass=one_pass)
    except (RuntimeError, MemoryError) as error:
        said = ran_out(error)
        if said is None:
            raise
        ran_out_in = phases.interrupted
    return {
        "out_of_memory": ran_out_in,
        "said": said,
        "total_bytes": budget.total_bytes,
        "held": {"inputs": sum(tensor.untyped_storage().nbytes() for tensor in resident)},
        "device_used": {},
        "metrics": phases.collect()[1],
        "attribution": history.attribution() if history else None,
    }


def _pass(
    phases: Phases, hidden: Tensor, weight: Tensor, target: Tensor, *, impl: str, one_pass: bool
) -> None:
    with phases("forward"):
        if one_pass:
            loss, *_ = linear_policy_loss(
                hidden,
                weight,
                target,
                lambda logprobs, entropies, tokens: -logprobs - 0.01 * entropies,
                impl=impl,
                entropy=True,
            )
        else:
            logprobs, entropies = linear_logprobs(hidden, weight, target, impl=impl, entropy=True)
            assert entropies is not None
            loss = -(logprobs + 0.01 * entropies).sum()
    with phases("backward"):
        loss.backward()
    hidden.grad = weight.grad = None


if __name__ == "__main__":
    sys.exit(main())
