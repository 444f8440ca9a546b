"""abrun from Python: the same numbers as the command line, as objects that notebooks show."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import abrun
from abrun.cli import app
from abrun.errors import AbrunError, RecipeError
from abrun.logs.recorded import sources
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from tests.launch.fakes import FAKE
from tests.launch.test_local import SMALL
from tests.verdict.simulate import write_experiment

pytestmark = pytest.mark.usefixtures("trainer_installed")

ROOT = Path(__file__).parents[1]


def test_importing_it_imports_nothing_slow_and_its_functions_are_its_packages_too() -> None:
    code = (
        "import sys, abrun\n"
        "assert not {'numpy', 'pandas', 'torch', 'pydantic', 'rich'} & set(sys.modules)\n"
        "import abrun.launch as package\n"
        "assert abrun.launch is package and callable(abrun.compare) and callable(abrun.launch)\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules\n"
        "assert callable(abrun.load) and not hasattr(abrun, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_result_holds_what_verdict_json_holds(tmp_path: Path) -> None:
    write_experiment(tmp_path / "apart", shift=0.2)
    result = abrun.compare("apart", runs_dir=tmp_path, output=tmp_path / "report", formats=["json"])
    written = json.loads((tmp_path / "report/verdict.json").read_text())
    assert (result.verdict, result.exit_code, result.reasons) == ("MISMATCH", 3, written["reasons"])
    (claim,) = result.claims.to_dict("records")
    (expected,) = written["claims"]
    assert claim["mean_difference"] == expected["mean_difference"] == pytest.approx(0.2, abs=0.02)
    assert list(claim["interval"]) == expected["interval"] and claim["result"] == "different"
    assert (
        len(result.guards) == sum(item["kind"] == "guard" for item in written["evidence"])
        and result.report is None
    )
    assert "MISMATCH: apart" in str(result) and "MISMATCH" in repr(result)
    post_hoc = abrun.compare(tmp_path / "apart", claim="train/reward:last 20%:0.5")
    assert post_hoc.claims["margin_text"].tolist() == ["±0.5"] and post_hoc.content["post_hoc"]


def test_objects_name_what_they_hold_and_a_wrong_name_is_one_line(tmp_path: Path) -> None:
    assert set(dir(abrun)) >= {"compare", "launch", "load"}
    write_experiment(tmp_path / "apart", shift=0.2)
    experiment = abrun.load("apart", runs_dir=tmp_path)
    assert repr(experiment).startswith("Experiment('apart', arms: baseline, treatment; ")
    result = experiment.compare(claim={"metric": "train/reward", "margin": 0.02})
    assert repr(result) == "Result(MISMATCH, 'apart')" and len(repr(experiment.recorded)) < 3000
    assert result.figure() and result.figure("train/grad_norm")
    with pytest.raises(
        AbrunError, match="figure: no run records 'train/rewards'; did you mean 'train/reward'"
    ):
        result.figure("train/rewards")
    with pytest.raises(AbrunError, match="got the option 'clam'; did you mean 'claim'"):
        abrun.compare("apart", runs_dir=tmp_path, clam="x")


def test_the_metrics_are_every_value_of_every_run(tmp_path: Path) -> None:
    write_experiment(tmp_path / "equal", seeds=[0, 1], steps=5)
    experiment = abrun.load(tmp_path / "equal")
    rows = {}
    for path in sorted((tmp_path / "equal").rglob("metrics.jsonl")):
        arm, seed, rerun = re.findall(r"(\w+)/seed-(\d+)(?:-aa(\d+))?/", str(path))[0]
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for metric in ("train/reward", "train/grad_norm"):
                rows[arm, int(seed), int(rerun or 0), row["step"], metric] = float(row[metric])
    table = experiment.metrics.set_index(["arm", "seed", "rerun", "step", "metric"])["value"]
    assert len(rows) == (2 * 2 + 2) * 5 * 2
    assert {key: table[key] for key in rows} == rows
    assert experiment.arms == ("baseline", "treatment") and set(experiment.runs["status"]) == {"finished"}
    assert experiment.runs["last_step"].tolist() == [5] * 6


def test_a_launch_is_an_experiment_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FAKE[1])
    experiment = abrun.launch(
        SMALL,
        seeds=[4, 7],
        name="mine",
        runs_dir=tmp_path,
        overrides={"steps": 2, "compare.claims": []},
        jobs=4,
    )
    assert experiment.exit_code == 0 and experiment.name == "mine"
    assert sorted(set(experiment.runs["seed"])) == [4, 7] and set(experiment.runs["last_step"]) == {2}
    assert "treatment/seed-7: finished" in capsys.readouterr().out
    abrun.launch(SMALL, seeds=[4, 7], name="again", runs_dir=tmp_path, jobs=4, quiet=True)
    assert capsys.readouterr().out == ""


def test_runs_of_another_framework_are_compared_with_the_options_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arm, level in (("old", 0.5), ("new", 0.51)):
        for seed in range(3):
            rows = "".join(f"{step},{level + 0.001 * seed + step / 1000}\n" for step in range(1, 21))
            (tmp_path / f"{arm}-s{seed}.csv").write_text("iteration,score\n" + rows)
    asked = {"baseline": "old", "aliases": {"train/reward": "score"}, "step_column": "iteration"}
    result = abrun.compare(f"csv:{tmp_path}", claim="train/reward:last 20%:0.05", step_one=False, **asked)
    (claim,) = result.claims.to_dict("records")
    assert claim["mean_difference"] == pytest.approx(0.01) and claim["num_pairs"] == 3
    assert set(result.metrics["arm"]) == {"old", "new"}
    assert all(path.suffix == ".csv" for path in tmp_path.iterdir())  # no report was asked for


def test_runs_are_read_once_however_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_experiment(tmp_path / "equal", seeds=[0, 1], steps=5)
    for arm, level in (("old", 0.5), ("new", 0.51)):
        for seed in range(2):
            rows = "".join(f"{step},{level + 0.001 * seed + step / 1000}\n" for step in range(1, 21))
            (tmp_path / f"{arm}-s{seed}.csv").write_text("step,train/reward\n" + rows)
    readings: list[str] = []

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_count(source: Any, **options: Any) -> Any:
            readings.append(Path(source).name)
            return read(source, **options)

        return read_and_count

    monkeypatch.setattr(sources, "load_experiment", counted(sources.load_experiment))
    monkeypatch.setattr(sources, "read_logs", counted(sources.read_logs))
    logged = f"csv:{tmp_path}"
    for source, options in ((str(tmp_path / "equal"), {}), (logged, {"baseline": "old", "interim": (2, 3)})):
        readings.clear()
        direct = abrun.compare(source, claim="train/reward:last 20%:0.05", **options)
        assert len(readings) == 1 and len(direct.experiment.recorded.runs) >= 4
        readings.clear()
        loaded = abrun.load(source, **options).compare(claim="train/reward:last 20%:0.05")
        assert len(readings) == 1 and loaded.content == direct.content
    readings.clear()
    with_cli = CliRunner().invoke(app, ["compare", str(tmp_path / "equal")])
    assert with_cli.exit_code == 0 and readings == ["equal"]


def test_a_notebook_gets_html_with_nothing_of_the_runs_as_markup(tmp_path: Path) -> None:
    write_experiment(tmp_path / "equal", seeds=[0, 1, 2])
    result = abrun.compare(tmp_path / "equal", output=tmp_path / "report", formats=["png", "html"])
    shown = result._repr_html_()
    assert result.verdict in shown and "<table" in shown and 'src="data:image/png;base64,' in shown
    assert str(result.report) in shown and "treatment" in result.experiment._repr_html_()
    hostile = replace(result.comparison, content=replace(result.verdict_file, experiment="<script>"))
    shown = replace(result, comparison=hostile)._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown


def test_bad_input_is_an_error_of_one_line(tmp_path: Path) -> None:
    write_experiment(tmp_path / "equal", seeds=[0, 1], steps=2)
    experiment = abrun.load(tmp_path / "equal")
    for call in (
        lambda: abrun.load("gone", runs_dir=tmp_path),
        lambda: abrun.load(),
        lambda: abrun.compare(),
        lambda: abrun.load(tmp_path / "equal", patern="x"),
        lambda: abrun.compare(experiment, "other"),
        lambda: abrun.compare(experiment, unpaired=True),
        lambda: abrun.compare(experiment, claim="train/rewrad:all:1"),
        lambda: abrun.compare(experiment, formats=["json"]),
        lambda: abrun.launch("quickstrat"),
    ):
        with pytest.raises(AbrunError) as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="'patern'"):
        abrun.load(tmp_path / "equal", patern="x")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_on_python_is_a_notebook_that_runs(tmp_path: Path) -> None:
    """Its blocks as cells, with real runs: about a minute."""
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    text = (ROOT / "docs" / "how-to" / "train-your-model.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(block) for block in blocks])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    experiment, result, table = (
        "".join(
            output["data"]["text/html"] for output in cell["outputs"] if "text/html" in output.get("data", {})
        )
        for cell in notebook.cells
    )
    assert "quickstart" in experiment and re.search("MATCH|INCONCLUSIVE", result)
    assert "data:image/png" in result and "treatment" in table
