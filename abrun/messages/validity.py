"""Sentences on runs that cannot be compared, and on a first step that cannot be read."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from abrun.messages.message import Message
from abrun.reasons import Code

UNPAIRED_HINT = "; --unpaired compares them as independent runs, of other seeds (Welch)"
_MOST_GRIDS = 4
_MOST_CHARACTERS = 300  # of the values of a configuration key
_MOST_VERSIONS = 3
_MOST_RECORDED = 5
_ENVIRONMENT = {
    "versions": "package versions differ",
    "python": "the Python version differs",
    "devices": "devices differ",
    "prompts_sha256": "the prompt hash differs",
    "initial_weights_hash": "the initial weights differ",
    "started_from": "the checkpoints that they started from differ",
}
_STEP_ONE_WORDS = {"train/reward": "reward", "train/loss": "loss", "train/grad_norm": "grad_norm"}


def first_and_more(names: Sequence[str]) -> str:
    """Return `a`, or `a and 2 more`."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def unread_text(unread: str | None) -> str:
    """Return the end of a sentence on a metric that a log holds as text."""
    return f": {unread}" if unread else ""


def alias_hint(recorded: Sequence[str]) -> str:
    """Return how to say which of the recorded metrics is one of step one's."""
    for metric, word in _STEP_ONE_WORDS.items():
        match = next((name for name in recorded if word in name.lower().replace("-", "_")), None)
        if match and match != metric:
            return f"; map its name: --alias {shlex.quote(f'{metric}={match}')}"
    names = ", ".join(recorded[:_MOST_RECORDED])
    return f"; map names with --alias (recorded: {names})" if names else "; map names with --alias"


def _no_shared_seed(baseline, baseline_seeds, arm, arm_seeds, can_unpair) -> str:
    """The arms have no seed in common."""
    both = f"{baseline} ({_seeds(baseline_seeds)}) and {arm} ({_seeds(arm_seeds)})"
    return f"no seed is in both {both}{UNPAIRED_HINT * can_unpair}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seeds {', '.join(map(str, seeds))}" if seeds else "no runs"


def _unpaired_seeds(seeds: list[int], arm: str, can_unpair: bool) -> str:
    """An arm has no run of these seeds."""
    noun, them = ("seed", "it") if len(seeds) == 1 else ("seeds", "them")
    listed = ", ".join(map(str, seeds))
    return (
        f"unpaired {noun} {listed}: {arm} has no run of {them}; every seed needs both arms"
        f"{UNPAIRED_HINT * can_unpair}"
    )


def _run_not_finished(run: str, status: str) -> str:
    """A run has not finished, or is missing."""
    state = "its directory is missing" if status == "missing" else status
    return f"{run} is not finished ({state}): launch with --resume"


def _runs_exchanged(run: str, identity: Mapping[str, Any]) -> str:
    """A run directory holds another run."""
    states = ", ".join(f"{key} {value}" for key, value in identity.items())
    return f"{run}: its config.json is that of another run ({states}): run directories were exchanged"


def _config_mixed(key: str, values: list[list[tuple[str, str]]], paired: bool) -> str:
    """A configuration key differs within an arm."""
    groups = (" / ".join(f"{run} {value}" for run, value in group) for group in values)
    apart = "not by seed" if paired else "not from run to run"
    return f"config {key} differs within an arm, and {apart}: {', '.join(groups)[:_MOST_CHARACTERS]}"


def _environment_differs(key: str, baseline: str, run: str, values: Any) -> str:
    """Versions, devices, prompts or initial weights of two runs differ."""
    if isinstance(values, Mapping):
        apart = [f"{name} {left} against {right}" for name, (left, right) in values.items()]
        more = len(apart) - _MOST_VERSIONS
        shown = ", ".join(apart[:_MOST_VERSIONS]) + (f" and {more} more" if more > 0 else "")
    else:
        shown = " against ".join(map(_brief, values))
    return f"{_ENVIRONMENT[key]} between {baseline} and {run}: {shown}"


def _brief(value: Any) -> str:
    if isinstance(value, list):
        names = sorted({str(item) for item in value})
        return f"{len(value)} x {', '.join(names)}"
    return str(value)[:16]


def _no_shared_step(grids: list[Mapping[str, Any]]) -> str:
    """No step is in all runs."""
    shown = [
        f"{first_and_more(grid['runs'])}: {grid['num_steps']} steps, {grid['first']}-{grid['last']}"
        for grid in grids[:_MOST_GRIDS]
    ]
    more = len(grids) - len(shown)
    shown += [f"{more} other grids"] * (more > 0)
    return f"step grids differ: the runs share no step ({'; '.join(shown)}): log them at the same steps"


def _steps_missing(runs, metric, num_missing, num_expected, first, last, step, run_ends, unread) -> str:
    """Runs lack steps of a window that others have."""
    if step > run_ends:
        how = f"{runs[0]} ends at step {run_ends}, and {metric} is compared over steps {first}-{last}"
    else:
        how = (
            f"{runs[0]} lacks {num_missing} of the {num_expected} steps {first}-{last} of {metric} (step "
            f"{step} is the first)"
        )
    others = len(runs) - 1
    more = f"; {others} more run{'s' * (others > 1)} likewise" if others else ""
    return f"step grids differ: {how}{more}{unread_text(unread)}"


def _metric_missing(metric, role, run, step, unread, alias) -> str:
    """A metric of a claim or a guard is not recorded."""
    if run is None:
        why = unread_text(unread) or (_mistaken_alias(**alias) if alias else "")
        return f"missing metric: no run recorded {metric} ({role}){why}"
    at = "" if step is None else f" at step {step}"
    return f"missing metric: {run} did not record {metric} ({role}){at}{unread_text(unread)}"


def _mistaken_alias(name: str, logged: list[str]) -> str:
    return f": trainer.aliases calls it {name!r}; logged: {', '.join(logged)}"


def _first_step_missing(recorded: list[str]) -> str:
    """No step-one metric is recorded in both arms at the first step."""
    return (
        "missing metric: no step-one metric (reward, loss, gradient norm, ...) is recorded in both arms at "
        f"step 0 or 1, so step one cannot be read{alias_hint(recorded)}; or say --no-step-one"
    )


def _first_step_not_recorded(recorded: list[str]) -> str:
    """No metric of step one is recorded in both arms."""
    return f"no reward, loss, gradient norm or entropy is recorded in both arms{alias_hint(recorded)}"


VALIDITY: dict[Code, Message] = {
    Code.NO_SHARED_SEED: _no_shared_seed,
    Code.UNPAIRED_SEEDS: _unpaired_seeds,
    Code.BASELINE_FAILED: "{runs:first} failed ({failure}): without its baseline a seed says nothing about "
    "the treatment; mend the cause and launch with --resume",
    Code.RERUN_FAILED: "{runs:first} failed ({failure}): without this control the noise floor of step one "
    "and of the divergence rests on fewer baseline reruns than declared, those that did not fail; mend the "
    "cause and launch with --resume",
    Code.UNPAIRED_BASELINE_FAILED: "{runs:first} failed ({failure}): without its failures the baseline looks "
    "better than it is; mend the cause",
    Code.RUN_UNREADABLE: "{run} cannot be read ({problem}){forbidden:if |: mend or remove what is damaged "
    "there}",
    Code.RUN_NOT_FINISHED: _run_not_finished,
    Code.RUNS_EXCHANGED: _runs_exchanged,
    Code.RUN_COPIED: "{run} is a copy of {original}: every number is the same, seconds included",
    Code.CONFIG_MISSING: "{run}: config.json is missing: whether the treatment is all that differs is "
    "unknown",
    Code.CONFIG_NOT_AS_DECLARED: "{run}: config {key} is {value}, not {declared} as the treatment declares",
    Code.CONFIG_DIFFERS: "{run}: config {key} is {value}, but {expected} in {reference}: outside the "
    "declared treatment",
    Code.CONFIG_MIXED: _config_mixed,
    Code.ENVIRONMENT_MISSING: "{run}: environment.json is missing: versions, devices and prompts are unknown",
    Code.ENVIRONMENT_DIFFERS: _environment_differs,
    Code.NO_SHARED_STEP: _no_shared_step,
    Code.STEPS_MISSING: _steps_missing,
    Code.FEW_SHARED_STEPS: "step grids differ: of {metric} the runs share {num_shared} of the steps "
    "{first}-{last}, of which each holds {num_held} or more: log it at the same steps",
    Code.REFERENCE_STEPS_DIFFER: "step grids differ: of steps {first}-{last} of {metric} the reference "
    "holds {num_reference}, the later runs {num_later}: train as long, and log as often, or freeze the "
    "reference with this claim, whose window it then keeps whole",
    Code.TEXT_VALUES: "{run}: {num_values:count value} of {metric} in steps {first}-{last}, from step "
    "{step} on, left out as text: {remedy}",
    Code.METRIC_MISSING: _metric_missing,
    Code.PEAK_MEMORY_MISSING: "missing metric: not every run recorded memory/<phase>/{counters} (guard)",
    Code.BASELINE_NOT_FINITE: "{run}: {metric} is {value} at step {step} in the baseline itself",
}
FIRST_STEP: dict[Code, Message] = {
    Code.FIRST_STEP_MISSING: _first_step_missing,
    Code.FIRST_STEP_NOT_PAIRED: "runs that are not paired have no first step in common",
    Code.FIRST_STEP_OFF: "switched off ({option})",
    Code.FIRST_STEP_OTHER_REFERENCE: "the reference was made with other package versions or devices",
    Code.FIRST_STEP_OTHER_VERSIONS: "the arms ran other package versions",
    Code.FIRST_STEP_COUNTED_ANEW: "the step counters begin anew, so that what is recorded as step 1 may be "
    "a later one",
    Code.FIRST_STEP_NOT_SHARED: "the runs share no step",
    Code.FIRST_STEPS_DIFFER: "the arms begin at different steps, the baseline at {baseline} and the "
    "treatment at {treatment}",
    Code.FIRST_STEP_LATE: "the first recorded step is {step}, after updates were made",
    Code.FIRST_STEP_NOT_FINITE: "what both arms record at their first step is no finite number",
    Code.FIRST_STEP_NOT_RECORDED: _first_step_not_recorded,
    Code.PROMPTS_NOT_KNOWN: "{metric} is {baseline_value:.6g} in {baseline} and {value:.6g} in {arm} at "
    "step {step} (seed {seed}), and nothing says that the arms saw the same prompts{hashes:if  "
    "(environment.json: prompts_sha256)}, so that this tells nothing of the treatment; --no-step-one leaves "
    "it out",
}
MESSAGES = {**VALIDITY, **FIRST_STEP}
