"""Memory of the dense log-prob head, in float32 copies of its logits, beside other code for the same.

    python tests/bench/bench_dense_head.py                 # on a CPU, and on CUDA if it is there
    python tests/bench/bench_dense_head.py --shape 4096,512,32768 --devices cpu

Each row is the peak of one forward and backward pass above its inputs (hidden states, weight and targets),
over the bytes of one [N, V] tensor in float32: in autograd's own code on a CPU by the memory events of
torch.profiler, on CUDA by the allocator's counter, cuBLAS' workspace excluded. The gradients of hidden and
weight are in it where they exist at the peak. Seconds are medians of passes that nobody watches.

The loss is minus the sum of the log-probs; `entropy with gradient` adds 0.01 times the entropies. Others'
code gets `F.linear(hidden, weight)`: log_softmax and gather, and cross_entropy, in float32, as transformers'
losses cast logits; TRL's selective_log_softmax in the logits' own dtype.

Letters: N tokens, H hidden size, V vocabulary.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from abrun.kernels import linear_logprobs

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.memory_events import peak_bytes

SHAPES = {"cpu": (2048, 128, 8192), "cuda": (16_384, 2048, 151_936)}  # N, H, V
RUNS = {"cpu": 5, "cuda": 20}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, H], weight [V, H], target [N] -> []


def abrun_dense(*, entropy: bool, gradient: bool = False) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logprobs, entropies = linear_logprobs(
            hidden, weight, target, impl="logits", entropy=entropy, entropy_gradient=gradient
        )
        if entropies is not None and entropies.requires_grad:
            return -(logprobs + 0.01 * entropies).sum()
        return -logprobs.sum()

    return loss


def log_softmax_gather(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logprobs = F.linear(hidden, weight).float().log_softmax(-1)
    return -logprobs.gather(-1, target[:, None]).sum()


def cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum")


def losses() -> dict[str, Loss]:
    found = {
        "abrun, no entropy": abrun_dense(entropy=False),
        "abrun, entropy as a metric": abrun_dense(entropy=True),
        "abrun, entropy with gradient": abrun_dense(entropy=True, gradient=True),
        "torch log_softmax, gather": log_softmax_gather,
        "torch cross_entropy": cross_entropy,
    }
    try:
        from trl.trainer.utils import selective_log_softmax  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found

    def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return -selective_log_softmax(F.linear(hidden, weight), target).sum()

    return found | {"TRL selective_log_softmax": trl}


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, hidden_size, vocab_size = shape
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, dtype=dtype, device=device).mul_(hidden_size**-0.5)
    return hidden, weight.requires_grad_(), torch.randint(vocab_size, (num_tokens,), device=device)


def peak_on(device: str, run: Callable[[], None]) -> int:
    """Return the most bytes that were allocated while `run` ran, above what there was before."""
    if device == "cpu":
        return peak_bytes(run)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def seconds(run: Callable[[], None], device: str) -> float:
    def timed() -> float:
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return statistics.median(timed() for _ in range(RUNS[device]))


def row(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor], device: str) -> tuple[float, float]:
    """Copies of the logits at the peak, and seconds."""

    def run() -> None:
        loss(*tensors).backward()
        tensors[0].grad = tensors[1].grad = None

    run()  # makes cuBLAS' workspace
    gc.collect()
    copy_bytes = 4 * len(tensors[0]) * len(tensors[1])
    return peak_on(device, run) / copy_bytes, seconds(run, device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", help="N,H,V (default: by device)")
    parser.add_argument("--devices", help="cpu, cuda, or both with a comma between (default: those here)")
    arguments = parser.parse_args()
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in arguments.devices.split(",") if arguments.devices else here:
        shape = tuple(map(int, arguments.shape.split(","))) if arguments.shape else SHAPES[device]
        num_tokens, hidden_size, vocab_size = shape
        name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        print(f"\nN {num_tokens:,}, H {hidden_size:,}, V {vocab_size:,}; {name}; torch {torch.__version__}\n")
        print("| inputs | head | copies of the logits at the peak | s |\n|---|---|---|---|")
        for dtype in (torch.float32, torch.bfloat16):
            tensors = inputs((num_tokens, hidden_size, vocab_size), dtype, device)
            for head, loss in losses().items():
                copies, taken = row(loss, tensors, device)
                print(f"| {str(dtype)[6:]} | {head} | {copies:.2f} | {taken:.4f} |", flush=True)


if __name__ == "__main__":
    main()
