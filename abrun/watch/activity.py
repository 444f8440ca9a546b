"""Sentences on a run without a recent step: what it does, for how long, and how long it may."""

from collections.abc import Iterable

from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.watch.reading import WatchedRun

# Reasons of a stalled run that say no more than that it takes no step
BARE_STALLS = (Code.NO_NEW_STEP, Code.NO_SIGN_OF_LIFE)


def describe_activity(run: WatchedRun, seconds: float | None = None) -> str | None:
    """Return what a run without a recent step does, such as `no step for 5:13 (limit 30:00)`.

    None for a run that takes steps, waits for devices or has ended. `seconds` replaces the measured time.
    """
    if run.warm_start:
        elapsed_s = run.warm_start.elapsed_s
        elapsed_text = "" if elapsed_s is None else f", {format_clock(elapsed_s)} so far"
        return f"waiting for the warm start{elapsed_text}"
    if run.since_step_s is None or not (run.is_starting or run.is_silent):
        return None
    progress, reason = run.state.progress, run.state.reason
    clock = format_clock(_silence_s(run) if seconds is None else seconds)
    limit_s, activity = (progress.limit_s, progress.activity) if progress else (None, None)
    limit = f" (limit {format_clock(limit_s)})" if limit_s is not None else ""
    suffix = f": {activity}" if activity else ""
    if reason and reason.code not in BARE_STALLS:
        return f"{sentence(reason)}{limit}"
    if run.is_starting:
        return f"starting for {clock}{suffix or ': no step logged yet'}{limit}"
    if run.step >= run.state.num_steps:
        return f"last step {clock} ago{suffix}{limit}"
    return f"no step for {clock}{suffix}{limit}"


def _silence_s(run: WatchedRun) -> float:
    """Return the seconds since the last step, or since the start of a run without one."""
    return (run.elapsed_s if run.is_starting else run.since_step_s) or 0.0


def merge_activities(runs: Iterable[WatchedRun]) -> list[tuple[list[WatchedRun], str]]:
    """Return what the runs do, each activity once, with its runs and the longest of their times."""
    groups: dict[str, list[WatchedRun]] = {}
    for run in runs:
        if activity := describe_activity(run, 0.0):
            groups.setdefault(activity, []).append(run)
    return [(group, describe_activity(max(group, key=_silence_s)) or "") for group in groups.values()]


def format_clock(seconds: float) -> str:
    """Return seconds as `5:13` or `1:05:13`."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
