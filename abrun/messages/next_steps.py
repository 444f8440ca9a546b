"""Sentences of what to do after a verdict; the command stands behind each of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from abrun.messages.message import Message
from abrun.messages.numbers import AT_OBSERVED, agreement_text, units
from abrun.reasons import Code


def _margin_suggested(margin_is: str, seen: Mapping[str, Any] | None, passes: bool) -> str:
    """Where a suggested margin comes from, and which difference is seen: a wide margin would let it pass."""
    offered = f"here {margin_is}"
    if seen is None:
        return offered
    offered += f"; but the difference seen is {seen['difference']:+.3g}, {agreement_text(seen)}"
    if passes:
        return f"{offered}: these runs already pass that margin, so choose yours by what loss you accept"
    return offered


def _declare_rounding(untested_metrics: Sequence[str]) -> str:
    """Declare a tolerance of the first step, and test it on fresh seeds."""
    text = "If it was rounding, declare how far that may take it, and test on fresh seeds"
    if not untested_metrics:
        return text
    untested = ", ".join(untested_metrics)
    return f"{text}; untested stays, as rounding may well take fresh seeds further: {untested}"


def _pairs_decide(count: int, paired: bool, if_differing: int | None) -> str:
    """So many fresh pairs, or runs of each arm, decide."""
    text = (
        f"{count} {units(paired=paired)} decide it with 80 % power {AT_OBSERVED}, if the arms are truly equal"
    )
    return f"{text} ({if_differing}, if they differ as they do here)" if if_differing else text


MESSAGES: dict[Code, Message] = {
    # Where fresh runs come from
    Code.FRESH_REFERENCE: "{step}: of those the reference has none; train its arm on seeds {first}-{last} "
    "and freeze it",
    Code.FRESH_FOLDERS: "{step}: train {num_runs} more runs of each arm into folders of their own, and "
    "compare those",
    Code.FRESH_SEEDS: "{step}: train both arms on seeds {first}-{last} beside these runs, then compare "
    "those alone",
    # How many decide
    Code.MARGIN_EXCEEDED: "No number of {paired:if pairs|runs of each arm} shows this margin if the "
    "observed difference is the true one",
    Code.HALVE_INTERVAL: "Four times the {paired:if pairs|runs of each arm} halve the interval that a "
    "limit is tested by",
    Code.MORE_THAN_1000_PAIRS: "This margin takes more than 1000 {paired:if pairs|runs of each arm}",
    Code.PAIRS_DECIDE: _pairs_decide,
    Code.MARGIN_SUGGESTED: _margin_suggested,
    # After a match
    Code.TEST_ON_FRESH_SEEDS: "{launched:if Declare the claim, and test it|Test the claim} on fresh seeds",
    Code.INJECT_FAULTS: "Measure what this comparison would have caught: faults injected in the baseline",
    Code.LAUNCH_NEXT_CHANGE: "Launch it again after the next change",
    Code.COMPARE_NEXT_CHANGE: "Compare the runs of the next change with it, too",
    Code.FREEZE_RUNS: "Hold later versions to these runs",
    # After a mismatch
    Code.SKIP_STEP_ONE: "If the arms saw other prompts, step one says nothing: leave it out",
    Code.READ_ENDINGS: "See how the failed runs ended",
    Code.FIND_MISMATCH: "Find what makes trainer and rollout engine differ",
    Code.READ_COMPLETIONS: "Read what both arms said to each prompt",
    Code.CONFIRM_ON_FRESH_SEEDS: "See whether fresh seeds say so too",
    # Where it stays open
    Code.TRAIN_LONGER: "These runs could {nothing_shown:if show nothing: {nothing_shown}|not have shown it "
    "(see the reasons)}; if they were too short, train longer",
    Code.DECLARE_METRIC: "Declare what has to agree, and how closely",
    Code.DECLARE_MARGIN: "Declare a margin that you accept ({margin}), and test it on fresh "
    "seeds{claim_needs:if : {claim_needs}}",
    Code.PLAN_SEEDS: "Or see first how many seeds it takes",
    Code.TRAIN_THREE_SEEDS: "Three seeds or more can decide",
    Code.FINISH_INTERIM_PAIRS: "A declared interim analysis is still to come: let its pairs finish",
    Code.RUN_IN_FLOAT32: "One step in float32 tells rounding, which agrees there to 1e-4, from a fault",
    Code.DECLARE_ROUNDING: _declare_rounding,
    Code.PLAN_WIDER_MARGIN: "{needed}: see what a wider one takes",
    Code.TRAIN_MORE_PAIRS: "{needed}",
    Code.CLAIM_WHAT_SHOWS: "{other_margin:if Claim what these runs can show, within a margin that you accept "
    "({other_margin})|Leave out what these runs cannot show}{launched:if , on fresh seeds}",
    Code.TELL_FROM_CHANCE: "Fresh seeds say whether it was chance",
    # Where runs of others stay open
    Code.REPEAT_IN_FLOAT32: "Train one step in float32, where rounding is no reason; if it was one, leave "
    "step one out",
    Code.TRAIN_FOR_INTERIM: "A declared interim analysis is still to come: train both arms on "
    "{seeds_to_come:plural seed} "
    "{seeds_to_come:join ,}",
    Code.CLAIM_ALIKE: "Claim that they are alike within a margin that you accept ({margin})",
    Code.LOG_OR_TRAIN_LONGER: "On no metric could these runs show a difference: log what they learn, or "
    "train longer",
    Code.TRAIN_TWO_EACH: "Train two runs or more beside each{paired:if , with the same seeds in both arms}, "
    "then compare again",
    Code.NAME_METRICS: "Say which metrics are the same",
    Code.FRESH_SEEDS_DECIDE: "Fresh seeds decide",
    Code.CONFIRM_DIFFERENCE: "{needed}: see whether fresh seeds show a mismatch",
    Code.CLAIM_AGAINST_REFERENCE: "The reference keeps no claim: say what has to agree, and how closely",
    Code.NARROW_INTERVAL: "More pairs narrow the interval",
    Code.OTHER_SEEDS_ALONE: "Train the other seeds of the reference ({seeds_left:list}), then "
    "compare those alone",
    Code.OTHER_SEED_TOO: "Train the other seeds of the reference too ({seeds_left:list}), then compare again",
    # Where no verdict can be given
    Code.CALL_VERSIONS_TREATMENT: "If the versions are what you compare, say that they are the treatment",
    Code.COMPARE_SHARED_SEEDS: "Compare the seeds that both arms have",
    Code.UNPAIR: "Compare them as independent runs, of other seeds",
    Code.NAME_STEP_COLUMN: "If another column counts the steps of all of them, name it",
    Code.MEND_REASONS: "Mend what the reasons name, then compare again",
    Code.READ_FIRST_LOG: "See how the first of them ended",
    Code.RESUME_RUNS: "Continue the runs that did not finish",
    Code.READ_BY_OTHER_NAME: "Read the same runs with the name that they log",
    Code.MEND_RECIPE: "Mend what the reasons name (--set, or the recipe): look at the plan before anything "
    "runs",
}
