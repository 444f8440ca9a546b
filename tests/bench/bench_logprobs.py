"""Time and memory of every implementation of linear log-probs, against the products all must do.

    python -m tests.bench.bench_logprobs                    # one GPU, the default shapes: some minutes
    python -m tests.bench.bench_logprobs --shapes '8192,4096,151936;2048,1536,151936' --only one-pass,verl
    python -m tests.bench.bench_logprobs --device cpu       # the script's own logic, at tiny shapes

All implementations get the same hidden, weight and target, and the same random gradients of each token's
log-prob and entropy. One without entropies gets the gradient of the log-probs alone; one that returns only a
scalar loss starts from that. Other projects' kernels take part where they are installed: liger-kernel,
cut-cross-entropy, and verl's, which may also be an unpacked wheel in the folder that VERL_SOURCE names. What
is right and how exact: tests/trainer/kernels.

What the columns say:

- fwd: the forward pass alone, without gradients. fwd+bwd: the whole step. Medians over all rounds. In a round
  every candidate runs in turn, for a fraction of a second, and each round reverses the order: the card is
  warm from the first on, and its clocks and its heat fall on all alike.
- x2NHV, x6NHV, x8NHV: the time over that of the pure products of the same shapes: logits; logits, d_weight
  and d_hidden; and these with the logits twice. They are timed in the same turns, in several chunkings of
  which the fastest counts, on the gradients of real logits, since a card's power and so its clock depend on
  the data. Beyond 8,192 tokens they are those of 8,192, scaled up. "its floor" is 8NHV for what recomputes
  the logits, 6NHV for what keeps them or computes the gradients in the forward pass.
- peak: the most a step allocates above the inputs and the gradients of hidden and weight.

Letters: N tokens, H hidden, V vocabulary; n tokens of a tile, v rows of a chunk.

Tried, and what it gave
-----------------------

On one H200 with torch 2.11 and triton 3.6, 2026-11-21, at N 8,192, V 151,936, H 4,096 unless said otherwise.
Times of different lines are of different runs.

Kept:

- Product and reduction in one Triton kernel, persistent, fed by TMA: the logits stay in registers. Forward
  15.1 ms, where the vendor's product with float32 output in chunks and one more pass over each took 17.1.
- The target's logit in a kernel of its own, by the same product. Picked in its tile, behind a branch that
  most tiles do not take, it cost the forward pass 1.4 ms of 16.4; without the branch 0.9.
- exp2, and the maximum before the scale, five instructions a logit fewer: forward at H 2,048 9.0 -> 8.6 ms.
- lg2.approx instead of tl.log2, which is thirty instructions: 0.45 ms of the one pass.
- One pass: tiles of 1,024 and 1,536 tokens, not of 1,664: the d_hidden products 16.1 -> 13.6 ms.

Not kept, since it gave nothing or less:

- One pass: the first H tokens' logits in the memory of d_weight, so that fewer tiles add to it: 1 ms on the
  H200; with and without it 25.2 and 25.5 ms at H 2,048 on an H100, 2026-11-26. Not worth its 90 lines.
- tl.range(..., flatten=True) in the persistent loop: forward 18.0 ms, not 15.0. warp_specialize=True: the
  same machine code on Hopper.
- Blocks of 128 x 128 with two programs a processor, 64 x 256, 256 x 128, and 128 deep instead of 64: forward
  18.9, 19.0, 17.1, 18.2 ms where 128 x 256 x 64 took 16.4. Stripes of 8, 16 or 32 blocks of tokens: alike.
- d_hidden on a second stream beside d_weight: two passes 61.6 ms, not 61.2; one pass 48.8, not 48.8. Cards
  like this are at their power limit, and both products fill them.
- d_weight before d_hidden: alike.
- Budgets of 256 MiB, 512 MiB and 1 GiB: two passes 62.0, 61.2, 61.0 ms. One pass gains 2 % from 1 GiB.
- A CUDA graph of forward and backward: 128 tokens of H 1,536 1.70 -> 0.63 ms, 1,024 tokens 3.13 -> 3.04. The
  calls can be captured; whether to is the caller's business.
- Chunks of 8,448 rows, 33 blocks of 256 that make whole waves of 132 processors: 3 % faster than 8,192 for
  the vendor's logits product, and so part of the floor; our own product has no chunks in the forward pass.

Bars not reached: two passes within 1.20 of the dense path under torch.compile (1.22; the 8NHV floor itself is
1.20 of it), and one pass within 0.95 of it (0.97).
"""

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from abrun.trainer import kernels
from tests.bench.common import heading, make_parser, markdown_row

GIB = 2**30
TILE = 1024  # tokens whose float32 logits are held at once


class Shape(NamedTuple):
    num_tokens: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How one kind of device is measured."""

    dtype: torch.dtype
    shapes: str  # N,H,V;N,H,V;...
    warm_up_s: float
    warm_up_size: int
    visit_s: float  # the least a candidate runs in a round
    product_s: float  # the least a pure product runs over all rounds
    product_tokens: tuple[int, ...]  # tiles of the pure products; none takes more tokens than the first
    product_chunks: tuple[int, ...]  # rows


CONDUCTS = {
    "cuda": Conduct(
        dtype=torch.bfloat16,
        shapes="8192,4096,151936;8192,2048,151936;2048,1536,151936;32768,4096,151936;"
        "131072,4096,151936;8192,1536,32000;8192,2048,262144",
        warm_up_s=1.0,
        warm_up_size=8192,
        visit_s=0.15,
        product_s=0.5,
        product_tokens=(8192, 2048),
        product_chunks=(8192, 8448, 16896),
    ),
    "cpu": Conduct(
        dtype=torch.float32,
        shapes="48,32,320;600,64,640;2100,16,128",
        warm_up_s=0.01,
        warm_up_size=64,
        visit_s=0.002,
        product_s=0.005,
        product_tokens=(512, 128),
        product_chunks=(128, 192),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all shapes have in common."""

    device: torch.device
    rounds: int
    only: list[str]  # parts of candidates' names; empty for all

    @property
    def conduct(self) -> Conduct:
        return CONDUCTS[self.device.type]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def free_memory(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


# --- the inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    target: Tensor  # [N]
    logprob_grads: Tensor  # [N] float32
    entropy_grads: Tensor  # [N] float32

    def clear_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


def draw_problem(bench: Bench, shape: Shape) -> Problem:
    generator = torch.Generator(bench.device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=bench.device)
    num_tokens, hidden_size, vocab_size = shape
    dtype = bench.conduct.dtype
    return Problem(
        weight=(normal(vocab_size, hidden_size) / math.sqrt(hidden_size)).to(dtype).requires_grad_(),
        hidden=normal(num_tokens, hidden_size).to(dtype).requires_grad_(),
        target=torch.randint(vocab_size, (num_tokens,), generator=generator, device=bench.device),
        logprob_grads=normal(num_tokens) / num_tokens,
        entropy_grads=normal(num_tokens) / num_tokens,
    )


@torch.no_grad()
def logit_gradients(problem: Problem, num_tokens: int) -> Tensor:  # [n, V] in the dtype of hidden
    """g * (onehot - p) - h * p * (log p + entropy), g and h the gradients of log-prob and entropy."""
    found = torch.empty(
        num_tokens, len(problem.weight), dtype=problem.hidden.dtype, device=problem.hidden.device
    )
    for tokens in slices(num_tokens, TILE):
        logprobs = (problem.hidden[tokens] @ problem.weight.T).float().log_softmax(1)
        probs = logprobs.exp()
        entropies = -(probs * logprobs).sum(1, keepdim=True)
        g, h = problem.logprob_grads[tokens, None], problem.entropy_grads[tokens, None]
        rows = -probs * (g + h * (logprobs + entropies))
        found[tokens] = rows.scatter_add(1, problem.target[tokens, None], g)
    return found


def slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


# --- the candidates


class Outputs(NamedTuple):
    logprobs: Tensor | None = None  # [N]
    entropies: Tensor | None = None  # [N]
    loss: Tensor | None = None  # the scalar that the backward pass starts from, where there is one


Evaluate = Callable[[Tensor, Tensor, Problem], Outputs]  # hidden and weight, which stand for the problem's


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    name: str
    operations: int  # its floor, in NHV
    evaluate: Evaluate
    has_forward: bool = True  # one that is worth timing alone


def step(candidate: Candidate, problem: Problem) -> Outputs:
    problem.clear_gradients()
    outputs = candidate.evaluate(problem.hidden, problem.weight, problem)
    if outputs.loss is not None:
        outputs.loss.backward()
    else:
        results = (outputs.logprobs, outputs.entropies)
        roots = [values for values in results if values is not None and values.requires_grad]
        gradients = [problem.logprob_grads, problem.entropy_grads][: len(roots)]
        matching = [gradient.to(root.dtype) for gradient, root in zip(gradients, roots, strict=True)]
        torch.autograd.backward(roots, matching)
    return outputs


@torch.no_grad()
def forward(candidate: Candidate, problem: Problem) -> None:
    # Detached: some compute gradients in their forward pass whenever an input asks for one.
    candidate.evaluate(problem.hidden.detach(), problem.weight.detach(), problem)


def our_candidates(bench: Bench) -> list[Candidate]:
    dense = _linear_logprobs(kernels.linear_logprobs, "logits")
    candidates = [Candidate(name="dense", operations=6, evaluate=dense)]
    if bench.on_gpu:
        function = torch.compile(kernels.linear_logprobs, dynamic=False, fullgraph=True)
        compiled = _linear_logprobs(function, "logits")
        candidates.append(Candidate(name="dense compiled", operations=6, evaluate=compiled))
    impls = ["chunked", "triton"] if bench.on_gpu else ["chunked"]
    for impl in impls:
        evaluate = _linear_logprobs(kernels.linear_logprobs, impl)
        candidates.append(Candidate(name=impl, operations=8, evaluate=evaluate))
    for impl in impls:
        evaluate = _linear_policy_loss(impl)
        name = f"one-pass {impl}"
        candidates.append(Candidate(name=name, operations=6, evaluate=evaluate, has_forward=False))
    return candidates


def _linear_logprobs(function: Callable[..., Any], impl: str) -> Evaluate:
    settings = {"impl": impl, "entropy": True}

    def evaluate(hidden: Tensor, weight: Tensor, problem: Problem) -> Outputs:
        return Outputs(*function(hidden, weight, problem.target, **settings))

    return evaluate


def _linear_policy_loss(impl: str) -> Evaluate:
    settings = {"impl": impl, "entropy": True}

    def evaluate(hidden: Tensor, weight: Tensor, problem: Problem) -> Outputs:
        def token_loss(logprobs: Tensor, entropies: Tensor, tokens: slice) -> Tensor:
            return problem.logprob_grads[tokens] * logprobs + problem.entropy_grads[tokens] * entropies

        results = kernels.linear_policy_loss(hidden, weight, problem.target, token_loss, **settings)
        loss, logprobs, entropies = results
        return Outputs(logprobs, entropies, loss)

    return evaluate


# Others' implementations. Each of these raises ImportError if the package or the kind of GPU is missing.


def load_stock() -> Candidate:
    def evaluate(hidden: Tensor, weight: Tensor, problem: Problem) -> Outputs:
        logits = torch.nn.functional.linear(hidden, weight)
        picked = torch.log_softmax(logits.float(), dim=-1).gather(1, problem.target[:, None])
        return Outputs(picked.squeeze(1))

    return Candidate(name="log_softmax and gather (no entropy)", operations=6, evaluate=evaluate)


def load_liger() -> Candidate:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyFunction,
    )

    def evaluate(hidden: Tensor, weight: Tensor, problem: Problem) -> Outputs:
        # Bias, class weights, ignored target, z-loss, label smoothing, reduction.
        settings = (None, None, -100, 0.0, 0.0, "sum")
        loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, problem.target, *settings)
        return Outputs(loss=loss)

    return Candidate(name="Liger (scalar loss)", operations=6, evaluate=evaluate)


def load_cut_cross_entropy() -> Candidate:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    def evaluate(hidden: Tensor, weight: Tensor, problem: Problem) -> Outputs:
        return Outputs(-linear_cross_entropy(hidden, weight, problem.target, reduction="none"))

    return Candidate(name="Cut Cross-Entropy (no entropy)", operations=8, evaluate=evaluate)


def load_verl() -> Candidate:
    folder = _verl_folder()
    # The kernel needs nothing of these two packages' own modules, which import Ray and much else.
    for name in ("verl", "verl.utils"):
        shell = ModuleType(name)
        shell.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = shell
    from verl.utils.kernel.linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        linear_cross_entropy,
    )

    def evaluate(hidden: Tensor, weight: Tensor, problem: Problem) -> Outputs:
        return Outputs(*linear_cross_entropy(hidden, weight, problem.target, 1.0, "none"))

    return Candidate(name="verl", operations=8, evaluate=evaluate)


def _verl_folder() -> Path:
    """The folder that holds the package, found without importing it."""
    if "VERL_SOURCE" in os.environ:
        return Path(os.environ["VERL_SOURCE"])
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ImportError("neither a module named 'verl' nor VERL_SOURCE")
    return Path(spec.origin).parents[1]


def load_peers(bench: Bench) -> list[Candidate]:
    peers = [load_stock()]
    for load in (load_liger, load_cut_cross_entropy, load_verl):
        try:
            if not bench.on_gpu:
                raise ImportError("needs a GPU")
            peers.append(load())
        except ImportError as error:
            reason = str(error).partition(" (")[0]  # without the module's file
            print(f"not measured: {load.__name__.removeprefix('load_')}: {reason}", flush=True)
    return peers


# --- the pure products, whose times are the floors


@dataclass(slots=True, kw_only=True)
class Timed:
    """Something that is timed in turn with all others."""

    run: Callable[[], object]
    least_s: float  # a visit
    expected_ms: float = 0.0
    samples_ms: list[float] = field(default_factory=list)
    failure: str | None = None

    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One way to compute one of the pure products."""

    kind: str  # "logits", "d_weight" or "d_hidden"
    variant: str
    scale: float  # all tokens over those it takes
    timed: Timed

    def milliseconds(self) -> float:
        return self.timed.median_ms() * self.scale


Way = tuple[str, str, Callable[[], None]]  # kind, variant, and how to compute it


@torch.no_grad()
def pure_products(bench: Bench, problem: Problem) -> list[Product]:
    conduct = bench.conduct
    num_tokens, num_rows = len(problem.hidden), len(problem.weight)
    num_taken = min(num_tokens, conduct.product_tokens[0])
    hidden, weight = problem.hidden.detach()[:num_taken], problem.weight.detach()
    d_logits = logit_gradients(problem, num_taken)
    ways: list[Way] = []
    for chunk in sorted({min(chunk, num_rows) for chunk in conduct.product_chunks}):
        ways += _logits_ways(hidden, weight, chunk)
        ways += _gradient_ways(hidden, weight, d_logits, chunk)
    for tile in sorted({min(tile, num_taken) for tile in conduct.product_tokens}):
        ways.append(_d_hidden_at_once(hidden, weight, d_logits, tile))
    least_s = max(conduct.visit_s, conduct.product_s / bench.rounds)
    scale = num_tokens / num_taken
    return [
        Product(kind=kind, variant=variant, scale=scale, timed=Timed(run=run, least_s=least_s))
        for kind, variant, run in ways
    ]


def _logits_ways(hidden: Tensor, weight: Tensor, chunk: int) -> Iterator[Way]:
    chunks = list(slices(len(weight), chunk))
    for dtype in {hidden.dtype, torch.float32}:
        buffers = {width: hidden.new_empty(len(hidden), width, dtype=dtype) for width in _widths(chunks)}

        def run(buffers: dict[int, Tensor] = buffers) -> None:
            for rows in chunks:
                multiply(hidden, weight[rows].T, buffers[rows.stop - rows.start])

        yield "logits", f"{chunk} rows, {dtype} out", run


def _gradient_ways(hidden: Tensor, weight: Tensor, d_logits: Tensor, chunk: int) -> Iterator[Way]:
    """d_weight and d_hidden by chunks of rows. The first chunk's gradients stand for those of all chunks."""
    chunks = list(slices(len(weight), chunk))
    d_chunks = {width: d_logits[:, :width].contiguous() for width in _widths(chunks)}
    d_weight = torch.empty_like(weight)
    d_hidden = torch.zeros_like(hidden, dtype=torch.float32)

    def run_d_weight() -> None:
        for rows in chunks:
            multiply(d_chunks[rows.stop - rows.start].T, hidden, d_weight[rows])

    def run_d_hidden() -> None:
        for rows in chunks:
            multiply_add(d_hidden, d_chunks[rows.stop - rows.start], weight[rows])

    yield "d_weight", f"{chunk} rows", run_d_weight
    yield "d_hidden", f"{chunk} rows, added up in float32", run_d_hidden


def _d_hidden_at_once(hidden: Tensor, weight: Tensor, d_logits: Tensor, tile: int) -> Way:
    d_hidden = torch.empty_like(hidden)

    def run() -> None:
        for tokens in slices(len(hidden), tile):
            multiply(d_logits[tokens], weight, d_hidden[tokens])

    return "d_hidden", f"{tile} tokens, all rows at once", run


def _widths(chunks: list[slice]) -> set[int]:
    return {rows.stop - rows.start for rows in chunks}


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def multiply_add(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


# --- measuring


@dataclass(slots=True, kw_only=True)
class Row:
    candidate: Candidate
    step: Timed
    forward: Timed | None
    peak_bytes: int | None = None  # unknown on a CPU

    def timings(self) -> list[Timed]:
        return [self.step] if self.forward is None else [self.forward, self.step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    shape: Shape
    rows: list[Row]
    products: list[Product]
    wall_s: float

    def fastest(self, kind: str) -> Product:
        timed = (it for it in self.products if it.kind == kind and it.timed.failure is None)
        return min(timed, key=Product.milliseconds)

    def floors_ms(self) -> dict[int, float]:
        """By operations, in NHV."""
        logits, *others = (self.fastest(kind).milliseconds() for kind in ("logits", "d_weight", "d_hidden"))
        return {2: logits, 6: logits + sum(others), 8: 2 * logits + sum(others)}


def measure(bench: Bench, peers: list[Candidate], shape: Shape) -> Measurement:
    started = time.perf_counter()
    torch.compiler.reset()  # else the compiled path gives up compiling after some shapes
    problem = draw_problem(bench, shape)
    candidates = [
        candidate
        for candidate in our_candidates(bench) + peers
        if not bench.only or any(part in candidate.name.lower() for part in bench.only)
    ]
    rows = [prepare(bench, candidate, problem) for candidate in candidates]
    products = pure_products(bench, problem)
    warm_up(bench)
    take_turns(bench, [timed for row in rows for timed in row.timings()] + [it.timed for it in products])
    return Measurement(shape=shape, rows=rows, products=products, wall_s=time.perf_counter() - started)


def prepare(bench: Bench, candidate: Candidate, problem: Problem) -> Row:
    """Run everything once or twice, so that nothing is compiled or tuned later; measure the peak."""
    timed = partial(Timed, least_s=bench.conduct.visit_s)
    row = Row(
        candidate=candidate,
        step=timed(run=lambda: step(candidate, problem)),
        forward=timed(run=lambda: forward(candidate, problem)) if candidate.has_forward else None,
    )
    row.step.failure = attempt(bench, lambda: _first_steps(bench, row, problem))
    problem.clear_gradients()
    if row.forward is not None:
        row.forward.failure = row.step.failure or attempt(bench, row.forward.run)
    bench.free_memory()
    return row


def _first_steps(bench: Bench, row: Row, problem: Problem) -> None:
    row.step.run()
    problem.clear_gradients()
    bench.free_memory()
    if not bench.on_gpu:
        row.step.run()
        return
    held_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    row.step.run()
    gradient_bytes = problem.hidden.nbytes + problem.weight.nbytes
    row.peak_bytes = torch.cuda.max_memory_allocated() - held_bytes - gradient_bytes


def attempt(bench: Bench, run: Callable[[], object]) -> str | None:
    """Why it failed, or None."""
    failure = None
    try:
        run()
    except torch.OutOfMemoryError:
        failure = "out of memory"
    except torch.AcceleratorError:
        raise  # the device is lost to this process
    except Exception as error:  # others' kernels may raise anything, and the rest is measured all the same
        first_line = str(error).strip().partition("\n")[0]
        failure = f"failed: {type(error).__name__}: {first_line}"
    if failure is not None:
        bench.free_memory()
    return failure


def warm_up(bench: Bench) -> None:
    size = bench.conduct.warm_up_size
    factor = torch.randn(size, size, device=bench.device).to(bench.conduct.dtype)
    started = time.perf_counter()
    while time.perf_counter() - started < bench.conduct.warm_up_s:
        time_runs(bench, lambda: factor @ factor, 5)


def take_turns(bench: Bench, everything: list[Timed]) -> None:
    for index in range(bench.rounds):
        for timed in everything if index % 2 == 0 else reversed(everything):
            if timed.failure is None:
                timed.failure = attempt(bench, partial(_visit, bench, timed))


def _visit(bench: Bench, timed: Timed) -> None:
    if not timed.samples_ms:
        [timed.expected_ms] = time_runs(bench, timed.run, 1)
    count = math.ceil(timed.least_s * 1e3 / timed.expected_ms)
    timed.samples_ms += time_runs(bench, timed.run, count)
    timed.expected_ms = timed.median_ms()


def time_runs(bench: Bench, run: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each run; on a GPU all are queued at once, so that it never waits for the host."""
    if not bench.on_gpu:
        return [_wall_clock_ms(run) for _ in range(count)]
    event = partial(torch.cuda.Event, enable_timing=True)
    spans = [(event(), event()) for _ in range(count)]
    for start, end in spans:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in spans]


def _wall_clock_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


# --- the report


HEADER = [
    "implementation",
    "fwd ms",
    "x2NHV",
    "fwd+bwd ms",
    "its floor",
    "x6NHV",
    "x8NHV",
    "peak GiB",
]


def report(measurement: Measurement) -> str:
    shape, floors = measurement.shape, measurement.floors_ms()
    title = f"N {shape.num_tokens:,}, H {shape.hidden_size:,}, V {shape.vocab_size:,}"
    lines = [f"## {title} (measured in {measurement.wall_s:.0f} s)", ""]
    lines += [heading(*HEADER), *(markdown_row(*_cells(row, floors)) for row in measurement.rows)]
    lines += ["", "Floors: " + ", ".join(f"{count}NHV {ms:.3f} ms" for count, ms in floors.items())]
    lines += [_product_line(measurement, kind) for kind in ("logits", "d_weight", "d_hidden")]
    failures = [(row.candidate.name, timed.failure) for row in measurement.rows for timed in row.timings()]
    lines += [f"- {name}: {failure}" for name, failure in dict.fromkeys(failures) if failure]
    return "\n".join(lines) + "\n"


def _cells(row: Row, floors: dict[int, float]) -> list[str]:
    peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / GIB:.2f}"
    forward_ms = row.forward.median_ms() if row.forward and row.forward.failure is None else None
    timed = ["-", "-"] if forward_ms is None else [f"{forward_ms:.2f}", f"{forward_ms / floors[2]:.2f}"]
    if row.step.failure is not None:
        return [row.candidate.name, *timed, "-", row.step.failure.partition(":")[0], "-", "-", peak]
    step_ms, operations = row.step.median_ms(), row.candidate.operations
    its_floor = f"{operations}NHV x {step_ms / floors[operations]:.2f}"
    ratios = [f"{step_ms / floors[count]:.2f}" for count in (6, 8)]
    return [row.candidate.name, *timed, f"{step_ms:.2f}", its_floor, *ratios, peak]


def _product_line(measurement: Measurement, kind: str) -> str:
    best = measurement.fastest(kind)
    shape, milliseconds = measurement.shape, best.milliseconds()
    rate = 2 * math.prod(shape) / milliseconds / 1e9
    return f"- {kind}: {milliseconds:.3f} ms, {rate:.0f} TFLOP/s ({best.variant})"


# --- the command


def find_version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", type=parse_shapes, help="N,H,V;N,H,V;... (default: by device)")
    parser.add_argument("--only", default="", help="parts of the implementations' names, with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=CONDUCTS, default="cuda")
    return parser.parse_args()


def parse_shapes(text: str) -> list[Shape]:
    return [Shape(*map(int, shape.split(","))) for shape in text.split(";")]


def make_bench(arguments: argparse.Namespace) -> Bench:
    return Bench(
        device=torch.device(arguments.device),
        rounds=arguments.rounds,
        only=[part for part in arguments.only.lower().split(",") if part],
    )


def main() -> None:
    arguments = parse_arguments()
    bench = make_bench(arguments)
    device = torch.cuda.get_device_name() if bench.on_gpu else "CPU"
    versions = {name: find_version(name) for name in ("torch", "triton", "liger-kernel", "cut-cross-entropy")}
    print(device, *(f"{name} {version}" for name, version in versions.items() if version), sep=", ")
    peers = load_peers(bench)
    for shape in arguments.shapes or parse_shapes(bench.conduct.shapes):
        print("\n" + report(measure(bench, peers, shape)), flush=True)
        bench.free_memory()


if __name__ == "__main__":
    main()
