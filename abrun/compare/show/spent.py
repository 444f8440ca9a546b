"""What an experiment with looks took, and what stopping early saved, in a sentence."""

from abrun.compare.judge.spent import Spent


def spent_sentence(spent: Spent) -> str:
    """Return a sentence such as `decided after 4 of 12 pairs: 8 of 24 runs, 5.3 GPU-hours; saved ...`."""
    decided = f"decided after {spent.decided_at} pairs" if spent.decided_at else "not decided"
    runs, planned = spent.num_runs, spent.num_planned_runs
    of_pairs = f"{spent.num_pairs} of {spent.num_planned_pairs} pairs begun"
    said = f"{decided}; {of_pairs}, {runs} of {planned} runs{_hours(spent, spent.device_hours)}"
    if runs == planned or not spent.decided_at:  # nothing is saved by what is still open, or invalid
        return said
    return f"{said}; saved: {planned - runs} runs{_hours(spent, spent.device_hours_saved)}"


def _hours(spent: Spent, hours: float | None) -> str:
    return "" if hours is None else f", {hours:.3g} {spent.device.replace(' ', '-')}-hours"
