"""Sentences of a verdict: why an arm matches, differs, stays open or is invalid, and how it is described."""

from collections.abc import Mapping, Sequence

from abrun.messages.message import Message
from abrun.messages.numbers import agreement_text, difference_text
from abrun.reasons import Code

_OPEN_GUARDS = {
    "baseline too": "the baseline breaks the limit as well",
    "open": "beyond the limit, which seeds alone may have done",
}
_MARGINS = {
    "climb": "a tenth of the {size:.3g} that the baseline learned",
    "level": "a twentieth of the baseline's level",
    "zero": "the baseline is 0",
}


def _guard_open(guard: str, reason: str, result: str) -> str:
    """A guard's limit is exceeded, but not by more than seeds may do."""
    return f"guard {guard}: {reason}: {_OPEN_GUARDS[result]}, and no ground for a match"


def _described(arm, baseline, metric, levels, steps, runs, paired, difference, interval, detected) -> str:
    """So far are the arms apart; `levels` and `runs` are the baseline's and the treatment's."""
    against = f"{levels[1]:.4g} against {levels[0]:.4g} in {baseline}, steps {steps[0]}-{steps[1]}"
    counted = f"{runs[0]} pairs" if paired else f"{runs[0]} and {runs[1]} runs"
    counted = "one run of each arm" if max(runs) == 1 else counted
    apart = f"{metric} is {abs(difference):.3g} {'lower' if difference < 0 else 'higher'} in {arm}"
    if interval is None:
        return f"{apart}: {against}, {counted}"
    stated = f"90 % interval {difference_text(difference, interval)}"
    if detected is None:
        return f"{metric}: no difference detected: {arm} {against}, {counted} ({stated})"
    return f"{apart}: {against}, {agreement_text(detected)} ({stated})"


def _other_metrics(apart: Mapping[str, float], alike: Sequence[str]) -> str:
    """Other metrics in which the arms differ, and those in which they do not."""
    words = []
    if apart:
        listed = ", ".join(f"{metric} {difference:+.3g}" for metric, difference in apart.items())
        words.append(f"also apart, each at 90 % (one metric in ten is so by chance): {listed}")
    if alike:
        words.append(f"no difference detected: {', '.join(alike)}")
    return "; ".join(words)


def _no_shared_metric(baseline: Sequence[str], treatment: Sequence[str], unread: str | None) -> str:
    """No metric is recorded in every run."""
    if unread is not None:
        return f"no metric is recorded in every run: {unread}"
    left, right = (", ".join(names) or "nothing" for names in (baseline, treatment))
    return (
        f"no metric is recorded in every run: the baseline has {left}, the treatment {right}; say which are "
        "the same, such as --alias train/reward=NAME"
    )


def _margin_offered(of: str, size: float, rounded_up_to: float | None) -> str:
    """Origin of a suggested margin."""
    what = _MARGINS[of].format(size=size)
    return what if rounded_up_to is None else f"{what}, rounded up to {rounded_up_to:.3g}"


MESSAGES: dict[Code, Message] = {
    Code.NO_CLAIM: "no verdict: no claim says which difference would be accepted (--claim "
    "METRIC:WINDOW:MARGIN), so this is a description and does not test whether the arms converge alike",
    Code.NOTHING_CLAIMED: "no claim is declared: step one and the guards pass, which does not show that "
    "the arms converge alike; declare compare.claims with a margin",
    Code.OF_ARM: "{arm}: {reason}",
    Code.MORE_FAULTS: "and {num} more of this kind",
    Code.STEP_ONE_DIFFERS: "step one: {metric} is {baseline:.6g} in the baseline and {treatment:.6g} in the "
    "treatment at step {step} (seed {seed}): a deviation by {deviation:.2g} of {scale_from} ({scale:.3g}), "
    "tolerance {tolerance:.2g} ({tolerance_from})",
    Code.STEP_ONE_OPEN: "step one: {metric} is {baseline:.6g} in the baseline and {treatment:.6g} in the "
    "treatment at step {step} (seed {seed}): a deviation by {deviation:.2g} of {scale_from} ({scale:.3g}), "
    "tolerance {tolerance:.2g} ({tolerance_from}): rounding raises it, as a fault does, and no ground for a "
    "match",
    Code.GUARD_FAILS: "guard {guard} fails: {reason}",
    Code.GUARD_OPEN: _guard_open,
    Code.ONE_RUN_EACH: "one run of each arm is a description and no test: what lies between them may be "
    "their seeds' doing",
    Code.POST_HOC: "post hoc: {why}",
    Code.DESCRIBED: _described,
    Code.OTHER_METRICS: _other_metrics,
    Code.NO_SHARED_METRIC: _no_shared_metric,
    Code.MARGIN_OFFERED: _margin_offered,
}
