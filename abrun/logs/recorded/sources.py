"""Sources of runs to compare: an experiment of the store, or logs of any framework."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from abrun.errors import ComparisonError, StoreError, UnknownRunsError
from abrun.logs import Log, read_logs
from abrun.logs.aliases import RenamedRuns, parse_aliases, recognise_metrics, rename_all
from abrun.logs.naming import guess_baseline, pattern_fields
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, refuse_mixed_axes, resolve_claims
from abrun.logs.recorded.identify import Sources, arm_from_source, identify_runs, parse_source
from abrun.logs.recorded.remedies import suggest_command
from abrun.logs.recorded.selection import ReadingOptions, last_step, restarted_counter_reasons
from abrun.logs.recorded.stored import choose_baseline, load_experiment
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import counted
from abrun.recipe.claims import Claim, Compare, Guards, is_interim_schedule
from abrun.recipe.experiment import BASELINE
from abrun.runs.experiment import find_experiment, is_experiment, suggest_experiments, suggest_path
from abrun.runs.files import exists
from abrun.runs.layout import RunName
from abrun.runs.redaction import list_names, printable
from abrun.stats.series import Series

T = TypeVar("T")


def find_stored_experiment(sources: Sequence[str], runs_dir: Path) -> Path | None:
    """Return the directory of a stored experiment if the sources name one, else None."""
    if len(sources) != 1 or ":" in sources[0] or "=" in sources[0]:
        return None
    directory = find_experiment(sources[0], runs_dir)
    return directory if is_experiment(directory) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContents:
    """Content of sources, read once and used by any number of comparisons."""

    sources: Sequence[str]
    reading: ReadingOptions
    directory: Path | None  # None: the source is not an experiment that abrun launched
    recorded: RecordedExperiment | Sources

    def experiment(self, **changes: Any) -> RecordedExperiment:
        """Return the experiment; `changes` replace fields of `reading` that do not affect reading the logs.

        Raises ComparisonError if arms or seeds cannot be determined.
        """
        if isinstance(self.recorded, RecordedExperiment):
            return self.recorded
        reading = replace(self.reading, **changes)
        try:
            experiment = build_foreign_experiment(self.recorded, reading)
        except UnknownRunsError as error:
            command = suggest_command(self.recorded, reading, build_foreign_experiment)
            raise UnknownRunsError(f"{error}; for example: {command}") from None
        return _add_interim(experiment, reading) if reading.interim else experiment


def read_sources(sources: Sequence[str], reading: ReadingOptions) -> SourceContents:
    """Read the runs of sources. Raises StoreError or ComparisonError if that fails."""
    directory = find_stored_experiment(sources, reading.runs_dir)
    if directory is None:
        recorded: RecordedExperiment | Sources = read_foreign(sources, reading)
    else:
        reading.refuse_reading_options(directory)
        recorded = load_experiment(directory)
        if reading.baseline is not None:
            recorded = choose_baseline(recorded, reading.baseline)
    return SourceContents(sources=sources, reading=reading, directory=directory, recorded=recorded)


def open_sources(
    sources: Sequence[str], reading: ReadingOptions, claims: Sequence[Claim] | None = None
) -> RecordedExperiment:
    """Return the runs of sources as an experiment; `claims` replace the declared claims.

    Raises StoreError or ComparisonError if runs cannot be read, or if arms or seeds cannot be determined.
    """
    experiment = read_sources(sources, reading).experiment()
    if claims is None:
        return experiment
    claims = resolve_claims(experiment, claims)
    compare = experiment.compare.model_copy(update={"claims": claims})
    return replace(experiment, compare=compare)


def _add_interim(experiment: RecordedExperiment, reading: ReadingOptions) -> RecordedExperiment:
    """Return the experiment with interim analyses. Raises ComparisonError if its runs do not fit them."""
    counts, problem = reading.interim, ""
    num_pairs = max((len(experiment.pairs(arm)) for arm in experiment.treatments), default=0)
    if not is_interim_schedule(counts):
        problem = "; allowed: two or more increasing numbers of pairs, from 2 up, such as 3,5,8"
    elif reading.allows_one_arm:
        problem = " with a reference, which allows no interim analyses; drop it"
    elif not experiment.compare.paired:
        problem = " with unpaired runs; give both arms the same seeds, or drop it"
    elif num_pairs < counts[0]:
        problem = f", but there are only {num_pairs} pairs; train more for the first analysis"
    elif num_pairs > counts[-1]:
        problem = f", but there are {num_pairs} pairs, and the last analysis takes all"
        problem += "; choose pairs with --seeds"
    if problem:
        raise ComparisonError(f"--interim: got {reading.given_options['--interim']}{problem}")
    compare = experiment.compare.model_copy(update={"interim": list(counts)})
    return replace(experiment, compare=compare)


# --- runs that abrun did not launch ---


def read_foreign(sources: Sequence[str], reading: ReadingOptions) -> Sources:
    """Read the logs of all sources. Raises ComparisonError or StoreError."""
    aliases = parse_aliases(reading.aliases)
    named_sources = [(arm, _locate(source, reading.runs_dir)) for arm, source in map(parse_source, sources)]
    if reading.pattern is not None:
        pattern_fields(reading.pattern)
    options = {"group": reading.group, "step_column": reading.step_column, "pattern": reading.pattern}
    logs_by_source = [
        read_logs(source, **options, is_excluded=reading.selection.excludes) for _, source in named_sources
    ]
    _refuse_duplicate_runs(sources, logs_by_source)
    return Sources(
        named_sources=named_sources, logs_by_source=logs_by_source, aliases=aliases, reading=reading
    )


def _locate(source: str, runs_dir: Path) -> str:
    """Return the path of a source: as given, or below `runs_dir`. Raises StoreError with the closest path.

    A source with a prefix, such as `tb:` or `wandb:`, is returned as it is.
    """
    below = runs_dir / source
    if ":" in source or exists(Path(source)):
        return source
    if exists(below):
        return str(below)
    closest = suggest_path(Path(source), exists) or suggest_path(below, exists)
    remedy = f"did you mean {closest}?" if closest else suggest_experiments(below)
    raise StoreError(f"{printable(source)}: no such file or folder, here or in {runs_dir}; {remedy}")


def build_foreign_experiment(sources: Sources, reading: ReadingOptions) -> RecordedExperiment:
    """Return the runs of some sources as an experiment, paired by seed unless `reading` is unpaired.

    Each of several sources is one arm, named by `ARM=SOURCE` or after its folder or file, unless the run
    names contain the arm; one source holds all arms. The baseline is the arm `baseline`, else one named
    "baseline", else that of the first source. Anything else is guessed and listed in `guessed`. Runs outside
    `seeds` or in `exclude` are dropped first and cause no error. With `allows_one_arm` no seeds are guessed;
    with `may_be_one_arm`, runs whose names differ only by a seed are one arm.
    Raises ComparisonError if arms or seeds cannot be determined.
    """
    selection, allows_one_arm = reading.selection, reading.allows_one_arm
    logs_by_source, excluded = selection.without_excluded(sources.logs_by_source)
    sources = replace(sources, logs_by_source=logs_by_source, reading=reading)
    try:
        naming = identify_runs(sources)
    except ComparisonError as error:
        raise UnknownRunsError(error.reason) from None
    paired = not reading.unpaired and naming.paired
    named_logs = list(zip(naming.names, sources.logs, strict=True))
    selected, left_out = selection.select(named_logs, excluded, paired=paired and not allows_one_arm)

    refuse_mixed_axes((log.axis, log.place) for log in selected.values())
    has_steps = any(log.axis == "steps" for log in selected.values())
    renamed = rename_all([log.metrics for log in selected.values()], sources.aliases, may_recognise=has_steps)
    by_name, prompts_left_out = share_prompts(_rename_logs(selected, renamed))
    arms, baseline_guesses = _order_arms(by_name, reading, has_several_sources=len(sources.named_sources) > 1)
    by_name, reruns_left_out = _leave_out_other_reruns(by_name, arms)
    _refuse_without_numbers(by_name, arms)

    by_name = _mark_diverged(by_name)
    ((_, source), *others) = sources.named_sources
    title = "-vs-".join(arms) if others else arm_from_source(source)
    ordered = sorted(by_name, key=lambda run: (run.seed, arms.index(run.arm), run.rerun))
    guessed = [
        *(Code.LOG_READ_AS(guess=text) for log in by_name.values() for text in log.guesses),
        *naming.guessed,
        *baseline_guesses,
        *(Code.LOG_READ_AS(guess=text) for text in renamed.guessed),
    ]
    return RecordedExperiment(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip("-.")[:100] or "comparison",
        arms=arms,
        compare=Compare(paired=paired),
        runs={run: _make_run(run, by_name[run], seed_is_unknown=not naming.seeds_known) for run in ordered},
        seeds_known=naming.seeds_known,
        guessed=tuple(dict.fromkeys(guessed)),
        renamed=renamed.names,
        left_out=(*left_out, *prompts_left_out, *reruns_left_out, *restarted_counter_reasons(by_name)),
        unselected=(
            *dict.fromkeys(str(run) for run, _ in named_logs if run not in selected),
            *(log.name for log in excluded),
        ),
        versions_differ=reading.versions_differ,
    )


def _refuse_duplicate_runs(sources: Sequence[str], logs_by_source: Sequence[Sequence[Log]]) -> None:
    """Raise ComparisonError if two sources hold the same run, which would be compared with itself."""
    seen_places: dict[tuple[object, str | None], tuple[int, str]] = {}
    for number, logs in enumerate(logs_by_source):
        for log in logs:
            key, place = (_file_identity(log.place), log.run_id), printable(log.place)
            first_source, first_place = seen_places.setdefault(key, (number, place))
            if (first_source, first_place) != (number, place):
                problem = f"{list_names([sources[first_source], sources[number]])} both hold {place}"
                if first_source == number:
                    problem = f"{first_place} and {place} are one file"
                raise ComparisonError(
                    f"sources: {problem}, and a run compared with itself always agrees; give each arm its "
                    "own runs"
                )


def _file_identity(place: str) -> object:
    """Return a key that is the same for every name and link of a file."""
    try:
        status = os.stat(place)
    except (OSError, ValueError):
        return place
    return status.st_dev, status.st_ino


def _rename_logs(logs: Mapping[RunName, Log], renamed: RenamedRuns) -> dict[RunName, Log]:
    return {
        run: replace(
            log,
            metrics=metrics,
            unread=_add_renamed_keys(log.unread, renamed.names),
            dropped=_add_renamed_keys(log.dropped, renamed.names),
        )
        for (run, log), metrics in zip(logs.items(), renamed.metrics, strict=True)
    }


def _add_renamed_keys(unread: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """Return a mapping that also has abrun's names of its metrics, from other runs or by recognition."""
    _, recognised = recognise_metrics(unread)
    our_names = {**{theirs: name for name, theirs in recognised.items()}, **names}
    return {**unread, **{our_names[name]: content for name, content in unread.items() if name in our_names}}


def _mark_diverged(logs: Mapping[RunName, Log]) -> dict[RunName, Log]:
    """Return the logs, those as failed that break off with NaN or Inf where other runs go on."""
    last_steps = {run: last_step(log) for run, log in logs.items()}
    longest = max(last_steps.values(), default=0)
    marked = dict(logs)
    for run, log in logs.items():
        training = {metric: log.metrics[metric] for metric in Guards().finite if metric in log.metrics}
        ends = {metric: series.values[-1] for metric, series in training.items() if len(series.steps)}
        broken = [metric for metric, value in ends.items() if not np.isfinite(value)]
        if log.status == "unknown" and broken and last_steps[run] < longest:
            failure = f"its log ends with {list_names(broken)} not finite, others go on to step {longest}"
            marked[run] = replace(log, status="failed", failure=failure)
    return marked


def _make_run(name: RunName, log: Log, *, seed_is_unknown: bool) -> RecordedRun:
    identity = log.identity if log.identity == name else None  # None if the user renamed the run
    return RecordedRun(
        **log.recording_fields(),
        name=name,
        status=log.status,
        identity={"arm": identity.arm, "seed": identity.seed, "rerun": identity.rerun} if identity else None,
        notes=(*log.notes, Code.SEED_NOT_KNOWN(place=log.place)) if seed_is_unknown else log.notes,
    )


def _order_arms(
    runs: Mapping[RunName, Log], reading: ReadingOptions, *, has_several_sources: bool
) -> tuple[tuple[str, ...], list[Reason]]:
    arms = list(dict.fromkeys(run.arm for run in runs))
    baseline = reading.baseline
    if len(arms) < 2 and not (reading.allows_one_arm or reading.may_be_one_arm):
        raise ComparisonError(
            f"arms: found only {list_names(arms)} in {counted(len(runs), 'run')}, but a comparison needs "
            "two; add a source, or name the arms, such as --pattern '{arm}-s{seed}'"
        )
    guessed = []
    if baseline is not None:
        if baseline not in arms:
            raise ComparisonError(f"--baseline: got '{printable(baseline)}'; allowed: {list_names(arms)}")
        baseline_arm = baseline
    elif BASELINE in arms:
        baseline_arm = BASELINE
    elif has_several_sources or len(arms) == 1:
        baseline_arm = arms[0]
    else:
        baseline_arm = guess_baseline(arms)
        other_arms = list_names([arm for arm in arms if arm != baseline_arm])
        guessed = [Code.BASELINE_GUESSED(baseline=baseline_arm, others=other_arms)]
    return (baseline_arm, *(arm for arm in arms if arm != baseline_arm)), guessed


def _refuse_without_numbers(runs: Mapping[RunName, Log], arms: Sequence[str]) -> None:
    """Raise ComparisonError for an arm without any number: these are probably the wrong files.

    A single run without numbers among others is data, and so is a failed run.
    """
    for arm in arms:
        logs = [log for run, log in runs.items() if run.arm == arm]
        if any(log.metrics or log.status != "unknown" for log in logs):
            continue
        first_log = logs[0]
        note = first_log.notes[0] if first_log.notes else "no metric has a number in it"
        problem = f"{first_log.place}: {note}; give files with a metric's numbers by step"
        reason = next(iter(first_log.unread.values()), problem)
        raise ComparisonError(f"arms: {arm!r} has no numbers in {counted(len(logs), 'run')}: {reason}")


def _leave_out_other_reruns(
    runs: Mapping[RunName, Log], arms: Sequence[str]
) -> tuple[dict[RunName, Log], list[Reason]]:
    """Return the runs without A/A reruns of other arms than the baseline, and a reason that names those.

    Only the baseline's reruns show the noise floor; as further runs of an arm, they would repeat a seed.
    """
    reruns = [run for run in runs if run.rerun and run.arm != arms[0]]
    remaining = {run: log for run, log in runs.items() if run not in reruns}
    unrepeated = [run for run in reruns if replace(run, rerun=0) not in remaining]
    if unrepeated:
        raise ComparisonError(
            f"{unrepeated[0]!s}: named as an A/A rerun (-aa) of a run that is not here; add that run, or "
            "leave this one out with --exclude"
        )
    return remaining, [Code.RERUNS_LEFT_OUT(runs=[str(run) for run in reruns])] if reruns else []


def share_prompts(logs: Mapping[RunName, Log]) -> tuple[dict[RunName, Log], list[Reason]]:
    """Return the logs with only the prompts that all of them have, and the metrics that lost some.

    A metric that some run lacks stays as it is. Raises ComparisonError for a metric without a shared prompt.
    """
    left_out: list[Reason] = []
    shared_logs = dict(logs)
    if any(log.axis != "prompts" for log in logs.values()):
        return shared_logs, left_out
    for metric in sorted({metric for log in logs.values() for metric in log.metrics}):
        series = [log.metrics[metric] for log in logs.values() if metric in log.metrics]
        if len(series) < len(logs):
            continue
        grids = [metric_series.steps for metric_series in series]
        shared, all_prompts = reduce(np.intersect1d, grids), reduce(np.union1d, grids)
        if len(shared) == len(all_prompts):
            continue
        if not len(shared):
            places = " and ".join([log.place for log in logs.values()][:2])
            raise ComparisonError(
                f"{metric}: no prompt is in every run ({places}); score all runs on the same prompts"
            )
        left_out.append(Code.PROMPTS_NOT_SHARED(metric=metric, shared=len(shared), total=len(all_prompts)))
        for name, log in shared_logs.items():
            prompts = log.metrics[metric]
            inside = np.isin(prompts.steps, shared)
            cut_series = Series(prompts.steps[inside], prompts.values[inside])
            shared_logs[name] = replace(log, metrics={**log.metrics, metric: cut_series})
    return shared_logs, left_out
