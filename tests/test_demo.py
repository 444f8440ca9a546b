"""`abrun demo`, end to end: three verdicts in a folder, without torch and matplotlib."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abrun.api.demo import ARCHIVE, EXPERIMENTS, render_demo, unpack_runs
from abrun.api.demo import run_demo as run_demo_here
from abrun.errors import RecipeError
from abrun.experiment.starter.shipped import find_recipe
from abrun.recipe.experiment import load_recipe, parse_stored_recipe
from abrun.report import next_step
from abrun.report.present.terminal import Terminal
from abrun.runs.files import write_file
from tests.commands import commands_in, problem_of
from tests.snapshot import Snapshot

Command = Callable[..., tuple[int, str, str]]
BASE_PACKAGE_ONLY = (
    "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'matplotlib', 'pandas')))\n"
    "from abrun.cli import main; main()"
)


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `abrun demo` in `folder` as the base package has it, on a terminal of 80 columns."""
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", BASE_PACKAGE_ONLY, "demo", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_demo_shows_a_match_a_mismatch_and_seed_noise(tmp_path: Path, snapshot: Snapshot) -> None:
    first = run_demo(tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    snapshot(first.stdout)
    assert max(map(len, first.stdout.splitlines())) <= 80
    commands = [
        words for line in first.stdout.replace("\\\n", " ").splitlines() for words in abrun_commands(line)
    ]
    assert len(commands) == 3 and [words for words in commands if problem_of(words)] == []
    for name, verdict in zip(EXPERIMENTS, ("MATCH", "MISMATCH", "INCONCLUSIVE"), strict=True):
        report = tmp_path / "abrun-demo" / name / "report"
        content = json.loads((report / "verdict.json").read_text())
        assert content["verdict"] == verdict and not content["post_hoc"]
        assert [claim["num_pairs"] for claim in content["claims"]] == [6 if verdict == "INCONCLUSIVE" else 4]
        assert (
            verdict in (report / "report.html").read_text()
            and str(report / "report.html")[-30:] in first.stdout
        )

    before = {path: path.read_bytes() for path in (tmp_path / "abrun-demo").rglob("*") if path.is_file()}
    (tmp_path / "abrun-demo" / "notes.txt").write_text("mine")
    second = run_demo(tmp_path)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "abrun-demo" / "notes.txt").read_text() == "mine"


def abrun_commands(line: str) -> list[list[str]]:
    return commands_in(line[line.index("abrun ") :]) if " abrun " in line else []


def test_demo_refuses_other_folders_and_a_python_without_lzma(
    tmp_path: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    refused = run_demo(tmp_path, "-o", "runs")
    assert (refused.returncode, refused.stdout) == (2, "")
    snapshot(refused.stderr)
    assert os.listdir(tmp_path / "runs") == ["notes.txt"]
    with snapshot.refused(RecipeError):
        unpack_runs(tmp_path / "runs" / "notes.txt")
    monkeypatch.setitem(sys.modules, "lzma", None)
    with snapshot.refused(RecipeError):
        unpack_runs(tmp_path / "new")


def test_an_interrupted_demo_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack_runs(tmp_path / "whole")
    num_written = 0

    def write_until_killed(path: Path, content: bytes, **options: Any) -> None:
        nonlocal num_written
        if num_written == 7:
            name = f".{path.name}.{socket.gethostname()}.{ended_process()}.partial"
            (path.parent / name).write_bytes(content[:9])
            raise KeyboardInterrupt
        num_written += 1
        write_file(path, content, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("abrun.api.demo.write_file", write_until_killed)
        unpack_runs(tmp_path / "cut")
    unpack_runs(tmp_path / "cut")
    whole, cut = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in files(tmp_path / name)}
        for name in ("whole", "cut")
    )
    assert cut == whole and len(whole) > 50


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_demo_leaves_other_experiments_of_its_names_as_they_are(tmp_path: Path, abrun: Command) -> None:
    unpack_runs(tmp_path)
    experiment = tmp_path / "quickstart/experiment.json"
    changed = json.loads(experiment.read_text())
    changed["recipe"]["compare"]["claims"] = []
    experiment.write_text(json.dumps(changed))
    code, _, errors = abrun("demo", "-o", tmp_path)
    assert code == 2 and errors == f"abrun: {experiment}: is not the demo's; choose another folder with -o\n"
    assert not (tmp_path / "quickstart/report").exists()


def test_a_demo_that_cannot_be_written_says_why(tmp_path: Path, abrun: Command) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name, problem in (
        ("dangling", "is not a folder; choose another one with -o"),
        ("file/demo", "cannot be written: Not a directory; choose another folder with -o"),
    ):
        assert abrun("demo", "-o", tmp_path / name)[::2] == (2, f"abrun: {tmp_path / name}: {problem}\n")


def test_a_narrow_terminal_without_unicode_shows_whole_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder with a name that is far too long for the eighty columns of a terminal"
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    output = run_demo(tmp_path, "-o", str(folder)).stdout
    assert f"abrun compare '{folder}/quickstart-injected-fault'\n" in output
    assert f"-----{25 * ':'}=o=" in output and "\\u" not in output
    narrow = render_demo(run_demo_here(folder), width=40)
    console = Terminal(file=io.StringIO(), width=40)
    console.print(narrow, crop=False)
    assert "▒▒" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_bundled_runs_are_small_and_of_the_built_in_recipes(tmp_path: Path) -> None:
    assert ARCHIVE.stat().st_size < 150_000
    unpack_runs(tmp_path)
    for name in EXPERIMENTS:
        stored = json.loads((tmp_path / name / "experiment.json").read_text())["recipe"]
        recipes = (parse_stored_recipe(stored), load_recipe(find_recipe(Path(name))))
        recorded, now = (recipe.model_dump() for recipe in recipes)
        for claim in (*recorded["compare"]["claims"], *now["compare"]["claims"]):
            claim |= {"sigma": None, "correlation": None}  # later recordings may be noisier
        recorded["compare"]["alpha_spending"] = None  # the default is another since then
        assert recorded == now


@pytest.mark.parametrize("packages", [True, False], ids=["with torch", "without torch"])
def test_next_commands_of_the_demo_can_work_on_its_runs(
    tmp_path: Path, abrun: Command, monkeypatch: pytest.MonkeyPatch, packages: bool
) -> None:
    """The demo's runs come without the weights that a trace starts from; faults need none of them."""
    monkeypatch.chdir(tmp_path)
    unpack_runs(Path("abrun-demo"))
    lacking = None if packages else "needs torch: pip install 'abrun[train]'"
    monkeypatch.setattr(next_step, "missing_package", lambda extra: lacking)
    texts = [abrun("compare", f"abrun-demo/{name}", "-v")[1] for name in EXPERIMENTS]
    match, mismatch, undecided = (" ".join(text.partition("\nnext ")[2].split()) for text in texts)
    install = "" if packages else "pip install 'abrun[train]' && "
    assert f": {install}abrun faults run abrun-demo/quickstart --runs-dir abrun-demo" in match
    assert f": {install}abrun launch abrun-demo/quickstart-injected-fault" in mismatch
    assert ": abrun reference save " in match and ": abrun completions " in mismatch
    assert "abrun trace" not in mismatch and "--seeds 6-91 --name quickstart-small-batch-fresh" in undecided


def test_the_bug_is_one_that_the_curves_and_the_claim_do_not_show(tmp_path: Path) -> None:
    """The same recipe without step one is a MATCH; equal arms of the third differ far more."""
    _, bug, equal = run_demo_here(tmp_path)
    (claim,), (noise,) = bug.comparison.content.claims, equal.comparison.content.claims
    assert claim.result == "equivalent" and bug.comparison.verdict == "MISMATCH"
    assert max(map(abs, claim.estimate.differences)) < 0.03 < max(map(abs, noise.estimate.differences)) / 5
    treated = {"policy.logprobs.impl", "policy.logprobs.chunk_size"}
    assert set(equal.comparison.content.arms["treatment"].treatment_diff) == treated
