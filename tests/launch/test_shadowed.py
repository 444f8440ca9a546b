"""Modules of the working directory that are named like others: none of our own processes imports them."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import abrun
from abrun.runs.rundir import RunDir

SMALL = Path(__file__).with_name("small.yaml")
NAMES = (
    *("types", "random", "token", "queue", "typing", "logging", "json", "signal", "socket", "platform"),
    *("copy", "code", "secrets", "select", "statistics", "string", "struct", "tempfile", "uuid", "calendar"),
    *("ast", "numpy", "scipy", "torch", "yaml", "pydantic", "orjson", "wandb", "tests", "matplotlib"),
    "transformers",
)
TRAINER = """
import json, os, sys
import mine  # which lies beside this file
os.makedirs(os.path.dirname(sys.argv[1]))
with open(sys.argv[1], "w") as log:
    for step in range(1, 4):
        print(json.dumps({"step": step, "train/reward": mine.REWARD}), file=log)
with open(sys.argv[2], "w") as file:
    json.dump({"path": sys.path, "safe": sys.flags.safe_path, "env": dict(os.environ)}, file)
"""
RECIPE = """
name: shadowed
trainer:
  type: command
  argv: ["{python}", trainer.py, "{run_dir}/out/metrics.jsonl", "{run_dir}/out/seen.json", "{label}"]
  metrics: {format: jsonl, path: "{run_dir}/out/metrics.jsonl"}
  parameters: {label: a}
  versions_of: [numpy]
steps: 3
arms: {baseline: {}, treatment: {trainer.parameters.label: b}}
seeds: [0]
"""


def launch(folder: Path, *words: str) -> None:
    """Launch as the console script does, whose folder is not the working directory."""
    command = [sys.executable, "-P", "-m", "abrun", "launch", *words, "--runs-dir", "runs", "--no-compare"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def shadow(folder: Path) -> None:
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name} of the working directory')\n")


def test_a_command_runs_in_a_folder_of_shadows(tmp_path: Path) -> None:
    shadow(tmp_path)
    trainer = tmp_path / "trainer" / "trainer.py"  # Python puts the folder of a script first
    trainer.parent.mkdir()
    trainer.write_text(TRAINER)
    trainer.with_name("mine.py").write_text("REWARD = 0.5\n")
    (tmp_path / "r.yaml").write_text(RECIPE.replace("trainer.py", "trainer/trainer.py"))
    launch(tmp_path, "r.yaml")
    run = RunDir(tmp_path / "runs" / "shadowed" / "baseline" / "seed-0")
    assert [row["train/reward"] for row in run.metrics_reader().read()] == [0.5] * 3
    seen = json.loads((run.path / "out" / "seen.json").read_text())
    assert seen["path"][0] == str(trainer.parent) and not seen["safe"]
    assert "PYTHONSAFEPATH" not in seen["env"]
    assert json.loads((run.path / "environment.json").read_text())["versions"]["numpy"]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["2", "1"])  # processes of their own, and copies of one
def test_the_own_trainer_runs_in_a_folder_of_shadows(tmp_path: Path, jobs: str) -> None:
    shadow(tmp_path)
    (tmp_path / "my_verifier.py").write_text("def judge(prompt, completion, answer):\n    return 0.5\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    task = "task={type: jsonl, path: prompts.jsonl, verifier: 'my_verifier:judge'}"
    settings = ["steps=2", "seeds=[0, 1]", "compare.claims=[]", task]
    launch(tmp_path, str(SMALL), "--jobs", jobs, *(word for text in settings for word in ("--set", text)))
    run = RunDir(tmp_path / "runs" / "small" / "baseline" / "seed-1")
    assert [row["train/reward"] for row in run.metrics_reader().read()] == [0.5] * 2


def test_every_module_is_started_without_the_working_directory() -> None:
    """An interpreter that is started with -m or -c alone puts the working directory first in sys.path."""
    allowed = {
        ("processes/__init__.py", ("-P", "-m")),
        ("tools/bisect/environments.py", ("-I", "-m", "venv")),
        ("tools/bisect/environments.py", ("python", "-I", "-m", "pip", "install")),
        ("report/doctor.py", ("-P", "-c")),
        # In the trainer's interpreter, as its user's `ray start`; -P would reach the tasks of the driver
        ("external/ray_node.py", ("-m", "ray.scripts.scripts", "start", "--block", "--log-color=false")),
    }
    root, starts = Path(abrun.__file__).parent, set[tuple[str, tuple[str, ...]]]()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple):
                words = tuple(str(each.value) for each in node.elts if isinstance(each, ast.Constant))
                names = {ast.unparse(each) for each in node.elts}
                if "-m" in words or ("-c" in words and "sys.executable" in names):
                    starts.add((path.relative_to(root).as_posix(), words))
    assert starts == allowed
