"""What a training step costs without its rollouts, lever by lever, and beside TRL: supervised fine-tuning.

    python tests/bench/bench_training.py                        # one GPU, Qwen2.5-1.5B, bfloat16
    python tests/bench/bench_training.py --only padded levers   # some candidates; * at the end: all such
    python tests/bench/bench_training.py --starts --only packed "packed, compiled"    # up to the first step
    python tests/bench/bench_training.py --profile              # how busy the GPU is, and with what
    python tests/bench/bench_training.py --chart runs/training  # and training.png and .svg: where steps go
    python tests/bench/bench_training.py --gpus 2 --lengths mixed --only "levers*"
    python tests/bench/bench_training.py --preset qwen3-8b --gpus 2 --only "8B*"
    python tests/bench/bench_training.py --device cpu           # the script's own logic, on a tiny model

All train one folder of random weights on the same sequences, of one length or of log-normal ones (`--lengths
mixed`: a median of 400 tokens, at most 4,096): forward, backward, clipping and AdamW with float32 master
weights. A candidate is a process of its own; figures are medians of the steps after the first two, which
compile. Utilisation: 6 x parameters x tokens over the seconds and the card's dense bfloat16 rate
(989 TFLOP/s, an H200's; NVIDIA's data sheet). `--starts`: a process fills the caches, and of three more the
median seconds of each part of the way to the first step's end, imports and all. TRL: `SFTTrainer`, with
and without Liger's kernels.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from charts import chart  # pyright: ignore[reportMissingImports]
from random_model import make_model  # pyright: ignore[reportMissingImports]

from abrun.train import early

PEAK_FLOPS = 989e12
STEPS, WARM_UP = 7, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    preset: str
    num_sequences: int
    length: int
    micro_batch: int  # padded rows
    micro_batch_tokens: int  # packed
    rate: float  # of the device, in operations a second


SHAPES = {
    "cuda": Shapes(
        preset="qwen2.5-1.5b",
        num_sequences=124,
        length=524,
        micro_batch=8,
        micro_batch_tokens=31 * 524,
        rate=PEAK_FLOPS,
    ),
    "cpu": Shapes(
        preset="qwen2-tiny", num_sequences=8, length=32, micro_batch=2, micro_batch_tokens=128, rate=1e12
    ),
}
KEPT = {"backend": {"keep_gathered": True}}
CANDIDATES: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": True},
    "padded, full": {"micro_batch_size": True, "activation_checkpointing": "full"},
    "packed, full": {"activation_checkpointing": "full"},
    "packed, full, compiled": {"activation_checkpointing": "full", "compile": True},
    "packed, selective, compiled": {"activation_checkpointing": "selective", "compile": True},
    "packed": {},
    "packed, compiled": {"compile": True},
    "packed, Liger": {"liger": True},
    "packed, gathered": KEPT,
    "levers: packed, gathered, compiled": {"compile": True, **KEPT},
    "levers: the same, one pass": {"compile": True, "logprobs": {"one_pass": True}, **KEPT},
    "levers: the same, selective": {"compile": True, "activation_checkpointing": "selective", **KEPT},
    "8B: full": {"activation_checkpointing": "full", "compile": True},
    "8B: selective": {"activation_checkpointing": "selective", "compile": True},
    "8B: full, gathered": {"activation_checkpointing": "full", "compile": True, **KEPT},
}
TRL = {"trl, padded": False, "trl with Liger, padded": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Of one candidate."""

    name: str
    device: str
    work: str
    lengths: str
    num_sequences: int
    profiled: bool
    started: float  # time.time()


def rows_of(asked: Asked, rank: int) -> list[list[int]]:
    """Of token ids; each rank has others."""
    import torch

    shapes, generator = SHAPES[asked.device], torch.Generator().manual_seed(rank)
    sizes = [shapes.length] * asked.num_sequences
    if asked.lengths == "mixed":
        draws = torch.empty(asked.num_sequences).log_normal_(math.log(400), 0.8, generator=generator)
        sizes = [min(max(int(draw * shapes.length / 524), 8), 8 * shapes.length - 96) for draw in draws]
    return [torch.randint(3, 90, (size,), generator=generator).tolist() for size in sizes]


class Way:
    """To the end of the first step: the seconds of each of its parts."""

    def __init__(self, asked: Asked) -> None:
        self._device, self._last_s = asked.device, asked.started
        self.seconds: dict[str, float] = {}

    def reached(self, end_of: str) -> None:
        if self._device == "cuda" and "torch" in self.seconds:
            import torch

            torch.cuda.synchronize() if torch.cuda.is_initialized() else None
        now_s = time.time()
        self.seconds[end_of], self._last_s = now_s - self._last_s, now_s


def come_up(asked: Asked, way: Way) -> Any:
    """As a rank does; its `Ranks`."""
    way.reached("Python")
    driver = early.begin()
    import torch  # noqa: F401

    way.reached("torch")
    import abrun.backends.dtensor
    import abrun.train.loop
    import abrun.train.sft  # noqa: F401
    from abrun.backends.ranks import join_ranks, make_ranks

    way.reached("other imports")
    early.finish(driver)
    way.reached("the driver's rest")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    on = join_ranks({"nodes": 1, "gpus_per_node": size if asked.device == "cuda" else 0, "cpu_ranks": size})
    ranks = make_ranks(on, {})
    ranks.total(0.0)
    way.reached("process group")
    return ranks


def train(asked: Asked) -> None:
    """Prints seconds a step, peak bytes, parameters, and where a step's time goes if `profiled`."""
    way = Way(asked)
    ranks = come_up(asked, way)
    import torch
    import torch.distributed as dist

    from abrun.backends.dtensor import DtensorBackend
    from abrun.models import open_network
    from abrun.recipe import Model, Policy
    from abrun.rl.batch import collate
    from abrun.train.sft import SupervisedObjective

    shapes, device = SHAPES[asked.device], asked.device
    settings = dict(CANDIDATES[asked.name])
    if settings.pop("micro_batch_size", False):
        settings["micro_batch_size"] = shapes.micro_batch
    else:
        settings |= {"packing": True, "micro_batch_tokens": shapes.micro_batch_tokens}
    policy = Policy.model_validate(
        {
            "dtype": "bfloat16" if device == "cuda" else "float32",
            **settings,
            "logprobs": {"impl": "triton" if device == "cuda" else "chunked", **settings.get("logprobs", {})},
        }
    )

    def load() -> Any:
        return open_network(Model(path=f"{asked.work}/model"), weights=None, seed=0, decodes=False)

    backend = DtensorBackend(load, policy, ranks)
    way.reached("model")
    rows = rows_of(asked, ranks.rank)
    batch = collate([row[:4] for row in rows], [row[4:] for row in rows], pad_id=0).to(ranks.device)
    (num_tokens,) = ranks.total(float(batch.token_mask.sum()))

    def step() -> float:
        start = time.perf_counter()
        backend.forward_backward(batch, SupervisedObjective(num_tokens=num_tokens))
        if "first update" not in way.seconds:
            way.reached("first gradient")
        backend.optimizer_step(1e-6)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    times = [step()]
    way.reached("first update")
    times += [step() for _ in range(STEPS - 1)]
    row = {
        "seconds": statistics.median(times[WARM_UP:]),
        "tokens": sum(ranks.gather([len(row) for row in rows])) / dist.get_world_size(),
        "starts": way.seconds,
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "parameters": sum(parameter.numel() for parameter in backend.module.parameters()),
        "parts": parts_of(step, backend, device),
    }
    if ranks.is_first:
        print("ROW " + json.dumps(row), flush=True)
    if asked.profiled:
        profile(step, quiet=not ranks.is_first)
    dist.destroy_process_group()


def parts_of(step: Callable[[], float], backend: Any, device: str) -> dict[str, float]:
    """Seconds of one more step by its parts, in which the device is waited for after each."""
    import torch

    seconds: dict[str, float] = {}
    inside: list[float] = []  # of what is inside of what

    def timed(owner: Any, method: str, part: str) -> Callable[[], None]:
        inner = getattr(owner, method)

        def run(*args: Any, **more: Any) -> Any:
            torch.cuda.synchronize() if device == "cuda" else None
            start = time.perf_counter()
            inside.append(0.0)
            found = inner(*args, **more)
            torch.cuda.synchronize() if device == "cuda" else None
            took = time.perf_counter() - start
            seconds[part] = seconds.get(part, 0.0) + took - inside.pop()
            if inside:
                inside[-1] += took
            return found

        setattr(owner, method, run)
        return lambda: setattr(owner, method, inner)

    undo = [
        timed(backend.module._head, "judge", "head forward"),
        timed(backend, "_forward", "forward"),
        timed(torch.Tensor, "backward", "backward"),
        timed(backend, "optimizer_step", "optimizer"),
    ]
    whole = step()
    for each in undo:
        each()
    return seconds | {"all else": whole - sum(seconds.values())}


def profile(step: Any, quiet: bool) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        wall = step()
    kernels: dict[str, float] = {}
    syncs = 0
    for event in profiled.events() or ():
        if event.device_type.name == "CUDA":
            kernels[event.name] = kernels.get(event.name, 0.0) + event.device_time / 1e6
        syncs += event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    busy = sum(kernels.values())
    if quiet:
        return
    print(f"PROFILE wall {wall:.3f} s under the profiler, kernels {busy:.3f} s, {syncs} synchronisations")
    for name, seconds in sorted(kernels.items(), key=lambda item: -item[1])[:14]:
        print(f"PROFILE {seconds / busy:6.1%} {seconds:7.4f} s {name[:90]}")


def train_trl(asked: Asked) -> None:
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    device, shapes, times = asked.device, SHAPES[asked.device], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if device == "cuda" else None
            times.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if device == "cuda" else None
            times[-1] = time.perf_counter() - times[-1]

    network: Any = AutoModelForCausalLM.from_pretrained(f"{asked.work}/model", dtype=torch.float32)
    rows = rows_of(asked, 0) * STEPS
    settings: dict[str, Any] = {
        "output_dir": f"{asked.work}/trl",
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "per_device_train_batch_size": shapes.micro_batch,
        "gradient_accumulation_steps": asked.num_sequences // shapes.micro_batch,
        "gradient_checkpointing": True,
        "bf16": device == "cuda",
        "use_cpu": device != "cuda",
        "use_liger_kernel": TRL[asked.name],
        "max_length": max(map(len, rows)),
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    SFTTrainer(
        model=network,
        args=SFTConfig(**settings),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(f"{asked.work}/model"),
        callbacks=[Clock()],
    ).train()
    row = {
        "seconds": statistics.median(times[WARM_UP:]),
        "tokens": sum(map(len, rows)) / STEPS,
        "starts": {},
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }
    print("ROW " + json.dumps(row), flush=True)
    os._exit(0)


def measured(asked: dict[str, Any], num_gpus: int) -> dict[str, Any] | None:
    command = [sys.executable, __file__, "--one", json.dumps(asked)]
    if num_gpus > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in ended.stdout.splitlines():
        if line.startswith("PROFILE "):
            print("   " + line[8:])
    rows = [line[4:] for line in ended.stdout.splitlines() if line.startswith("ROW ")]
    if not rows:
        print(f"{asked['name']}: failed\n" + "\n".join(ended.stderr.strip().splitlines()[-12:]), flush=True)
        return None
    return json.loads(rows[-1])


def shown(name: str, row: dict[str, Any], shapes: Shapes) -> None:
    rate = row["tokens"] / row["seconds"]
    print(
        f"{name:36s} {row['seconds']:7.3f} s  {rate:9.0f} tokens/s a device  "
        f"utilisation {6 * row['parameters'] * rate / shapes.rate:.2f}  peak {row['peak'] / 2**30:6.1f} GiB",
        flush=True,
    )


def show_start(fields: dict[str, Any], num_gpus: int) -> None:
    """The medians of three processes after one that fills the caches."""
    rows = [measured({**fields, "started": time.time()}, num_gpus) for _ in range(1 + 3)][1:]
    found = [row["starts"] for row in rows if row is not None]
    if not found:
        return
    parts = {part: statistics.median(one[part] for one in found) for part in found[0]}
    whole = statistics.median(sum(one.values()) for one in found)
    words = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
    print(f"{fields['name']:36s} first step ended after {whole:.1f} s: {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    parser.add_argument("--only", nargs="*", help="candidates, by name; * at the end: all that begin so")
    parser.add_argument("--preset", help="another architecture")
    parser.add_argument("--lengths", choices=("one", "mixed"), default="one")
    parser.add_argument("--sequences", type=int, help="other than so many a device")
    parser.add_argument("--gpus", type=int, default=1, help="of one host; each has as many sequences")
    parser.add_argument("--starts", action="store_true", help="the way to the first step alone")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--chart", type=Path, help="without its ending")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one = Asked(**json.loads(asked.one))
        train_trl(one) if one.name in TRL else train(one)
        return
    shapes, found = SHAPES[asked.device], {}
    preset = asked.preset or shapes.preset
    num_sequences = asked.sequences or shapes.num_sequences
    print(f"{num_sequences} sequences a device, {asked.lengths} length(s), {preset}", flush=True)
    names = [*CANDIDATES, *(TRL if importlib.util.find_spec("trl") else ())]
    wanted = asked.only or [name for name in names if not name.startswith("8B")]
    with tempfile.TemporaryDirectory() as work:
        make_model(preset, Path(work) / "model", asked.device)
        for name in names:
            if not any(name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in wanted):
                continue
            one = Asked(
                name=name,
                device=asked.device,
                work=work,
                lengths=asked.lengths,
                num_sequences=num_sequences,
                profiled=asked.profile,
                started=time.time(),
            )
            if asked.starts:
                show_start(asdict(one), asked.gpus)
                continue
            row = measured(asdict(one), asked.gpus)
            if row is not None:
                found[name] = row
                shown(name, row, shapes)
    fastest = max((row["tokens"] / row["seconds"] for row in found.values()), default=0.0)
    for name, row in found.items():
        print(f"{name:36s} {row['tokens'] / row['seconds'] / fastest:5.2f} of the fastest")
    if asked.chart:
        chart({name: row["parts"] for name, row in found.items() if "parts" in row}, asked.chart, "s a step")


if __name__ == "__main__":
    main()
