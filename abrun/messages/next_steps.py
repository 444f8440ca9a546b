"""Sentences that suggest what to do after a verdict. A command follows each of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import AT_OBSERVED, direction_text, sample_unit


def _margin_suggested(
    margin_is: str, seen: Mapping[str, Any] | None, passes: bool, arm: str, baseline_arm: str
) -> str:
    """Origin of a suggested margin, and the difference of these runs if one was detected."""
    origin = f"suggested here: {margin_is}"
    if seen is None:
        return origin
    difference = f"{seen['difference']:+.3g}, {direction_text(seen, arm, baseline_arm)}"
    if passes:
        return (
            f"{origin}, but these runs pass it although they differ by {difference}: choose the margin by "
            "the loss that you accept"
        )
    return f"{origin}; the runs differ by {difference}"


def _pairs_decide(
    count: int, paired: bool, if_differing: int | None, gains: Sequence[float], if_equal: bool
) -> str:
    """Number of fresh pairs, or runs of each arm, that decide; `gains`: those planned for by `better`."""
    gain_texts = sorted({f"{gain:.3g}" for gain in gains}, key=float)
    truths = ["the arms are truly equal"] * if_equal
    truths += [f"the true gain is {' or '.join(gain_texts)}"] * bool(gain_texts)
    text = f"{count} {sample_unit(paired=paired)} give 80 % power {AT_OBSERVED}, if {' or '.join(truths)}"
    return f"{text} ({if_differing}, if they differ as they do here)" if if_differing else text


MESSAGES: dict[Code, Message] = {
    # Sources of fresh runs
    Code.FRESH_REFERENCE: "{step}: the reference has none, so train its arm on seeds {first}-{last} and "
    "save it as a reference",
    Code.FRESH_FOLDERS: "{step}: train {num_runs} more runs of each arm into new folders, and compare only "
    "those",
    Code.FRESH_SEEDS: "{step}: train both arms on seeds {first}-{last} next to these runs, then compare only "
    "the new ones",
    # Number of pairs that decide
    Code.MARGIN_EXCEEDED: "No number of {paired:if pairs|runs of each arm} shows this margin if the observed "
    "difference is the true one",
    Code.HALVE_INTERVAL: "Four times as many {paired:if pairs|runs of each arm} halve the interval that a "
    "limit is tested with",
    Code.MORE_THAN_1000_PAIRS: "This margin takes more than 1000 {paired:if pairs|runs of each arm}",
    Code.PAIRS_DECIDE: _pairs_decide,
    Code.MARGIN_SUGGESTED: _margin_suggested,
    # After a match
    Code.TEST_ON_FRESH_SEEDS: "{launched:if Declare the claim, and test it|Test the claim} on fresh seeds",
    Code.INJECT_FAULTS: "Measure which bugs this comparison would catch, by injecting faults into the "
    "baseline",
    Code.LAUNCH_NEXT_CHANGE: "Launch it again after the next change",
    Code.COMPARE_NEXT_CHANGE: "Compare the runs of the next change with this reference, too",
    Code.FREEZE_RUNS: "Compare later versions with these runs",
    # After a mismatch
    Code.SKIP_STEP_ONE: "If the arms saw different prompts, step one is meaningless: leave it out",
    Code.READ_ENDINGS: "See how the failed runs ended",
    Code.FIND_MISMATCH: "Find out why trainer and rollout engine differ",
    Code.FIND_TENSOR: "Find the first tensor in which the arms differ",
    Code.READ_COMPLETIONS: "Compare completions side by side",
    Code.CONFIRM_ON_FRESH_SEEDS: "Confirm it on fresh seeds",
    # After an inconclusive verdict
    Code.TRAIN_LONGER: "These runs could not show a difference{nothing_shown:if  ({nothing_shown})| (see the "
    "reasons)}; if they were too short, train longer",
    Code.DECLARE_METRIC: "Declare which metric has to agree, and how closely",
    Code.DECLARE_MARGIN: "Declare a margin that you accept ({margin}), and test it on fresh "
    "seeds{claim_needs:if : {claim_needs}}",
    Code.PLAN_SEEDS: "Or first plan the number of seeds",
    Code.TRAIN_THREE_SEEDS: "Three or more seeds can decide",
    Code.FINISH_INTERIM_PAIRS: "An interim analysis is still to come: let its pairs finish",
    Code.RUN_IN_FLOAT32: "Train one step in float32, where rounding errors stay below 1e-4, to tell rounding "
    "from a fault",
    Code.DECLARE_ROUNDING: "If it was rounding, declare a tolerance for it and test on fresh "
    "seeds{untested_metrics:if  (left untested, because fresh seeds may round differently: "
    "{untested_metrics:list})}",
    Code.PLAN_WIDER_MARGIN: "{needed}; plan with a wider margin",
    Code.TRAIN_MORE_PAIRS: "{needed}",
    Code.CLAIM_WHAT_SHOWS: "{other_margin:if Claim what these runs can show, within a margin that you accept "
    "({other_margin})|Leave out the claims that these runs cannot show}{launched:if , and use fresh seeds}",
    Code.TELL_FROM_CHANCE: "Train fresh seeds to see whether it was chance",
    # After an inconclusive verdict on foreign runs
    Code.REPEAT_IN_FLOAT32: "Train one step in float32, where rounding cannot explain it; if rounding was "
    "the cause, leave step one out",
    Code.TRAIN_FOR_INTERIM: "An interim analysis is still to come: train both arms on {seeds_to_come:plural "
    "seed} {seeds_to_come:join ,}",
    Code.CLAIM_ALIKE: "Claim that they agree within a margin that you accept ({margin})",
    Code.LOG_OR_TRAIN_LONGER: "No metric of these runs could show a difference: log what they learn, or "
    "train longer",
    Code.TRAIN_TWO_EACH: "Train at least two more runs of each arm{paired:if , with the same seeds in both}, "
    "then compare again",
    Code.TRAIN_MORE_OF_ARM: "Train at least two more runs of this arm with other seeds, then measure again",
    Code.TRAIN_MORE_OF_NEW: "For a verdict, train at least two more runs of the arm that has one",
    Code.COMPARE_CHANGE: "Compare runs of a change with these",
    Code.NAME_METRICS: "Map metrics that mean the same",
    Code.FRESH_SEEDS_DECIDE: "Decide it with fresh seeds",
    Code.CONFIRM_DIFFERENCE: "{needed}; see whether fresh seeds show a mismatch",
    Code.CLAIM_AGAINST_REFERENCE: "The reference has no claim: say which metric has to agree, and how "
    "closely",
    Code.NARROW_INTERVAL: "Train more pairs to narrow the interval",
    Code.OTHER_SEEDS_ALONE: "Train the remaining seeds of the reference ({seeds_left:list}), then compare "
    "only those",
    Code.OTHER_SEED_TOO: "Train the remaining seeds of the reference, too ({seeds_left:list}), then compare "
    "again",
    # After an invalid comparison
    Code.CALL_VERSIONS_TREATMENT: "If you compare versions, declare them as the treatment",
    Code.COMPARE_SHARED_SEEDS: "Compare only the seeds that both arms have",
    Code.UNPAIR: "Compare them as independent runs",
    Code.NAME_STEP_COLUMN: "If another column has the steps of all runs, name it",
    Code.MEND_REASONS: "Fix what makes the comparison invalid and compare again",
    Code.READ_FIRST_LOG: "See how the first of them ended",
    Code.RESUME_RUNS: "Continue the runs that did not finish",
    Code.READ_BY_OTHER_NAME: "Compare the same runs under the metric name that they log",
    Code.MEND_RECIPE: "Fix what makes the comparison invalid (in the recipe, or with --set), then check the "
    "plan with a dry run",
}
