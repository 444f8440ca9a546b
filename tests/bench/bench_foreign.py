"""Runs of other trainers as they lie on disk, each answered by one `abrun compare` without a flag.

    python tests/bench/bench_foreign.py                   # all layouts; the real libraries train for minutes
    python tests/bench/bench_foreign.py --only wandb      # layouts whose name has this in it
    python tests/bench/bench_foreign.py --print           # and what each command prints

TRL's GRPOTrainer, transformers' Trainer, TensorBoard and wandb (offline) write their own files here; the rest
are written as those trainers do (tests/logs/layouts.py names the sources). Exits with 1 where a command was
refused, took 3 s or more of the processor, or described nothing.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from abrun.verdict.verdict_file import read_verdict_file  # noqa: E402
from tests.logs.layouts import ARMS, LAYOUTS, SEEDS, every_run, rows  # noqa: E402

MOST_S = 3.0


def trl_grpo(folder: Path) -> list[str]:
    """The run's output folder as TRL and TensorBoard leave it: runs/<time>_<host>."""
    for rate, arm in zip(("3e-3", "1e-3"), ARMS, strict=True):
        for seed in SEEDS[:2]:
            output = folder / arm / f"seed{seed}"
            train = [str(ROOT / "recipes/external/trl_grpo.py"), "--output", str(output)]
            made("-u", *train, "--seed", str(seed), "--steps", "12", "--learning-rate", rate)
    return [str(folder / arm) for arm in ARMS]


TRAINER = """
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed
output, seed, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
set_seed(seed)
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2))
tokens = torch.randint(0, 32, (256, 8))
rows = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=output, seed=seed, learning_rate=rate, max_steps=40, save_steps=20, logging_steps=10,
    per_device_train_batch_size=8, use_cpu=True, disable_tqdm=True, report_to="none",
)
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""


def hf_trainer(folder: Path) -> list[str]:
    """Defaults of 5.x: no tracker, the state in the checkpoints, every 10 steps."""
    for rate, arm in zip(("1e-3", "9e-4"), ARMS, strict=True):
        for seed in SEEDS[:2]:
            made("-c", TRAINER, str(folder / f"{arm}-seed{seed}"), str(seed), rate)
    return [str(folder)]


WANDB = """
import json, sys, wandb
name, seed, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
run = wandb.init(project="p", name=name, config={"seed": seed, "lr": 1e-6}, mode="offline")
for row in json.load(open(path)):
    step = row.pop("step")
    run.log({f"train/{key}": value for key, value in row.items()}, step=int(step))
run.finish()
"""


def wandb_offline(folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    for arm, seed in every_run():
        (folder / "rows.json").write_text(json.dumps(rows(arm, seed)))
        made("-c", WANDB, f"grpo-{arm}-s{seed}", str(seed), str(folder / "rows.json"), cwd=folder)
    return [str(folder / "wandb")]


REAL = {"TRL GRPOTrainer": trl_grpo, "transformers Trainer": hf_trainer, "wandb offline": wandb_offline}


def made(*arguments: str, cwd: Path | None = None) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)[:200]}: {done.stderr[-2000:]}")


def answered(name: str, sources: list[str], output: Path, *, verbose: bool) -> bool:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "abrun", "compare", *sources, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if verbose or done.returncode not in (3, 4):
        print(done.stdout, done.stderr)
    if done.returncode not in (3, 4):
        print(f"{name:28s} refused with exit code {done.returncode}")
        return False
    content = read_verdict_file(output / "verdict.json")
    described = content.descriptions
    metrics = ", ".join(one.metric for one in described[:3])
    counts = (
        f"{'x'.join(map(str, described[0].num_runs))}{'' if content.paired else ' unpaired'}"
        if described
        else "-"
    )
    print(f"{name:28s} {done.returncode} {counts:12s} {wall:5.1f} {busy:5.1f}  {metrics}", flush=True)
    return bool(described) and busy < MOST_S


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--print", action="store_true", dest="verbose")
    asked = parser.parse_args()
    print("layout                    exit runs         wall   CPU s  metrics first shown")
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, build) in enumerate({**REAL, **LAYOUTS}.items()):
            if asked.only in name:
                folder = Path(scratch) / f"layout{number}"
                sources = build(folder)
                good &= answered(name, sources, Path(scratch) / f"report{number}", verbose=asked.verbose)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
