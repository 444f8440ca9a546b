"""Write a folder of stored experiments with an older version: `python tests/formats/make.py NAME COMMIT`.

The commit is checked out as a git worktree, and its own commands launch `pairs` (claims, interim analyses, a
rerun), `killed` (its launcher died with runs half-way) and `own` (abrun's trainer). Hosts, users and paths
are replaced by neutral ones. `expected.json` holds what that version said.
"""

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.runs.lines import json_line

FORMATS = Path(__file__).parent
REPOSITORY = FORMATS.parent.parent
KEPT = (".json", ".jsonl", ".yaml", ".log")
MAX_BYTES = 60_000

COMMAND = """\
name: NAME
trainer:
  type: command
  argv: [python3, trainer.py, --folder, "{run_dir}/output", --steps, "{steps}", --seed, "{seed}",
         --offset, "{offset}", --step-s, "{step_s}"]
  parameters: {offset: 0.0, step_s: 0.0}
  metrics: {format: jsonl, path: "{run_dir}/output/metrics.jsonl"}
  aliases: {train/reward: reward, train/loss: loss, memory/train/peak_live_tensor_bytes: peak}
steps: 10
arms:
  baseline: {}
  treatment: {trainer.parameters.offset: 0.002}
seeds: [0, 1, 2]
"""
PAIRS = """\
compare:
  claims:
    - {metric: train/reward, window: last 40%, margin: 0.05}
    - {metric: memory, window: all, below: 1.3x}
    - {metric: train/reward, window: all, above: level -0.5}
  interim: [2, 3]
  alpha_spending: rising
controls: {aa_reruns: 1}
"""
OWN = """\
name: own
algorithm: {type: grpo, prompts_per_step: 4, group_size: 2}
model: {preset: qwen2-tiny}
rollout: {max_new_tokens: 4}
task: {type: arithmetic}
steps: 2
seeds: [0, 1]
arms:
  baseline: {}
  treatment: {injected_fault: stale_rollout_weights}
compare:
  claims: [{metric: train/reward, window: all, margin: 0.5, climbs: false}]
"""


class Version:
    """Commands of one commit, in a folder of their own."""

    def __init__(self, worktree: Path, folder: Path) -> None:
        self.folder = folder
        clean = {key: value for key, value in os.environ.items() if not key.startswith("ABRUN")}
        self.environment = {**clean, "PYTHONPATH": str(worktree)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "abrun", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> str:
        process = self.start(*words)
        output, _ = process.communicate()
        print(f"$ abrun {' '.join(words)} -> {process.returncode}\n{output[-600:]}", file=sys.stderr)
        return output


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Give a git worktree of a commit, and remove it again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worktree"
        git = ("git", "-C", str(REPOSITORY), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def kill_half_way(version: Version) -> None:
    """Launch `killed`, and kill launcher and trainer as a run takes its steps, after another has ended."""
    launcher = version.start("launch", "killed.yaml", "--jobs", "1")
    experiment = version.folder / "runs" / "killed"
    while True:
        done = [path.parent for path in experiment.glob("*/*/result.json")]
        rows = [path for path in experiment.glob("*/*/output/metrics.jsonl") if path.parents[1] not in done]
        if len(done) > 1 and any(len(path.read_text().splitlines()) > 4 for path in rows):
            break
        if launcher.poll() is not None:
            raise RuntimeError(f"the launcher ended: {launcher.stdout and launcher.stdout.read()}")
        time.sleep(0.01)
    launcher.send_signal(signal.SIGKILL)
    for path in experiment.glob("*/*/launch.json"):
        pid = json.loads(path.read_text())["launches"][-1].get("pid")
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()
    time.sleep(1)  # for the trainer, which its agent took along


def write_experiments(version: Version) -> dict[str, Any]:
    """Launch the experiments, and return the verdicts by experiment."""
    folder = version.folder
    shutil.copy(FORMATS / "trainer.py", folder)
    (folder / "pairs.yaml").write_text(COMMAND.replace("NAME", "pairs") + PAIRS)
    killed = COMMAND.replace("NAME", "killed").replace("step_s: 0.0", "step_s: 0.1").replace(", 2]", "]")
    killed += "compare: {claims: [{metric: train/reward, window: last 40%, margin: 0.05}]}\n"
    (folder / "killed.yaml").write_text(killed)
    (folder / "own.yaml").write_text(OWN)
    version.run("launch", "pairs.yaml")
    version.run("launch", "own.yaml", "--no-compare")
    kill_half_way(version)
    reference, claim = "runs/reference.json", ("--claim", "train/reward:last 40%:0.05")
    version.run("reference", "save", "runs/pairs", *claim, "--budget", "train/reward=0.5", "-o", reference)
    version.run("reference", "add", reference, "pairs")
    gate = ("gate", "runs/pairs", "--against", "runs/gate.jsonl", "--arm")
    version.run(*gate, "baseline", "--start", "--claim", "train/reward:last 40%:better 0")
    version.run(*gate, "treatment")
    return {
        path.parents[1].name: json.loads(path.read_text())["verdict"]
        for path in sorted((folder / "runs").glob("*/report/verdict.json"))
    }


def neutral_texts(folder: Path) -> Mapping[str, str]:
    """Return what stands for names of this machine, the longest first."""
    texts = {
        str(folder): "/folder",
        sys.executable: "/usr/bin/python3",
        f'"{os.uname().nodename}"': '"host"',
        str(Path.home()): "/home/user",
        f'"{getpass.getuser()}"': '"user"',
    }
    return dict(sorted(texts.items(), key=lambda pair: -len(pair[0])))


def keep(source: Path, target: Path, texts: Mapping[str, str]) -> None:
    """Copy the files that are read, without names of this machine, and with checksums of the new lines."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        is_own_output = "output" in relative.parts and "killed" not in relative.parts
        is_report = "report" in relative.parts and path.name != "verdict.json"
        is_kept = path.is_file() and path.suffix in KEPT and path.stat().st_size <= MAX_BYTES
        if not is_kept or is_report or is_own_output:
            continue
        text = old_text = path.read_text()
        for name, neutral in texts.items():
            text = text.replace(name, neutral)
        if text != old_text and '"crc32"' in text:
            rows = [json.loads(line) for line in text.splitlines()]
            rows = [{key: value for key, value in row.items() if key != "crc32"} for row in rows]
            text = "".join(json_line(row).decode() for row in rows)
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        (target / relative).write_text(text)


def main(name: str, commit: str) -> None:
    target = FORMATS / name
    with checkout(commit) as worktree, tempfile.TemporaryDirectory() as text:
        folder = Path(os.path.realpath(text))
        verdicts = write_experiments(Version(worktree, folder))
        shutil.rmtree(target, ignore_errors=True)
        keep(folder, target, neutral_texts(folder))
        (target / "trainer.py").unlink(missing_ok=True)
        content = json.dumps({"commit": commit, "verdicts": verdicts}, indent=1)
        (target / "expected.json").write_text(f"{content}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
