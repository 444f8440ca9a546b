"""Sentences on claims about the rate of divergence."""

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import arm_texts, confidence_text, count_text, interval_level_text


def _divergence_rate(
    result, margin, alpha, diverged, interval, p_equal, p_beyond, needed, arm, baseline_arm
) -> str:
    treatment, baseline = arm_texts(arm, baseline_arm)
    (num_baseline, baselines), (num_treatment, treatments) = diverged
    counts = f"{num_treatment} of {count_text(treatments, 'run')} of {treatment} diverged"
    ends = f"{interval_level_text(alpha)} CI [{', '.join(f'{100 * end:.3g} %' for end in interval)}]"
    if p_equal is not None:  # against the baseline
        margin += f" than {baseline}'s"
        counts += f", {num_baseline} of {baselines} of {baseline}"
        ends = f"difference {ends}; p = {p_equal:.2g} if the rates were equal (Fisher)"
    if result == "holds":
        return f"rate of divergence: {margin} at {confidence_text(alpha)} confidence: {counts}, {ends}"
    if result == "different":
        ends += f"; p = {p_beyond:.2g} if the claim held, Holm-corrected"
        return f"rate of divergence: not {margin}: {counts}, {ends}"
    advice = f"{needed} runs in all would show it if no other diverges"
    if needed is None:
        advice = "more runs narrow the interval"
    return f"rate of divergence: undecided whether {margin}: {counts}, {ends}; {advice}"


MESSAGES: dict[Code, Message] = {Code.DIVERGENCE_RATE: _divergence_rate}
