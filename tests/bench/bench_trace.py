"""Which module a trace names for each fault of the library, against the same run without it.

python -m tests.bench.bench_trace [--only NAMES]

It trains a tiny Qwen2 on CPU cores, from a short supervised warm start, so that rewards differ. A fault is
traced at step 1 and, if nothing differs there, at step 2. Faults of the rollout engine that change what is
sampled cannot be seen on recorded rollouts. With --work FOLDER a stopped command goes on: rows that the
folder has are not measured again. Clean layouts: bench_trace_gpu.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from abrun.recipe.faults import FAULTS, Fault, unmet_need
from abrun.recipe.run import OwnRunConfig
from abrun.runs.captures import Capture, read_capture
from abrun.runs.files import read_json, write_json
from abrun.runs.traces import TraceResult
from abrun.tools.trace.command import REPLICAS, read_replicas
from abrun.tools.trace.judge import NUM_REPLICAS, judge_trace
from tests.bench.common import heading, make_parser, markdown_row
from tests.tools.trace.captured import capture, config

GRPO: dict[str, Any] = {
    "algorithm": {
        "type": "grpo",
        "prompts_per_step": 8,
        "group_size": 8,
        "minibatches_per_step": 2,
        "kl_coefficient": 0.01,
        "entropy_coefficient": 0.005,
    },
    "model": {"preset": "qwen2-tiny"},
    "policy": {
        "micro_batch_size": 16,
        "packing": True,
        "optimizer": {"learning_rate": 1e-3, "beta2": 0.95, "warmup_steps": 10},
    },
    "rollout": {"max_new_tokens": 6, "temperature": 0.9},
    "task": {"type": "arithmetic", "max_operand": 3},
    "steps": 4,
}
CORRECTION = {"type": "sequence_mask", "low": 0.9995, "high": 1.0005}  # as small as the mismatch of bf16
PPO = {key: value for key, value in GRPO["algorithm"].items() if key != "group_size"} | {"type": "ppo"}
# Runs that faults are injected into, the first that meets a fault's needs
BASES: dict[str, OwnRunConfig] = {
    "grpo": config(base=GRPO),
    "gspo": config({"algorithm": {"loss": "gspo"}}, base=GRPO),
    "ranks": config({"algorithm": {"normalize_over": "batch"}}, base=GRPO, ranks=2),
    "correction": config(
        {
            "algorithm": {"importance_correction": CORRECTION},
            "policy": {"dtype": "bfloat16", "logprobs": {"one_pass": False}},
        },
        base=GRPO,
    ),
    "ppo": config(base={**GRPO, "algorithm": PPO}),
    "truncated": config({"rollout": {"max_new_tokens": 2}}, base=GRPO),
}
# Fault -> the modules that are right; a parent of one is right as well
RIGHT: dict[str, tuple[str, ...]] = {
    "flipped_advantages": ("batch.advantages",),
    "rewards_of_other_rows": ("batch.advantages",),
    "misgrouped": ("batch.advantages",),
    "whiten_per_rank": ("batch.advantages",),
    "first_rollout_stats": ("batch.advantages",),
    "eos_not_trained": ("batch.token_ids", "batch.token_mask"),
    "late_half_batch": ("batch.loss_weights",),
    "padding_in_denominator": ("batch.loss_weights",),
    "microbatch_mean": ("batch.loss_weights",),
    "rank_mean": ("batch.loss_weights",),
    "last_microbatch_only": ("loss",),
    "kl_without_gradient": ("loss.logprobs",),
    "kl_sign": ("loss", "loss.logprobs"),
    "old_logprobs_from_current": ("loss", "loss.logprobs"),
    "dual_clip_everywhere": ("loss",),
    "gspo_padding": ("loss", "loss.logprobs"),
    "sequence_weight_sum": ("batch.importance_weights", "loss"),
    "upstream_gradient_first": ("loss.logprobs",),
    "fused_drops_term": ("loss.entropy",),
    "attention_across_packed": ("model.layers.0.self_attn",),
    "rope_bf16": ("model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.2.self_attn"),
    "dropout_on": ("model.layers.0.self_attn",),
    "temperature_missing": ("lm_head.logprobs", "lm_head.entropy"),
    "labels_off_by_one": ("lm_head.logprobs",),
    "value_unshifted": ("batch.old_values", "batch.advantages"),
    "critic_mask_of_other_rows": ("batch.old_values", "batch.advantages"),
    "adam_step_ahead": ("update",),
    "bf16_moments": ("update",),
    "schedule_by_ranks": ("optimizer.learning_rate",),
    "local_grad_norm": ("optimizer.grad_norm",),
    "forced_eos": ("batch.token_ids",),
}
TIMEOUT_S = 3600.0
Row = tuple[bool, str]  # whether it counts, and its text


class Bench:
    """Captures below one folder, which share the baselines of a configuration."""

    def __init__(self, work: Path) -> None:
        self._work = work
        runs_dir = work / "runs"
        if not runs_dir.exists():
            settings = ["steps=1", "controls.aa_reruns=0", "compare.claims=[]"]
            sets = [word for setting in settings for word in ("--set", setting)]
            command = [sys.executable, "-m", "abrun", "launch", "quickstart", "--seeds", "0", "--exit-zero"]
            subprocess.run(
                [*command, *sets, "--runs-dir", str(runs_dir)], check=True, stdout=subprocess.DEVNULL
            )
        (self.weights,) = (runs_dir / "warm-starts").glob("*/checkpoints/final")

    def row(self, key: str, measure: Callable[[], Row]) -> Row:
        """Return a row that the folder has, or measure it."""
        path = self._work / "rows" / f"{key}.json"
        if not path.exists():
            counts, text = measure()
            write_json(path, {"counts": counts, "text": text})
        content = read_json(path)
        return content["counts"], content["text"]

    def _capture(
        self, folder: Path, run: OwnRunConfig, arm: str, step: int, seed: int, **settings: Any
    ) -> Capture:
        weights = self.weights if run.model.preset == GRPO["model"]["preset"] else None
        return capture(
            folder, run, arm, step=step, seed=seed, weights=weights, timeout_s=TIMEOUT_S, **settings
        )

    def baseline(self, run: OwnRunConfig, name: str, step: int, seed: int = 0) -> Path:
        """Capture a baseline and its replicas, once."""
        folder = self._work / f"{name}-{step}-{seed}"
        if not (folder / REPLICAS).exists():
            self._capture(folder, run, "baseline", step, seed, records=True, replicas=NUM_REPLICAS)
        return folder

    def trace(self, folder: Path, run: OwnRunConfig, step: int, seed: int = 0) -> TraceResult:
        treatment = self._capture(folder, run, "treatment", step, seed)
        result = judge_trace(read_capture(folder / "baseline"), treatment, read_replicas(folder))
        shutil.rmtree(folder / "treatment")
        return result


def trace_fault(bench: Bench, fault: Fault) -> tuple[str, int | None, TraceResult] | None:
    """Return the base, the step and the result of a fault; None if no base can have it."""
    fitting = [name for name, run in BASES.items() if unmet_need(fault, run) is None]
    base = "truncated" if fault.name == "forced_eos" else next(iter(fitting), None)
    if base is None:
        return None
    run = BASES[base]
    faulty = OwnRunConfig.model_validate({**run.model_dump(), "injected_fault": {"name": fault.name}})
    for step in (1, 2):
        result = bench.trace(bench.baseline(run, base, step), faulty, step)
        if result.first:
            return base, step, result
    return base, None, result


def is_right(fault: Fault, result: TraceResult) -> bool:
    if result.first is None:
        return False
    found = result.first
    names = RIGHT.get(fault.name, ())
    module = found.module.partition("@")[0]  # of any optimizer step
    return found.kind in names or any(f"{name}.".startswith(f"{module}.") for name in names)


def fault_row(bench: Bench, fault: Fault) -> Row:
    name = f"`{fault.name}`"
    if fault.name not in RIGHT:
        return False, markdown_row(name, fault.seam, "", "not on recorded rollouts", "", "no")
    traced = trace_fault(bench, fault)
    if traced is None:
        return False, markdown_row(name, fault.seam, "", "no run can have it", "", "no")
    base, step, result = traced
    right = is_right(fault, result)
    first = f"`{result.first.name}`" if result.first else "nothing"
    ratio = f"{result.first.ratio:.3g} / {result.limit:.3g}" if result.first else ""
    return right, markdown_row(name, base, step or "", first, ratio, "yes" if right else "no")


def fault_rows(bench: Bench, only: list[str]) -> Iterator[Row]:
    for fault in FAULTS:
        if not only or fault.name in only:
            yield bench.row(f"fault-{fault.name}", partial(fault_row, bench, fault))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    bench = Bench(options.work or Path(tempfile.mkdtemp(prefix="bench-trace-")))
    print(heading("fault", "run", "step", "first difference", "ratio / limit", "right"))
    counts = []
    for counted, row in fault_rows(bench, options.only):
        counts.append(counted)
        print(row, flush=True)
    print(f"\n{sum(counts)} of {len(counts)}")


if __name__ == "__main__":
    main()
