"""Sentences on injected faults: the evidence that detected one, or what would detect a missed one."""

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import sample_unit


def _fault_missed(num_pairs, paired, rounded_metric, tolerance, amount, most, num_steps, shows) -> str:
    """Changes that would detect an injected fault that was missed."""
    unit = sample_unit(paired=paired)
    changes = [f"a smaller margin and more {unit}" if num_pairs is None else f"more than {num_pairs} {unit}"]
    if rounded_metric is not None:
        changes = [f"policy.dtype: float32, which rules out rounding of {rounded_metric} at step one"]
    if tolerance is not None:
        changes.append(_lower_tolerance(**tolerance))
    if amount is not None:
        changes.append(f"a size above {amount:g}" + ("" if most is None else f" (at most {most:g})"))
    return f"{', '.join(changes)}, more than {num_steps} steps, or a claim where it shows: {shows}"


def _lower_tolerance(metric: str, deviation: float, aa_deviation: float) -> str:
    return (
        f"compare.step_one_tolerance below {deviation:.2g} (the deviation of {metric} at step one; its A/A "
        f"reruns deviate by {aa_deviation:.2g})"
    )


MESSAGES: dict[Code, Message] = {
    Code.FOUND_BY_STEP_ONE: "deviates by {deviation:.2g} relative to {scale:.3g} ({scale_from}), tolerance "
    "{tolerance:.2g}",
    Code.FOUND_BY_GUARD: "{value:.3g}, limit {limit:.3g}",
    Code.LIMITED_METRIC: "{metric} is {value:.3g}, {limit}",
    Code.MOVED_METRIC: "{metric} differs by {difference:+.3g}, certified bound {bound}, margin {margin}",
    Code.FINAL_WEIGHTS_NOT_RECORDED: "the {arm} run of seed {seed} does not record its final weights",
    Code.NO_SKETCHES_IN_COMMON: "the runs of seed {seed} have no sketches of the same weights, which only "
    "this version of abrun's own trainer keeps; launch them again",
    Code.WEIGHTS_DID_NOT_MOVE: "the baseline of seed {seed} ended with its initial weights, or with NaN or "
    "Inf",
    Code.FAULT_MISSED: _fault_missed,
}
