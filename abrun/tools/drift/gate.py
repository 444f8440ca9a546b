"""Start a gate, and ask it about a candidate, for `abrun gate`."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Sides, union_steps
from abrun.logs.recorded.identify import parse_source
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import find_stored_experiment, open_sources
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import bound_text, counted, difference_text, listed
from abrun.recipe.claims import Claim
from abrun.report.present.tables import Table, columns
from abrun.runs.files import is_directory
from abrun.runs.metric_names import default_transform
from abrun.runs.redaction import printable
from abrun.stats.online import ALPHA, MIN_SEEDS, Sample, read_candidate, seeds_to_add
from abrun.stats.series import in_window, window_bounds
from abrun.tools.drift.store import (
    Answer,
    Runs,
    Start,
    State,
    create_ledger,
    environment_sha256,
    locked_state,
    read_state,
    refuse_changed_runs,
    remember_run,
)
from abrun.verdict.sensitivity import check_distinct_seeds
from abrun.verdict.summaries import summarize_runs

INCUMBENT_SEEDS = 16  # recommended: with fewer, fewer improvements are found
OLD_AFTER_DAYS = 7.0
_DAY_S = 86400.0


def start_gate(
    path: Path,
    source: str,
    reading: ReadingOptions,
    claim: Claim,
    *,
    arm: str | None = None,
    name: str | None = None,
    worth: str | None = None,
    alpha: float | None = None,
) -> tuple[State, list[Reason]]:
    """Write a new ledger whose incumbent is a source's arm, and say what is left out. Raises AbrunError."""
    _check_claim(claim)
    amount, in_sds = _parse_worth(worth or "2 sigma", claim)
    incumbent, claim, (first_step, last_step), left_out = _read_arm(source, reading, claim, arm, name)
    _refuse_unfinished(incumbent)
    num_runs = len(incumbent.values)
    if num_runs < MIN_SEEDS or len({*incumbent.values}) == 1:
        raise ComparisonError(
            f"{incumbent.name}: got {counted(num_runs, 'run')} as the incumbent; allowed: at least "
            f"{MIN_SEEDS} that differ, so that the noise is known"
        )
    start = Start(
        time_s=time.time(),
        metric=claim.metric,
        window=claim.window,
        first_step=first_step,
        last_step=last_step,
        transform=claim.transform or default_transform(claim.metric),
        higher_is_better=claim.better_direction == "higher",
        margin=claim.margin_in[0],
        worth=amount,
        worth_in_sds=in_sds,
        alpha=alpha or ALPHA,
        incumbent=incumbent,
    )
    create_ledger(path, start)
    return State(start=start, incumbent=incumbent), [*left_out]


@np.errstate(all="ignore")
def ask_gate(
    path: Path, source: str, reading: ReadingOptions, *, arm: str | None = None, name: str | None = None
) -> tuple[Answer, State, list[Reason]]:
    """Judge a candidate at its present seeds, and record the answer. Returns what it does not cover, too.

    Asking again without new runs returns the recorded answer. Asking about the incumbent adds its new runs.
    Raises AbrunError.
    """
    start = read_state(path).start
    steps = start.first_step, start.last_step
    candidate, *_, left_out = _read_arm(source, reading, start.claim(), arm, name, steps)
    with locked_state(path) as (state, writer):
        answer = _judge(state, candidate)
        if answer is not state.candidates.get(candidate.name):
            writer.write(asdict(answer))
            writer.sync()
            state.add(answer)
    return answer, state, [*left_out, *caveats(answer, state, time.time())]


def _judge(state: State, candidate: Runs) -> Answer:
    """Return the answer about a candidate, which is the recorded one if it has no new runs."""
    name, start = candidate.name, state.start
    earlier = state.candidates.get(name)
    if earlier:
        refuse_changed_runs(earlier.candidate, candidate)
        is_same = earlier.candidate.num_runs == candidate.num_runs
        if is_same and earlier.candidate.failed == candidate.failed:
            return earlier
    for known_name, runs in state.runs_by_name.items():
        if known_name != name:
            _refuse_copies(name, runs.restore(start.metric), candidate.restore(start.metric), start.metric)
    answer = Answer(
        number=state.num_answers + 1,
        time_s=time.time(),
        outcome="WORSE",
        candidate=candidate,
        incumbent=state.incumbent.name,
        num_incumbent_runs=len(state.incumbent.values),
        level=state.level(name),
    )
    if name == state.incumbent.name:
        refuse_changed_runs(state.incumbent, candidate)
        _refuse_unfinished(candidate)
        num_runs = len(candidate.values)
        num_missing = max(0, INCUMBENT_SEEDS - num_runs)
        return replace(answer, outcome="INCUMBENT", num_incumbent_runs=num_runs, seeds_to_add=num_missing)
    if name in state.superseded:
        raise ComparisonError(
            f"{name}: new runs of an earlier incumbent; to judge it against {state.incumbent.name}, run it "
            "anew and give another --name"
        )
    if candidate.num_runs > start.max_seeds:
        raise ComparisonError(
            f"{name}: got {candidate.num_runs} seeds; allowed: at most {start.max_seeds}, chosen in advance "
            f"(--seeds 0-{start.max_seeds})"
        )
    is_unfinished = candidate.num_diverged or candidate.failed
    return answer if is_unfinished else replace(answer, **_test_candidate(state, candidate))


def _test_candidate(state: State, candidate: Runs) -> dict[str, Any]:
    """Return the fields of the answer that follow from the values of the candidate and the incumbent."""
    start = state.start
    sign = 1.0 if start.higher_is_better else -1.0
    samples = Sample.of(sign * np.array(candidate.values)), Sample.of(sign * np.array(state.incumbent.values))
    noise = state.noise(candidate.name)
    settings = {
        "level": state.level(candidate.name),
        "worth": start.worth,
        "in_sds": start.worth_in_sds,
        "margin": start.margin,
        "max_seeds": start.max_seeds,
    }
    reading = read_candidate(*samples, noise, **settings)
    decided = {"BETTER": reading.better, "WORSE": reading.worse, "ALIKE": reading.alike}
    outcome = next((outcome for outcome, is_shown in decided.items() if is_shown), "OPEN")
    return {
        "outcome": outcome,
        "reading_level": float(reading.level),
        "interval": tuple(map(float, reading.interval())),
        "worth": float(start.worth * (reading.sd if start.worth_in_sds else 1.0)),
        "seeds_to_add": int(seeds_to_add(*samples, noise, **settings)) if outcome == "OPEN" else 0,
        **{key: float(getattr(reading, key)) for key in ("p", "improvement", "upper", "sd")},
    }


def _refuse_unfinished(incumbent: Runs) -> None:
    """Raise ComparisonError if a run of the incumbent failed or has no finite value."""
    num_diverged = incumbent.num_diverged + len(incumbent.failed)
    if num_diverged:
        raise ComparisonError(
            f"{incumbent.name}: {counted(num_diverged, 'run')} failed or became NaN or infinite; an "
            "incumbent needs runs that end; leave the run out with --exclude"
        )


def _refuse_copies(
    candidate: str, known_runs: tuple[RecordedRun, ...], own: tuple[RecordedRun, ...], metric: str
) -> None:
    """Raise ComparisonError if a run of the candidate repeats another one, or a known run of another name."""
    problem = check_distinct_seeds(Sides(baselines=known_runs, treatments=own, paired=False), metric)
    if problem:
        raise ComparisonError(f"{problem}; run {candidate} with seeds that no other run has")


def _check_claim(claim: Claim) -> None:
    """Raise ComparisonError unless the claim is a superiority with an absolute margin."""
    if claim.kind != "better" or claim.margin_in[1]:
        raise ComparisonError(
            f"--claim: got another kind of claim on {claim.metric}; allowed: METRIC:WINDOW:better NUMBER, in "
            "the metric's unit, such as 'train/reward:last 20%:better 0'"
        )
    if claim.better_direction is None:
        raise ComparisonError(
            f"--claim: whether higher is better is unknown for {claim.metric}; add ', higher is better' or "
            "', lower is better'"
        )


def _parse_worth(worth: str, claim: Claim) -> tuple[float, bool]:
    """Return the number of `--worth` and whether it is in standard deviations. Raises ComparisonError."""
    number, in_sds = worth.strip().removesuffix("sigma"), worth.strip().endswith("sigma")
    try:
        amount = float(number)
    except ValueError:
        amount = float("nan")
    margin = claim.margin_in[0]
    if not 0 < amount < float("inf") or (not in_sds and amount <= margin):
        raise ComparisonError(
            f"--worth: got {worth!r}; allowed: a number above the claim's {margin:g}, or standard deviations "
            "such as '2 sigma'"
        )
    return amount, in_sds


def _read_arm(
    source: str,
    reading: ReadingOptions,
    claim: Claim,
    arm: str | None,
    name: str | None,
    steps: tuple[int, int] | None = None,
) -> tuple[Runs, Claim, tuple[int, int], Sequence[Reason]]:
    """Return the claim's values of an arm's runs, the claim, its steps, and what was left out.

    `steps`: those of the ledger; None: those of the claim's window. Raises AbrunError.
    """
    experiment = open_sources([source], reading, [claim])
    (claim,) = experiment.compare.claims
    arm = experiment.choose_arm(arm, experiment.arms)
    name = name or _name_runs(source, reading, experiment, arm)
    runs = list(experiment.arm(arm).values())
    grid = union_steps(run.series(claim.metric).steps for run in runs)
    steps = steps or window_bounds(claim.window, grid, claim.metric)
    failed = tuple(str(run) for run in runs if run.status == "failed")
    values = {run: _reduce_run(run, claim, steps) for run in runs if run.status != "failed"}
    finite = {run: value for run, value in values.items() if np.isfinite(value)}
    _refuse_copies(name, (), tuple(finite), claim.metric)
    ends = [run.span_s[1] for run in runs if run.span_s]
    judged = Runs(
        name=name,
        values=tuple(finite.values()),
        num_diverged=len(values) - len(finite),
        failed=failed,
        runs=tuple(remember_run(run, claim.metric) for run in runs),
        left_out=experiment.unselected,
        oldest_s=min(ends) if len(ends) == len(runs) else None,
        environment_sha256=environment_sha256(runs) if all(run.environment for run in runs) else None,
    )
    return judged, claim, steps, experiment.left_out


def _name_runs(source: str, reading: ReadingOptions, experiment: RecordedExperiment, arm: str) -> str:
    """Return the name of the given folder; its arm's of several, `ARM=SOURCE`, `--pattern` or a file."""
    label, path = parse_source(source)
    is_alone = len(experiment.arms) == 1 and not label and "{arm}" not in (reading.pattern or "")
    if stored := find_stored_experiment([source], reading.runs_dir):
        folder = printable(Path(os.path.realpath(stored)).name)
        return folder if is_alone else f"{folder}/{arm}"
    return printable(Path(os.path.realpath(path)).name) if is_alone and is_directory(path) else arm


def _reduce_run(run: RecordedRun, claim: Claim, steps: tuple[int, int]) -> float:
    """Return the claim's value of a run. Raises ComparisonError if it has not finished, or lacks steps."""
    grid = run.series(claim.metric).steps
    if not run.finished:
        raise ComparisonError(
            f"{run}: is {run.status}, so the candidate cannot be judged; wait or run it again"
        )
    if not len(grid) or grid[0] > steps[0] or grid[-1] < steps[1]:
        recorded = f"covers steps {grid[0]}-{grid[-1]}" if len(grid) else "is not recorded"
        raise ComparisonError(
            f"{run}: {claim.metric} {recorded}, but the gate reads steps {steps[0]}-{steps[1]}; run it "
            "to the end"
        )
    return float(summarize_runs(run.series(claim.metric).values[None, in_window(grid, steps)], claim)[0])


# --- answers in words and as JSON ---


def answer_text(answer: Answer, state: State) -> str:
    """Return an answer as a sentence with the evidence that it rests on."""
    start, candidate, incumbent = state.start, answer.candidate, answer.incumbent
    if answer.outcome == "INCUMBENT":
        num_runs = counted(candidate.values, "run")
        return f"INCUMBENT: {candidate.name} now has {num_runs}, which later candidates are compared with"
    if candidate.failed:
        failed = listed(candidate.failed)
        return f"WORSE: of {candidate.name}, {failed} failed; discard it, or run what failed again"
    if candidate.num_diverged:
        num_runs = counted(candidate.num_diverged, "run")
        return f"WORSE: {start.metric} of {candidate.name} is NaN or infinite in {num_runs}; discard it"
    difference = difference_text(answer.improvement, answer.interval)
    evidence = (
        f"improvement of {start.metric} {difference}, {counted(candidate.values, 'seed')} against "
        f"{answer.num_incumbent_runs} runs"
    )
    above = f" by more than {start.margin:g}" if start.margin else ""
    levels = f"p {answer.p:.2g}, level {answer.reading_level:.2g}"
    more = f"add {counted(answer.seeds_to_add, 'seed')} and ask again"
    next_step = more if answer.seeds_to_add else "its seeds are spent: discard it"
    results = {
        "BETTER": f"improves on {incumbent}{above} and is the new incumbent: {evidence}; {levels}",
        "WORSE": f"is worse than {incumbent}: {evidence}; discard it",
        "ALIKE": f"does not improve on {incumbent} by {bound_text(answer.worth)} or more: {evidence}; "
        "discard it",
        "OPEN": f"is not decided against {incumbent}: {evidence}; {next_step}",
    }
    return f"{answer.outcome}: {candidate.name} {results[answer.outcome]}"


def caveats(answer: Answer, state: State, now_s: float) -> list[Reason]:
    """Return what the answer does not cover: the incumbent's age and machine, and what to run next."""
    reasons = []
    incumbent = state.superseded.get(answer.incumbent, state.incumbent)
    days = None if incumbent.oldest_s is None else (now_s - incumbent.oldest_s) / _DAY_S
    if days is not None and days >= OLD_AFTER_DAYS:
        reasons.append(Code.GATE_AGE(incumbent=incumbent.name, days=round(days)))
    hashes = {incumbent.environment_sha256, answer.candidate.environment_sha256}
    if len(hashes) == 2 and None not in hashes:
        reasons.append(Code.GATE_ENVIRONMENT(candidate=answer.candidate.name, incumbent=incumbent.name))
    missing = INCUMBENT_SEEDS - len(state.incumbent.values)
    if missing > 0:
        reasons.append(Code.GATE_ADD_TO_INCUMBENT(incumbent=state.incumbent.name, seeds_to_add=missing))
    return reasons


def as_json(answer: Answer | None, state: State) -> dict[str, Any]:
    """Return an answer for `--json`, or else the state of the gate."""
    start = state.start
    num_tried, num_kept = len(state.candidates), len(state.discoveries)
    totals = {"metric": start.metric, "num_candidates": num_tried, "num_discoveries": num_kept}
    if answer:
        hidden = ("outcome", "candidate", "kind", "number", "time_s")
        return {
            "answer": answer.outcome,
            "candidate": answer.candidate.name,
            "num_seeds": answer.candidate.num_runs,
            "left_out": answer.candidate.left_out,
            **{key: value for key, value in asdict(answer).items() if key not in hidden},
            **totals,
        }
    return {
        **totals,
        "first": start.first_step,
        "last": start.last_step,
        "higher": start.higher_is_better,
        "incumbent": state.incumbent.name,
        "num_runs": len(state.incumbent.values),
        "level": state.next_level,
    }


def render_state(state: State) -> RenderableType:
    """Return the last answer about each candidate as a table, then the state."""
    rows = [
        (
            datetime.fromtimestamp(answer.time_s, UTC).date().isoformat(),
            answer.candidate.name,
            answer.outcome,
            str(len(answer.candidate.values)),
            answer.incumbent,
            difference_text(answer.improvement, answer.interval),
            f"{answer.level:.2g}",
        )
        for answer in state.candidates.values()
    ]
    titles = ("date", "candidate", "answer", "seeds", "incumbent", "improvement [90 % CI]", "level")
    start = state.start
    text = (
        f"gate on {start.metric} over steps {start.first_step}-{start.last_step}, "
        f"{'higher' if start.higher_is_better else 'lower'} is better: "
        f"{counted(state.candidates, 'candidate')}, {len(state.discoveries)} kept; the incumbent is "
        f"{state.incumbent.name} ({counted(state.incumbent.values, 'run')}); level of the next candidate "
        f"{state.next_level:.2g}"
    )
    head = Text(printable(text), style="bold")
    return Group(Table(columns(*titles, numeric=("seeds",), fold=True), rows), head) if rows else head
