"""Regression mode: an ensemble frozen as a file, and a later run compared with it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

from abrun.errors import ComparisonError, StoreError
from abrun.logs.recorded.reference import freeze, load_reference, make_regression_experiment
from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.report.comparing import compare, compare_sources, freeze_arm
from abrun.report.evidence import evidence_lines
from abrun.report.next_step import run_argument
from abrun.runs.layout import RunName
from tests.snapshot import Snapshot
from tests.verdict.simulate import edit, edit_rows, write_experiment


@pytest.fixture
def frozen(simulated, tmp_path: Path) -> Path:
    freeze(load_experiment(simulated()), "baseline", tmp_path / "ref.json")
    return tmp_path / "ref.json"


def later(
    tmp_path: Path, frozen: Path, arm: str = "baseline", change=lambda experiment_dir: None, **scenario
):
    """The verdict on a later experiment's arm against the frozen one."""
    experiment_dir = write_experiment(tmp_path / "later", **scenario)
    change(experiment_dir)
    experiment = make_regression_experiment(load_experiment(experiment_dir), load_reference(frozen), arm)
    return compare(experiment, output=tmp_path / "report", formats=("json",)).content


def test_a_margin_that_was_chosen_once_the_runs_were_there_stays_post_hoc(simulated, tmp_path):
    experiment = load_experiment(simulated())
    began = replace(experiment.runs[RunName(arm="treatment", seed=0)], span_s=(1e9, 1e9 + 60))
    experiment = replace(experiment, runs={**experiment.runs, began.name: began})
    for number, margin in enumerate((experiment.compare.claims[0].margin, 0.016)):
        claims = [experiment.compare.claims[0].model_copy(update={"margin": margin})]
        chosen = replace(experiment, compare=experiment.compare.model_copy(update={"claims": claims}))
        freeze(chosen, "baseline", tmp_path / f"{number}.json")
        held = make_regression_experiment(
            experiment, load_reference(tmp_path / f"{number}.json"), "treatment"
        )
        content = compare(held, output=tmp_path / "report", formats=("json",)).content
        assert content.post_hoc == (number == 1), margin


def test_a_recipe_of_one_arm_gives_it_any_name(simulated, tmp_path, frozen):
    scenario = {"arms": {"candidate": {}}, "compare": {"reference": str(frozen)}, "shift": -0.1}
    content = later(
        tmp_path, frozen, "candidate", lambda path: shutil.copy(frozen, path / "reference.json"), **scenario
    )
    assert content.verdict == "MISMATCH" and content.baseline == "reference"
    assert "candidate is 0.0984 lower than reference" in sentence(content.reasons[0]) and list(
        content.arms
    ) == ["candidate"]
    read = load_experiment(tmp_path / "later")
    assert read.arms == ("candidate",) and {name.arm for name in read.runs} == {"candidate"}


def test_one_arm_is_frozen_and_compared_alone(simulated, tmp_path):
    arm = str(simulated() / "treatment")
    experiment = open_sources(
        [arm], ReadingOptions(allows_one_arm=True), [Claim(metric="train/reward", margin=0.05)]
    )
    freeze(experiment, experiment.baseline, tmp_path / "ref.json")
    report = tmp_path / "report"
    comparison = compare_sources([arm], ReadingOptions(), reference=tmp_path / "ref.json")
    assert comparison.verdict == "MATCH" and comparison.content.num_pairs == 5
    alone = compare_sources([arm], ReadingOptions(), output=report)
    assert len(alone.content.select("seed noise")[0]["levels"]) == 5 and (report / "report.html").exists()


@pytest.mark.parametrize("arm", ["baseline", "reference", "mine"])
def test_what_is_under_test_is_neither_baseline_nor_reference(simulated, tmp_path, frozen, arm):
    runs = simulated() / "baseline"
    found = compare_sources([f"{arm}={runs}"], ReadingOptions(), reference=frozen)
    assert list(found.content.arms) == ["mine" if arm == "mine" else "new"] and found.verdict == "MATCH"


def test_commands_about_the_runs_under_test_name_their_folders(simulated, tmp_path, frozen):
    later_runs = make_regression_experiment(load_experiment(simulated()), load_reference(frozen), "baseline")
    argument = run_argument(later_runs, RunName(arm="new", seed=1))
    assert argument == str(tmp_path / "simulated" / "baseline" / "seed-1")


def test_a_package_that_was_only_installed_leaves_step_one(tmp_path, frozen):
    def installed(experiment_dir: Path) -> None:
        for path in experiment_dir.glob("*/*/environment.json"):
            edit(path, lambda content: content["versions"].update(vllm="0.27.0"))

    content = later(tmp_path, frozen, change=installed)
    assert content.arms["new"].treatment_diff == {} and content.select("step one")


def test_a_window_is_the_same_one_where_the_reference_has_left_out_steps_before_it(tmp_path):
    freeze(load_experiment(write_experiment(tmp_path / "long", steps=200)), "baseline", tmp_path / "ref.json")
    found = later(tmp_path, tmp_path / "ref.json", steps=200)
    assert found.verdict == "MATCH" and found.claims[0].claim.steps == (161, 200)
    assert later(tmp_path / "longer", tmp_path / "ref.json", steps=250).claims[0].claim.steps == (161, 200)
    assert later(tmp_path / "shorter", tmp_path / "ref.json", steps=180).verdict == "INVALID"


def test_windows_are_whole_and_the_rest_is_thinned(tmp_path):
    experiment_dir = write_experiment(tmp_path / "long", steps=1000, seeds=[0, 1])
    freeze(load_experiment(experiment_dir), "baseline", tmp_path / "ref.json")
    whole = load_experiment(experiment_dir).arm("baseline")[0]
    kept = next(run for run in load_reference(tmp_path / "ref.json").runs if run.name.seed == 0)
    reward, norm = kept.series("train/reward"), kept.series("train/grad_norm")
    assert np.isin(np.arange(801, 1001), reward.steps).all() and reward.steps[0] == 1 and len(reward) < 260
    assert len(norm) <= 66 and norm.values.max() == whole.series("train/grad_norm").values.max()
    assert [reward.value_at(step) for step in (1, 900)] == [
        whole.series("train/reward").value_at(step) for step in (1, 900)
    ]
    assert (tmp_path / "ref.json").stat().st_size < 100_000


def test_a_reference_is_safe_to_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e9)
    experiment_dir = write_experiment(
        tmp_path / "x", seeds=[0, 1], model={"path": "/home/somebody/weights"}, wandb={"entity": "somebody"}
    )
    freeze(load_experiment(experiment_dir), "baseline", tmp_path / "ref.json")
    text = (tmp_path / "ref.json").read_text()
    assert "somebody" not in text and "node-1" not in text and str(tmp_path) not in text
    again = tmp_path / "again.json"
    freeze(load_experiment(experiment_dir), "baseline", again)
    assert again.read_text() == text


def test_nan_survives(tmp_path, simulated):
    experiment_dir = simulated()
    edit_rows(experiment_dir / "baseline/seed-2", lambda row: row.update({"train/entropy": "NaN"}))
    freeze(load_experiment(experiment_dir), "baseline", tmp_path / "ref.json")
    json.loads((tmp_path / "ref.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    kept = next(run for run in load_reference(tmp_path / "ref.json").runs if run.name.seed == 2)
    assert kept.first_non_finite("train/entropy") == 1


def test_margins_in_its_sigma(tmp_path, simulated):
    """k sigma of a frozen reference is absolute: the spread of the compared runs does not move it."""
    recipe = {"compare": {"claims": [{"metric": "train/reward", "margin": "2 sigma"}]}}
    freeze_arm(load_experiment(simulated(**recipe)), "baseline", tmp_path / "ref.json")
    reference = load_reference(tmp_path / "ref.json")
    windows = [run.series("train/reward").values[-8:].mean() for run in reference.runs if not run.name.rerun]
    content = later(tmp_path, tmp_path / "ref.json", noise=0.02)
    lower_bound = np.std(windows, ddof=1) * np.sqrt(4 / chi2.ppf(0.95, 4))
    assert content.claims[0].claim.margin == pytest.approx(2 * lower_bound, rel=5e-3)  # three digits are kept
    assert (content.claims[0].claim.test, content.claims[0].claim.margin_unit) == ("paired TOST", "")
    assert reference.compare.claims[0].margin == content.claims[0].claim.margin


def reference_of(run: str) -> str:
    head = '"schema_version": 2, "name": "x", "compare": {}, "config": {}, "environment": {}'
    return f'{{{head}, "runs": [{{{run}, "config": {{}}, "environment": {{}}}}]}}'


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"schema_version": 2, "runs": [{}]}',
        "\x00\x01",
        '{"schema_version": 2, "runs": [], "recipe": {}}',
        reference_of('"seed": 0, "rerun": 0, "metrics": []'),
        reference_of('"seed": "0", "rerun": 0, "metrics": {}'),
        reference_of('"seed": 0, "rerun": 0, "metrics": {"x": {"steps": [1, 2], "values": [3]}}'),
    ],
    ids=["empty", "no claims", "binary", "experiment", "metrics", "seed", "values"],
)
def test_other_files_are_refused_in_one_line(tmp_path, content, snapshot):
    (tmp_path / "ref.json").write_text(content)
    with pytest.raises((ComparisonError, StoreError)) as caught:
        load_reference(tmp_path / "ref.json")
    snapshot(caught.value)


def test_files_that_are_not_there_or_cannot_be(simulated, tmp_path):
    with pytest.raises(ComparisonError, match=r"got .*/ref.json', no such file"):
        load_reference(tmp_path / "ref.json")
    (tmp_path / "file").touch()
    with pytest.raises(ComparisonError, match=r"--output: .* cannot be written"):
        freeze(load_experiment(simulated()), "baseline", tmp_path / "file" / "ref.json")


def test_several_arms_ask_for_one(simulated, tmp_path):
    experiment_dir = simulated(shift={"treatment": -0.1})
    reference, where = tmp_path / "fused.json", [str(experiment_dir)]
    freeze(load_experiment(experiment_dir), "baseline", reference)
    with pytest.raises(ComparisonError, match="choose one with --arm: baseline, treatment"):
        compare_sources(where, ReadingOptions(), reference=reference)
    for arm, verdict in (("baseline", "INVALID"), ("treatment", "MISMATCH")):
        comparison = compare_sources(where, ReadingOptions(), reference=reference, arm=arm)
        assert arm == "baseline" or comparison.verdict == verdict
        assert comparison.content.experiment.startswith(f"simulated's arm '{arm}' against ")


def test_numbers_against_a_reference_agree_and_say_what_they_are_of(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    """A reference drops steps outside its windows, and its other seeds are left out."""
    claims = {"claims": [{"metric": "train/reward", "margin": 0.06}]}
    scenario = {"steps": 200, "noise": 0.02, "compare": claims}
    frozen = write_experiment(tmp_path / "frozen", seeds=[0, 1, 2, 3, 4, 5], **scenario)
    freeze(load_experiment(frozen), "baseline", tmp_path / "ref.json")
    content = later(tmp_path, tmp_path / "ref.json", "treatment", seeds=[0, 1, 2, 3], **scenario)
    lines = [text for _, text in evidence_lines(content)]
    (claim,) = content.claims
    estimate = claim.estimate
    assert estimate.treatment_mean is not None and estimate.baseline_mean is not None
    (used,) = [warning for warning in claim.warnings if warning.code == Code.SEEDS_WITHOUT_PAIR]
    assert used["seeds"] == [4, 5]  # a control variate, which moves the difference
    assert np.mean(used["interval"]) == pytest.approx(estimate.treatment_mean - estimate.baseline_mean)
    (shared,) = [line for line in lines if "steps shared" in line]
    snapshot(shared)
