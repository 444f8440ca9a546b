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


def _one_run_as_two_seeds(run: str, other: str, metrics: Sequence[str], correlation: float | None) -> str:
    """Two seeds hold one run: whole, in these metrics, or but for noise."""
    if correlation is not None:
        moves = f"{', '.join(metrics)} of {run} moves as that of {other} does, from step to step"
        return f"{moves} (correlation above {correlation:g}): {_ONE_RUN}"
    if metrics:
        held = f"holds the {', '.join(metrics)} of {other} at every step, but for rounding"
        return f"{run} {held}: {_ONE_RUN}"
    return f"{run} holds the numbers of {other} at every step: {_ONE_RUN}"


def _climb_not_shown(margin: float, step: int, climb: float, bound: float) -> str:
    """The baseline is not shown to learn enough."""
    return (
        f"the baseline is not shown to climb by more than the margin of {margin:.3g} up to step {step} "
        f"(it climbs by {climb:.3g}, lower 95 % bound {bound:.3g}), so that arms that learn nothing would "
        f"agree as well: train {'more seeds' if climb > margin else 'longer'}, claim a smaller margin, or "
        "declare `climbs: false` in a recipe where it need not climb"
    )


def _outside_domain(transform: str, value: float) -> str:
    """A value that the transform cannot take."""
    allowed = "at least 1" if transform == "log_excess" else "above 0"
    return f"transform {transform!r} got the value {value:.6g}; it takes values {allowed}"


def _skewed(sample: str, skewness: float | None, num_far: int | None, p: float) -> str:
    """A sample is skewed beyond what normal ones are by chance."""
    how = f"skewness {skewness:+.2g}" if skewness is not None else _FAR_OFF[num_far or 1]
    return (
        f"{_SAMPLES[sample]} skewed ({how}, p = {p:.2g} of normal ones), which the t-test assumes they are "
        "not: it may err more often than it says"
    )


def _differs_earlier(blocks: Sequence[str], largest: str, difference: float) -> str:
    """Eighths of training differ by more than the margin."""
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


def _same_summaries(paired: bool) -> str:
    """Both arms have the same summaries throughout."""
    pairs = "pair" if paired else "run"
    return f"the bound is 0 because the summaries of both arms are the same number in every {pairs}"


def _values_unfit(needed: str) -> str:
    """Values in the window are not recorded, or not of the kind that the limit needs."""
    return f"its values in the window are not all {_NEEDED_VALUES[needed]}, or not recorded"


MESSAGES: dict[Code, Message] = {
    Code.WEIGHTS_DIFFER: "those of seed {seed} differ",
    Code.VALUES_DIFFER: "first at step {step} of seed {seed}: {baseline:repr} and {treatment:repr}",
    Code.WEIGHTS_UNKNOWN: "the runs of seed {seed} do not say what weights they ended with",
    Code.STEPS_DIFFER: "it was not recorded at the same steps in both runs of seed {seed}",
    Code.PAIRS_LACKING: "{usable} of {planned} {paired:if planned pairs|runs} are usable, and "
    "{equivalence:if equivalence needs every one|every one is needed}",
    Code.NONE_FINISHED: "no {paired:if pair|run of an arm} has finished",
    Code.PAIRS_ALONE: "{exact:if bit-exactness|how far final weights are apart} is a matter of pairs of one "
    "seed",
    Code.VALUES_UNFIT: _values_unfit,
    Code.OUTSIDE_DOMAIN: _outside_domain,
    Code.CLAIM_OUTSIDE_DOMAIN: "{problem} (or declare another transform)",
    Code.YARDSTICK_NOT_POSITIVE: "the baseline's {unit} is not shown to be above 0, to take {margin} of",
    Code.BASELINE_WITHOUT_SPREAD: "the baseline has no spread over seeds to measure its sigma in: give an "
    "absolute margin",
    Code.FOLLOWS_FROM_CONFIG: "it follows from configuration and seed, whatever the arms learn",
    Code.NOTHING_LEARNED: "{metric} is 0{finite:if | or not a number} at every step of every {arm} run: "
    "nothing was learned",
    Code.ADVANTAGES_ZERO: "all advantages are 0 at every step of every {arm} run: no reward differed in a "
    "group",
    Code.NEVER_MOVED: "it is {value:.6g} at every step of every run of both arms",
    Code.CUT_SHORT: "{run} recorded its last step at {step} of {configured} configured ones: launch with "
    "--resume, or train anew",
    Code.ARMS_IDENTICAL: "both arms hold the same numbers, bit for bit, in every pair: either the treatment "
    "changes nothing or it was not applied; where bit-exactness is what is expected, claim `exact: true`",
    Code.DEAD_SEEDS: "{num} of {of} baseline seeds did not climb by more than the margin of {margin:.3g} up "
    "to step {step}: half of a baseline that learns nothing agrees with any treatment; train longer, or "
    "mend what stops them",
    Code.CLIMB_NOT_SHOWN: _climb_not_shown,
    Code.NOTHING_CLIMBED: "no climb of the baseline is shown up to step {step} ({metrics:list}: lower 95 % "
    "bound {bound:.3g}): train longer, or declare `climbs: false` in a recipe where nothing need be learned",
    Code.ONE_RUN_AS_TWO_SEEDS: _one_run_as_two_seeds,
    Code.SKEWED: _skewed,
    Code.SEEDS_NOT_CLIMBED: "{num} of {of} baseline seeds did not climb by more than the margin",
    Code.BOUND_OF_ZERO: _same_summaries,
    Code.MARGIN_WIDER_THAN_LEVEL: "the margin is wider than the baseline's level of {level:.3g}: an arm at "
    "0 would pass",
    Code.WIDE_STEPS: "the metric moves in steps that are wide for so few pairs, and the interval allows for "
    "one",
    Code.TOO_FEW_FOR_MISMATCH: "{paired:if two pairs|two runs of an arm} cannot show a mismatch: that takes "
    "{needed}{paired:if | of each}",
    Code.RUNNING_MEAN: "changes of {metric} from step to step correlate by {correlation:.2f} with the "
    "previous ones, as those of a running mean do, or of a curve almost without noise; if it is a running "
    "mean, which shows a change late, compare the raw log",
    Code.COLLAPSED: "the {arm}'s level in the window is {level:.3g}, its best {best:.3g} (steps "
    "{steps[0]}-{steps[1]})",
    Code.DIFFERS_EARLIER: _differs_earlier,
    Code.EMPTY_WINDOW: "{metric}: window: got {window:repr}, which selects none of the {num} steps "
    "{steps[0]}-{steps[1]} at which it was recorded; use a wider window, such as 'all'",
    Code.METRIC_OUTSIDE_DOMAIN: "{metric}: {problem}: declare `transform: identity` for this metric",
    Code.SIGMA_UNKNOWN: "{metric}: margin: got {margin:repr} over {window:repr}, of which the reference "
    "{reference:repr} knows no sigma; it holds: {known:list}",
    Code.NO_SPREAD: _no_spread,
}
