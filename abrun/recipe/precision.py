"""Precision of the LM head in an arm and in its baseline."""

from collections.abc import Mapping

LABELS = {
    "projection": "the trainer's LM head",
    "logits": "the trainer's logits",
    "engine": "the rollout engine's LM head",
}


def precision_difference(arm: str, baseline: Mapping[str, str], treatment: Mapping[str, str]) -> str | None:
    """Say in which dtypes of `OwnRunConfig.head_precision` an arm and its baseline differ; None: in none."""
    differences = [
        f"{label} in {treatment[key]} instead of {baseline[key]}"
        for key, label in LABELS.items()
        if key in baseline and key in treatment and baseline[key] != treatment[key]
    ]
    return f"{arm}: {', '.join(differences)}" if differences else None
