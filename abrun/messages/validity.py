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


def _no_shared_seed(
    baseline: str, baseline_seeds: list[int], arm: str, arm_seeds: list[int], can_unpair: bool
) -> str:
    both = f"{baseline} ({_seeds(baseline_seeds)}) and {arm} ({_seeds(arm_seeds)})"
    return f"no seed is in both {both}{UNPAIRED_HINT * can_unpair}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seeds {', '.join(map(str, seeds))}" if seeds else "no runs"


def _unpaired_seeds(seeds: list[int], arm: str, can_unpair: bool) -> str:
    noun, them = ("seed", "it") if len(seeds) == 1 else ("seeds", "them")
    listed = ", ".join(map(str, seeds))
    return (
        f"unpaired {noun} {listed}: {arm} has no run of {them}; every seed needs both arms"
        f"{UNPAIRED_HINT * can_unpair}"
    )


def _baseline_failed(runs: list[str], failure: str) -> str:
    return (
        f"{first_and_more(runs)} failed ({failure}): without its baseline a seed says nothing about the "
        "treatment"
    )


def _rerun_failed(runs: list[str], failure: str) -> str:
    return (
        f"{first_and_more(runs)} failed ({failure}): without this control the noise floor of step one and of "
        "the "
        "divergence rests on fewer baseline reruns than declared, those that did not fail"
    )


def _run_unreadable(run: str, problem: str, forbidden: bool) -> str:
    return f"{run} cannot be read ({problem}){'' if forbidden else ': mend or remove what is damaged there'}"


def _run_not_finished(run: str, status: str) -> str:
    state = "its directory is missing" if status == "missing" else status
    return f"{run} is not finished ({state}): launch with --resume"


def _runs_exchanged(run: str, identity: Mapping[str, Any]) -> str:
    states = ", ".join(f"{key} {value}" for key, value in identity.items())
    return f"{run}: its config.json is that of another run ({states}): run directories were exchanged"


def _config_mixed(key: str, values: list[list[tuple[str, str]]], paired: bool) -> str:
    groups = (" / ".join(f"{run} {value}" for run, value in group) for group in values)
    apart = "not by seed" if paired else "not from run to run"
    return f"config {key} differs within an arm, and {apart}: {', '.join(groups)[:_MOST_CHARACTERS]}"


def _environment_differs(key: str, baseline: str, run: str, values: Any) -> str:
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
    shown = [
        f"{first_and_more(grid['runs'])}: {grid['num_steps']} steps, {grid['first']}-{grid['last']}"
        for grid in grids[:_MOST_GRIDS]
    ]
    more = len(grids) - len(shown)
    shown += [f"{more} other grids"] * (more > 0)
    return f"step grids differ: the runs share no step ({'; '.join(shown)}): log them at the same steps"


def _steps_missing(
    runs: list[str],
    metric: str,
    num_missing: int,
    num_expected: int,
    first: int,
    last: int,
    step: int,
    run_ends: int,
    unread: str | None,
) -> str:
    if step > run_ends:
        how = f"{runs[0]} ends at step {run_ends}, and {metric} is compared over steps {first}-{last}"
    else:
        how = (
            f"{runs[0]} lacks {num_missing} of the {num_expected} steps {first}-{last} of {metric} (step "
            f"{step} is "
            "the first)"
        )
    others = len(runs) - 1
    more = f"; {others} more run{'s' * (others > 1)} likewise" if others else ""
    return f"step grids differ: {how}{more}{unread_text(unread)}"


def _metric_missing(
    metric: str,
    role: str,
    run: str | None,
    step: int | None,
    unread: str | None,
    alias: Mapping[str, Any] | None,
) -> str:
    if run is None:
        why = unread_text(unread) or (_mistaken_alias(**alias) if alias else "")
        return f"missing metric: no run recorded {metric} ({role}){why}"
    at = "" if step is None else f" at step {step}"
    return f"missing metric: {run} did not record {metric} ({role}){at}{unread_text(unread)}"


def _mistaken_alias(name: str, logged: list[str]) -> str:
    return f": trainer.aliases calls it {name!r}; logged: {', '.join(logged)}"


def _text_values(
    run: str, metric: str, num_values: int, first: int, last: int, step: int, remedy: str
) -> str:
    values = f"{num_values} value{'s' * (num_values > 1)}"
    return (
        f"{run}: {values} of {metric} in steps {first}-{last}, from step {step} on, left out as text: "
        f"{remedy}"
    )


def _first_step_missing(recorded: list[str]) -> str:
    return (
        "missing metric: no step-one metric (reward, loss, gradient norm, ...) is recorded in both arms at "
        f"step 0 or 1, so step one cannot be read{alias_hint(recorded)}; or say --no-step-one"
    )


def _first_step_not_recorded(recorded: list[str]) -> str:
    return f"no reward, loss, gradient norm or entropy is recorded in both arms{alias_hint(recorded)}"


def _prompts_not_known(
    metric: str,
    baseline: str,
    baseline_value: float,
    arm: str,
    value: float,
    step: int,
    seed: int,
    hashes: bool,
) -> str:
    where = " (environment.json: prompts_sha256)" if hashes else ""
    return (
        f"{metric} is {baseline_value:.6g} in {baseline} and {value:.6g} in {arm} at step {step} (seed "
        f"{seed}), "
        f"and nothing says that the arms saw the same prompts{where}, so that this tells nothing of the "
        "treatment; --no-step-one leaves it out"
    )


VALIDITY = {
    Code.NO_SHARED_SEED: Message(_no_shared_seed, meaning="the arms have no seed in common"),
    Code.UNPAIRED_SEEDS: Message(_unpaired_seeds, meaning="an arm has no run of these seeds"),
    Code.BASELINE_FAILED: Message(
        _baseline_failed,
        remedy="mend the cause and launch with --resume",
        meaning="baseline runs failed, in pairs that a verdict needs",
    ),
    Code.RERUN_FAILED: Message(
        _rerun_failed,
        remedy="mend the cause and launch with --resume",
        meaning="same-seed reruns of the baseline failed",
    ),
    Code.UNPAIRED_BASELINE_FAILED: Message(
        "{run} failed ({failure}): without its failures the baseline looks better than it is",
        remedy="mend the cause",
    ),
    Code.RUN_UNREADABLE: Message(_run_unreadable, meaning="a run's files cannot be read"),
    Code.RUN_NOT_FINISHED: Message(_run_not_finished, meaning="a run has not finished, or is missing"),
    Code.RUNS_EXCHANGED: Message(_runs_exchanged, meaning="a run directory holds another run"),
    Code.RUN_COPIED: Message("{run} is a copy of {original}: every number is the same, seconds included"),
    Code.CONFIG_MISSING: Message(
        "{run}: config.json is missing: whether the treatment is all that differs is unknown"
    ),
    Code.CONFIG_NOT_AS_DECLARED: Message(
        "{run}: config {key} is {value}, not {declared} as the treatment declares"
    ),
    Code.CONFIG_DIFFERS: Message(
        "{run}: config {key} is {value}, but {expected} in {reference}: outside the declared treatment"
    ),
    Code.CONFIG_MIXED: Message(_config_mixed, meaning="a configuration key differs within an arm"),
    Code.ENVIRONMENT_MISSING: Message(
        "{run}: environment.json is missing: versions, devices and prompts are unknown"
    ),
    Code.ENVIRONMENT_DIFFERS: Message(
        _environment_differs, meaning="versions, devices, prompts or initial weights of two runs differ"
    ),
    Code.NO_SHARED_STEP: Message(_no_shared_step, meaning="no step is in all runs"),
    Code.STEPS_MISSING: Message(_steps_missing, meaning="runs lack steps of a window that others have"),
    Code.FEW_SHARED_STEPS: Message(
        "step grids differ: of {metric} the runs share {num_shared} of the steps {first}-{last}, of which "
        "each "
        "holds {num_held} or more: log it at the same steps"
    ),
    Code.REFERENCE_STEPS_DIFFER: Message(
        "step grids differ: of steps {first}-{last} of {metric} the reference holds {num_reference}, the "
        "later "
        "runs {num_later}: train as long, and log as often, or freeze the reference with this claim, whose "
        "window it then keeps whole"
    ),
    Code.TEXT_VALUES: Message(
        _text_values, meaning="a log holds text in place of numbers in a claim's window"
    ),
    Code.METRIC_MISSING: Message(_metric_missing, meaning="a metric of a claim or a guard is not recorded"),
    Code.PEAK_MEMORY_MISSING: Message(
        "missing metric: not every run recorded memory/<phase>/{counters} (guard)"
    ),
    Code.BASELINE_NOT_FINITE: Message("{run}: {metric} is {value} at step {step} in the baseline itself"),
}
FIRST_STEP = {
    Code.FIRST_STEP_MISSING: Message(
        _first_step_missing, meaning="no step-one metric is recorded in both arms at the first step"
    ),
    Code.FIRST_STEP_NOT_PAIRED: Message("runs that are not paired have no first step in common"),
    Code.FIRST_STEP_OFF: Message("switched off ({option})"),
    Code.FIRST_STEP_OTHER_REFERENCE: Message("the reference was made with other package versions or devices"),
    Code.FIRST_STEP_OTHER_VERSIONS: Message("the arms ran other package versions"),
    Code.FIRST_STEP_COUNTED_ANEW: Message(
        "the step counters begin anew, so that what is recorded as step 1 may be a later one"
    ),
    Code.FIRST_STEP_NOT_SHARED: Message("the runs share no step"),
    Code.FIRST_STEPS_DIFFER: Message(
        "the arms begin at different steps, the baseline at {baseline} and the treatment at {treatment}"
    ),
    Code.FIRST_STEP_LATE: Message("the first recorded step is {step}, after updates were made"),
    Code.FIRST_STEP_NOT_FINITE: Message("what both arms record at their first step is no finite number"),
    Code.FIRST_STEP_NOT_RECORDED: Message(
        _first_step_not_recorded, meaning="no metric of step one is recorded in both arms"
    ),
    Code.PROMPTS_NOT_KNOWN: Message(
        _prompts_not_known,
        meaning="the first steps differ, and nothing says that the arms saw the same prompts",
    ),
}
MESSAGES = {**VALIDITY, **FIRST_STEP}
