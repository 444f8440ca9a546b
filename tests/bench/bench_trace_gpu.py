"""What a trace finds between layouts that one or two GPUs hold, and what observing a step costs.

python -m tests.bench.bench_trace_gpu                        # one GPU, a tiny Qwen2: minutes
python -m tests.bench.bench_trace_gpu --ranks 2              # and the layouts of two GPUs
python -m tests.bench.bench_trace_gpu --model FOLDER         # a checkpoint: each capture is gigabytes
python -m tests.bench.bench_trace_gpu --device cpu           # the same code on CPU cores (TRITON_INTERPRET=1)
python -m tests.bench.bench_trace_gpu --only fused,times     # some rows; --dtypes float32 for one dtype

Clean layouts are compared with one rank, packed, with dense log-probs, uncompiled: `agree` is right. All runs
of one number of ranks share processes. Layouts without their package (megatron-core, liger-kernel) are left
out. Faults: bench_trace.
Nothing is written but a temporary folder; with --work FOLDER a stopped command goes on in it.

The last lines are of one run: seconds of a plain step, of a step that is observed, and of one that is also
gathered and written. Medians of alternating steps.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from abrun.errors import AbrunError
from abrun.recipe.run import OwnRunConfig
from abrun.runs.captures import read_capture
from abrun.runs.files import read_json, write_json
from abrun.tools.trace.command import MAX_TOKENS, REPLICAS, read_replicas
from abrun.tools.trace.judge import NUM_REPLICAS, judge_trace
from abrun.tools.trace.measure import Tracer, run_job
from abrun.tools.trace.observe import StepObserver
from abrun.trainer.backends.ranks import join_ranks
from abrun.trainer.loop.setup import make_setup
from abrun.trainer.training import make_algorithm
from tests.bench.bench_trace import GRPO
from tests.bench.common import heading, make_parser, markdown_row, sync_of
from tests.tools.trace.captured import config
from tests.tools.trace.test_layouts import DTENSOR, EXPERTS, MEGATRON

TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
CLEAN: dict[str, tuple[int, dict[str, Any]]] = {
    "padded": (1, {"packing": False}),
    "token budget": (1, {"micro_batch_size": None, "micro_batch_tokens": 400}),
    "shared prompts": (1, {"share_prompts": True}),
    "chunked": (1, {"logprobs": {"impl": "chunked", "chunk_size": 32}}),
    "fused": (1, {"logprobs": {"impl": "triton"}}),
    "one pass": (1, {"logprobs": {"impl": "triton", "one_pass": True}}),
    "checkpointed": (1, {"activation_checkpointing": "full"}),
    "compiled": (1, {"compile": True}),
    "liger": (1, {"liger": True}),
    "megatron": (1, {"backend": MEGATRON}),
    "data": (2, {}),
    "context": (2, {"backend": {**DTENSOR, "context_parallel": 2}}),
    "tensor": (2, {"backend": {**DTENSOR, **TENSOR}}),
    "tensor fused": (2, {"backend": {**DTENSOR, **TENSOR}, "logprobs": {"impl": "triton"}}),
    "experts expert": (2, {"backend": {**DTENSOR, "expert_parallel": 2}}),
    "experts tensor": (2, {"backend": {**DTENSOR, **TENSOR}}),
    "megatron tensor": (2, {"backend": {**MEGATRON, **TENSOR}}),
    "megatron context": (2, {"backend": {**MEGATRON, "context_parallel": 2}}),
    "experts megatron expert": (2, {"backend": {**MEGATRON, "expert_parallel": 2}}),
}
NUM_PROMPTS, ROUNDS, TIMES = 64, 7, "times"
BASELINE, TREATMENT = "baseline", "treatment"


def reward(prompt: str, completion: str, answer: str) -> float:
    """Reward of a completion that differs between completions of any model."""
    return sum(map(ord, completion)) % 7 / 7


class Runs:
    """The configurations to compare, on one device, all on the same prompts."""

    def __init__(self, folder: Path, device: str, model: Path | None) -> None:
        self._folder, self._device = folder, device
        self._model = {"path": str(model)} if model else {"preset": "qwen2-tiny-128"}
        prompts = folder / "prompts.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        if not prompts.exists():
            rows = (f'{{"prompt": "{number}+{number % 7}=", "answer": "0"}}' for number in range(NUM_PROMPTS))
            prompts.write_text("\n".join(rows))
        self._task = {"type": "jsonl", "path": str(prompts), "verifier": f"{__spec__.name}:{reward.__name__}"}

    def folder(self, name: str, dtype: str, seed: int) -> Path:
        """Return the folder of the baseline that a case is compared with."""
        return self._folder / f"{'experts-' * name.startswith('experts')}{dtype}-{seed}"

    def config(
        self, name: str, dtype: str, ranks: int = 1, policy: dict[str, Any] | None = None
    ) -> OwnRunConfig:
        base = {**GRPO, "task": self._task, "model": self._model}
        on_gpu = self._device == "cuda"
        changes: dict[str, Any] = {
            "policy": {**(policy or {}), "dtype": dtype},
            "rollout": {"max_new_tokens": 16},
            "cluster": {"gpus_per_node": ranks, "cpu_ranks": 1} if on_gpu else {"cpu_ranks": ranks},
        }
        experts = EXPERTS if name.startswith("experts") else {}
        return config(changes, experts, base=base)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One arm to compare with its baseline."""

    name: str
    dtype: str
    ranks: int
    policy: dict[str, Any]
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}-{self.dtype}-{self.seed}".replace(" ", "-")

    def row(self, *cells: object) -> str:
        return markdown_row(self.name, self.dtype, self.seed, self.ranks, *cells)


def cases(ranks: int, seeds: int, dtypes: list[str], only: list[str]) -> Iterator[Case]:
    """Yield the cases of so many ranks."""
    for seed, dtype in product(range(seeds), dtypes):
        for name, (size, policy) in CLEAN.items():
            if size == ranks and (not only or name in only) and is_installed(policy):
                yield Case(name=name, dtype=dtype, ranks=ranks, policy=policy, seed=seed)


def trace_case(runs: Runs, case: Case, device: torch.device, replicas: int) -> tuple[bool, str]:
    """Capture a case, and its baseline if that is missing; return whether it is right, and its row."""
    folder = runs.folder(case.name, case.dtype, case.seed)
    if not (folder / REPLICAS).exists():
        run_job(_job(runs.config(case.name, case.dtype), folder, BASELINE, case.seed, replicas), device)
    run = runs.config(case.name, case.dtype, case.ranks, case.policy)
    run_job(_job(run, folder, TREATMENT, case.seed), device)
    if dist.get_rank():
        return True, ""
    baseline, treatment = (read_capture(folder / arm) for arm in (BASELINE, TREATMENT))
    result = judge_trace(baseline, treatment, read_replicas(folder))
    worst = max(result.tensors, key=lambda tensor: tensor.ratio)
    first = result.first
    shown = first or worst
    cells = f"{shown.ratio:.3g} / {result.limit:.3g}", f"`{shown.name}`", "differ" if first else "agree"
    return first is None, case.row(*cells, len(result.missing), "NO" if first else "yes")


def try_case(runs: Runs, case: Case, device: torch.device, replicas: int) -> tuple[bool, str]:
    """Return what `trace_case` does, or the row of a failure, which does not end the run of a single rank."""
    try:
        return trace_case(runs, case, device, replicas)
    except AbrunError as error:  # alike on all ranks
        return False, case.row("", "", f"refused: {error}", "", "NO")
    except Exception as error:
        if case.ranks > 1:  # other ranks may wait for this one
            raise
        traceback.print_exc()
        return False, case.row("", "", f"failed: {error!r:.200}", "", "NO")


def _job(run: OwnRunConfig, folder: Path, arm: str, seed: int = 0, replicas: int = 0) -> dict[str, Any]:
    return {
        "config": run.model_dump(mode="json"),
        "recorded": str(folder / "recorded"),
        "captures": str(folder),
        "arm": arm,
        "seed": seed,
        "step": 1,
        "initial_weights": None,
        "records": arm == BASELINE,
        "replicas": replicas,
        "max_tokens": MAX_TOKENS,
    }


def measure_times(runs: Runs, device: torch.device, dtype: str, compiles: bool) -> str:
    """Return the line with the cost of a step that is observed, and captured."""
    fused = "triton" if device.type == "cuda" else "chunked"
    run = runs.config("times", dtype, policy={"compile": compiles, "logprobs": {"impl": fused}})
    sync = sync_of(device.type)
    folder = runs.folder("", f"times-{dtype}", 0)
    plain, observed, captured = (make_setup(run, 0, None, device) for _ in range(3))
    observer, tracer = StepObserver(observed, MAX_TOKENS), Tracer(captured, _job(run, folder, BASELINE))
    algorithms = [make_algorithm(setup) for setup in (plain, observed, captured)]
    calls = (
        lambda: algorithms[0].step(1),
        lambda: observer.observe(lambda: algorithms[1].step(1)),
        lambda: tracer._capture(algorithms[2], TREATMENT, None),
    )
    seconds: list[list[float]] = [[], [], []]
    for _ in range(ROUNDS + 2):
        for call, times in zip(calls, seconds, strict=True):
            sync()
            began_s = time.perf_counter()
            call()
            sync()
            times.append(time.perf_counter() - began_s)
    step, *others = (statistics.median(times[2:]) for times in seconds)
    texts = (
        f"{name} {other:.3f} s, {other / step:.2f} times"
        for name, other in zip(("observed", "also gathered and written"), others, strict=True)
    )
    return f"{dtype}, {'compiled' if compiles else 'eager'}, fused: a step {step:.3f} s; {'; '.join(texts)}"


def run_rank(rank: int, size: int, port: int, results: Any, options: dict[str, Any]) -> None:
    """Run all cases of so many ranks, in one process a rank. Prints rows on the first."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store
    }
    runs = Runs(options["folder"], options["device"], options["model"])
    some = runs.config("", "float32", size)
    device = join_ranks(some.cluster.model_dump())
    for case in cases(size, options["seeds"], options["dtypes"], options["only"]):
        path = options["folder"] / "rows" / f"{case.key}.json"
        if not path.exists():
            right, row = try_case(runs, case, device, options["replicas"])
            if not rank:
                write_json(path, {"right": right, "row": row})
        if not rank:
            content = read_json(path)
            results.put((case.name, content["right"]))
            print(content["row"], flush=True)
        dist.barrier()
    if size == 1 and (not options["only"] or TIMES in options["only"]):
        for dtype in options["dtypes"]:
            for compiles in (False, True):
                print(measure_times(runs, device, dtype, compiles), flush=True)
    dist.destroy_process_group()


def is_installed(policy: dict[str, Any]) -> bool:
    """Return whether the packages of a layout are there."""
    uses_megatron = policy.get("backend", DTENSOR)["type"] == MEGATRON["type"]
    packages = ["liger_kernel"] * policy.get("liger", False) + ["megatron"] * uses_megatron
    return all(importlib.util.find_spec(package) for package in packages)


def run_ranks_once(size: int, options: dict[str, Any]) -> list[tuple[str, bool]]:
    """Run the cases of so many ranks in processes; return each case and whether it is right."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    arguments = [(rank, size, store.port, results, options) for rank in range(size)]
    ranks = [context.Process(target=run_rank, args=words, daemon=True) for words in arguments]
    for process in ranks:
        process.start()
    found = []
    while any(process.is_alive() for process in ranks) or not results.empty():
        if any(process.exitcode for process in ranks):
            break
        try:
            found.append(results.get(timeout=0.2))
        except multiprocessing.queues.Empty:  # pyright: ignore[reportAttributeAccessIssue]
            continue
    for process in ranks:
        process.kill()
        process.join()
    return found


def main() -> None:
    parser = make_parser(__doc__, devices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--replicas", type=int, default=NUM_REPLICAS)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    options = vars(parser.parse_args())
    began_s = time.perf_counter()
    titles = "layout", "dtype", "seed", "ranks", "ratio / limit", "of", "found", "not compared", "right"
    print(heading(*titles), flush=True)
    with contextlib.ExitStack() as stack:
        temporary = options["work"] or stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-trace-"))
        options["folder"] = Path(temporary)
        found = [row for size in range(1, options["ranks"] + 1) for row in run_ranks_once(size, options)]
    skipped = [name for name, (_, policy) in CLEAN.items() if not is_installed(policy)]
    print(f"left out, without their package: {', '.join(skipped) or 'none'}")
    num_right = sum(right for _, right in found)
    print(f"{num_right} of {len(found)} right; {time.perf_counter() - began_s:.0f} s in all")


if __name__ == "__main__":
    main()
