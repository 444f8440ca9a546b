"""Runs that other trainers made, as an experiment to compare."""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from abrun.errors import ComparisonError
from abrun.logs import Log, read_logs
from abrun.logs.aliases import Aliases, RenamedRuns, parse_aliases, recognise_metrics, rename_all
from abrun.logs.guessing import Guess, differ_only_by_numbers, guess_baseline, guess_runs
from abrun.logs.log import list_names, printable
from abrun.logs.naming import RunFilter, has_arm_field, name_runs, name_seeds, strip_suffix
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Compare
from abrun.recipe.experiment import BASELINE
from abrun.recorded.experiment import Experiment, RecordedRun
from abrun.recorded.selection import Reading, restarted
from abrun.regular_files import exists, is_directory
from abrun.runs.layout import RunName

T = TypeVar("T")
NAMED_SOURCE = r"([^/:=]+)=(.+)"  # ARM=SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of a comparison, the logs that each holds, and how their runs are named and selected."""

    named: Sequence[tuple[str | None, str]]  # arm, source
    logs_of: Sequence[Sequence[Log]]
    aliases: Aliases
    reading: Reading

    @property
    def logs(self) -> list[Log]:
        return [log for logs in self.logs_of for log in logs]

    @property
    def has_arms(self) -> bool:
        return any(arm for arm, _ in self.named)

    @property
    def pattern(self) -> str | None:
        return self.reading.pattern

    @property
    def selects(self) -> RunFilter:
        return self.reading.selection.selects


def read_foreign(sources: Sequence[str], reading: Reading) -> Sources:
    """Read what sources hold. Raises ComparisonError or StoreError, one line, where that cannot be done."""
    aliases = parse_aliases(reading.aliases)
    named = [_named_source(source) for source in sources]
    logs_of = [read_logs(source, group=reading.group, step_column=reading.step_column) for _, source in named]
    _refuse_twice(sources, logs_of)
    return Sources(named=named, logs_of=logs_of, aliases=aliases, reading=reading)


def foreign_experiment(sources: Sources, reading: Reading) -> Experiment:
    """The runs of some sources, paired by seed unless `reading` says otherwise.

    Several sources are an arm each, named `ARM=SOURCE` or after the folder or file, unless their runs' names
    say the arm; one source holds all arms. The baseline is the arm `baseline`, else one called "baseline",
    else the first source's. What follows from neither is guessed, and `guessed` says so. Runs that `seeds`
    and `exclude` do not take are left out first: nothing is refused for them. `alone` guesses no seeds.
    Raises ComparisonError, one line, where that cannot be told.
    """
    selection, paired, alone = reading.selection, not reading.unpaired, reading.alone
    logs_of, excluded = selection.without_excluded(sources.logs_of)
    sources = replace(sources, logs_of=logs_of, reading=reading)
    if reading.pattern is None:
        _refuse_experiments_as_arms(sources)
    if alone:
        sources = replace(sources, named=_as_one_arm(sources))
    guess = _identified(sources, paired=paired, may_guess=not alone)
    if paired and not (guess.paired or reading.may_unpair):
        guess = _identified(sources, paired=True, may_guess=False)
    paired = paired and guess.paired
    named = list(zip(guess.names, sources.logs, strict=True))
    selected, left_out = selection.apply(named, excluded, paired=paired and not alone)
    renamed = rename_all([log.metrics for log in selected.values()], sources.aliases)
    by_name = _by_our_names(selected, renamed)
    arms, of_baseline = _arms(by_name, reading, several=len(sources.named) > 1)
    _refuse_without_numbers(by_name, arms)
    _refuse_other_reruns(by_name, arms[0])
    ordered = sorted(by_name, key=lambda run: (run.seed, arms.index(run.arm), run.rerun))
    guessed = [
        *(Code.LOG_READ_AS(guess=text) for log in by_name.values() for text in log.guesses),
        *guess.guessed,
        *of_baseline,
        *(Code.LOG_READ_AS(guess=text) for text in renamed.guessed),
    ]
    return Experiment(
        name=_experiment_name(sources.named, arms),
        arms=arms,
        compare=Compare(paired=paired),
        runs={run: _run(run, by_name[run], numbered=not guess.seeds_known) for run in ordered},
        seeds_known=guess.seeds_known,
        guessed=tuple(dict.fromkeys(guessed)),
        renamed=renamed.names,
        left_out=(*left_out, *restarted(by_name)),
        versions_differ=reading.versions_differ,
    )


def _by_our_names(logs: Mapping[RunName, Log], renamed: RenamedRuns) -> dict[RunName, Log]:
    return {
        run: replace(
            log,
            metrics=metrics,
            unread=_renamed(log.unread, renamed.names),
            dropped=_renamed(log.dropped, renamed.names),
        )
        for (run, log), metrics in zip(logs.items(), renamed.metrics, strict=True)
    }


def _renamed(unread: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """Return values by our names too: those that other runs gave them or, without numbers, would have."""
    _, found = recognise_metrics(unread)
    ours = {**{theirs: name for name, theirs in found.items()}, **names}
    return {**unread, **{ours[name]: where for name, where in unread.items() if name in ours}}


def _run(name: RunName, log: Log, *, numbered: bool) -> RecordedRun:
    identity = log.identity if log.identity == name else None  # else it was given another name by hand
    return RecordedRun(
        **log.recording_fields(),
        name=name,
        status=log.status,
        identity={"arm": identity.arm, "seed": identity.seed, "rerun": identity.rerun} if identity else None,
        notes=(*log.notes, Code.SEED_NOT_KNOWN(place=log.place)) if numbered else log.notes,
    )


# --- names ---


def _named_source(source: str) -> tuple[str | None, str]:
    named = re.fullmatch(NAMED_SOURCE, source, re.DOTALL)
    if named and not exists(Path(source)):
        return printable(named[1]), named[2]
    return None, source


def _identified(sources: Sources, *, paired: bool, may_guess: bool) -> Guess:
    """Return which run each log is: as `_names` says, or else as guessed."""
    may_guess = may_guess and sources.pattern is None
    try:
        names = _names(sources, unpaired=not paired, may_guess=may_guess)
    except ComparisonError:
        guess = _guessed(sources) if may_guess else None
        if guess is None:
            _refuse_one_arm(sources)
            raise
        return guess
    seeds_known = paired or names == _unless_refused(_names, sources, unpaired=False)
    guess = Guess(names=names, paired=paired, seeds_known=seeds_known, guessed=[])
    selected = [run for run in names if sources.selects(run)]
    seeds: dict[str, set[int]] = {}
    for run in selected:
        seeds.setdefault(run.arm, set()).add(run.seed)
    if paired and may_guess and len(seeds) > 1 and not set.intersection(*seeds.values()):
        return replace(guess, paired=False, guessed=[Code.ARMS_SHARE_NO_SEED()])
    by_themselves = all(log.identity for log in sources.logs)
    if by_themselves or sources.pattern is not None or len(names) == len(seeds) or not seeds_known:
        return guess
    how = f"names such as '{printable(sources.logs[0].name)}'"
    first = names[0]
    return replace(guess, guessed=[Code.SEEDS_FROM(how=how, arm=printable(first.arm), seed=first.seed)])


def _as_one_arm(sources: Sources) -> Sequence[tuple[str | None, str]]:
    """A folder, or files of one, whose runs name their seeds and no arms: the arm of the folder's name.

    Raises ComparisonError where more than numbers tells its runs apart: two arms are not to pass as one.
    """
    logs, named = sources.logs, sources.named
    folders = {source if len(named) == 1 else str(Path(source).parent) for _, source in named}
    if sources.has_arms or len(folders) > 1 or len(named) not in (1, len(logs)):
        return named
    options = {"pattern": sources.pattern, "run_filter": sources.selects}
    if _unless_refused(name_runs, logs, **options) or not _unless_refused(name_seeds, logs, "any", **options):
        return named
    (folder,) = folders
    if len(logs) > 1 and not differ_only_by_numbers(logs):
        names = list_names([log.name for log in logs])
        raise ComparisonError(
            Code.MORE_THAN_SEEDS_DIFFERS(folder=printable(folder), num_runs=len(logs), names=names)
        )
    return [(_arm_of(folder), source) for _, source in named]


def _refuse_one_arm(sources: Sources) -> None:
    """Raise ComparisonError where the runs of the only source say their seeds, and no arms."""
    if len(sources.named) > 1 or len(sources.logs) < 2 or sources.pattern is not None:
        return
    names = _unless_refused(name_seeds, sources.logs, "any", run_filter=sources.selects)
    if names is None:
        return
    runs = {run for run in names if sources.selects(run) and not run.rerun}
    source = printable(sources.named[0][1])
    raise ComparisonError(Code.SOURCE_OF_ONE_ARM(source=source, num_seeds=len(runs)))


def _guessed(sources: Sources) -> Guess | None:
    logs, num_sources = sources.logs, len(sources.named)
    if num_sources == 1:
        return guess_runs(logs, run_filter=sources.selects)
    if len(logs) == num_sources > 2 and not sources.has_arms:
        guess = guess_runs(_named_from_common_folder(sources), run_filter=sources.selects)
        if guess is not None and guess.seeds_known:  # a run each, as `runs/*.csv` is
            return guess
    _refuse_several_arms(sources)
    arms = _arms_of(sources)
    arm_of_logs = [arm for arm, of in zip(arms, sources.logs_of, strict=True) for _ in of]
    guess = guess_runs(logs, arm_of_logs, sources.selects)
    if guess is not None and len(logs) == num_sources and not sources.has_arms:
        guess = replace(guess, guessed=[Code.SOURCES_ARE_ARMS(num_sources=num_sources), *guess.guessed])
    return guess


def _unless_refused(
    name: Callable[..., list[RunName]], *arguments: Any, **options: Any
) -> list[RunName] | None:
    """Return the names that a rule gives; None where it refuses the logs."""
    try:
        return name(*arguments, **options)
    except ComparisonError:
        return None


def _names(sources: Sources, *, unpaired: bool, may_guess: bool = False) -> list[RunName]:
    """The run that each log is, in the order of the sources and their logs."""
    logs, pattern, selects = sources.logs, sources.pattern, sources.selects
    says_both = pattern is not None and has_arm_field(pattern)
    if says_both and sources.has_arms:
        raise ComparisonError(Code.ARM_NAMED_TWICE(pattern=pattern))
    by_runs = all(log.identity for log in logs) or says_both or len(sources.named) == 1
    if by_runs and not sources.has_arms:
        return name_runs(logs, pattern, unpaired=unpaired, run_filter=selects)
    if pattern is None and not sources.has_arms and all(len(of) == 1 for of in sources.logs_of):
        try:  # as `runs/*.csv` is: a run each
            return name_runs(_named_from_common_folder(sources), run_filter=selects)
        except ComparisonError:
            if may_guess and len(logs) > 2:
                raise
            pass  # an arm each
    of_arm: dict[str, list[Log]] = {}
    for arm, of in zip(_arms_of(sources), sources.logs_of, strict=True):
        of_arm.setdefault(arm, []).extend(of)
    found = {
        id(log): run
        for arm, of in of_arm.items()
        for log, run in zip(
            of, name_seeds(of, arm, pattern, unpaired=unpaired, run_filter=selects), strict=True
        )
    }
    return [found[id(log)] for log in logs]


def _named_from_common_folder(sources: Sources) -> list[Log]:
    logs, paths = sources.logs, [Path(source).resolve() for _, source in sources.named]
    if not all(exists(path) for path in paths):
        return logs
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [
        log
        if log.run_id
        else replace(log, name=printable(path.relative_to(common).as_posix().replace("\\", "/")))
        for path, log in zip(paths, logs, strict=True)
    ]


def _arms_of(sources: Sources) -> list[str]:
    """An arm for each source; one without a name goes by its folder or file, or what sets the paths apart.

    Raises ComparisonError where a name that was given is another source's too.
    """
    arms = [arm or _arm_of(source) for arm, source in sources.named]
    given = [arm for arm, _ in sources.named]
    twice = next((arm for arm in arms if 1 < arms.count(arm) != given.count(arm)), None)
    if twice is None:
        return arms
    parts = [list(Path(source).resolve().parts) for _, source in sources.named]
    if not sources.has_arms and all(exists(Path(source)) for _, source in sources.named):
        while len({of[-1] for of in parts}) == 1:
            parts = [of[:-1] for of in parts]
        apart = [printable(strip_suffix(of[-1])) for of in parts]
        if len(set(apart)) == len(apart):
            return apart
    both = [source for arm, (_, source) in zip(arms, sources.named, strict=True) if arm == twice]
    raise ComparisonError(
        Code.SOURCES_OF_ONE_NAME(sources=list_names(both), arm=twice, first=printable(both[0]))
    )


def _arm_of(source: str) -> str:
    """The arm that a source without a name is: its folder or file, or the last part of a wandb path."""
    path = (
        source.split(":", 1)[1] if re.match(r"(tb|tensorboard|wandb|csv|jsonl|parquet):", source) else source
    )
    name = Path(path).resolve().name if exists(Path(path)) else path.rstrip("/").split("/")[-1]
    return printable(strip_suffix(name.rpartition("\\")[2]))


def _arms(
    runs: Mapping[RunName, Log], reading: Reading, *, several: bool
) -> tuple[tuple[str, ...], list[Reason]]:
    """The arms, the baseline first, and what of that is guessed."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    baseline = reading.baseline
    if len(arms) < 2 and not reading.alone:
        raise ComparisonError(Code.ONE_ARM_OF_RUNS(arms=list_names(arms), num_runs=len(runs)))
    guessed = []
    if baseline is not None:
        if baseline not in arms:
            raise ComparisonError(
                Code.NOT_ALLOWED(field="--baseline", got=f"'{printable(baseline)}'", allowed=list_names(arms))
            )
        first = baseline
    elif BASELINE in arms:
        first = BASELINE
    elif several or len(arms) == 1:
        first = arms[0]
    else:
        first = guess_baseline(arms)
        others = list_names([arm for arm in arms if arm != first])
        guessed = [Code.BASELINE_GUESSED(baseline=first, others=others)]
    return (first, *(arm for arm in arms if arm != first)), guessed


def _refuse_twice(sources: Sequence[str], logs_of: Sequence[Sequence[Log]]) -> None:
    """A run that two sources hold would be compared with itself."""
    held: dict[tuple[object, str | None], tuple[int, str]] = {}
    for number, (source, logs) in enumerate(zip(sources, logs_of, strict=True)):
        for log in logs:
            first, place = held.setdefault((_file_of(log.place), log.run_id), (number, log.place))
            if (first, place) != (number, log.place):
                if first == number:
                    places = f"{printable(place)} and {printable(log.place)}"
                    raise ComparisonError(Code.RUN_GIVEN_TWICE(places=places))
                both = list_names([sources[first], source])
                raise ComparisonError(Code.RUN_IN_TWO_SOURCES(sources=both, place=printable(log.place)))


def _refuse_experiments_as_arms(sources: Sources) -> None:
    """A source is to be one arm, and its runs themselves say that they are of several."""
    runs = [log.identity for log in sources.logs]
    by_runs = None not in runs and len(set(runs)) == len(runs) and not sources.has_arms
    if len(sources.named) == 1 or by_runs:
        return
    for (_, source), logs in zip(sources.named, sources.logs_of, strict=True):
        arms = list(dict.fromkeys(log.identity.arm for log in logs if log.identity))
        if len(arms) > 1 and all(log.identity for log in logs):
            folder = Path(logs[0].place).parent
            one = f"the folder of one, such as {folder}" if is_directory(Path(source)) else "the runs of one"
            raise ComparisonError(
                Code.SOURCE_OF_SEVERAL_ARMS(
                    source=printable(source), arms=list_names(arms), example=printable(one)
                )
            )


def _refuse_several_arms(sources: Sources) -> None:
    """Raise ComparisonError for a source, given as one arm, whose runs name several arms and share seeds."""
    for (_, source), logs in zip(sources.named, sources.logs_of, strict=True):
        names = _unless_refused(name_runs, logs, run_filter=sources.selects)
        if names is None:
            continue
        names_of: dict[str, list[str]] = {}
        for run, log in zip(names, logs, strict=True):
            names_of.setdefault(run.arm, []).append(log.name)
        if len(names_of) > 1 and len({run.seed for run in names}) < len(set(names)):
            *_, last = names_of.values()
            first, end = min(last), max(last)
            shared = next(
                (at for at, both in enumerate(zip(first, end, strict=False)) if len({*both}) > 1), 0
            )
            raise ComparisonError(
                Code.SOURCE_OF_ARMS_AND_SEEDS(
                    source=printable(source),
                    arms=list_names(list(names_of)),
                    pattern=shlex.quote(f"{first[:shared]}*"),
                )
            )


def _file_of(place: str) -> object:
    """What stays the same under every name and link of a file."""
    try:
        status = os.stat(place)
    except (OSError, ValueError):
        return place
    return status.st_dev, status.st_ino


def _refuse_without_numbers(runs: Mapping[RunName, Log], arms: Sequence[str]) -> None:
    """An arm without any number is the wrong files; one such run of several is data, and one that failed."""
    for arm in arms:
        logs = [log for run, log in runs.items() if run.arm == arm]
        if any(log.metrics or log.status != "unknown" for log in logs):
            continue
        first = logs[0]
        note = first.notes[0] if first.notes else Code.NOTHING_NUMERIC()
        why = next(iter(first.unread.values()), Code.NO_NUMBERS(place=first.place, note=note))
        raise ComparisonError(Code.ARM_WITHOUT_NUMBERS(arm=arm, num_runs=len(logs), why=why))


def _refuse_other_reruns(runs: Mapping[RunName, Log], baseline: str) -> None:
    other = next((run for run in runs if run.rerun and run.arm != baseline), None)
    if other is not None:
        raise ComparisonError(Code.RERUN_OF_TREATMENT(run=str(other), baseline=baseline))


def _experiment_name(sources: Sequence[tuple[str | None, str]], arms: Sequence[str]) -> str:
    """A name that can be a folder's."""
    text = _arm_of(sources[0][1]) if len(sources) == 1 else "-vs-".join(arms)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "comparison"
