"""The experiments of recipes/evidence on one host, by `abrun launch`, packed as they are judged.

python -m tests.bench.bench_evidence --model FOLDER --output ARCHIVES [--only NAMES] [--limit SECONDS]

Experiments run one after another, each on all GPUs; recipes say how many runs share one. Several GPUs take
a call each (CUDA_VISIBLE_DEVICES), since only a launch with one GPU starts MPS. Calls side by side on one GPU
take turns, unless an MPS daemon that all of them use (nvidia-cuda-mps-control -d) runs before them. 80 GiB
hold ten runs of SmolLM2-135M with completions of six tokens, all calls together: a run reserves 6 to 9 GiB.
At the limit runs save a checkpoint and stop; the same command resumes them, as long as --work is there.
ARCHIVES gets NAME.tar.xz of each experiment that a call has begun, finished or not: report, metrics,
completions and the launch's log, no weights.
On CPU cores (--gpus 0): --set makes the recipes small.
"""

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from abrun.errors import AbrunError
from abrun.experiment.plan import make_draft
from abrun.experiment.preflight.machine import find_gpus
from abrun.processes import start_process
from abrun.recipe.experiment import load_recipe
from abrun.runs.experiment import read_run_state
from abrun.verdict.verdict_file import VerdictFile, read_verdict_file
from tests.bench.common import make_parser

RECIPES = Path(__file__).parents[2] / "recipes" / "evidence"
ORDER = (  # the most valuable first
    "gspo-documents",
    "megatron-ppo-validation",
    "levers-gym",
    "gspo-microbatches-recorded",
    "grpo-fused-float32",
    "levers-float32",
    "grpo-fused",
    "ppo-word-problems",
    "levers-apart",
    "grpo-fused-gym",
    "megatron-ppo-recorded",
    "fp32-head",
    "sft-fused-float32",
    "grpo-fused-recorded",
    "context-parallel-recorded",
    "levers-recorded",
    "sft-fused",
    "dpo-fused",
    "gspo-microbatches",
    "ppo-values",
    "megatron-ppo",
    "vllm-engine",
    "levers",
)
SUFFIX, MAX_ARCHIVE = ".tar.xz", 16 * 2**20
SAMPLE = 2**20  # of weights, by which a report says how far apart they are: larger files are models


class Evidence:
    """One experiment and its files."""

    def __init__(self, name: str, work: Path, overrides: Sequence[str]) -> None:
        self.name, self.recipe = name, RECIPES / f"smollm2-{name}.yaml"
        self._overrides = overrides
        self._runs_dir = work / "runs"
        self.directory = self._runs_dir / self.recipe.stem
        self.log, self.done = work / f"{name}.log", work / f"{name}.done"

    @property
    def command(self) -> list[str]:
        """The command that launches it, or resumes it."""
        sets = [word for override in self._overrides for word in ("--set", override)]
        options = [*sets, *["--resume"] * self.directory.exists(), "--runs-dir", str(self._runs_dir)]
        options.append("--exit-zero")  # whatever the verdict
        return [sys.executable, "-m", "abrun", "launch", str(self.recipe), *options]

    def run(self, command: Sequence[str], output: Path, deadline_s: float, gpus: Sequence[str] = ()) -> None:
        """Run the command, which saves and stops at the deadline; report and pack the experiment."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        began_s = time.time()
        with self.log.open("ab") as log:
            process = start_process(list(command), env, death_signal=signal.SIGTERM, stdout=log, stderr=log)
            try:
                process.wait(max(deadline_s - began_s, 0.0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                process.wait()
        path = self.directory / "report" / "verdict.json"
        if process.returncode == 0 and path.exists():
            verdict = read_verdict_file(path)
            lines = [f"{self.name}: {line}" for line in verdict_lines(verdict)]
            if verdict.verdict != "INVALID":  # which a later call may mend
                self.done.touch()
        else:
            lines = [f"{self.name}: no verdict, {self.progress()}; its log ends:"]
            logged = self.log.read_text(errors="replace").strip().splitlines()
            lines += [f"    {line}" for line in logged[-8:]]
        print(
            *lines, f"{self.name}: {time.time() - began_s:.0f} s, {self.pack(output)}", sep="\n", flush=True
        )

    def progress(self) -> str:
        try:
            plan = make_draft(load_recipe(self.recipe, self._overrides))
            states = [read_run_state(self.directory, run.name).status for run in plan.runs]
        except AbrunError as error:  # such as none that was begun
            return str(error)
        return f"{states.count('finished')} of {len(states)} runs have finished"

    def pack(self, output: Path) -> str:
        """Write the experiment without weights as NAME.tar.xz; return a line on it."""
        archive = output / f"{self.recipe.stem}{SUFFIX}"
        output.mkdir(parents=True, exist_ok=True)

        def is_small(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            weights = member.name.endswith(".safetensors") and member.size > SAMPLE
            return None if weights or Path(member.name).name == "checkpoints" else member

        partial = archive.with_name(f"{archive.name}.partial")
        with tarfile.open(partial, "w:xz") as packed:
            packed.add(self.log, f"{self.name}.log")
            if self.directory.exists():
                packed.add(self.directory, self.recipe.stem, filter=is_small)
        partial.replace(archive)  # an earlier call's archive stays whole until then
        size = archive.stat().st_size
        too_large = ": TOO LARGE to be brought back" * (size > MAX_ARCHIVE)
        return f"{archive.name} {size / 2**20:.1f} MiB{too_large}"


def verdict_lines(verdict: VerdictFile) -> Iterator[str]:
    """Yield the verdict of each arm with its first reason, each claim's bound, each injected fault."""
    for arm, section in verdict.arms.items():
        reason = section.reasons[0] if section.reasons else ""
        yield f"{arm} {section.verdict} ({section.num_pairs} pairs) {reason}"
    for claim in verdict.claims:
        bound = claim.estimate.certified_bound or claim.estimate.limited_interval
        yield f"{claim.arm} {claim.claim.metric} {claim.result}, {claim.claim.margin_text}, bound {bound}"
    for fault in verdict.sensitivity.faults if verdict.sensitivity else ():
        at = f"{fault.caught_by} {fault.metric or ''}"
        yield f"injected {fault.fault}: {fault.verdict} by {at}, {fault.figures}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="", help="folder of SmolLM2-135M-Instruct; else from the hub")
    parser.add_argument("--only", nargs="*", choices=ORDER, help="these alone, in the order of the list")
    gpus = find_gpus()
    parser.add_argument("--gpus", type=int, default=len(gpus), help="0: on CPU cores")
    parser.add_argument("--work", type=Path, default=Path("/tmp/evidence"), help="where experiments lie")
    parser.add_argument("--output", type=Path, default=Path("archives"), help="where archives go")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, and a minute to save and pack")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="of every recipe")
    asked = parser.parse_args()
    if asked.gpus > len(gpus):
        parser.error(f"--gpus: got {asked.gpus}; this machine has {len(gpus)} visible")
    overrides = [f"model.path={asked.model}"] * bool(asked.model)
    overrides += ["cluster.gpus_per_node=0"] * (asked.gpus == 0) + asked.overrides
    deadline_s = time.time() + asked.limit
    for name in ORDER:
        evidence = Evidence(name, asked.work, overrides)
        if name not in (asked.only or ORDER) or evidence.done.exists():
            continue
        if time.time() > deadline_s:
            print(f"{name}: not begun", flush=True)
            continue
        evidence.run(evidence.command, asked.output, deadline_s, gpus[: asked.gpus])


if __name__ == "__main__":
    main()
