"""What a trial by people found: sentences of a claim, of its refusal, and of commands beside it."""

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.cli.arguments import parse_seeds
from abrun.errors import AbrunError, RecipeError
from abrun.messages import sentence
from abrun.messages.codes import Code
from tests.reasons import reason_of
from tests.verdict.simulate import edit, edit_rows

TEN = {"seeds": list(range(10)), "controls": {"aa_reruns": 0}}


def kill(experiment_dir, num_seeds):
    """These seeds learn nothing, in both arms."""
    for arm in ("baseline", "treatment"):
        for seed in range(num_seeds):
            edit_rows(
                experiment_dir / arm / f"seed-{seed}",
                lambda row: row.update({"train/reward": 0.2 + 0.01 * (row["train/reward"] - 0.5)}),
            )


def test_half_of_a_baseline_that_did_not_climb_is_no_match(simulated, judged, snapshot):
    experiment_dir = simulated(**TEN)
    kill(experiment_dir, 5)
    found = judged(experiment_dir)
    assert found.verdict == "INCONCLUSIVE"
    dead = reason_of(found, Code.DEAD_SEEDS)
    assert (dead["num"], dead["of"]) == (5, 10)
    snapshot(sentence(dead))


@pytest.mark.parametrize(("text", "why"), [("2-0", "runs backwards; write 0-2"), ("0-5000", "at most 1000")])
def test_ranges_of_seeds_are_refused_for_what_is_wrong(text, why):
    with pytest.raises(RecipeError, match=why):
        parse_seeds(text)


def test_a_tolerance_that_nothing_reads_stops_a_resumed_launch_before_it_begins(simulated, monkeypatch):
    experiment_dir = simulated(compare={"step_one_tolerance": {"train/loss": 0.1}})
    unread = {"step_one_tolerance": {"train/critic/loss": 0.1}}
    edit(experiment_dir / "experiment.json", lambda content: content["recipe"]["compare"].update(unread))
    before = sorted(experiment_dir.rglob("*"))
    monkeypatch.chdir(experiment_dir.parent)
    resume = ["launch", "./simulated", "--name", "simulated", "--runs-dir", ".", "--resume"]
    found = CliRunner().invoke(app, resume)
    said = str(found.exception)
    assert said.startswith(
        "simulated: compare.step_one_tolerance.train/critic/loss: got 'train/critic/loss', "
    )
    assert isinstance(found.exception, AbrunError) and "\n" not in said
    assert "compare.step_one_tolerance" in str(found.exception)
    assert sorted(experiment_dir.rglob("*")) == before
    without = [*resume, "--set", "compare.step_one_tolerance=null", "--dry-run"]
    assert CliRunner().invoke(app, without).exit_code == 0


def test_a_pilot_that_does_not_vary_plans_nothing(simulated, monkeypatch):
    experiment_dir = simulated()
    for seed in range(5):
        rows = (experiment_dir / f"baseline/seed-{seed}/metrics.jsonl").read_text()
        (experiment_dir / f"treatment/seed-{seed}/metrics.jsonl").write_text(rows)
    monkeypatch.chdir(experiment_dir.parent)
    typed = ["power", "--from", "./simulated", "--set", "compare.claims.0.margin=0.5"]
    said = " ".join(CliRunner().invoke(app, typed).stdout.split())
    advice = "abrun power simulated --set compare.claims.0.margin=0.5 --sigma X"
    assert f": {advice})" in said and "steps 33-40" in said
    assert "P(match) if " not in said
    both = CliRunner().invoke(app, [*typed, "--sigma", "0.02"])
    assert isinstance(both.exception, AbrunError) and "which --from measures" in str(both.exception)
    planned = CliRunner().invoke(app, advice.replace("X", "0.02").split()[1:])
    assert "±0.5" in planned.stdout and "sigma 0.02" in planned.stdout
