"""Start a gate, and ask it about a candidate, for `abrun gate`."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from abrun.diagnose.gate.ledger import (
    Answer,
    Outcome,
    Runs,
    Start,
    State,
    create_ledger,
    locked_state,
    read_state,
    refuse_changed_runs,
    write_answer,
)
from abrun.diagnose.ledger.drift import environment_sha256
from abrun.errors import ComparisonError
from abrun.metric_names import default_transform
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import RecordedExperiment, RecordedRun, union_steps
from abrun.recorded.selection import ReadingOptions
from abrun.recorded.sources import find_stored_experiment, open_sources
from abrun.stats.online import ALPHA, MAX_SEEDS, MIN_SEEDS, Sample, read_candidate, seeds_to_add
from abrun.stats.series import in_window, window_bounds
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
    worth: str = "2 sigma",
    alpha: float = ALPHA,
    max_seeds: int = MAX_SEEDS,
) -> State:
    """Write a new ledger whose incumbent is the arm of a source. Raises AbrunError."""
    claim = _check_claim(claim)
    amount, in_sds = _parse_worth(worth, claim)
    experiment = open_sources([source], reading, [claim])
    (claim,) = experiment.compare.claims
    runs, default_name = _arm_runs(experiment, arm, source, reading)
    grid = union_steps(run.series(claim.metric).steps for run in runs)
    first_step, last_step = window_bounds(claim.window, grid, claim.metric)
    incumbent = _read_runs(name or default_name, runs, claim, (first_step, last_step))
    _refuse_diverged(incumbent)
    if len(incumbent.values) < MIN_SEEDS or len({*incumbent.values}) == 1:
        raise ComparisonError(
            Code.GATE_INCUMBENT_REFUSED(
                incumbent=incumbent.name, num_runs=len(incumbent.values), minimum=MIN_SEEDS
            )
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
        alpha=alpha,
        max_seeds=max_seeds,
        incumbent=incumbent,
    )
    create_ledger(path, start)
    return State(start=start, incumbent=incumbent)


@np.errstate(all="ignore")
def ask_gate(
    path: Path, source: str, reading: ReadingOptions, *, arm: str | None = None, name: str | None = None
) -> tuple[Answer, State]:
    """Judge a candidate at its present seeds, and record the answer. Raises AbrunError.

    Asking again without new runs returns the recorded answer. Asking about the incumbent adds its new runs.
    """
    start = read_state(path).start
    claim = Claim(
        metric=start.metric,
        window=start.window,
        transform=start.transform,
        higher_is_better=start.higher_is_better,
        better=start.margin,
    )
    experiment = open_sources([source], reading, [claim])
    runs, default_name = _arm_runs(experiment, arm, source, reading)
    candidate = _read_runs(name or default_name, runs, claim, (start.first_step, start.last_step))
    with locked_state(path) as (state, writer):
        answer = _judge(state, candidate)
        if answer is not state.candidates.get(candidate.name):
            write_answer(writer, answer)
            state.add(answer)
        return answer, state


def answer_reason(answer: Answer, state: State) -> Reason:
    start, candidate = state.start, answer.candidate
    codes: dict[Outcome, Code] = {
        "BETTER": Code.GATE_BETTER,
        "WORSE": Code.GATE_WORSE,
        "ALIKE": Code.GATE_ALIKE,
        "OPEN": Code.GATE_OPEN if answer.seeds_to_add else Code.GATE_SEEDS_SPENT,
    }
    if answer.outcome == "INCUMBENT":
        return Code.GATE_INCUMBENT(incumbent=candidate.name, num_runs=len(candidate.values))
    if candidate.num_diverged:
        return Code.GATE_DIVERGED(
            candidate=candidate.name, metric=start.metric, num_diverged=candidate.num_diverged
        )
    evidence = Code.GATE_EVIDENCE(
        metric=start.metric,
        improvement=answer.improvement,
        interval=answer.interval,
        num_seeds=len(candidate.values),
        num_incumbent_runs=answer.num_incumbent_runs,
    )
    own = {
        "BETTER": {"p": answer.p, "level": answer.reading_level, "margin": start.margin},
        "WORSE": {},
        "ALIKE": {"worth": answer.worth},
        "OPEN": {"seeds_to_add": answer.seeds_to_add} if answer.seeds_to_add else {},
    }
    names = {"candidate": candidate.name, "incumbent": answer.incumbent}
    return codes[answer.outcome](**names, evidence=evidence, **own[answer.outcome])


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


def _judge(state: State, candidate: Runs) -> Answer:
    """Return the answer about a candidate, which is the recorded one if it has no new runs."""
    name, start = candidate.name, state.start
    earlier = state.candidates.get(name)
    if earlier:
        refuse_changed_runs(earlier.candidate, candidate)
        if earlier.candidate.num_runs == candidate.num_runs:
            return earlier
    if name == state.incumbent.name:
        return _extend_incumbent(state, candidate)
    if name in state.superseded:
        raise ComparisonError(Code.GATE_SUPERSEDED(candidate=name, incumbent=state.incumbent.name))
    if candidate.num_runs > start.max_seeds:
        raise ComparisonError(
            Code.GATE_TOO_MANY_SEEDS(candidate=name, num_seeds=candidate.num_runs, maximum=start.max_seeds)
        )
    if candidate.num_diverged:
        return _answer(state, candidate, outcome="WORSE")
    sign = 1.0 if start.higher_is_better else -1.0
    samples = Sample.of(sign * np.array(candidate.values)), Sample.of(sign * np.array(state.incumbent.values))
    noise, level = state.noise(name), state.level(name)
    settings = {
        "level": level,
        "worth": start.worth,
        "in_sds": start.worth_in_sds,
        "margin": start.margin,
        "max_seeds": start.max_seeds,
    }
    reading = read_candidate(*samples, noise, **settings)
    is_open = not (reading.better or reading.worse or reading.alike)
    decided: Outcome = "BETTER" if reading.better else "WORSE" if reading.worse else "ALIKE"
    low, high = reading.interval()
    return _answer(
        state,
        candidate,
        outcome="OPEN" if is_open else decided,
        reading_level=float(reading.level),
        p=float(reading.p),
        improvement=float(reading.improvement),
        interval=(float(low), float(high)),
        upper=float(reading.upper),
        worth=float(start.worth * (reading.sd if start.worth_in_sds else 1.0)),
        sd=float(reading.sd),
        seeds_to_add=int(seeds_to_add(*samples, noise, **settings)) if is_open else 0,
    )


def _answer(state: State, candidate: Runs, **values: Any) -> Answer:
    """Return the next line of the ledger, about a candidate against the incumbent of the day."""
    return Answer(
        number=state.num_answers + 1,
        time_s=time.time(),
        candidate=candidate,
        incumbent=state.incumbent.name,
        num_incumbent_runs=len(state.incumbent.values),
        level=state.level(candidate.name),
        **values,
    )


def _extend_incumbent(state: State, runs: Runs) -> Answer:
    """Return the answer about the incumbent itself: its new runs join the baseline."""
    refuse_changed_runs(state.incumbent, runs)
    _refuse_diverged(runs)
    answer = _answer(
        state, runs, outcome="INCUMBENT", seeds_to_add=max(0, INCUMBENT_SEEDS - len(runs.values))
    )
    return replace(answer, num_incumbent_runs=len(runs.values))


def _refuse_diverged(incumbent: Runs) -> None:
    """Raise ComparisonError if a run of the incumbent has no finite value."""
    if incumbent.num_diverged:
        raise ComparisonError(
            Code.GATE_INCUMBENT_DIVERGED(incumbent=incumbent.name, num_diverged=incumbent.num_diverged)
        )


def _check_claim(claim: Claim) -> Claim:
    """Return the claim. Raises ComparisonError unless it is a superiority with an absolute margin."""
    if claim.kind != "better" or claim.margin_in[1]:
        raise ComparisonError(Code.GATE_CLAIM_REFUSED(metric=claim.metric))
    if claim.better_direction is None:
        raise ComparisonError(Code.GATE_DIRECTION_UNKNOWN(metric=claim.metric))
    return claim


def _parse_worth(worth: str, claim: Claim) -> tuple[float, bool]:
    """Return the number of `--worth` and whether it is in standard deviations. Raises ComparisonError."""
    number, in_sds = worth.strip().removesuffix("sigma"), worth.strip().endswith("sigma")
    try:
        amount = float(number)
    except ValueError:
        amount = float("nan")
    margin = claim.margin_in[0]
    if not 0 < amount < float("inf") or (not in_sds and amount <= margin):
        raise ComparisonError(Code.GATE_WORTH_REFUSED(worth=worth, margin=margin))
    return amount, in_sds


def _arm_runs(
    experiment: RecordedExperiment, arm: str | None, source: str, reading: ReadingOptions
) -> tuple[list[RecordedRun], str]:
    """Return the runs of the arm to judge, and its name in the ledger. Raises ComparisonError."""
    arm = experiment.choose_arm(arm, experiment.arms)
    is_stored = find_stored_experiment([source], reading.runs_dir) is not None
    return list(experiment.arm(arm).values()), f"{experiment.name}/{arm}" if is_stored else arm


def _read_runs(name: str, runs: Sequence[RecordedRun], claim: Claim, steps: tuple[int, int]) -> Runs:
    """Return the claim's values of the runs. Raises ComparisonError for a run that lacks steps."""
    values = []
    for run in runs:
        grid = run.series(claim.metric).steps
        if not run.finished:
            raise ComparisonError(Code.GATE_RUN_NOT_FINISHED(run=str(run), status=run.status))
        if not len(grid) or grid[0] > steps[0] or grid[-1] < steps[1]:
            recorded = [int(grid[0]), int(grid[-1])] if len(grid) else None
            raise ComparisonError(
                Code.GATE_RUN_SHORT(run=str(run), metric=claim.metric, recorded=recorded, steps=steps)
            )
        window = run.series(claim.metric).values[None, in_window(grid, steps)]
        values.append(float(summarize_runs(window, claim)[0]))
    ends = [run.span_s[1] for run in runs if run.span_s]
    return Runs(
        name=name,
        values=tuple(value for value in values if np.isfinite(value)),
        num_diverged=int((~np.isfinite(values)).sum()),
        oldest_s=min(ends) if len(ends) == len(runs) else None,
        environment_sha256=environment_sha256(runs) if all(run.environment for run in runs) else None,
    )
