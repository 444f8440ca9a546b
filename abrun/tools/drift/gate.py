"""Start a gate, and ask it about a candidate, for `abrun gate`."""

import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
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
from abrun.stats.online import (
    ALPHA,
    MIN_SEEDS,
    NUM_OLD,
    OLD_RUNS_SD,
    Noise,
    environment_excess,
    plan_seeds,
    read_candidate,
    reading_sizes,
    seeds_to_add,
    spent_level,
)
from abrun.stats.series import in_window, window_bounds
from abrun.tools.drift.store import (
    Answer,
    Runs,
    Start,
    State,
    create_store,
    locked_store,
    paired_differences,
    read_state,
    remember_run,
)
from abrun.verdict.sensitivity import check_distinct_seeds
from abrun.verdict.summaries import summarize_runs

OLD_AFTER_DAYS = 7.0
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the runs of a candidate are, or of an incumbent."""

    path: str
    reading: ReadingOptions
    arm: str | None = None  # required if there are several
    control: str | None = None  # arm of fresh runs of the incumbent
    old_runs: bool = False  # without such an arm: judge by the incumbent's earlier runs alone
    name: str | None = None  # in the store; None: that of the folder


def start_gate(
    path: Path, source: Source, claim: Claim, *, worth: str | None = None, alpha: float | None = None
) -> tuple[State, list[Reason]]:
    """Write a new store whose incumbent is a source's arm, and say what is left out. Raises AbrunError."""
    _check_claim(claim)
    amount, in_sds = _parse_worth(worth or "2 sigma", claim)
    incumbent, _, claim, (first_step, last_step), left_out = _read_arms(source, claim)
    _refuse_unfinished(incumbent, "an incumbent")
    if len(incumbent.runs) < MIN_SEEDS or len({*incumbent.values}) == 1:
        raise ComparisonError(
            f"{incumbent.name}: got {counted(incumbent.runs, 'run')} as the incumbent; allowed: at least "
            f"{MIN_SEEDS} that differ, so that the noise is known"
        )
    sd = float(np.sqrt(Noise.of(incumbent.values).variance))
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
        max_seeds=plan_seeds(amount if in_sds else (amount - claim.margin_in[0]) / sd),
        incumbent=incumbent,
    )
    create_store(path, start)
    return State(start=start, incumbent=incumbent), left_out


def ask_gate(path: Path, source: Source) -> tuple[Answer, State, list[Reason]]:
    """Judge a candidate at its present seeds, and record the answer. Returns what it does not cover, too.

    A call adds the runs that are new to those that the store knows. Without new ones, the answer is the
    recorded one. Asking about the incumbent adds its new runs. Raises AbrunError.
    """
    start = read_state(path).start
    steps = start.first_step, start.last_step
    candidate, controls, *_, left_out = _read_arms(source, start.claim(), steps)
    with locked_store(path) as (state, append):
        answer = _judge(state, candidate, controls, old_runs=source.old_runs)
        if answer is not state.candidates.get(candidate.name):
            append(answer)
    return answer, state, [*left_out, *caveats(answer, state, time.time())]


def _judge(state: State, candidate: Runs, controls: Runs, *, old_runs: bool) -> Answer:
    """Return the answer about a candidate, which is the recorded one if it has no new runs."""
    name, start = candidate.name, state.start
    earlier, is_incumbent = state.candidates.get(name), name == state.incumbent.name
    stored = state.incumbent if is_incumbent else earlier.candidate if earlier else Runs(name=name)
    candidate = stored.with_new(candidate)
    controls = earlier.controls.with_new(controls) if earlier else controls
    if earlier and (earlier.candidate.runs, earlier.controls.runs) == (candidate.runs, controls.runs):
        return earlier
    _refuse_known_runs(state, candidate, controls)
    _refuse_other_settings(state, candidate, controls)
    answer = Answer(
        time_s=time.time(),
        outcome="WORSE",
        candidate=candidate,
        controls=controls,
        incumbent=state.incumbent.name,
        num_old=len(state.incumbent.values),
        level=state.level(name),
        spent=earlier.spent if earlier else 0.0,
    )
    if is_incumbent:
        _refuse_unfinished(candidate, "an incumbent")
        return replace(answer, outcome="INCUMBENT", num_old=len(candidate.values))
    if earlier:
        refuse_decided(earlier, state)
    if not (controls.runs or old_runs):
        raise ComparisonError(
            f"{name}: has no fresh runs of {state.incumbent.name} beside it; name their arm with --control, "
            "launch them with --round RECIPE, or judge by the old runs alone, which finds less: --old-runs"
        )
    _refuse_unfinished(controls, "a control")
    if repeated := [seed for seed, num in Counter(run.seed for run in controls.runs).items() if num > 1]:
        raise ComparisonError(f"{name}: seed {listed(repeated)} has several controls; give the first alone")
    without = {run.seed for run in candidate.runs} - {run.seed for run in controls.runs}
    if controls.runs and without:
        raise ComparisonError(
            f"{name}: seed {listed(sorted(without))} has no control; run {state.incumbent.name} with the "
            "same seeds in the same round"
        )
    if len(candidate.runs) > start.max_seeds:
        raise ComparisonError(
            f"{name}: got {counted(candidate.runs, 'seed')}; allowed: at most {start.max_seeds}, as planned "
            f"for --worth; leave the later ones out with --seeds"
        )
    if len(candidate.values) < len(candidate.runs):  # a run that failed or diverged is a result
        return answer
    num_before = len(earlier.candidate.values) if earlier else 0
    for size in reading_sizes(num_before, len(candidate.runs), start.max_seeds):
        answer = replace(answer, **_test_candidate(state, answer, size))
        if answer.outcome != "OPEN":  # as if later runs had not been trained
            break
    return answer


def refuse_decided(earlier: Answer, state: State) -> None:
    """Raise ComparisonError for new runs of a candidate that was decided, or compared with another one."""
    name, incumbent = earlier.candidate.name, state.incumbent.name
    if name in state.superseded:
        raise ComparisonError(
            f"{name}: new runs of an earlier incumbent; to judge it against {incumbent}, run it anew and "
            "give another --name"
        )
    if earlier.outcome != "OPEN" and not earlier.candidate.failed:
        raise ComparisonError(
            f"{name}: was answered {earlier.outcome}, and its level is spent; to judge it again, run it "
            "anew and give another --name"
        )
    if earlier.controls.runs and earlier.incumbent != incumbent:
        raise ComparisonError(
            f"{name}: its controls are runs of {earlier.incumbent}, but the incumbent is now {incumbent}; "
            "run it anew beside that, and give another --name"
        )


def _refuse_other_settings(state: State, candidate: Runs, controls: Runs) -> None:
    """Raise ComparisonError unless candidate and controls each have one configuration, the incumbent's."""
    if (num := len(_settings(candidate))) > 1:
        raise ComparisonError(
            f"{candidate.name}: its runs have {num} configurations; give the edited one another --name"
        )
    if len(_settings(controls, state.incumbent)) > 1:
        raise ComparisonError(
            f"{candidate.name}: its controls have other settings than {state.incumbent.name}, the incumbent; "
            "give the control arm the incumbent's settings, and run the round anew"
        )


def _settings(*arms: Runs) -> set[str | None]:
    """Return the hashes of the settings that are known."""
    return {run.settings_sha256 for arm in arms for run in arm.runs} - {None}


def _refuse_known_runs(state: State, candidate: Runs, controls: Runs) -> None:
    """Raise ComparisonError for a run that repeats another, or that the store knows under another name."""
    metric = state.start.metric
    judged, fresh = candidate.restore(metric), controls.restore(metric)
    _refuse_copies(candidate.name, fresh, judged, metric, paired=True)
    control_names = {run.name for run in controls.runs}
    for stored in state.known_runs():
        originals = tuple(run for run in stored.restore(metric) if run.place not in control_names)
        for name, runs in ((candidate.name, judged), (controls.name, fresh)):
            if stored.name != name:
                _refuse_copies(candidate.name, originals, runs, metric)


def _refuse_copies(
    name: str,
    originals: tuple[RecordedRun, ...],
    runs: tuple[RecordedRun, ...],
    metric: str,
    *,
    paired: bool = False,
) -> None:
    """Raise ComparisonError if two runs are one, `paired`: of two seeds."""
    problem = check_distinct_seeds(Sides(baselines=originals, treatments=runs, paired=paired), metric)
    if problem:
        raise ComparisonError(f"{problem}; run {name} with seeds that no other run has")


def _test_candidate(state: State, answer: Answer, num_seeds: int) -> dict[str, Any]:
    """Return the fields of the answer that follow from the values of the first seeds."""
    start, name = state.start, answer.candidate.name
    candidate = replace(answer.candidate, runs=answer.candidate.runs[:num_seeds])
    seeds = {run.seed for run in candidate.runs}
    controls = replace(answer.controls, runs=tuple(run for run in answer.controls.runs if run.seed in seeds))
    values = {run.seed: run.value for run in controls.runs}
    fresh = state.sign * np.array([values[run.seed] for run in candidate.runs]) if controls.runs else None
    memory = state.memory(name, controls)
    spent = max(answer.spent, float(spent_level(answer.level, num_seeds, start.max_seeds)))
    level = spent - answer.spent
    with np.errstate(all="ignore"):
        reading = read_candidate(
            state.sign * np.array(candidate.values),
            fresh,
            memory,
            level=level,
            worth=start.worth,
            in_sds=start.worth_in_sds,
            margin=start.margin,
            max_seeds=start.max_seeds,
        )
    repeats = fresh is not None and not paired_differences(candidate, controls).any()
    decided = {"BETTER": reading.better, "WORSE": reading.worse, "ALIKE": reading.alike | repeats}
    outcome = next((outcome for outcome, is_shown in decided.items() if is_shown), "OPEN")
    excess = None if fresh is None else float(environment_excess(fresh, memory))
    return {
        "outcome": outcome,
        "num_read": num_seeds,
        "num_old": int(memory.num_old),
        "spent": spent,
        "reading_level": level,
        "interval": tuple(map(float, reading.interval())),
        "worth": float(start.worth * (reading.sd if start.worth_in_sds else 1.0)),
        "environment": excess if excess is not None and np.isfinite(excess) else None,
        "seeds_to_add": seeds_to_add(num_seeds, start.max_seeds) if outcome == "OPEN" else 0,
        **{key: float(getattr(reading, key)) for key in ("p", "improvement", "upper", "sd")},
    }


def _refuse_unfinished(runs: Runs, kind: str) -> None:
    """Raise ComparisonError if a run failed or has no finite value."""
    num = len(runs.runs) - len(runs.values)
    if num:
        raise ComparisonError(
            f"{runs.name}: {counted(num, 'run')} failed or became NaN or infinite; {kind} needs runs that "
            "end; run it again, or leave it out with --exclude"
        )


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


def _read_arms(
    source: Source, claim: Claim, steps: tuple[int, int] | None = None
) -> tuple[Runs, Runs, Claim, tuple[int, int], list[Reason]]:
    """Return candidate, controls, the claim, its steps, and what was left out.

    `steps`: those of the store; None: those of the claim's window. Raises AbrunError.
    """
    experiment = open_sources([source.path], source.reading, [claim])
    (claim,) = experiment.compare.claims
    if source.control is not None and source.control not in experiment.arms:
        raise ComparisonError(f"--control: got {source.control!r}; allowed: {listed(experiment.arms)}")
    arm = experiment.choose_arm(source.arm, [arm for arm in experiment.arms if arm != source.control])
    name = source.name or _name_runs(source, experiment, arm)
    if steps is None:
        grid = union_steps(run.series(claim.metric).steps for run in experiment.arm(arm).values())
        steps = window_bounds(claim.window, grid, claim.metric)

    def read(arm: str | None, name: str, prefix: str = "") -> Runs:
        runs = list(experiment.arm(arm).values()) if arm else []
        values = {run: _reduce_run(run, claim, steps) for run in runs if run.status != "failed"}
        finite = tuple(run for run, value in values.items() if np.isfinite(value))
        _refuse_copies(name, (), finite, claim.metric)
        remembered = [remember_run(run, claim.metric, values.get(run)) for run in runs]
        named = tuple(replace(run, name=prefix + run.name) for run in remembered)
        return Runs(name=name, runs=named, left_out=() if prefix else experiment.unselected)

    # Seeds may repeat from round to round: the candidate's name tells its controls from others
    controls = read(source.control, f"controls of {name}", f"{name}: ")
    return read(arm, name), controls, claim, steps, [*experiment.left_out]


def _name_runs(source: Source, experiment: RecordedExperiment, arm: str) -> str:
    """Return the name of the given folder; its arm's of several, `ARM=SOURCE`, `--pattern` or a file."""
    label, path = parse_source(source.path)
    is_alone = len(experiment.arms) == 1 and not label and "{arm}" not in (source.reading.pattern or "")
    if stored := find_stored_experiment([source.path], source.reading.runs_dir):
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
    if answer.controls.runs and not paired_differences(candidate, answer.controls).any():
        return (
            f"ALIKE: {candidate.name} repeats {incumbent} bit for bit in {counted(candidate.values, 'pair')}"
            ": it changes nothing, or was not applied; discard it"
        )
    difference = difference_text(answer.improvement, answer.interval)
    basis = f"{counted(answer.num_read, 'seed')} against {answer.num_old} old runs"
    if answer.controls.runs:
        basis = f"{counted(answer.num_read, 'pair')}, {answer.num_old} old runs"
    evidence = f"improvement of {start.metric} {difference}, {basis}"
    above = f" by more than {start.margin:g}" if start.margin else ""
    levels = f"p {answer.p:.2g}, level {answer.reading_level:.2g}"
    unit = "pair" if answer.controls.runs else "seed"
    request = f"add {counted(answer.seeds_to_add, unit)} and ask again"
    next_step = request if answer.seeds_to_add else "its seeds are spent: discard it"
    results = {
        "BETTER": f"improves on {incumbent}{above} and is the new incumbent: {evidence}; {levels}",
        "WORSE": f"is worse than {incumbent}: {evidence}; discard it",
        "ALIKE": f"does not improve on {incumbent} by {bound_text(answer.worth)} or more: {evidence}; "
        "discard it",
        "OPEN": f"is not decided against {incumbent}: {evidence}; {next_step}",
    }
    return f"{answer.outcome}: {candidate.name} {results[answer.outcome]}"


def caveats(answer: Answer, state: State, now_s: float) -> list[Reason]:
    """Return what the answer does not cover: old runs alone, their age, and other machines or versions."""
    reasons = []
    incumbent = state.superseded.get(answer.incumbent, state.incumbent)
    compared = answer.controls if answer.controls.runs else replace(incumbent, runs=incumbent.runs[-NUM_OLD:])
    if answer.outcome != "INCUMBENT" and not answer.controls.runs:
        reasons.append(Code.GATE_OLD_RUNS(incumbent=incumbent.name, moved=OLD_RUNS_SD))
        ends_s = [run.end_s for run in compared.runs if run.end_s is not None]
        days = (now_s - min(ends_s)) / _DAY_S if ends_s else 0.0
        if days >= OLD_AFTER_DAYS:
            reasons.append(Code.GATE_AGE(incumbent=incumbent.name, days=round(days)))
    hashes = {run.environment_sha256 for run in (*compared.runs, *answer.candidate.runs)} - {None}
    if len(hashes) > 1:
        reasons.append(Code.GATE_ENVIRONMENT(candidate=answer.candidate.name, incumbent=incumbent.name))
    return reasons


def as_json(answer: Answer | None, state: State) -> dict[str, Any]:
    """Return an answer for `--json`, or else the state of the gate."""
    start = state.start
    num_tried, num_kept = len(state.candidates), len(state.discoveries)
    totals = {"metric": start.metric, "num_candidates": num_tried, "num_discoveries": num_kept}
    totals["max_seeds"] = start.max_seeds
    if answer:
        hidden = ("outcome", "candidate", "controls", "kind", "time_s")
        return {
            "answer": answer.outcome,
            "candidate": answer.candidate.name,
            "num_seeds": len(answer.candidate.runs),
            "num_controls": len(answer.controls.runs),
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
            f"{len(answer.candidate.values)}+{len(answer.controls.values)}",
            answer.incumbent,
            difference_text(answer.improvement, answer.interval) if answer.sd else "-",
            f"{answer.level:.2g}",
        )
        for answer in state.candidates.values()
    ]
    titles = ("date", "candidate", "answer", "runs", "incumbent", "improvement [90 % CI]", "level")
    start = state.start
    text = (
        f"gate on {start.metric} over steps {start.first_step}-{start.last_step}, "
        f"{'higher' if start.higher_is_better else 'lower'} is better: "
        f"{counted(state.candidates, 'candidate')}, {len(state.discoveries)} kept; the incumbent is "
        f"{state.incumbent.name} ({counted(state.incumbent.values, 'run')}); at most {start.max_seeds} pairs "
        f"a candidate; level of the next {state.next_level:.2g}"
    )
    head = Text(printable(text), style="bold")
    return Group(Table(columns(*titles, fold=True), rows), head) if rows else head
