"""The command line: help, one line for bad input, dry runs that write nothing, and exit codes."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from abrun.errors import ComparisonError
from abrun.experiment.preflight import machine
from abrun.experiment.starter.shipped import recipe_files
from abrun.launch.memory import profile
from abrun.launch.memory.profile import MemoryProfile
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.report import comparing
from abrun.runs.experiment import planned_runs
from tests.commands import all_commands
from tests.installed import SEES_TRAINER
from tests.launch.fakes import FAKE
from tests.launch.test_local import SMALL

pytestmark = pytest.mark.usefixtures("trainer_installed")

Run = Callable[..., tuple[int, str, str]]
CLAIM = ["--set", "compare.claims.0.metric=train/rewrad"]
TO_COME = ["--set", "cluster.nodes=2", "--set", "rollout={engine: vllm, devices: 1}"]
WINDOW = ["--set", "compare.claims.0.window=steps 2-4"]
SLOW = ("torch", "transformers", "pandas", "scipy", "numpy", "wandb", "matplotlib")


@pytest.fixture
def run(abrun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`abrun ARGUMENTS` in an empty folder, with the fake trainer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FAKE[1])
    return abrun


class Verdict:
    """What `abrun.compare` answers, without its work."""

    def __init__(self, verdict: str) -> None:
        self.verdict, self.content = verdict, SimpleNamespace()
        self.exit_code = {"MATCH": 0, "MISMATCH": 3, "INCONCLUSIVE": 4, "INVALID": 5}[verdict]

    def summary(self, *, verbose: bool = False) -> str:
        return f"The verdict: {self.verdict}"


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    def answer(result: str | Exception) -> list[Any]:
        calls: list[Any] = []

        def compare(sources: list[str], reading: Any, **options: Any) -> Verdict:
            calls.append((sources, {**options, "reading": reading}))
            if isinstance(result, Exception):
                raise result
            return Verdict(result)

        monkeypatch.setattr(comparing, "compare_sources", compare)
        return calls

    return answer


# --- help ---


def abrun_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    probe = (
        "import sys; from abrun.cli import main\n"
        "try: main()\n"
        f"finally: print([name for name in {SLOW} if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", probe, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_help_imports_nothing_slow() -> None:
    for arguments in ([], ["--help"], ["launch", "--help"]):
        done = abrun_process(*arguments)
        assert done.returncode == 0 and "Usage" in done.stdout
        assert done.stderr.strip() == "[]"


def test_help_imports_few_modules() -> None:
    """The number of modules decides how long help takes; unlike seconds, it is the same everywhere."""
    count = (
        "import sys; from abrun.cli import main\n"
        "try: main()\n"
        "finally: print(len(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", count, "--help"], capture_output=True, text=True, check=True)
    assert int(done.stderr) < 300


def test_only_what_computes_imports_what_computes(tmp_path: Path) -> None:
    """A dry run's expected power takes scipy, and a look at runs nothing."""
    for arguments, slow in (
        (["launch", str(SMALL), "--dry-run"], ["scipy", "numpy"]),
        (["status", "--runs-dir", str(tmp_path)], []),
    ):
        done = abrun_process(*arguments)
        assert done.returncode == 0, done.stderr
        assert done.stderr.strip().splitlines()[-1] == str(slow)


def test_every_command_has_help(run: Run) -> None:
    _, output, _ = run("--help")
    assert {"launch", "compare", "watch", "status"} <= set(re.findall(r"^  ([a-z-]+) +[A-Z]", output, re.M))
    for command, _ in all_commands():
        code, output, _ = run(*command.split(), "-h")
        assert code == 0 and f"Usage: abrun {command}" in output


# --- bad input: one line, exit code 2 ---


def test_an_error_with_a_built_in_recipe_is_one_line_and_output_follows_its_path(run: Run) -> None:
    code, output, errors = run("launch", "quickstart", "--set", "wrong=1", "--dry-run")
    assert (code, output, errors.count("\n")) == (2, "", 1) and "wrong" in errors
    code, output, errors = run("launch", "quickstart", "--dry-run")
    assert code == 0 and output and errors.startswith("abrun: using built-in recipe quickstart: ")


@pytest.mark.parametrize("kib", [60_000, 180_000, 470_000])
def test_too_little_address_space_is_one_line(kib: int, tmp_path: Path) -> None:
    limited = ["sh", "-c", f'ulimit -v {kib}; exec "$@"', "sh", sys.executable, "-m", "abrun"]
    done = subprocess.run([*limited, "compare", "x"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("abrun: ulimit -v is ")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "x"),
        ImportError("x.so: failed to map segment from shared object"),
    ],
)
def test_no_memory_is_one_line(run: Run, verdict: Callable[[Any], list[Any]], error: Exception) -> None:
    verdict(error)
    code, output, errors = run("compare", "mine")
    assert (code, output, errors.count("\n")) == (2, "", 1) and errors.startswith("abrun: out of memory for ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "'frobnicate'; see: abrun --help"),
        (["launch"], "Missing argument"),
        (["launch", SMALL, "--job", "2"], "--job"),
        (["launch", SMALL, "--jobs", "0"], "'--jobs': got '0'; allowed: greater than"),
        (["launch", SMALL, "--jobs", "two"], "--jobs"),
        (["power", SMALL, "--from", "x", "--sigma", "1"], "--from: got 'x' with --sigma or --correlation"),
        (["power", "--from", "gone"], "gone: no experiment here"),
        (["logs", "gone"], "gone: no such run"),
        (["launch", "."], "cannot be read"),
        (["launch", SMALL, "--set", "steps"], "--set: got 'steps'; allowed: key=value"),
        (["launch", SMALL, "--set", "stepz=3"], "mean 'steps'"),
        (["launch", SMALL, "--seeds", "1;2"], "--seeds: got '1;2'; allowed: numbers such as 0,1,2"),
        (["launch", SMALL, "--seeds", "9" * 5000], "--seeds: got"),
        (["launch", SMALL, "--seeds", "0-999999999"], "at most 1000"),
        (["launch", SMALL, "--seeds", "1,1"], "list each seed once"),
        (["launch", SMALL, "--seeds", "3"], "3 is one seed, number 3; for 3 seeds write 0-2, for that"),
        (["launch", SMALL, "--seeds", "3-3"], "an equivalence margin"),
        (["launch", SMALL, "--name", "a/b"], "--name: got 'a/b'"),
        (["launch", SMALL, "--name", "a/b", "--dry-run"], "--name: got 'a/b'"),
        (["launch", SMALL, "--name", "never", "--resume", "--dry-run"], "never: there is nothing to resume"),
        (["memory-profile", SMALL, "--lengths", "9" * 5000], "--lengths: got"),
        (["memory-profile", SMALL, "--sequences", "0"], "--sequences: got '0'; allowed: numbers of at"),
        (["memory-profile", SMALL, "--sequences", "0"], "at least 1, such as 1,2,4"),
        (["memory-profile", SMALL, "--sweep", "steps=1", "--sweep", "steps=2"], "--sweep: got steps twice"),
        (["memory-profile", SMALL, "--sweep", "stepz=1,2"], "mean 'steps'"),
        (["memory-profile", SMALL, "--max-seq-len"], "--budget-gib: missing"),
        (["memory-profile", SMALL, "--predict", "--max-seq-len"], "--max-seq-len cannot be combined with"),
        (["memory-profile", SMALL, "--predict", "--budget-gib", "1"], "--budget-gib cannot be combined with"),
        (["memory-profile", SMALL, "--predict", "--no-rollouts"], "--no-rollouts cannot be combined with"),
        (["memory-profile", SMALL, "--budget-gib", "inf"], "'--budget-gib': got 'inf'; allowed: less"),
        (["memory-profile", SMALL, "--device-memory", "h100"], "--device-memory requires --predict; add it"),
        (["memory-profile", SMALL, "--master-dtype", "bfloat16"], "--master-dtype requires --predict"),
        (
            ["memory-profile", SMALL, "--predict", "--master-dtype", "fp8"],
            "--master-dtype: got 'fp8'; allowed: float32 or bfloat16",
        ),
        (["status", "x" * 5000], "name too long"),
        (["launch", SMALL, "--set", "=1"], "--set: got '=1'; allowed: key=value"),
        (["launch", SMALL, "--set", "steps="], "steps: got null; allowed: a whole number"),
        (["launch", SMALL, "--launcher", "pigeon"], "--launcher: got 'pigeon'; allowed: local"),
        (["launch", SMALL, "--launcher", "pigeon", "--dry-run"], "--launcher: got 'pigeon'; allowed: local"),
        (["launch", SMALL, "--set", "cluster.nodes=2"], "has only this machine"),
        (["launch", SMALL, *TO_COME], "not supported yet; "),
        (["memory-profile", SMALL, *TO_COME], "rollout.devices: got 1 with cluster.nodes 2, which is"),
        (["launch", SMALL, "--runs-dir", "/proc/runs"], "cannot be written"),
        (["launch", SMALL, "--runs-dir", str(SMALL)], "in the place of a folder"),
        (["launch", SMALL, "--resume"], "there is nothing to resume"),
        (["launch", SMALL, "--dry-run", *CLAIM], "mean 'train/reward'?"),
        (["power", SMALL, *CLAIM], "compare.claims.0.metric: got 'train/rewrad'"),
        (["power", SMALL, *WINDOW], "compare.claims.0.window: got 'steps 2-4'"),
        (["launch", SMALL, "--dry-run", *WINDOW], "end at step 3"),
        (["freeze", "x", "-o", "y"], "freeze was renamed; use abrun reference save"),
        (["faults", "flipped"], "allowed: show, run, as in abrun faults show flipped; see: abrun "),
        (["reference", "my ref.json"], "add, as in abrun reference show 'my ref.json'; "),
        (["reference", "save", "x", "-o", "y", "--chain-alone"], "--chain-alone requires --budget; add it"),
        (["reference", "show", "/dev/null"], "got '/dev/null', not a file; make one with abrun"),
        (["faults", "show", "fliped_advantages"], "faults show: got 'fliped_advantages'; allowed: names"),
        (["faults", "--json", "show", "misgrouped"], "for one: abrun faults show NAME --json"),
        (["recipes", "quickstart", "--schema"], "all recipes have one schema"),
        (["launch", SMALL, "--export", "jobset"], "--export was removed; run abrun launch on the nodes"),
        (["compare", "gone", "--margin", "0.05"], "--margin is part of a claim; use --claim METRIC:WINDOW:"),
        (["compare", "gone", "--primary", "reward"], "--primary was renamed; use --claim"),
        (["compare", "gone", "--looks", "4,8"], "--looks was renamed; use --interim"),
        (["watch", "gone"], "gone: no experiment here"),
        (["status"], "runs: no such folder"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_writes_nothing(
    run: Run, tmp_path: Path, arguments: list[str | Path], words: str
) -> None:
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("abrun: ") and errors.count("\n") == 1 and words in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("before", ["", "os.open(os.devnull, os.O_RDONLY); "])  # as a library may, at import
def test_a_closed_stdout_is_no_traceback(before: str, tmp_path: Path) -> None:
    program = f"import os; {before}from abrun.cli import main; main()"
    command = [sys.executable, "-c", program, "status", "--runs-dir", str(tmp_path)]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- launch ---


def test_a_dry_run_shows_the_plan_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    known = "{metric: train/reward, margin: 0.05, sigma: 0.02, correlation: 0.5}"
    of_level = "{metric: train/entropy, margin: 5%, sigma: 0.02}"
    claim = f"compare.claims=[{known}, {{metric: train/loss, margin: 1}}, {of_level}]"
    changes = ["--set", claim, "--set", "warm_start={steps: 7}", "--set", "controls.aa_reruns=1"]
    code, output, _ = run("launch", SMALL, "--dry-run", "--seeds", "0-2", "--jobs", "2", *changes)
    assert code == 0 and list(tmp_path.iterdir()) == []
    rows = [line.split() for line in output.splitlines()]
    assert rows[0] == ["small:", "7", "runs,", "2", "arms", "x", "3", "seeds", "+", "1", "A/A"]
    assert [row[1] for row in rows if row and row[0].isdecimal()] == [
        *("baseline/seed-0", "treatment/seed-0", "baseline/seed-0-aa1"),
        *("baseline/seed-1", "treatment/seed-1", "baseline/seed-2", "treatment/seed-2"),
    ]
    assert ["treatment", "policy.logprobs.impl", "logits", "chunked"] in rows
    assert output.splitlines()[-1].endswith(" runs 2 at once.")
    # sigma 0.02, correlation 0.5: sd of a difference 0.02, so the margin is 2.5 sd
    power = next(row for row in rows if row[:1] == ["train/reward"])
    assert power[1:6] == ["last", "20%", "±0.05", "0.02", "0.5"]
    assert 70 <= int(power[6].rstrip("%")) <= 85 and power[-1] == "pairs"
    assert "unknown: see abrun power --from EXPERIMENT, or set compare.claims.1.sigma" in output
    (unknown,) = (row for row in rows if row[:1] == ["train/loss"])
    assert unknown[-1] == "unknown" and "compare.claims.2.sigma" not in output  # of no use without the level


def test_a_hub_s_model_that_cannot_be_had_is_one_line_before_anything_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(machine, "hub_refusal", lambda name: asked.append(name) or "it sleeps")
    change = ("--set", "model={path: some/hub-name}")
    line = (
        "arms baseline, treatment: model.path: got 'some/hub-name', which is not a folder here, "
        "and it sleeps; "
    )
    code, output, _ = run("launch", SMALL, "--dry-run", *change)
    assert code == 2 and f"- {line}" in output and asked == ["some/hub-name"]
    assert run("launch", SMALL, "--plan-only", *change)[:2] == (0, output)
    code, output, errors = run("launch", SMALL, *change)
    assert (code, output) == (2, "") and errors.startswith(f"abrun: small: {line}")
    assert errors.count("\n") == 1 and list(tmp_path.iterdir()) == []
    of_another_hub = "trainer={env: {HF_ENDPOINT: http://mirror}}"  # of which nothing is known here
    assert run("launch", SMALL, "--dry-run", *change, "--set", of_another_hub)[1].endswith(" at once.\n")


@pytest.mark.parametrize("word", ["train.py", "{recipe_dir}/no/train.sh"])
def test_a_script_that_does_not_exist_is_one_line_before_anything_starts(
    run: Run, tmp_path: Path, word: str
) -> None:
    path, recipe = tmp_path / "r.yaml", (SMALL.parents[1] / "external/foreign.yaml").read_text()
    _, _, rest = recipe.partition("  env:")

    def launch(argv: str, *arguments: str) -> tuple[int, str, str]:
        names = "'{learning_rate} {behaviour} {step_s} {label} {script}'"
        path.write_text(f"name: r\ntrainer:\n  type: command\n  argv: [{argv}, {names}]\n  env:{rest}")
        return run("launch", path, *arguments)

    code, output, _ = launch(f"'{{python}}', -u, '{word}'", "--dry-run")
    got = word.replace("{recipe_dir}", str(tmp_path))
    assert code == 2 and f"got '{got}', which does not exist here" in " ".join(output.split())
    code, output, errors = launch(f"'{{python}}', -u, '{word}'")
    assert (code, output, errors.count("\n")) == (2, "", 1) and list(tmp_path.iterdir()) == [path]
    hint = f"write {{recipe_dir}}/{Path(word).name} for a script beside the recipe"
    assert (hint in errors) is ("{" not in word)
    # Arguments of a module, and scripts of a program that may change the folder
    for argv in (f"'{{python}}', -m, x, '{word}'", f"env, python, '{word}'"):
        assert launch(argv, "--dry-run")[0] == 0
    (tmp_path / "no").mkdir()
    for script in ("train.py", "no/train.sh"):
        (tmp_path / script).touch()
    assert launch(f"'{{python}}', '{word}'", "--dry-run")[0] == 0


def test_a_launch_runs_compares_and_exits_with_the_code_of_the_verdict(
    run: Run, tmp_path: Path, verdict: Any
) -> None:
    calls = verdict("MISMATCH")
    code, output, errors = run("launch", SMALL, "--name", "mine", "--seeds", "4,7-8", "--jobs", "6")
    assert (code, errors) == (3, "")
    assert [sources for sources, _ in calls] == [[str(tmp_path / "runs" / "mine")]]
    assert output.rstrip().endswith("The verdict: MISMATCH") and "treatment/seed-8: finished" in output
    assert {name.seed for name in planned_runs(tmp_path / "runs" / "mine")} == {4, 7, 8}
    code, output, _ = run("status")
    assert code == 0 and output.splitlines()[1].split() == ["mine", "6", "finished", "18/18", "-"]
    for experiment in ("mine", "runs/mine"):
        code, output, _ = run("status", experiment)
        assert code == 0 and output.splitlines()[0].split() == ["mine", "6", "finished"]
    code, output, _ = run("watch", "mine")
    assert code == 0 and "treatment/seed-8: finished" in output


def test_a_failed_run_is_exit_code_1_even_where_nothing_can_be_compared(
    run: Run, verdict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict(ComparisonError("no pair"))
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"runs": {"treatment/seed-0": "fail"}}))
    code, output, errors = run("launch", SMALL)
    assert code == 1 and errors.startswith("abrun: ") and errors.endswith(": no pair\n")
    assert "treatment/seed-0: failed at step 0/3: the planned failure" in output
    assert f"Resume with: abrun launch {SMALL} --resume" in output
    monkeypatch.delenv("FAKE_TRAINER")
    calls = verdict("MATCH")
    code, output, _ = run("launch", SMALL, "--resume", "--no-compare")
    assert code == 0 and calls == [] and "The verdict" not in output


@pytest.mark.usefixtures("heard_signals")
def test_ctrl_c_exits_with_130_and_says_how_to_resume(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"{SEES_TRAINER}import abrun.cli; from abrun.recipe.implementations import LOCAL_LAUNCHERS\n"
        f"LOCAL_LAUNCHERS['local'] = {FAKE[1]!r}; abrun.cli.main()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", script, "launch", str(SMALL), "--set", "steps=500", "--jobs", "2"],
        cwd=tmp_path,
        env={**os.environ, "FAKE_TRAINER": '{"step_s": 0.05}'},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    heartbeat = tmp_path / "runs" / "small" / "treatment" / "seed-0" / "heartbeat.json"
    deadline = time.monotonic() + 30
    while not heartbeat.exists():
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    output, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (130, "")
    assert "stopping 2 runs" in output and "baseline/seed-0: interrupted at step" in output
    again = f"Stopped. Resume with: abrun launch {SMALL} --set steps=500 --jobs 2 --resume"
    assert output.splitlines()[-1] == again


def test_a_memory_profile_is_named_after_its_recipe_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = MemoryProfile(name="x", counter="", cells=[])
    monkeypatch.setattr(profile, "measure_recipe", lambda *_: empty)
    for name in ("small", "small-memory"):
        code, output, _ = run("memory-profile", SMALL, "--set", f"name={name}")
        assert code == 0
        assert output.rstrip().endswith("in runs/small-memory")


# --- compare ---


@pytest.mark.parametrize(
    ("result", "options", "code"),
    [
        ("MATCH", [], 0),
        ("MISMATCH", [], 3),
        ("INCONCLUSIVE", [], 4),
        ("INVALID", [], 5),
        ("INCONCLUSIVE", ["--allow-inconclusive"], 0),
        ("MISMATCH", ["--allow-inconclusive"], 3),
    ],
)
def test_the_verdict_is_the_exit_code(
    run: Run, verdict: Any, result: str, options: list[str], code: int
) -> None:
    calls = verdict(result)
    claim = ["--claim", "train/reward:last 20%:0.05", "--claim", "train/kl/mean:steps 1-9:0.1"]
    assert run("compare", "mine", *claim, "--output", "report", *options)[:2] == (
        code,
        f"The verdict: {result}\n",
    )
    ((sources, asked),) = calls
    assert sources == ["mine"] and asked["output"] == Path("report")
    assert [(claim.metric, claim.window, claim.margin) for claim in asked["claims"]] == [
        ("train/reward", "last 20%", 0.05),
        ("train/kl/mean", "steps 1-9", 0.1),
    ]


def test_an_error_of_the_comparison_is_exit_code_2(run: Run, verdict: Any) -> None:
    verdict(ComparisonError("two\nlines"))
    assert run("compare", "mine") == (2, "", "abrun: two lines\n")


@pytest.mark.parametrize("command", ["recipes", "faults"])
def test_lists_have_a_line_an_entry(command: str, abrun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, printed, _ = abrun(command)
    lines = printed.splitlines()
    assert code == 0 and max(map(len, lines[:-1])) <= 80 and len(lines) < 60


def test_all_recipes_are_listed_by_names_that_can_be_launched(
    abrun: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    some, whole = abrun("recipes")[1], abrun("recipes", "--all")[1]
    for name in recipe_files():
        assert f"\n{name} " in whole, name
        assert name.startswith("smollm2-") or f"\n{name} " in some, name
