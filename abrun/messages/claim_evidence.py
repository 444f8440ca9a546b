"""Sentences beside claims: why one is not tested or cannot be read, and what to know of one that is."""

from collections.abc import Mapping, Sequence

from abrun.messages.message import Message
from abrun.reasons import Code

_FAR_OFF = {1: "one is far from all others", 2: "two are far from all others, on one side"}
_SAMPLES = {
    "baseline": "the baseline's runs are",
    "treatment": "the treatment's runs are",
    "differences": "the differences are",
    "values": "the values are",
}
_ONE_RUN = "one run, or a seed that changes nothing"
_NEEDED_VALUES = {
    "number": "numbers",
    "positive": "numbers above 0, as a ratio needs",
    "excess": "at least 1, as a ratio of excesses over 1 needs",
}


def _pairs_lacking(usable: int, planned: int, paired: bool, equivalence: bool) -> str:
    counted = f"{planned} planned pairs" if paired else f"{planned} runs"
    every = "equivalence needs every one" if equivalence else "every one is needed"
    return f"{usable} of {counted} are usable, and {every}"


def _one_run_as_two_seeds(run: str, other: str, metrics: Sequence[str], correlation: float | None) -> str:
    if correlation is not None:
        moves = f"{', '.join(metrics)} of {run} moves as that of {other} does, from step to step"
        return f"{moves} (correlation above {correlation:g}): {_ONE_RUN}"
    if metrics:
        held = f"holds the {', '.join(metrics)} of {other} at every step, but for rounding"
        return f"{run} {held}: {_ONE_RUN}"
    return f"{run} holds the numbers of {other} at every step: {_ONE_RUN}"


def _nothing_learned(metric: str, arm: str, finite: bool) -> str:
    what = "0" if finite else "0 or not a number"
    return f"{metric} is {what} at every step of every {arm} run: nothing was learned"


def _climb_not_shown(margin: float, step: int, climb: float, bound: float) -> str:
    return (
        f"the baseline is not shown to climb by more than the margin of {margin:.3g} up to step {step} "
        f"(it climbs by {climb:.3g}, lower 95 % bound {bound:.3g}), so that arms that learn nothing would "
        f"agree as well: train {'more seeds' if climb > margin else 'longer'}, claim a smaller margin, or "
        "declare `climbs: false` in a recipe where it need not climb"
    )


def _outside_domain(transform: str, value: float) -> str:
    allowed = "at least 1" if transform == "log_excess" else "above 0"
    return f"transform {transform!r} got the value {value:.6g}; it takes values {allowed}"


def _skewed(sample: str, skewness: float | None, num_far: int | None, p: float) -> str:
    how = f"skewness {skewness:+.2g}" if skewness is not None else _FAR_OFF[num_far or 1]
    return (
        f"{_SAMPLES[sample]} skewed ({how}, p = {p:.2g} of normal ones), which the t-test assumes they are "
        "not: it may err more often than it says"
    )


def _too_few_for_mismatch(paired: bool, needed: int) -> str:
    sample = "two pairs" if paired else "two runs of an arm"
    return f"{sample} cannot show a mismatch: that takes {needed}{'' if paired else ' of each'}"


def _differs_earlier(blocks: Sequence[str], largest: str, difference: float) -> str:
    found = f"most by {difference:+.3g} in {largest}" if len(blocks) > 1 else f"by {difference:+.3g}"
    return f"the arms differ by more than the margin in steps {', '.join(blocks)} ({found})"


def _no_spread(metric: str, margin: str, whose: Mapping[str, str]) -> str:
    """`whose`: a `reference`, or an `arm` of an `experiment`."""
    if "reference" in whose:
        runs = f"the reference {whose['reference']!r}"
    else:
        runs = f"arm {whose['arm']} of {whose['experiment']}"
    return (
        f"{metric}: margin: got {margin!r}, and {runs} has no spread over seeds to measure it in; give an "
        "absolute margin"
    )


def _of_pairs_alone(exact: bool) -> str:
    what = "bit-exactness" if exact else "how far final weights are apart"
    return f"{what} is a matter of pairs of one seed"


def _none_finished(paired: bool) -> str:
    return "no pair has finished" if paired else "no run of an arm has finished"


def _same_summaries(paired: bool) -> str:
    pairs = "pair" if paired else "run"
    return f"the bound is 0 because the summaries of both arms are the same number in every {pairs}"


MESSAGES = {
    Code.WEIGHTS_DIFFER: Message("those of seed {seed} differ"),
    Code.VALUES_DIFFER: Message("first at step {step} of seed {seed}: {baseline:repr} and {treatment:repr}"),
    Code.WEIGHTS_UNKNOWN: Message("the runs of seed {seed} do not say what weights they ended with"),
    Code.STEPS_DIFFER: Message("it was not recorded at the same steps in both runs of seed {seed}"),
    Code.PAIRS_LACKING: Message(_pairs_lacking, meaning="not every planned pair, or run, is usable"),
    Code.NONE_FINISHED: Message(_none_finished, meaning="no pair, or no run of an arm, has finished"),
    Code.PAIRS_ALONE: Message(
        _of_pairs_alone, meaning="the claim is one of pairs, and the arms are not paired"
    ),
    Code.VALUES_UNFIT: Message(
        lambda needed: f"its values in the window are not all {_NEEDED_VALUES[needed]}, or not recorded",
        meaning="values in the window are not recorded, or not of the kind that the limit needs",
    ),
    Code.OUTSIDE_DOMAIN: Message(_outside_domain, meaning="a value that the transform cannot take"),
    Code.CLAIM_OUTSIDE_DOMAIN: Message("{problem} (or declare another transform)"),
    Code.YARDSTICK_NOT_POSITIVE: Message(
        "the baseline's {unit} is not shown to be above 0, to take {margin} of"
    ),
    Code.BASELINE_WITHOUT_SPREAD: Message(
        "the baseline has no spread over seeds to measure its sigma in: give an absolute margin"
    ),
    Code.FOLLOWS_FROM_CONFIG: Message("it follows from configuration and seed, whatever the arms learn"),
    Code.NOTHING_LEARNED: Message(_nothing_learned, meaning="what drives learning is 0 throughout an arm"),
    Code.ADVANTAGES_ZERO: Message(
        "all advantages are 0 at every step of every {arm} run: no reward differed in a group"
    ),
    Code.NEVER_MOVED: Message("it is {value:.6g} at every step of every run of both arms"),
    Code.CUT_SHORT: Message(
        "{run} recorded its last step at {step} of {configured} configured ones: launch with --resume, or "
        "train anew"
    ),
    Code.ARMS_IDENTICAL: Message(
        "both arms hold the same numbers, bit for bit, in every pair: either the treatment changes "
        "nothing or it was not applied",
        remedy="where bit-exactness is what is expected, claim `exact: true`",
    ),
    Code.DEAD_SEEDS: Message(
        "{num} of {of} baseline seeds did not climb by more than the margin of {margin:.3g} up to step "
        "{step}: half of a baseline that learns nothing agrees with any treatment",
        remedy="train longer, or mend what stops them",
    ),
    Code.CLIMB_NOT_SHOWN: Message(_climb_not_shown, meaning="the baseline is not shown to learn enough"),
    Code.NOTHING_CLIMBED: Message(
        "no climb of the baseline is shown up to step {step} ({metrics:list}: lower 95 % bound {bound:.3g}): "
        "train longer, or declare `climbs: false` in a recipe where nothing need be learned"
    ),
    Code.ONE_RUN_AS_TWO_SEEDS: Message(
        _one_run_as_two_seeds, meaning="two seeds hold one run: whole, in these metrics, or but for noise"
    ),
    Code.SKEWED: Message(_skewed, meaning="a sample is skewed beyond what normal ones are by chance"),
    Code.SEEDS_NOT_CLIMBED: Message("{num} of {of} baseline seeds did not climb by more than the margin"),
    Code.BOUND_OF_ZERO: Message(_same_summaries, meaning="both arms have the same summaries throughout"),
    Code.MARGIN_WIDER_THAN_LEVEL: Message(
        "the margin is wider than the baseline's level of {level:.3g}: an arm at 0 would pass"
    ),
    Code.WIDE_STEPS: Message(
        "the metric moves in steps that are wide for so few pairs, and the interval allows for one"
    ),
    Code.TOO_FEW_FOR_MISMATCH: Message(_too_few_for_mismatch, meaning="two pairs cannot show a mismatch"),
    Code.RUNNING_MEAN: Message(
        "changes of {metric} from step to step correlate by {correlation:.2f} with the previous ones, as "
        "those of a running mean do, or of a curve almost without noise",
        remedy="if it is a running mean, which shows a change late, compare the raw log",
    ),
    Code.COLLAPSED: Message(
        "the {arm}'s level in the window is {level:.3g}, its best {best:.3g} (steps {steps[0]}-{steps[1]})"
    ),
    Code.DIFFERS_EARLIER: Message(
        _differs_earlier, meaning="eighths of training differ by more than the margin"
    ),
    Code.EMPTY_WINDOW: Message(
        "{metric}: window: got {window:repr}, which selects none of the {num} steps {steps[0]}-{steps[1]} at "
        "which it was recorded",
        remedy="use a wider window, such as 'all'",
    ),
    Code.METRIC_OUTSIDE_DOMAIN: Message("{metric}: {problem}: declare `transform: identity` for this metric"),
    Code.SIGMA_UNKNOWN: Message(
        "{metric}: margin: got {margin:repr} over {window:repr}, of which the reference {reference:repr} "
        "knows no sigma",
        remedy="it holds: {known:list}",
    ),
    Code.NO_SPREAD: Message(_no_spread, meaning="no spread over seeds to measure a margin in sigmas in"),
}
