"""Sentences about device time: what an experiment spent, will spend, or could save."""

from collections.abc import Mapping

from abrun.messages.message import Message
from abrun.messages.numbers import percent_text
from abrun.reasons import Code

PARTS = {  # of abrun.verdict.spent.Spent
    "steps_s": "steps of compared runs",
    "start_up_s": "start-up",
    "unknown_s": "runs without step times",
    "controls_s": "controls",
    "warm_starts_s": "warm starts",
    "other_s": "checkpoints, validation, exit",
    "lost_s": "failed or repeated work",
    "idle_s": "idle devices",
}
MIN_SHARE = 0.005  # smaller parts are left out of the sentence


def device_time_text(seconds: float, device: str) -> str:
    """Return device seconds in the largest fitting unit: `1.9 GPU-hours`, `12 core-minutes`."""
    unit, unit_s = device_time_unit(seconds, device)
    return f"{amount_text(seconds / unit_s)} {unit}"


def device_time_unit(seconds: float, device: str) -> tuple[str, float]:
    """Return the largest fitting unit of device seconds, and its size in seconds."""
    units = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
    unit = next((unit for unit, unit_s in units.items() if seconds >= 0.995 * unit_s), "seconds")
    return f"{'GPU' if device == 'GPU' else 'core'}-{unit}", units[unit]


def amount_text(amount: float) -> str:
    """Return a number in two digits, from 10 on as a whole number."""
    return f"{amount:,.0f}" if amount >= 9.95 else f"{amount:.2g}"


def part_seconds(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the label and seconds of each part, the steps first and then the largest."""
    parts = {label: spent[name] for name, label in PARTS.items() if spent[name] > 0}
    return dict(sorted(parts.items(), key=lambda part: (part[0] != PARTS["steps_s"], -part[1])))


def _spent(device: str, held_s: float, parts: Mapping[str, float]) -> str:
    """Device time by purpose, as in verdict.json."""
    shares = [
        f"{percent_text(seconds / held_s)} {label}"
        for label, seconds in part_seconds(parts).items()
        if seconds / held_s >= MIN_SHARE
    ]
    return f"{device_time_text(held_s, device)}: {', '.join(shares)}"


MESSAGES: dict[Code, Message] = {Code.SPENT: _spent}
