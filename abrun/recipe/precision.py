"""Precision of the LM head in an arm and in its baseline."""

from collections.abc import Mapping

from abrun.reasons import Code, Reason

LABELS = {
    "projection": "the trainer's LM head",
    "logits": "the trainer's logits",
    "engine": "the rollout engine's LM head",
}


def precision_difference(
    arm: str, baseline: Mapping[str, str], treatment: Mapping[str, str]
) -> Reason | None:
    """Return in which dtypes of `OwnRunConfig.head_precision` an arm and its baseline differ; None: none."""
    precisions = {
        label: [baseline[key], treatment[key]]
        for key, label in LABELS.items()
        if key in baseline and key in treatment and baseline[key] != treatment[key]
    }
    return Code.PRECISION_DIFFERS(arm=arm, precisions=precisions) if precisions else None
