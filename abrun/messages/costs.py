"""Sentences about device time: what an experiment spent, will spend, or could save."""

from collections.abc import Mapping, Sequence

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
    "idle_s": "idle devices and shares",
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


def duration_text(seconds: float) -> str:
    """Return a duration in its largest fitting unit: `1.3 h`, `42 min`, `12 s`."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 0.995 * size:
            return f"{amount_text(seconds / size)} {unit}"
    return f"{amount_text(seconds)} s"


def _budget(
    wall_s: float | None,
    device: str,
    device_s: float,
    num_runs: int,
    paces: Mapping[str, Sequence[float]],
    without_runs: Sequence[str],
    not_counted: int,
    experiment: str,
    measured_on: str,
) -> str:
    """Expected wall time and device time; `paces` has seconds of a step and of the start-up by arm."""
    time_text = "" if wall_s is None else f"{duration_text(wall_s)} on this machine, "
    pace_texts: dict[str, list[str]] = {}
    for arm, (step_s, start_up_s) in paces.items():
        start_up_text = f" and {duration_text(start_up_s)} of start-up" if start_up_s else ""
        pace_texts.setdefault(f"{duration_text(step_s)} a step{start_up_text}", []).append(arm)
    clauses = [f"{text} ({', '.join(arms)})" for text, arms in pace_texts.items()]
    others = f"; no earlier run of {', '.join(without_runs)}, taken to be as fast" if without_runs else ""
    others += "; without the warm start, of which there is no earlier one" if not_counted else ""
    cost_text = f"{time_text}{device_time_text(device_s, device)}"
    return (
        f"about {cost_text} for {num_runs} runs, at {'; '.join(clauses)}, as measured in {experiment} on "
        f"{measured_on}{others}"
    )


def _stages_spent(num_pairs: int, max_pairs: int, device: str, spent_s: float, saved_s: float) -> str:
    """Device time of a launch in stages, and what the pairs that it did not need would have cost."""
    text = f"{num_pairs} of {max_pairs} pairs: {device_time_text(spent_s, device)} spent"
    return f"{text}, about {device_time_text(saved_s, device)} saved" if saved_s else text


MESSAGES: dict[Code, Message] = {
    Code.STAGES_SPENT: _stages_spent,
    Code.INTERIM_SAVES: "Interim analyses are cheaper: {pairs_if_equal:.3g} pairs on average if the arms are "
    "equal, at most {max_pairs}; one analysis with the same P(match) takes {fixed_pairs:.3g}; launch with "
    "{options}",
    Code.INTERIM_COSTS_MORE: "One analysis is cheaper: {fixed_pairs:.3g} pairs; interim analyses with the "
    "same P(match) take {pairs_if_equal:.3g} on average if the arms are equal",
    Code.SPENT: _spent,
    Code.BUDGET: _budget,
    Code.NO_BUDGET: "unknown: no finished run of this configuration on this kind of device; once a run has "
    "taken steps, abrun status shows the time left",
}
