"""Sentences on runs that cannot be compared, and on a first step that cannot be read."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import listed, more_text, plural

UNPAIRED_HINT = "; --unpaired compares them as independent runs (Welch)"
_MAX_GRIDS = 4
_MAX_CHARACTERS = 300  # of the values of a configuration key
_MAX_VERSIONS = 3
_MAX_RECORDED = 5
_ENVIRONMENT = {
    "versions": "package versions differ",
    "python": "Python versions differ",
    "scripts": "the command's scripts differ",
    "devices": "devices differ",
    "prompts_sha256": "prompts differ (prompts_sha256)",
    "initial_weights_hash": "initial weights differ",
    "started_from": "the checkpoints to start from differ",
}
_STEP_ONE_WORDS = {"train/reward": "reward", "train/loss": "loss", "train/grad_norm": "grad_norm"}


def first_and_more(names: Sequence[str]) -> str:
    """Return `a`, or `a and 2 more`."""
    return names[0] + more_text(len(names) - 1)


def unread_text(unread: str | None) -> str:
    """Return the clause on values of a metric that were not read because they are text; or nothing."""
    return f": {unread}" if unread else ""


def alias_hint(recorded: Sequence[str]) -> str:
    """Return a clause that advises to map a recorded metric to a step-one metric."""
    for metric, word in _STEP_ONE_WORDS.items():
        match = next((name for name in recorded if word in name.lower().replace("-", "_")), None)
        if match and match != metric:
            return f"; map its name: --alias {shlex.quote(f'{metric}={match}')}"
    names = ", ".join(recorded[:_MAX_RECORDED])
    return f"; map names with --alias (recorded: {names})" if names else "; map names with --alias"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{plural(seeds, 'seed')} {listed(seeds)}" if seeds else "no runs"


def _config_mixed(key: str, values: list[list[tuple[str, str]]], paired: bool) -> str:
    groups = (" / ".join(f"{run} {value}" for run, value in group) for group in values)
    problem = "within an arm, which its seeds do not explain" if paired else "between some runs of an arm"
    return f"config {key} differs {problem}: {', '.join(groups)[:_MAX_CHARACTERS]}"


def _environment_differs(key: str, baseline: str, run: str, values: Any) -> str:
    if isinstance(values, Mapping):
        changes = [f"{name} {base} against {version}" for name, (base, version) in values.items()]
        text = ", ".join(changes[:_MAX_VERSIONS]) + more_text(len(changes) - _MAX_VERSIONS)
    else:
        text = " against ".join(map(_short_text, values))
    return f"{_ENVIRONMENT[key]} between {baseline} and {run}: {text}"


def _short_text(value: Any) -> str:
    if isinstance(value, list):
        names = sorted({str(item) for item in value})
        return f"{len(value)} x {', '.join(names)}"
    return str(value)[:16]


def _no_shared_step(grids: list[Mapping[str, Any]]) -> str:
    ranges = [
        f"{first_and_more(grid['runs'])}: {grid['num_steps']} steps, {grid['first']}-{grid['last']}"
        for grid in grids[:_MAX_GRIDS]
    ]
    num_more = len(grids) - len(ranges)
    ranges += [f"{num_more} other grids"] * (num_more > 0)
    return f"the runs share no step ({'; '.join(ranges)}); log them at the same steps"


def _steps_missing(runs, metric, num_missing, num_expected, first, last, step, run_ends, unread) -> str:
    if step > run_ends:
        problem = f"{runs[0]} ends at step {run_ends}, but {metric} is compared over steps {first}-{last}"
    else:
        problem = (
            f"{runs[0]} lacks {num_missing} of the {num_expected} steps {first}-{last} of {metric} (first: "
            f"step {step})"
        )
    num_more = len(runs) - 1
    more = f"; so do {num_more} more" if num_more > 1 else "; so does one more" if num_more else ""
    return f"steps missing: {problem}{more}{unread_text(unread)}"


def _metric_missing(metric, role, run, step, unread, alias) -> str:
    if run is None:
        mistaken = f": trainer.aliases maps it to {alias['name']!r}, but the log has: " if alias else ""
        reason = unread_text(unread) or (mistaken and mistaken + ", ".join(alias["logged"]))
        return f"missing metric: no run recorded {metric} ({role}){reason}"
    place = "" if step is None else f" at step {step}"
    return f"missing metric: {run} did not record {metric} ({role}){place}{unread_text(unread)}"


VALIDITY: dict[Code, Message] = {
    Code.NO_SHARED_SEED: lambda baseline, baseline_seeds, arm, arm_seeds, can_unpair: (
        f"no common seed: {baseline} has {_seeds(baseline_seeds)}, {arm} has {_seeds(arm_seeds)}"
        f"{UNPAIRED_HINT * can_unpair}"
    ),
    Code.UNPAIRED_SEEDS: lambda seeds, arm, can_unpair: (
        f"unpaired {_seeds(seeds)}: {arm} has no such run, but every seed needs both arms"
        f"{UNPAIRED_HINT * can_unpair}"
    ),
    Code.SEEDS_NOT_SHARED: lambda seeds, arm, can_unpair: (
        f"{_seeds(seeds)} left out: {arm} has no such run{UNPAIRED_HINT * can_unpair}"
    ),
    Code.BASELINE_FAILED: "{runs:first} failed ({failure}), and without its baseline a seed cannot be "
    "compared; fix the cause and run it again",
    Code.RERUN_FAILED: "{runs:first} failed ({failure}), so the noise floor rests on fewer baseline reruns "
    "than declared; fix the cause and run it again",
    Code.UNPAIRED_BASELINE_FAILED: "{runs:first} failed ({failure}), and without its failed runs the "
    "baseline looks better than it is; fix the cause",
    Code.RUN_UNREADABLE: "{run} cannot be read: {problem}{forbidden:if |; repair or remove the damaged file}",
    Code.RUN_NOT_FINISHED: lambda run, status: (
        f"{run} is not finished ({'its directory is missing' if status == 'missing' else status}); launch "
        "with --resume"
    ),
    Code.RUNS_EXCHANGED: lambda run, identity: (
        f"{run}: its config.json belongs to another run "
        f"({', '.join(f'{key} {value}' for key, value in identity.items())}); run directories were swapped"
    ),
    Code.ROLLOUTS_DIFFER: "{run} and {other} {recorded:if trained on different recorded rollouts|did not "
    "both record what they trained on}",
    Code.RUN_COPIED: "{run} is a copy of {original}: all numbers are the same, even the times",
    Code.CONFIG_MISSING: "{run}: config.json is missing, so undeclared differences cannot be ruled out",
    Code.CONFIG_NOT_AS_DECLARED: "{run}: config {key} is {value}, but the treatment declares {declared}",
    Code.CONFIG_DIFFERS: "{run}: config {key} is {value}, but {expected} in {reference}; the declared "
    "treatment does not explain this difference",
    Code.CONFIG_MIXED: _config_mixed,
    Code.ENVIRONMENT_MISSING: "{run}: environment.json is missing, so versions, devices and prompts are "
    "unknown",
    Code.ENVIRONMENT_DIFFERS: _environment_differs,
    Code.NO_SHARED_STEP: _no_shared_step,
    Code.STEPS_MISSING: _steps_missing,
    Code.FEW_SHARED_STEPS: "too few common steps of {metric}: every run has {num_held} or more of steps "
    "{first}-{last}, but all runs share only {num_shared}; log it at the same steps",
    Code.REFERENCE_STEPS_DIFFER: "too few common steps of {metric}: of steps {first}-{last}, the reference "
    "has {num_reference}, the later runs {num_later}; train as long and log as often, or save the "
    "reference with this claim, which keeps its whole window",
    Code.TEXT_VALUES: "{run}: {num_values:count value} of {metric} in steps {first}-{last}, from step {step} "
    "on, are text and were skipped: {remedy}",
    Code.METRIC_MISSING: _metric_missing,
    Code.PEAK_MEMORY_MISSING: "missing metric: not every run recorded memory/<phase>/{counters} (guard)",
    Code.BASELINE_NOT_FINITE: "{run}: {metric} is {value} at step {step}; without a finite baseline, this "
    "pair cannot be compared",
}
FIRST_STEP: dict[Code, Message] = {
    Code.FIRST_STEP_MISSING: lambda recorded: (
        "missing metric: step one needs a reward, loss or gradient norm that both arms record at step 0 or 1"
        f"{alias_hint(recorded)}; or leave step one out: --no-step-one"
    ),
    Code.FIRST_STEP_OF_SCORES: "the sources hold scores, without training steps",
    Code.FIRST_STEP_NOT_PAIRED: "unpaired runs have no common first step",
    Code.FIRST_STEP_OFF: "switched off ({option})",
    Code.FIRST_STEP_OTHER_REFERENCE: "the reference was made with other package versions or devices",
    Code.FIRST_STEP_OTHER_VERSIONS: "the arms ran different package versions",
    Code.FIRST_STEP_COUNTED_ANEW: "the step counter restarts, so the recorded step 1 may be a later one",
    Code.FIRST_STEP_NOT_SHARED: "the runs share no step",
    Code.FIRST_STEPS_DIFFER: "the arms begin at different steps: the baseline at {baseline}, the treatment "
    "at {treatment}",
    Code.FIRST_STEP_LATE: "the first recorded step is {step}, after the first updates",
    Code.FIRST_STEP_NOT_FINITE: "both arms record only NaN or Inf at their first step",
    Code.FIRST_STEP_NOT_RECORDED: lambda recorded: (
        f"no reward, loss, gradient norm or entropy is recorded in both arms{alias_hint(recorded)}"
    ),
    Code.PROMPTS_NOT_KNOWN: "{metric} is {baseline_value:.6g} in {baseline} and {value:.6g} in {arm} at step "
    "{step} (seed {seed}); it is unknown whether the arms saw the same prompts{hashes:if  (environment.json: "
    "prompts_sha256)}; --no-step-one leaves step one out",
}
MESSAGES = {**VALIDITY, **FIRST_STEP}
