"""Declared interim verdicts: which pairs they read, at which level; the first that decides stands."""

import shutil

import pytest
from pydantic import ValidationError

from abrun.api.launching import state_of_looks
from abrun.reasons import Code
from tests.verdict.simulate import edit, edit_rows, fail

LOOKS = {"primary": [{"metric": "train/reward", "margin": 0.02}], "looks": [3, 5]}


def unfinished(experiment_dir, *seeds):
    for seed in seeds:
        for arm in ("baseline", "treatment"):
            (experiment_dir / f"{arm}/seed-{seed}/result.json").unlink()
            edit(
                experiment_dir / f"{arm}/seed-{seed}/attempts/0001.json",
                lambda content: content.update(status="pending"),
            )


def to_come(experiment_dir, *seeds):
    """Planned, and never begun."""
    for seed in seeds:
        for run in experiment_dir.glob(f"*/seed-{seed}"):
            shutil.rmtree(run / "attempts")
            for name in ("environment.json", "metrics.jsonl", "result.json"):
                (run / name).unlink()


def taken(content):
    return [(look.num_pairs, look.verdict) for look in content.arms["treatment"].looks]


def test_a_look_reads_the_first_pairs_while_the_others_run(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    unfinished(experiment_dir, 3, 4)
    content = judged(experiment_dir).content
    assert content.verdict == "MATCH" and taken(content) == [(3, "MATCH"), (5, None)]
    assert content.primaries[0].claim.num_pairs == 3 and content.primaries[0].claim.alpha == pytest.approx(
        0.0292, abs=2e-4
    )
    reason = content.reasons[0]
    assert (reason.code, reason["over"]["pairs"]) == (Code.CLAIM_EQUIVALENT, 3)
    assert reason["alpha"] == content.primaries[0].claim.alpha
    assert not content.post_hoc
    low, high = content.primaries[0].estimate.interval
    assert low < content.primaries[0].estimate.ci90[0] and high > content.primaries[0].estimate.ci90[1]


def test_pairs_to_come_do_not_hide_what_differs_at_step_one(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    for seed in range(3):
        edit_rows(experiment_dir / f"treatment/seed-{seed}", lambda row: row.update({"train/grad_norm": 9.0}))
    to_come(experiment_dir, 3, 4)
    content = judged(experiment_dir).content
    assert content.verdict == "MISMATCH" and content.reasons[0].code is Code.STEP_ONE_DIFFERS
    assert content.reasons[0]["metric"] == "train/grad_norm"


def test_before_the_first_look_there_is_none(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    unfinished(experiment_dir, 2, 3, 4)
    content = judged(experiment_dir).content
    assert content.verdict == "INVALID" and content.reasons[0].code is Code.RUN_NOT_FINISHED
    assert content.reasons[0]["run"] == "baseline/seed-2"


def test_the_first_look_that_decides_stands(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    for seed in (3, 4):  # pairs that would undo the match
        edit_rows(
            experiment_dir / f"treatment/seed-{seed}",
            lambda row: row.update({"train/reward": row["train/reward"] + 0.1 * (row["step"] > 1)}),
        )
    content = judged(experiment_dir).content
    assert content.verdict == "MATCH" and taken(content) == [(3, "MATCH"), (5, None)]


def test_an_undecided_look_goes_on_to_the_next(simulated, judged):
    experiment_dir = simulated(compare=LOOKS, noise=0.02)
    content = judged(experiment_dir).content
    assert taken(content)[0] == (3, "INCONCLUSIVE")
    assert content.primaries[0].claim.num_pairs == 5


def test_a_crash_after_the_match_still_counts(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    fail(experiment_dir / "treatment/seed-4", after_steps=20)
    content = judged(experiment_dir).content
    assert content.verdict == "MISMATCH" and content.reasons[0]["guard"] == "finished"


def test_pairs_added_without_looks_are_post_hoc(simulated, judged):
    experiment_dir = simulated()
    edit(experiment_dir / "experiment.json", lambda content: content.update(launched_pairs=3))
    content = judged(experiment_dir).content
    assert content.post_hoc
    assert content.reasons[-1] == Code.POST_HOC(why=Code.PAIRS_ADDED(num_pairs=2))


def test_one_look_per_treatment(simulated, judged):
    """An arm that is decided keeps its verdict while the other goes on."""
    arms = {"baseline": {}, "near": {"policy.logprobs.impl": "chunked"}, "far": {"policy.dtype": "bfloat16"}}
    found = judged(simulated(arms=arms, compare=LOOKS, shift={"near": 0.0, "far": 0.018}))
    content = found.content
    looks = {arm: [look.verdict for look in section.looks] for arm, section in content.arms.items()}
    assert looks["near"] == ["MATCH", None]
    assert looks["far"] == ["INCONCLUSIVE", "INCONCLUSIVE"]
    assert found.next_steps[0].reason.code is not Code.FINISH_LOOK  # the other's, which it does not need


def test_more_pairs_settle_what_step_one_leaves_open_in_no_arm(simulated, judged, snapshot):
    """A launch in stages goes on for the arm whose claim they can decide, and for no other."""
    arms = {arm: {"policy.logprobs.impl": impl} for arm, impl in (("near", "chunked"), ("far", "triton"))}
    shift = {"near": 0.0, "far": 0.018}
    experiment_dir = simulated(
        arms={"baseline": {}, **arms}, policy={"dtype": "bfloat16"}, compare=LOOKS, shift=shift
    )
    to_come(experiment_dir, 3, 4)
    for raised, state in (("near", "open"), ("far", "step one")):
        for seed in range(3):
            edit_rows(
                experiment_dir / f"{raised}/seed-{seed}",
                lambda row: row.update({"train/token_mult_prob_error": 1.04}),
            )
        found = judged(experiment_dir)
        assert found.verdict == "INCONCLUSIVE" and state_of_looks(experiment_dir, 3) == state
        assert (found.next_steps[0].reason.code is Code.FINISH_LOOK) == (state == "open")
    assert found.next_steps[0].reason.code is Code.RUN_IN_FLOAT32


@pytest.mark.parametrize("looks", [[5], [1, 5], [5, 5], [5, 3]])
def test_looks_go_up_from_two(simulated, looks, snapshot):
    with pytest.raises(ValidationError) as refused:
        simulated(compare={**LOOKS, "looks": looks})
    (problem,) = refused.value.errors()
    assert problem["loc"] == ("compare", "looks")
    snapshot(problem["msg"])


def test_a_missing_pair_does_not_let_a_later_one_take_its_place(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    shutil.rmtree(experiment_dir / "treatment/seed-1")
    content = judged(experiment_dir).content
    assert content.verdict == "INVALID"
    assert content.reasons[0] == Code.RUN_NOT_FINISHED(run="treatment/seed-1", status="missing")


def test_rising_looks_are_declared_and_judged_at_their_levels(simulated, judged):
    rising = judged(simulated(compare={**LOOKS, "looks_spending": "rising"}))
    equal = judged(simulated(compare=LOOKS))
    first, last = rising.content.arms["treatment"].looks
    assert first.alpha == pytest.approx(0.6 * last.alpha)
    assert first.alpha_difference == pytest.approx(0.6 * last.alpha_difference)
    assert first.alpha < equal.content.arms["treatment"].looks[0].alpha < last.alpha < 0.05
    assert rising.content.primaries[0].claim.alpha == first.alpha and not rising.content.post_hoc


def test_pairs_after_the_look_that_decided_are_not_said_to_be_unfinished(simulated, judged):
    experiment_dir = simulated(compare=LOOKS)
    assert judged(experiment_dir).content.num_pairs == 3
    assert "**pairs**: 3 compared, of 5 planned;" in (experiment_dir / "report/report.md").read_text()
