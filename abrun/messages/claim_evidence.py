"""Sentences on claims that cannot be tested or measured, and cautions on those that were tested."""

from collections.abc import Sequence

from abrun.messages.codes import Code
from abrun.messages.message import Message

_OUTLIERS = {1: "one outlier", 2: "two outliers on the same side"}
_SAMPLES = {
    "baseline": "the baseline's runs are",
    "treatment": "the treatment's runs are",
    "differences": "the differences are",
    "values": "the values are",
}
_ONE_RUN = "the same run twice, or a seed without effect"
_NOISE_SOURCES = "{num:if {num:count earlier experiment}}{both:if  and }{reruns:if {reruns:count A/A rerun}}"
_NEEDED_VALUES = {
    "number": "numbers",
    "positive": "above 0, as a ratio needs",
    "excess": "at least 1, as a ratio of excesses over 1 needs",
}


def _one_run_as_two_seeds(run: str, other: str, metrics: Sequence[str], correlation: float | None) -> str:
    """Two seeds are copies of one run: in all metrics, in the listed ones, or up to noise."""
    names = ", ".join(metrics)
    if correlation is not None:
        verb = "move" if len(metrics) > 1 else "moves"
        return (
            f"{names} of {run} {verb} from step to step as in {other} (correlation above {correlation:g}): "
            f"{_ONE_RUN}"
        )
    if metrics:
        return f"{run} repeats {names} of {other} at every step, except for rounding: {_ONE_RUN}"
    return f"{run} repeats the numbers of {other} at every step: {_ONE_RUN}"


def _climb_not_shown(margin: float, step: int, climb: float, bound: float) -> str:
    return (
        f"the baseline is not shown to climb by more than the margin of {margin:.3g} up to step {step}: it "
        f"climbs by {climb:.3g} (95 % lower bound {bound:.3g}), so arms that learn nothing would also agree; "
        f"train {'more seeds' if climb > margin else 'longer'}, claim a smaller margin, or declare "
        "`climbs: false` if it need not climb"
    )


def _skewed(sample: str, skewness: float | None, num_far: int | None, p: float) -> str:
    sign = f"skewness {skewness:+.2g}" if skewness is not None else _OUTLIERS[num_far or 1]
    return (
        f"{_SAMPLES[sample]} skewed ({sign}; p = {p:.2g} if they were normal), so the t-test may err more "
        "often than stated"
    )


def _exact_outcomes(needed: int | None, num: int, paired: bool) -> str:
    text = "all values are 0 or 1, so the test is exact"
    if needed is None or num >= needed:
        return text
    return f"{text}; the claim can hold from {needed} {'pairs' if paired else 'runs'} on"


def _differs_earlier(blocks: Sequence[str], largest: str, difference: float) -> str:
    size = f"most by {difference:+.3g} in {largest}" if len(blocks) > 1 else f"by {difference:+.3g}"
    return f"the arms differ by more than the margin in steps {', '.join(blocks)} ({size})"


MESSAGES: dict[Code, Message] = {
    Code.WEIGHTS_DIFFER: "the weights of seed {seed} differ",
    Code.VALUES_DIFFER: "first at step {step} of seed {seed}: {baseline:repr} and {treatment:repr}",
    Code.WEIGHTS_UNKNOWN: "the runs of seed {seed} do not record their final weights",
    Code.STEPS_DIFFER: "the runs of seed {seed} recorded it at different steps",
    Code.PAIRS_LACKING: "{usable} of {planned} {paired:if planned pairs|runs} are usable, but "
    "{equivalence:if equivalence needs all of them|all are needed}",
    Code.NONE_FINISHED: "no {paired:if pair|run of an arm} has finished",
    Code.PAIRS_ALONE: "{exact:if bit-exactness|the distance of final weights} can only be tested on pairs of "
    "one seed",
    Code.VALUES_UNFIT: lambda needed: (
        f"its values in the window are missing, or not all {_NEEDED_VALUES[needed]}"
    ),
    Code.OUTSIDE_DOMAIN: lambda transform, value: (
        f"transform {transform!r} got the value {value:.6g}, but takes only values "
        f"{'of at least 1' if transform == 'log_excess' else 'above 0'}"
    ),
    Code.CLAIM_OUTSIDE_DOMAIN: "{problem}; declare another transform",
    Code.YARDSTICK_NOT_POSITIVE: "the margin is {margin}, but the baseline's {unit} is not shown to be above "
    "0",
    Code.BASELINE_WITHOUT_SPREAD: "the baseline has no spread over seeds, so its sigma is unknown; give an "
    "absolute margin",
    Code.FOLLOWS_FROM_CONFIG: "it follows from configuration and seed, whatever the arms learn",
    Code.NOTHING_LEARNED: "{metric} is 0{finite:if | or not a number} at every step of every {arm} run: "
    "nothing was learned",
    Code.ADVANTAGES_ZERO: "all advantages are 0 at every step of every {arm} run: within each group, all "
    "rewards are equal",
    Code.NEVER_MOVED: "it is {value:.6g} at every step of every run of both arms",
    Code.FIXED_BY_RECORDING: "{run} trained on recorded rollouts, which hold this metric",
    Code.ONLY_SOME_SAMPLE: "{run} trained on recorded rollouts, so its times lack the sampling of others",
    Code.TIMES_OF_SHARED_GPUS: "up to {runs_per_gpu} runs shared the GPUs of {run}, so its times depend on "
    "other runs; launch with cluster.runs_per_gpu: 1",
    Code.CUT_SHORT: "{run} ends at step {step} of {configured}; launch with --resume, or train it again",
    Code.ARMS_IDENTICAL: "both arms are bit-identical in every pair{declared:if : the treatment changes "
    "nothing, or was not applied; if bit-exactness is expected, claim `exact: true`}",
    Code.DEAD_SEEDS: "{num} of {of} baseline seeds did not climb by more than the margin of {margin:.3g} up "
    "to step {step}, so they would agree with any treatment; train longer, or fix what stops them",
    Code.CLIMB_NOT_SHOWN: _climb_not_shown,
    Code.NOTHING_CLIMBED: "the baseline is not shown to climb up to step {step} ({metrics:list}: 95 % lower "
    "bound {bound:.3g}); train longer, or declare `climbs: false` if nothing need be learned",
    Code.ONE_RUN_AS_TWO_SEEDS: _one_run_as_two_seeds,
    Code.SKEWED: _skewed,
    Code.SEEDS_NOT_CLIMBED: "{num} of {of} baseline seeds did not climb by more than the margin",
    Code.BOUND_OF_ZERO: "the values are the same in every {paired:if pair|run}, so the bound is 0",
    Code.MARGIN_WIDE_OF_CLIMB: "the margin is {percent:.0f} % of what the baseline learned",
    Code.MARGIN_WIDER_THAN_LEVEL: "the margin exceeds the baseline's level of {level:.3g}: an arm at 0 would "
    "pass",
    Code.EXACT_OUTCOMES: _exact_outcomes,
    Code.OUTCOMES_NEED_NUMBER: "values of 0 and 1 need a number as margin, not {bound}",
    Code.SPREAD_NOT_SHOWN: "a spread needs at least {needed} {paired:if pairs|runs of each arm}, and a "
    "baseline that varies over seeds",
    Code.SECOND_ARM_NEEDED: "one arm shows only its level; give a second arm or --reference FILE",
    Code.WIDE_STEPS: "the metric has few distinct values, and the interval allows for one step between them",
    Code.TOO_FEW_FOR_MISMATCH: "a mismatch needs at least {needed} {paired:if pairs|runs of each arm}",
    Code.TOO_FEW_FOR_BETTER: "a better treatment needs at least {needed} {paired:if pairs|runs of each arm}",
    Code.RUNNING_MEAN: "the changes of {metric} from step to step correlate with the previous ones "
    "({correlation:.2f}), as in a running mean or a curve almost without noise; a running mean shows a "
    "change late, so compare the raw values",
    Code.RUNNING_BEST: "{metric} of the {arm} looks like its best value so far, which hides every loss; "
    "compare the raw values",
    Code.TINY_DIFFERENCES: "{metric} differs by at most {largest:.2g} at all {num_steps} steps, less than a "
    "thousandth of their noise: check that the treatment was applied",
    Code.CHANGES_SHARED: "{metric}: the {paired:if pairs' differences|runs} share noise (mean correlation of "
    "steps {correlation:.2f}), as averages of the same runs do: they are not independent, so the test errs "
    "more often",
    Code.COLLAPSED: "the {arm}'s level in the window is {level:.3g}, but its best is {best:.3g} (steps "
    "{steps[0]}-{steps[1]})",
    Code.DIFFERS_EARLIER: _differs_earlier,
    Code.NOISE_BORROWED: f"noise from {_NOISE_SOURCES} (d0 = {{dof:.1f}}): {{pairs}} pairs count like "
    "{like:.1f}; without it the interval would be {interval[0]:.3g} to {interval[1]:.3g}",
    Code.NOISE_UNLIKE: f"the noise of {_NOISE_SOURCES} (sd {{sd:.2g}}) is not used: an F test tells it from "
    "this one's (sd {own:.2g})",
    Code.SEEDS_WITHOUT_PAIR: "a control variate: {seeds:plural seed} {seeds:list} of the reference, which no "
    "later run has; without it the interval would be {interval[0]:.3g} to {interval[1]:.3g}",
    Code.LARGEST_STEP: "at the step where each pair differs most, only ±{bound:.3g} would hold",
    Code.STEPS_APART: "the medians hide steps: {share:.0%} of the treatment's, and {baseline_share:.0%} of "
    "the baseline's, are more than {ratio:.2f}x from those of the other seeds",
}
