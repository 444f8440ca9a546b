"""Experiments with a known truth on disk: the verdict, and that the reason is the right one."""

import pytest

from abrun.errors import ComparisonError
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.runs.lines import LineWriter, read_json_lines
from abrun.verdict.decide import EXIT_CODES, worst_verdict
from abrun.verdict.validity import Coverage
from tests.reasons import codes_of, reason_of, refused
from tests.verdict.simulate import OUT_OF_MEMORY, edit, edit_rows, fail

STEP_TIME = "timing/train/total_step_time_s"
REWARD = Claim(metric="train/reward", margin=0.02)


# --- MATCH ---


def test_a_small_difference_may_be_significant_and_still_equivalent(simulated, judged):
    comparison = judged(simulated(shift=0.01, noise=0.001))
    claim = comparison.arms[0].claims[0]
    assert claim.estimate.p_difference is not None and claim.estimate.p_difference < 0.01
    assert comparison.verdict == "MATCH"


# --- MISMATCH ---


def test_a_treatment_that_crashes_before_its_first_step_is_a_mismatch(simulated, judged):
    experiment_dir = simulated()
    for seed in range(5):
        fail(experiment_dir / f"treatment/seed-{seed}", after_steps=0)
        (experiment_dir / f"treatment/seed-{seed}/environment.json").unlink()
    comparison = judged(experiment_dir, formats=("json", "markdown", "png"))
    assert comparison.verdict == "MISMATCH"
    assert reason_of(comparison, Code.RUN_FAILED)["num_more"] == 4


# --- INVALID ---


def invalid(comparison, code=None, **values):
    """Expect a verdict without a claim, for a reason with a code and these of its values."""
    assert (comparison.verdict, comparison.exit_code) == ("INVALID", 5), comparison.content.reasons
    if code is not None:
        reason = reason_of(comparison, code)
        assert {name: reason[name] for name in values} == values


def test_a_seed_without_its_pair(simulated, judged):
    experiment_dir = simulated()
    edit(
        experiment_dir / "experiment.json",
        lambda content: content.update(
            runs=[r for r in content["runs"] if (r["arm"], r["seed"]) != ("treatment", 4)]
        ),
    )
    invalid(judged(experiment_dir), Code.UNPAIRED_SEEDS, seeds=[4], arm="treatment")


@pytest.mark.parametrize(
    ("file", "code"),
    [("config.json", Code.CONFIG_MISSING), ("environment.json", Code.ENVIRONMENT_MISSING)],
)
def test_a_run_that_does_not_say_what_it_was(simulated, judged, file, code):
    experiment_dir = simulated()
    (experiment_dir / f"treatment/seed-2/{file}").unlink()
    invalid(judged(experiment_dir), code, run="treatment/seed-2")


@pytest.mark.parametrize(
    ("runs", "costs"),
    [
        (["baseline/seed-1"], [Code.BASELINE_FAILED]),
        (["baseline/seed-1-aa1"], [Code.RERUN_FAILED]),
        (["baseline/seed-0", "baseline/seed-1-aa1"], [Code.BASELINE_FAILED, Code.RERUN_FAILED]),
    ],
)
def test_a_failed_baseline_and_a_failed_rerun_say_what_they_cost(simulated, judged, runs, costs, snapshot):
    experiment_dir = simulated()
    for run in runs:
        fail(experiment_dir / run, after_steps=5)
    comparison = judged(experiment_dir)
    for run, cost in zip(runs, costs, strict=True):
        invalid(comparison, cost, runs=[run], failure=f"exit code 1: {OUT_OF_MEMORY}")
        snapshot(sentence(reason_of(comparison, cost)))
    assert codes_of(comparison) == costs


def test_a_value_that_changed_on_the_disk_is_damage(simulated, judged):
    path = simulated() / "baseline/seed-0/metrics.jsonl"
    rows = read_json_lines(path)
    path.unlink()
    writer = LineWriter(path)
    for row in rows:
        writer.write(row)
    writer.close()
    assert Code.RUN_UNREADABLE not in codes_of(judged(path.parents[2]))
    content = bytearray(path.read_bytes())
    content[content.index(b'"train/reward": 0.') + len(b'"train/reward": 0.')] ^= 1
    path.write_bytes(content)
    comparison = judged(path.parents[2])
    invalid(comparison, Code.RUN_UNREADABLE, run="baseline/seed-0")
    assert "line 1: " in reason_of(comparison, Code.RUN_UNREADABLE)["problem"]


def test_a_torn_last_line_of_a_finished_run_is_damage_and_a_missing_one_shortens_the_grid(simulated, judged):
    path = simulated() / "baseline/seed-0/metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    comparison = judged(path.parents[2])
    invalid(comparison, Code.RUN_UNREADABLE, run="baseline/seed-0")
    assert "line 40: " in reason_of(comparison, Code.RUN_UNREADABLE)["problem"]
    path.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
    comparison = judged(path.parents[2])
    invalid(comparison, Code.STEPS_MISSING, runs=["baseline/seed-0"], metric="train/reward", run_ends=39)
    assert comparison.arms[0].coverage == Coverage(shared_steps=39, all_steps=40)


@pytest.mark.parametrize("change", [{"devices": ["NVIDIA H100"]}, {"python": "3.12.1"}], ids=str)
def test_another_machine(simulated, judged, change, snapshot):
    experiment_dir = simulated()
    edit(experiment_dir / "treatment/seed-2/environment.json", lambda content: content.update(change))
    comparison = judged(experiment_dir)
    (key,) = change
    invalid(comparison, Code.ENVIRONMENT_DIFFERS, key=key, baseline="baseline/seed-2", run="treatment/seed-2")
    snapshot(sentence(reason_of(comparison, Code.ENVIRONMENT_DIFFERS)))
    assert comparison.content.claims[0].result == "not tested"  # no claim on what is not comparable


def test_a_package_that_was_only_installed(simulated, judged):
    """For other work, between two launches: what the trainer does not import changes nothing."""
    experiment_dir = simulated()
    path = experiment_dir / "treatment/seed-2/environment.json"
    edit(path, lambda content: content["versions"].update({"vllm": "0.26.0", "liger-kernel": "0.8.5"}))
    assert judged(experiment_dir).verdict == "MATCH"
    with_vllm = {"policy.logprobs.impl": "chunked", "rollout.engine": "vllm"}
    experiment_dir = simulated(arms={"baseline": {}, "treatment": with_vllm})
    path = experiment_dir / "treatment/seed-2/environment.json"
    edit(path, lambda content: content["versions"].update(vllm="0.26.0"))
    invalid(judged(experiment_dir), Code.ENVIRONMENT_DIFFERS, values={"vllm": [None, "0.26.0"]})
    edit(
        experiment_dir / "treatment/seed-2/config.json", lambda one: one["config"]["trainer"].update(type="x")
    )
    edit(path, lambda content: content["versions"].update(vllm=None, **{"liger-kernel": "0.8.5"}))
    invalid(judged(experiment_dir), Code.ENVIRONMENT_DIFFERS, values={"liger-kernel": [None, "0.8.5"]})


def test_another_model_has_other_initial_weights(simulated, judged):
    """As has another task, or another warm start; an older version did not say."""
    for arm, recorded in (({"model.preset": "qwen2-wide-vocab"}, "f" * 16), ({}, None)):
        arms = {"baseline": {}, "treatment": {"policy.logprobs.impl": "chunked", **arm}}
        experiment_dir = simulated(arms=arms)
        for path in experiment_dir.glob("treatment/*/environment.json"):
            edit(path, lambda content, hash=recorded: content.update(initial_weights_hash=hash))
        comparison = judged(experiment_dir)
        assert comparison.verdict == "MATCH"
        unsaid = Code.RUNS_DO_NOT_SAY(missing=["initial weights"])
        assert (unsaid in comparison.content.not_tested) == (recorded is None)


def test_a_metric_missing_at_one_step(simulated, judged):
    experiment_dir = simulated()
    edit_rows(
        experiment_dir / "treatment/seed-2",
        lambda row: row.pop("train/token_mult_prob_error") if row["step"] == 9 else None,
    )
    missing = {"metric": "train/token_mult_prob_error", "role": "guard", "step": 9}
    invalid(judged(experiment_dir), Code.METRIC_MISSING, **missing)


def test_nothing_to_check_at_step_one(simulated, judged):
    experiment_dir = simulated(compare={"claims": [{"metric": "train/clip_fraction", "margin": 1.0}]})
    for arm in ("baseline", "treatment"):
        for directory in (experiment_dir / arm).iterdir():
            edit_rows(directory, _only_clip_fraction)
    invalid(judged(experiment_dir), Code.FIRST_STEP_MISSING)


def _only_clip_fraction(row):
    for key in [key for key in row if "/" in key]:
        del row[key]
    row["train/clip_fraction"] = 0.01 * row["step"]


# --- several treatments ---


def test_worst_is_ordered_as_the_exit_codes():
    assert worst_verdict(["MATCH", "INCONCLUSIVE"]) == "INCONCLUSIVE"
    assert worst_verdict(["MISMATCH", "INCONCLUSIVE", "MATCH"]) == "MISMATCH"
    assert worst_verdict(["MISMATCH", "INVALID"]) == "INVALID"
    assert worst_verdict(["PASS", "INCONCLUSIVE", "FAIL"]) == "FAIL"
    codes = {"MATCH": 0, "PASS": 0, "MISMATCH": 3, "FAIL": 3, "INCONCLUSIVE": 4, "INVALID": 5}
    assert codes | {"DESCRIPTION": 0} == EXIT_CODES


# --- claims made by hand ---


def test_in_another_order_they_are_the_same_claims(simulated, judged):
    entropy = Claim(metric="train/entropy", margin=0.5, sigma=0.1)
    declared = [one.model_dump(mode="json") for one in (REWARD, entropy)]
    experiment_dir = simulated(compare={"claims": declared})
    as_launched = judged(experiment_dir)
    again = [entropy.model_copy(update={"sigma": None}), REWARD]
    found = judged(experiment_dir, claims=again)
    assert not found.content.post_hoc and found.as_json() == as_launched.as_json()
    assert found.next_steps == as_launched.next_steps
    with pytest.raises(ComparisonError, match="got 'entropy' twice"):
        judged(experiment_dir, claims=[entropy, entropy.model_copy(update={"metric": "entropy"})])


def test_a_window_between_recorded_steps_is_refused(simulated, judged):
    experiment_dir = simulated()
    for arm in ("baseline", "treatment"):
        for directory in (experiment_dir / arm).iterdir():
            edit_rows(
                directory,
                lambda row: (
                    row.update({"validation/accuracy": row["step"] / 50}) if row["step"] % 10 == 0 else None
                ),
            )
    sparse = Claim(metric="validation/accuracy", margin=0.1, window="steps 11-19")
    with refused("window: got 'steps 11-19', which selects none of its 4 recorded steps (10-40)"):
        judged(experiment_dir, claims=[sparse])
    assert judged(experiment_dir, claims=[sparse.model_copy(update={"window": "all"})]).verdict == "MATCH"


def test_a_value_outside_the_transform_is_no_claim_s_outcome(simulated, judged, snapshot):
    experiment_dir = simulated()
    edit_rows(
        experiment_dir / "treatment/seed-0",
        lambda row: row.update({"train/grad_norm": 0.0}) if row["step"] == 38 else None,
    )
    claim = Claim(metric="train/grad_norm", margin=0.1)
    comparison = judged(experiment_dir, claims=[claim], formats=("json", "markdown", "html", "png"))
    assert comparison.verdict == "INCONCLUSIVE"
    assert reason_of(comparison, Code.OUTSIDE_DOMAIN) == Code.OUTSIDE_DOMAIN(transform="log", value=0.0)
    snapshot(sentence(reason_of(comparison, Code.CLAIM_NOT_TESTED)))


@pytest.mark.parametrize("unpaired", [False, True])
def test_keys_that_change_no_number_are_no_difference(simulated, judged, unpaired):
    """Limits may change on --resume; a mirror or kept completions change no number either."""
    experiment_dir = simulated()
    for key, value in (
        ("limits", {"stalled_s": 20.0, "retries": 0}),
        ("wandb", {"project": "other"}),
        ("keep_samples", None),
    ):
        edit(
            experiment_dir / "treatment/seed-2/config.json",
            lambda content, key=key, value=value: content["config"].update({key: value}),
        )
    assert judged(experiment_dir, unpaired=unpaired).verdict != "INVALID"
    edit(experiment_dir / "treatment/seed-2/config.json", lambda content: content["config"].update(steps=41))
    assert judged(experiment_dir, unpaired=unpaired).verdict == "INVALID"
