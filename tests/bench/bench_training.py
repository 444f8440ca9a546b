"""What a training step costs without its rollouts, lever by lever, and beside TRL: supervised fine-tuning.

    python tests/bench/bench_training.py                        # one GPU, Qwen2.5-1.5B, bfloat16
    python tests/bench/bench_training.py --only padded levers   # some candidates; * at the end: all such
    python tests/bench/bench_training.py --profile              # how busy the GPU is, and with what
    python tests/bench/bench_training.py --device cpu           # the script's own logic, on a tiny model

All train random weights on the same sequences of one length: forward, backward, clipping and AdamW with
float32 master weights. A candidate is a process of its own; figures are medians of the steps after the first
two, which compile. Utilisation: 6 x parameters x tokens over the seconds and the card's dense bfloat16 rate
(989 TFLOP/s, an H200's; NVIDIA's data sheet). TRL: `SFTTrainer`, with and without Liger's kernels.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

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
    "packed, gathered": KEPT,
    "levers: packed, gathered, compiled": {"compile": True, **KEPT},
    "levers: the same, selective": {"compile": True, "activation_checkpointing": "selective", **KEPT},
}
TRL = {"trl, padded": False, "trl with Liger, padded": True}


def train(name: str, device: str, preset: str | None, profiled: bool) -> None:
    """Prints seconds a step, peak bytes, parameters, and where a step's time goes if `profiled`."""
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    from abrun.backends.dtensor import DtensorBackend
    from abrun.backends.ranks import make_ranks
    from abrun.models import load_network
    from abrun.recipe import Model, Policy
    from abrun.rl.batch import collate
    from abrun.train.sft import SupervisedObjective

    shapes = SHAPES[device]
    started = time.perf_counter()
    rank = int(os.environ.get("RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = {} if "WORLD_SIZE" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **store)
    on = torch.device(device, rank) if device == "cuda" else torch.device(device)
    settings = dict(CANDIDATES[name])
    if settings.pop("micro_batch_size", False):
        settings["micro_batch_size"] = shapes.micro_batch
    else:
        settings |= {"packing": True, "micro_batch_tokens": shapes.micro_batch_tokens}
    policy = Policy.model_validate(
        {
            "dtype": "bfloat16" if device == "cuda" else "float32",
            "logprobs": {"impl": "triton" if device == "cuda" else "chunked"},
            **settings,
        }
    )

    def load() -> Any:
        return load_network(Model.model_validate({"preset": preset or shapes.preset}), weights=None, seed=0)

    backend = DtensorBackend(load, policy, make_ranks(on, {}))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 90, (shapes.num_sequences, shapes.length), generator=generator).tolist()
    batch = collate([row[:4] for row in rows], [row[4:] for row in rows], pad_id=0).to(on)
    num_tokens = float(batch.token_mask.sum()) * dist.get_world_size()

    def step() -> float:
        start = time.perf_counter()
        backend.forward_backward(batch, SupervisedObjective(num_tokens=num_tokens))
        backend.optimizer_step(1e-6)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    times = [step()]
    first = time.perf_counter() - started
    times += [step() for _ in range(STEPS - 1)]
    row = {
        "seconds": statistics.median(times[WARM_UP:]),
        "first": first,
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "parameters": sum(parameter.numel() for parameter in backend.module.parameters()),
    }
    if rank == 0:
        print("ROW " + json.dumps(row), flush=True)
    if profiled:
        profile(step, quiet=rank > 0)
    dist.destroy_process_group()


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


def train_trl(liger: bool, device: str, work: str) -> None:
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    from abrun.models import load_network
    from abrun.recipe import Model

    shapes, times = SHAPES[device], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if device == "cuda" else None
            times.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if device == "cuda" else None
            times[-1] = time.perf_counter() - times[-1]

    network: Any = load_network(Model.model_validate({"preset": shapes.preset}), weights=None, seed=0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 90, (STEPS * shapes.num_sequences, shapes.length), generator=generator).tolist()
    settings: dict[str, Any] = {
        "output_dir": f"{work}/trl",
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "per_device_train_batch_size": shapes.micro_batch,
        "gradient_accumulation_steps": shapes.num_sequences // shapes.micro_batch,
        "gradient_checkpointing": True,
        "bf16": device == "cuda",
        "use_cpu": device != "cuda",
        "use_liger_kernel": liger,
        "max_length": shapes.length,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(str(number) for number in range(97))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({w: at for at, w in enumerate(words)}, unk_token="<unk>")
        ),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    SFTTrainer(
        model=network,
        args=SFTConfig(**settings),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()
    row = {
        "seconds": statistics.median(times[WARM_UP:]),
        "first": 0.0,
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }
    print("ROW " + json.dumps(row), flush=True)
    os._exit(0)


def measured(asked: dict[str, Any], num_gpus: int) -> dict[str, float] | None:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    parser.add_argument("--only", nargs="*", help="candidates whose names begin so")
    parser.add_argument("--preset", help="another architecture for abrun's candidates")
    parser.add_argument("--gpus", type=int, default=1, help="of one host; each has as many sequences")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        given = json.loads(asked.one)
        if given["name"] in TRL:
            train_trl(TRL[given["name"]], given["device"], given["work"])
        else:
            train(given["name"], given["device"], given["preset"], given["profiled"])
        return
    shapes, found = SHAPES[asked.device], {}
    tokens = shapes.num_sequences * shapes.length
    print(f"{shapes.num_sequences} sequences of {shapes.length} tokens, {asked.preset or shapes.preset}")
    names = [*CANDIDATES, *(TRL if importlib.util.find_spec("trl") else ())]
    for name in names:
        if asked.only and not any(
            name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in asked.only
        ):
            continue
        with tempfile.TemporaryDirectory() as work:
            row = measured(
                {
                    "name": name,
                    "device": asked.device,
                    "work": work,
                    "preset": asked.preset,
                    "profiled": asked.profile,
                },
                asked.gpus,
            )
        if row is None:
            continue
        found[name] = row["seconds"]
        used = 6 * row["parameters"] * tokens / row["seconds"] / shapes.rate
        print(
            f"{name:36s} {row['seconds']:7.3f} s  {tokens / row['seconds']:9.0f} tokens/s a device  "
            f"utilisation {used:.2f}  peak {row['peak'] / 2**30:6.1f} GiB  first after {row['first']:5.1f} s",
            flush=True,
        )
    slowest = max(found.values(), default=0.0)
    for name, seconds in found.items():
        print(f"{name:36s} {slowest / seconds:5.2f} x the slowest")


if __name__ == "__main__":
    main()
