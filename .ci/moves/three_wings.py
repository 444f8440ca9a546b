"""Move the modules and tests of abrun into three wings: core, trainer and tools. Run once, from the root.

A module or package in MOVES goes from the left path to the right one, and every dotted name and path of it
in the repository follows. `--check` prints the table of files before and after, and moves nothing.
"""

import re
import subprocess
import sys
from pathlib import Path

MOVES = {
    # The trainer: a program that the core starts
    "abrun.train.__main__": "abrun.trainer.__main__",
    "abrun.train.faults": "abrun.trainer.faults",
    "abrun.train.agent": "abrun.launch.agent",
    "abrun.train.failures": "abrun.runs.failures",
    "abrun.train.loop": "abrun.trainer.training",
    "abrun.train": "abrun.trainer.loop",
    "abrun.rl": "abrun.trainer.rl",
    "abrun.kernels": "abrun.trainer.kernels",
    "abrun.tasks": "abrun.trainer.tasks",
    "abrun.models": "abrun.trainer.models",
    "abrun.backends": "abrun.trainer.backends",
    "abrun.rollout": "abrun.trainer.rollout",
    "abrun.seeds": "abrun.trainer.seeds",
    "abrun.memory.measure": "abrun.trainer.memory.measure",
    "abrun.memory.peak": "abrun.trainer.memory.peak",
    # The tools: each behind one command, imported by nothing
    "abrun.memory.allocations": "abrun.tools.predict.fake_device",
    "abrun.memory.compiled": "abrun.tools.predict.compiled",
    "abrun.memory.fake_device": "abrun.tools.predict.fake_device",
    "abrun.memory.trace": "abrun.tools.predict.trace",
    "abrun.memory.predict": "abrun.tools.predict.peaks",
    "abrun.memory.facts": "abrun.tools.predict.facts",
    "abrun.memory.probes": "abrun.tools.predict.probes",
    "abrun.launch.auto": "abrun.tools.predict.auto",
    "abrun.launch.candidates": "abrun.tools.predict.auto",
    "abrun.diagnose.trace": "abrun.tools.trace",
    "abrun.diagnose.logprob_diff": "abrun.tools.logprob_diff",
    "abrun.diagnose.bisect": "abrun.tools.bisect",
    "abrun.diagnose.fleet": "abrun.tools.drift.fleet",
    "abrun.diagnose.gate": "abrun.tools.drift.gate",
    "abrun.diagnose.ledger": "abrun.tools.drift.ledger",
    "abrun.diagnose": "abrun.tools",
    "abrun.cli.tracing": "abrun.tools.trace.cli",
    "abrun.cli.bisecting": "abrun.tools.bisect.cli",
    "abrun.cli.gating": "abrun.tools.drift.gate.cli",
    # The core
    "abrun.memory": "abrun.launch.memory",
    "abrun.foreign": "abrun.logs.foreign",
    "abrun.recorded": "abrun.logs.recorded",
    "abrun.present": "abrun.report.present",
    "abrun.experiment.preflight.doctor": "abrun.report.doctor",
    "abrun.extras": "abrun.recipe.extras",
    "abrun.redaction": "abrun.runs.redaction",
    "abrun.regular_files": "abrun.runs.regular_files",
    "abrun.metric_names": "abrun.runs.metric_names",
    "abrun.reasons": "abrun.messages.codes",
    # Tests follow; `tests.X.snapshots` is where the recorded sentences of a test module stand
    "tests.train.test_agent": "tests.launch.test_agent",
    "tests.train.test_failures": "tests.runs.test_failures",
    "tests.train.test_faults": "tests.trainer.faults.test_faults",
    "tests.train": "tests.trainer.loop",
    "tests.rl": "tests.trainer.rl",
    "tests.kernels": "tests.trainer.kernels",
    "tests.tasks": "tests.trainer.tasks",
    "tests.models": "tests.trainer.models",
    "tests.backends": "tests.trainer.backends",
    "tests.rollout": "tests.trainer.rollout",
    "tests.triton_interpreted": "tests.trainer.triton_interpreted",
    "tests.memory.test_peak": "tests.trainer.memory.test_peak",
    "tests.memory.test_facts": "tests.tools.predict.test_facts",
    "tests.memory.test_predict": "tests.tools.predict.test_predict",
    "tests.launch.test_auto": "tests.tools.predict.test_auto",
    "tests.launch.test_auto_gpu": "tests.tools.predict.test_auto_gpu",
    "tests.launch.test_candidates": "tests.tools.predict.test_candidates",
    "tests.memory": "tests.launch.memory",
    "tests.experiment.test_doctor": "tests.report.test_doctor",
    "tests.diagnose.fleet": "tests.tools.drift.fleet",
    "tests.diagnose.gate": "tests.tools.drift.gate",
    "tests.diagnose.ledger": "tests.tools.drift.ledger",
    "tests.diagnose": "tests.tools",
    # Tests that start the trainer or import torch
    "tests.experiment.test_hub_trained": "tests.trainer.launched.test_hub",
    "tests.logs.test_tensorboard_trained": "tests.trainer.launched.test_tensorboard",
    "tests.wandb_sync.test_mirror_trained": "tests.trainer.launched.test_mirror",
    "tests.launch.test_runs_per_gpu_trained": "tests.trainer.launched.test_runs_per_gpu",
    "tests.launch.test_hosts_vllm": "tests.trainer.launched.test_hosts_vllm",
    "tests.launch.fake_pool": "tests.tools.predict.fake_pool",
    "tests.launch.test_git": "tests.tools.bisect.test_git",
    "tests.foreign": "tests.logs.foreign",
    "tests.recorded": "tests.logs.recorded",
    "tests.present": "tests.report.present",
    "tests.test_redaction": "tests.runs.test_redaction",
    "tests.test_regular_files": "tests.runs.test_regular_files",
    "tests.test_metric_names": "tests.runs.test_metric_names",
    "tests.test_extras": "tests.recipe.test_extras",
}
NEW_PACKAGES = {
    "abrun.trainer": "The trainer: a program that abrun starts, and that writes a run directory.",
    "abrun.trainer.loop": "The training loop: one file an algorithm, checkpoints, and what a step records.",
    "abrun.trainer.memory": "Measured memory of a training step.",
    "abrun.tools.predict": "Memory of a training step, predicted on a fake GPU.",
    "abrun.tools.drift": "Drift of a main line: gate, fleet and ledger.",
    "tests.trainer": "",
    "tests.trainer.faults": "",
    "tests.trainer.launched": "",
    "tests.trainer.memory": "",
    "tests.tools.predict": "",
    "tests.tools.drift": "",
}
TEXTS = ("*.py", "*.md", "*.toml", "*.yaml", "*.yml", "*.json", "*.txt", ".ci/run")
NOT_RENAMED = ("docs/changelog.md", "tests/formats/20", "docs/evidence/", "runs/")
BY_LENGTH = sorted(MOVES, key=len, reverse=True)  # the longest name first
DOTTED = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, BY_LENGTH)) + r")(?!\w)")
PROGRAM = re.compile(
    r'(?<=")abrun\.train(?=")|(?<=-m )abrun\.train(?![\w.])'
)  # python -m abrun.trainer RUN_DIR
SLASHED = re.compile(
    r"(?<![\w/])(" + "|".join(name.replace(".", "/") for name in BY_LENGTH) + r")(?=\.py|/|`|$)", re.MULTILINE
)
FROM = re.compile(r"^( *)from ((?:abrun|tests)(?:\.\w+)*) import (\([^)]*\)|.*)$", re.MULTILINE)


def rename(module: str) -> str:
    """Return the new dotted name of a module or package."""
    return DOTTED.sub(lambda match: MOVES[match[1]], module) if DOTTED.match(module) else module


def split_import(match: re.Match[str]) -> str:
    """Return an import of modules from a package as one import for each package that they are in now."""
    indent, package, names = match[1], match[2], match[3]
    listed, _, comment = names.partition("  #")
    members = [member.split("#")[0].strip() for member in re.split(r"[,\n]", listed.strip("()"))]
    by_package: dict[str, list[str]] = {}
    for member in filter(None, members):
        name, _, alias = member.partition(" as ")
        target = rename(f"{package}.{name}")
        if target == f"{rename(package)}.{name}":
            by_package.setdefault(rename(package), []).append(member)
        else:
            parent, _, new_name = target.rpartition(".")
            local = alias or name
            by_package.setdefault(parent, []).append(
                new_name if new_name == local else f"{new_name} as {local}"
            )
    if [*by_package] == [rename(package)]:
        return match[0].replace(package, rename(package), 1)
    lines = [f"{indent}from {parent} import {', '.join(found)}" for parent, found in by_package.items()]
    return "\n".join(lines) + (f"  #{comment}" if comment else "")


def new_path(path: Path) -> Path:
    """Return where a file goes: a module, data beside it, or the recorded sentences of a test module."""
    is_snapshot = path.parts[:2] == ("tests", "snapshots")
    module, dot, suffix = path.name.rpartition(".")
    if "." in module:  # data, which follows its folder
        return Path(*rename(".".join(path.parent.parts)).split("."), path.name)
    parts = rename(".".join([path.parts[0], *path.parts[2 if is_snapshot else 1 : -1], module])).split(".")
    return Path(parts[0], *(["snapshots"] * is_snapshot), *parts[1:-1], f"{parts[-1]}{dot}{suffix}")


def main() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    files = [Path(name) for name in tracked if name.startswith(("abrun/", "tests/"))]
    moved = {path: new_path(path) for path in files if new_path(path) != path}
    if "--check" in sys.argv:
        print("\n".join(f"{before} -> {after}" for before, after in moved.items()))
        return
    for before, after in moved.items():
        after.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(before), str(after)], check=True)
    for package, docstring in NEW_PACKAGES.items():
        path = Path(*package.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not path.read_text():
            path.write_text(f'"""{docstring}"""\n' if docstring else "")
        subprocess.run(["git", "add", str(path)], check=True)
    deeper = {after: len(after.parts) - len(before.parts) for before, after in moved.items()}
    listed = subprocess.run(["git", "ls-files", *TEXTS], capture_output=True, text=True, check=True).stdout
    for name in listed.split("\n"):
        path = Path(name)
        if not name or name.startswith(NOT_RENAMED) or path.name == "three_wings.py" or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        renamed = FROM.sub(split_import, text) if path.suffix == ".py" else text
        renamed = PROGRAM.sub("abrun.trainer", renamed)
        renamed = DOTTED.sub(lambda match: MOVES[match[1]], renamed)
        renamed = SLASHED.sub(lambda match: MOVES[match[1].replace("/", ".")].replace(".", "/"), renamed)
        if deeper.get(path):
            by = deeper[path]
            renamed = re.sub(
                r"\.parents\[(\d)\]", lambda match, by=by: f".parents[{int(match[1]) + by}]", renamed
            )
        if renamed != text:
            path.write_text(renamed, encoding="utf-8")


if __name__ == "__main__":
    main()
