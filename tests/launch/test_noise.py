"""The noise of earlier experiments: declared before the runs, and of no effect afterwards."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.experiment.noise import declare_noise, hash_recipe
from abrun.recipe.experiment import load_recipe
from abrun.runs.noise import NoiseRecord, add_noise, read_noise
from tests.launch.curves import begin_in, verdict_of

Run = Callable[..., tuple[int, str, str]]
HISTORY = Path("runs/noise.jsonl")
OTHER_SEEDS = count(100)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abrun: Run) -> Run:
    """`abrun launch` of the recipe in an empty folder: exit code, stdout, stderr."""
    begin_in(tmp_path, monkeypatch, "staged", [0, 1, 2])
    return lambda *arguments: abrun("launch", "staged.yaml", "--jobs", "4", *arguments)


def record(**changes: Any) -> NoiseRecord:
    """A record of the staged recipe's claim."""
    recipe, arms = hash_recipe(load_recipe(Path("staged.yaml")))
    values: dict[str, Any] = {
        "experiment": "old",
        "recipe": recipe,
        "metric": "train/reward",
        "window": "last 20%",
        "arms": arms,
        "seeds": [next(OTHER_SEEDS)],
    }
    return NoiseRecord(
        **(values | {"transform": "identity", "recorded": False, "sd": 0.006, "dof": 4.0} | changes)
    )


def priors() -> list[Any]:
    return declare_noise(load_recipe(Path("staged.yaml")), Path("runs/new")).compare.noise_priors


def claim_of(name: str) -> dict[str, Any]:
    return verdict_of(name)["claims"][0]


def test_a_launch_takes_the_noise_of_earlier_ones_and_no_later_change_of_the_file_counts(
    run: Run, abrun: Run
) -> None:
    assert run("--name", "first")[0] == 0 and "noise" not in claim_of("first")
    assert "noise of" not in run("--name", "repeated", "--dry-run")[1]  # the same numbers again are no more
    code, output, errors = run("--name", "second", "--seeds", "3,4,5")
    assert (code, errors) == (0, "") and "noise of 1 earlier experiment" in output
    found, content = claim_of("second"), verdict_of("second")
    assert not content["post_hoc"] and found["noise"]["experiments"] == 1
    assert found["noise"]["pairs_like"] > 3 and found["noise"]["interval_alone"] != found["interval"]
    assert "noise from 1 earlier experiment" in found["warning"]
    assert [one.experiment for one in read_noise(HISTORY)] == ["first", "second"]

    # Compared again, resumed, without the file or with another: the same verdict
    for text in (HISTORY.read_text(), "", HISTORY.read_text().replace('"sd": 0.', '"sd": 9.')):
        HISTORY.write_text(re.sub(r', "crc32": "\w+"', "", text))
        assert run("--name", "second", "--seeds", "3,4,5", "--resume")[0] == 0
        assert abrun("compare", "second", "-o", "again")[0] == 0
        assert verdict_of("second")["claims"] == content["claims"]
        assert json.loads(Path("again/verdict.json").read_text())["claims"] == content["claims"]

    # A record that is edited is not what was declared
    path = Path("runs/second/experiment.json")
    stored = json.loads(path.read_text())
    stored["recipe"]["compare"]["noise_priors"][0]["sd"] /= 10
    path.write_text(json.dumps(stored))
    assert "post hoc" in abrun("compare", "second")[1]


def test_two_pairs_match_with_a_history_and_a_report_adds_one_record(run: Run, abrun: Run) -> None:
    add_noise(HISTORY, [record(experiment=f"old-{number}") for number in range(5)])
    staged = ("--until-decided", "--max-seeds", "5", "--set", "seeds=[0,1]")
    assert run("--name", "new", *staged)[0] == 0
    interim = verdict_of("new")["arms"]["treatment"]["interim_analyses"]
    assert [(one["num_pairs"], one["verdict"]) for one in interim] == [(2, "MATCH"), (4, None), (5, None)]
    before = HISTORY.read_text()
    assert abrun("compare", "new", "-o", "again")[0] == 0 and HISTORY.read_text() == before


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{torn", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ('{"experiment": "x"}', "recipe: missing"),
        ("SD", "sd: got nan; expected a finite number"),
        ("NEGATIVE", "sd: got -1.0; expected a number of at least 0"),
        ("DOF", "dof: got 0.0; expected a number above 0"),
    ],
)
def test_a_damaged_history_is_named_in_one_line(run: Run, line: str, problem: str) -> None:
    broken = {"SD": {"sd": float("nan")}, "NEGATIVE": {"sd": -1.0}, "DOF": {"dof": 0.0}}
    if line in broken:
        line = json.dumps(asdict(record(**broken[line]))).replace("NaN", '"NaN"')
    HISTORY.parent.mkdir()
    HISTORY.write_text(f"{line}\n")
    with pytest.raises(StoreError, match=re.escape(problem)) as error:
        priors()
    assert "noise.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_history_stops_a_launch_unless_it_is_switched_off(run: Run) -> None:
    HISTORY.parent.mkdir()
    HISTORY.write_text("{torn\n")
    code, output, errors = run("--name", "new")
    assert (code, output) == (2, "") and "noise.jsonl" in errors and errors.count("\n") == 1
    assert not Path("runs/new").exists()
    assert run("--name", "new", "--set", "compare.noise=none")[0] == 0
    assert HISTORY.read_text() == "{torn\n"


def test_a_history_damaged_after_the_launch_is_a_note_and_no_verdict(run: Run) -> None:
    assert run("--name", "new")[0] == 0
    HISTORY.write_text("{torn\n")
    assert run("--name", "new", "--resume")[0] == 0
    assert any("was not added to its history" in note for note in verdict_of("new")["notes"])


def test_only_records_of_the_same_recipe_and_scale_count(run: Run) -> None:
    others = [{"recipe": "other"}, {"metric": "train/loss"}, {"window": "all"}, {"transform": "log"}]
    others += [{"recorded": True}, {"experiment": "new"}, {"sd": 0.0}]
    for number, change in enumerate(others):
        add_noise(HISTORY, [record(**({"experiment": f"e{number}"} | change))])
    assert priors() == []
    add_noise(HISTORY, [record(), record(sd=0.008)])  # the later one replaces the first
    (prior,) = priors()
    assert prior.experiments == 1 and 0 < prior.dof < 4
    assert prior.sd == pytest.approx(0.008, rel=0.2)


def test_repeats_of_an_experiment_count_once(run: Run) -> None:
    for number, seeds in enumerate(([7, 8], [7, 8, 9], [20, 21], [21, 22], [0, 30])):
        add_noise(HISTORY, [record(experiment=f"e{number}", seeds=seeds)])  # the last repeats the new one
    assert [prior.experiments for prior in priors()] == [2]
    add_noise(HISTORY, [record(experiment="of other arms", seeds=[7, 8], arms="other")])
    assert [prior.experiments for prior in priors()] == [3]


def test_records_without_anything_in_common_are_no_prior(run: Run) -> None:
    add_noise(HISTORY, [record(experiment=f"e{n}", sd=sd) for n, sd in enumerate((1e-150, 1e-150, 1e90))])
    assert priors() == []


def test_a_thousand_records_are_a_prior_of_four_degrees_of_freedom(run: Run) -> None:
    HISTORY.parent.mkdir()
    rows = [asdict(record(experiment=f"e{number}", sd=0.005 + number * 1e-6)) for number in range(1000)]
    HISTORY.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (prior,) = priors()
    assert (prior.experiments, prior.dof) == (1000, 4.0) and prior.sd == pytest.approx(0.0055, rel=0.1)


def test_a_history_by_its_path_and_one_that_is_no_file(run: Run) -> None:
    assert run("--name", "first", "--set", "compare.noise=shared.jsonl")[0] == 0
    assert len(read_noise(Path("shared.jsonl"))) == 1 and not HISTORY.exists()
    Path("folder").mkdir()
    with pytest.raises(StoreError):
        read_noise(Path("folder"))
