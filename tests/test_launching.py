"""A launch from its recipe to its verdict: exit codes, stages from Python, and `auto` decided once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import abrun
from abrun.api import launching
from abrun.api.launching import LaunchResult
from abrun.experiment.plan import RunName
from abrun.launch.supervisor import LaunchOutcome
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.runs.experiment import open_experiment
from abrun.tools.predict import auto
from tests.launch.curves import begin_in, begun, verdict_of
from tests.launch.fakes import FAKE
from tests.launch.test_local import SMALL

pytestmark = pytest.mark.usefixtures("trainer_installed")

Command = Callable[..., tuple[int, str, str]]

SHIFTED = {"trainer.parameters.shift": 0.06}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abrun: Command) -> Command:
    """`abrun ARGUMENTS` beside curves.yaml: exit code, stdout, stderr."""
    begin_in(tmp_path, monkeypatch, "curves", [0, 1, 2])
    return abrun


def settings(changes: dict[str, Any]) -> list[str]:
    return [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.mark.parametrize(
    ("changes", "verdict", "code"),
    [
        ({}, "MATCH", 0),
        pytest.param({"arms.treatment": SHIFTED}, "MISMATCH", 3, marks=pytest.mark.slow),
        pytest.param({"compare.claims.0.margin": 0.0001}, "INCONCLUSIVE", 4, marks=pytest.mark.slow),
        pytest.param({"compare.claims": []}, "DESCRIPTION", 0, marks=pytest.mark.slow),
        pytest.param(
            {"arms.treatment": {"trainer.parameters.last": 5}}, "INVALID", 5, marks=pytest.mark.slow
        ),
        ({"arms.shifted": SHIFTED}, "MISMATCH", 3),  # of several treatments: the worst
    ],
)
def test_a_launch_exits_with_the_code_of_the_verdict_or_with_0_where_that_is_asked(
    command: Command, changes: dict[str, Any], verdict: str, code: int
) -> None:
    launch = ("launch", "curves.yaml", "--jobs", "4", *settings(changes))
    exited, output, _ = command(*launch)
    assert exited == verdict_of("curves")["exit_code"] == code and f"{verdict}: curves" in output
    assert f" {verdict} " in command("status")[1]
    exited, output, _ = command(*launch, "--resume", "--exit-zero")
    assert exited == 0 and f"{verdict}: curves" in output
    exited, output, _ = command(*launch, "--resume", "--no-compare")
    assert exited == 0 and f"{verdict}: curves" not in output


def test_a_launch_whose_comparison_cannot_be_made_exits_with_1_and_says_so(command: Command) -> None:
    launch = ("launch", "curves.yaml", "--jobs", "4")
    assert command(*launch, "--no-compare")[0] == 0
    Path("runs/curves/report").symlink_to("elsewhere")  # which a report is not written through
    for more in ((), ("--exit-zero",)):
        code, output, errors = command(*launch, "--resume", *more)
        assert code == 1 and errors.startswith("abrun: the comparison ")
        assert errors.count("\n") == 1 and "Resume with" not in output


def test_ctrl_c_during_the_comparison_tells_how_to_continue(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("abrun.report.comparing.compare_sources", interrupted)
    code, output, _ = command("launch", "curves.yaml", "--jobs", "4", "--exit-zero")
    assert code == 130 and "Resume with: abrun launch curves.yaml" in output


@pytest.mark.parametrize(
    ("changes", "seeds"),
    [
        ({}, {0, 1, 2}),
        pytest.param({"compare.claims.0.margin": 0.0001}, {0, 1, 2, 3, 4}, marks=pytest.mark.slow),
    ],
)
def test_python_stops_once_it_is_decided_as_the_command_does(
    command: Command, changes: dict[str, Any], seeds: set[int]
) -> None:
    stages = ("--until-decided", "--max-seeds", "5", "--jobs", "4")
    code, printed, _ = command("launch", "curves.yaml", "--name", "typed", *stages, *settings(changes))
    experiment = abrun.launch(
        "curves.yaml", name="called", overrides=changes, until_decided=True, max_seeds=5, jobs=4, quiet=True
    )
    result = experiment.compare(output="runs/called/report", formats=["json"])
    assert begun("called") == begun("typed") == seeds
    assert (experiment.exit_code, result.exit_code) == (0, code)
    typed, called = verdict_of("typed"), verdict_of("called")
    for key in ("verdict", "claims", "post_hoc"):
        assert called[key] == typed[key]
    assert called["arms"]["treatment"]["interim_analyses"] == typed["arms"]["treatment"]["interim_analyses"]
    assert printed.count("not decided yet") == (2 if len(seeds) == 5 else 0)
    with pytest.raises(abrun.errors.RecipeError, match="requires --until-decided"):
        abrun.launch("curves.yaml", name="third", max_seeds=5)
    with pytest.raises(abrun.errors.RecipeError, match="allowed: a list of at most"):
        abrun.launch("curves.yaml", name="third", until_decided=True, max_seeds=10**12)


CHECKPOINTING = "policy.activation_checkpointing"


@pytest.mark.parametrize(
    "words", [("launch", SMALL, "--no-compare"), ("faults", "run", SMALL, "--faults=flipped_advantages"), ()]
)
def test_auto_is_decided_once_and_one_engine_made_wherever_a_launch_is_called_from(
    command: Command, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FAKE[1])
    calls: list[str] = []

    def count(module: Any, name: str) -> None:
        counted = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return counted(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    count(auto, "decide_values")
    count(launching, "make_engine")
    if words:
        assert command(*map(str, words), "--set", f"{CHECKPOINTING}=auto")[0] == 0
    else:
        abrun.launch(SMALL, overrides={CHECKPOINTING: "auto"}, quiet=True)
    assert sorted(calls) == ["decide_values", "make_engine"]
    (record,) = Path("runs").glob("*/experiment.json")
    content = open_experiment(record.parent)
    assert content["recipe"]["policy"]["activation_checkpointing"] == "none"
    assert content["decided"][CHECKPOINTING]["asked"] == "auto"


@pytest.mark.parametrize(("verdict", "code"), [("MATCH", 0), ("MISMATCH", 3), ("damaged", 1), (None, 1)])
def test_what_a_job_of_a_cluster_compared_gives_the_exit_code(
    tmp_path: Path, verdict: str | None, code: int
) -> None:
    if verdict is not None:
        (tmp_path / "report").mkdir()
        (tmp_path / "report/verdict.json").write_text(json.dumps({"verdict": verdict, "exit_code": code}))
    outcome = LaunchOutcome(statuses={RunName(arm="baseline", seed=0): "finished"}, stopped_by=None)
    launched = launching._add_job_verdict(LaunchResult(experiment_dir=tmp_path, outcome=outcome), "printed")
    assert (launched.exit_code or launched.verdict_exit_code, launched.compared) == (code, "printed")
