"""Sentences on claims about the rate of divergence."""

from collections.abc import Sequence

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import arm_texts, confidence_text, count_text, interval_level_text


def _divergence_rate(
    result: str,
    margin: str,
    alpha: float,
    diverged: Sequence[Sequence[int]],
    interval: Sequence[float],
    p_equal: float | None,
    p_beyond: float | None,
    needed: int | None,
    arm: str,
    baseline_arm: str,
) -> str:
    treatment, baseline = arm_texts(arm, baseline_arm)
    counts = f"{diverged[1][0]} of {count_text(diverged[1][1], 'run')} of {treatment} diverged"
    ends = ", ".join(f"{100 * end:.3g} %" for end in interval)
    level = f"{interval_level_text(alpha)} CI [{ends}]"
    if p_equal is not None:
        margin += f" than {baseline}'s"
        counts += f", {diverged[0][0]} of {diverged[0][1]} of {baseline}"
        level = f"difference {level}; p = {p_equal:.2g} if the rates were equal (Fisher)"
    if result == "holds":
        head, tail = f"{margin} at {confidence_text(alpha)} confidence", ""
    elif result == "different":
        head, tail = f"not {margin}", f"; p = {p_beyond:.2g} if the claim held, Holm-corrected"
    else:
        head, tail = f"undecided whether {margin}", "; more runs narrow the interval"
        if needed is not None:
            tail = f"; {needed} runs in all would show it if no other diverges"
    return f"rate of divergence: {head}: {counts}, {level}{tail}"


MESSAGES: dict[Code, Message] = {Code.DIVERGENCE_RATE: _divergence_rate}
