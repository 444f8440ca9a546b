"""Runs that other trainers made, as an experiment to compare."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from abrun.compare.read.experiment import Experiment, RecordedRun
from abrun.compare.read.selection import EVERYTHING, Selection, restarted
from abrun.errors import ComparisonError
from abrun.layout import RunName
from abrun.logs import Log, read_logs
from abrun.logs.aliases import Renamed, apply_to_all, parse, recognised
from abrun.logs.guessing import Guess, guess_baseline, guess_runs, told_by_numbers
from abrun.logs.log import listed, printable
from abrun.logs.naming import Selects, name_runs, name_seeds, names_both, stem
from abrun.recipe import BASELINE, Compare

T = TypeVar("T")
NAMED_SOURCE = r"([^/:=]+)=(.+)"  # ARM=SOURCE


def load_foreign(
    sources: Sequence[str],
    *,
    compare: Compare,
    name: str | None = None,
    pattern: str | None = None,
    group: str | None = None,
    baseline: str | None = None,
    aliases: Sequence[str] = (),
    step_column: str | None = None,
    selection: Selection = EVERYTHING,
    versions_differ: bool = False,
    alone: bool = False,
    may_unpair: bool = True,
) -> Experiment:
    """The runs of some sources, paired by seed unless `compare` says otherwise.

    Several sources are an arm each, named `ARM=SOURCE` or after the folder or file, unless their runs' names
    say the arm; one source holds all arms. The baseline is the arm `baseline`, else one called "baseline",
    else the first source's. What follows from neither is guessed, and `guessed` says so. What `selection`
    does not take is left out first: nothing is refused for it. `alone` lets one arm pass, and guesses no
    seeds: a reference is its counterpart. `may_unpair`: runs that do not say their seeds, or share none, are
    independent. Raises ComparisonError or StoreError, one line, where that cannot be told.
    """
    given = parse(aliases)
    named_sources = [_named_source(source) for source in sources]
    logs_of = [read_logs(source, group=group, step_column=step_column) for _, source in named_sources]
    _refuse_twice(sources, logs_of)
    logs_of, excluded = selection.without_excluded(logs_of)
    if pattern is None:
        _refuse_experiments_as_arms(named_sources, logs_of)
    selects = selection.selects
    if alone:
        named_sources = _as_one_arm(named_sources, logs_of, pattern, selects)
    identify = partial(_identified, named_sources, logs_of, pattern, selects)
    found = identify(paired=compare.paired, may_guess=not alone)
    if compare.paired and not (found.paired or may_unpair):
        found = identify(paired=True, may_guess=False)
    named = list(zip(found.names, [log for logs in logs_of for log in logs], strict=True))
    selected, left_out = selection.apply(
        named, excluded, paired=compare.paired and found.paired and not alone
    )
    renamed = apply_to_all([log.metrics for log in selected.values()], given)
    by_name = _by_our_names(selected, renamed)
    arms, of_baseline = _arms(by_name, baseline, several=len(sources) > 1, fewest=1 if alone else 2)
    _refuse_without_numbers(by_name, arms)
    _refuse_other_reruns(by_name, arms[0])
    ordered = sorted(by_name, key=lambda run: (run.seed, arms.index(run.arm), run.rerun))
    read_as = [guess for log in by_name.values() for guess in log.guesses]
    said = [*read_as, *found.said, *of_baseline, *renamed.guessed]
    return Experiment(
        name=name or _experiment_name(named_sources, arms),
        arms=arms,
        compare=compare.model_copy(update={"paired": compare.paired and found.paired}),
        runs={run: _run(run, by_name[run], numbered=not found.seeds_known) for run in ordered},
        seeds_known=found.seeds_known,
        guessed=tuple(dict.fromkeys(said)),
        renamed=renamed.names,
        left_out=(*left_out, *restarted(by_name)),
        versions_differ=versions_differ,
    )


def _by_our_names(logs: Mapping[RunName, Log], renamed: Renamed) -> dict[RunName, Log]:
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
    """By our names too: by those that other runs gave them, or, where none has numbers, would have."""
    _, found = recognised(unread)
    ours = {**{theirs: name for name, theirs in found.items()}, **names}
    return {**unread, **{ours[name]: where for name, where in unread.items() if name in ours}}


def _run(name: RunName, log: Log, *, numbered: bool) -> RecordedRun:
    identity = log.identity if log.identity == name else None  # else it was given another name by hand
    return RecordedRun(
        name=name,
        place=log.place,
        status=log.status,
        failure=log.failure,
        identity={"arm": identity.arm, "seed": identity.seed, "rerun": identity.rerun} if identity else None,
        config=log.config,
        environment=log.environment,
        metrics=log.metrics,
        code=log.code,
        notes=(*log.notes, f"numbered, its seed is not known: {log.place}") if numbered else log.notes,
        unread=log.unread,
        dropped=log.dropped,
    )


# --- names ---


def _named_source(source: str) -> tuple[str | None, str]:
    named = re.fullmatch(NAMED_SOURCE, source, re.DOTALL)
    if named and not Path(source).exists():
        return printable(named[1]), named[2]
    return None, source


def _identified(
    sources: Sequence[tuple[str | None, str]],
    logs_of: Sequence[Sequence[Log]],
    pattern: str | None,
    selects: Selects,
    *,
    paired: bool,
    may_guess: bool,
) -> Guess:
    """Which run each log is: as `_names` says, or else as guessed."""
    logs = [log for logs in logs_of for log in logs]
    try:
        names = _names(sources, logs_of, pattern, selects, unpaired=not paired, may_guess=may_guess)
        known = paired or names == _names_by_seed(sources, logs_of, pattern, selects)
        found = Guess(names=names, paired=paired, seeds_known=known, said=[])
    except ComparisonError:
        guess = _guessed(sources, logs_of, selects) if may_guess and pattern is None else None
        if guess is None:
            if len(sources) == 1 and len(logs) > 1 and pattern is None:
                _refuse_one_arm(sources[0][1], logs, selects)
            raise
        return guess
    selected = [run for run in names if selects(run)]
    arms = dict.fromkeys(run.arm for run in selected)
    seeds = [{run.seed for run in selected if run.arm == arm} for arm in arms]
    if paired and may_guess and pattern is None and len(seeds) > 1 and not set.intersection(*seeds):
        said = "runs are independent: the arms have no seed in common"
        return replace(found, paired=False, said=[said])
    if all(log.identity for log in logs) or pattern is not None or len(names) == len(seeds):
        return found
    first, log = names[0], logs[0]
    shown = f"'{printable(log.name)}': {printable(first.arm)}, seed {first.seed}"
    return replace(found, said=[f"arms and seeds from names such as {shown}"] if known else [])


def _as_one_arm(
    sources: Sequence[tuple[str | None, str]],
    logs_of: Sequence[Sequence[Log]],
    pattern: str | None,
    selects: Selects,
) -> Sequence[tuple[str | None, str]]:
    """A folder, or files of one, whose runs name their seeds and no arms: the arm of the folder's name.

    Raises ComparisonError where more than numbers tells its runs apart: two arms are not to pass as one.
    """
    logs = [log for logs in logs_of for log in logs]
    folders = {source if len(sources) == 1 else str(Path(source).parent) for _, source in sources}
    if any(arm for arm, _ in sources) or len(folders) > 1 or len(sources) not in (1, len(logs)):
        return sources
    try:
        name_runs(logs, pattern, selects=selects)
        return sources
    except ComparisonError:
        try:
            name_seeds(logs, "one", pattern, selects=selects)
        except ComparisonError:
            return sources
    (folder,) = folders
    if len(logs) > 1 and not told_by_numbers(logs):
        raise ComparisonError(
            f"arms: got {printable(folder)}, whose {len(logs)} runs name their seeds, no arms, and more that "
            f"differs ({listed([log.name for log in logs])}); where all are of one arm, name it: "
            f"ARM={printable(folder)}"
        )
    return [(_arm_of(folder), source) for _, source in sources]


def _refuse_one_arm(source: str, logs: Sequence[Log], selects: Selects) -> None:
    """Raises ComparisonError where the runs of the only source say their seeds, and no arms."""
    try:
        runs = {run for run in name_seeds(logs, "one", selects=selects) if selects(run) and not run.rerun}
    except ComparisonError:
        return
    s = "s" * (len(runs) != 1)
    raise ComparisonError(
        f"arms: {printable(source)} holds one arm of {len(runs)} seed{s}; give the other arm's folder "
        f"(abrun compare {printable(source)} OTHER), or --reference FILE"
    )


def _guessed(
    sources: Sequence[tuple[str | None, str]], logs_of: Sequence[Sequence[Log]], selects: Selects
) -> Guess | None:
    logs = [log for logs in logs_of for log in logs]
    if len(sources) == 1:
        return guess_runs(logs, selects=selects)
    if len(logs) == len(sources) > 2 and not any(arm for arm, _ in sources):
        common = _named_from_common_folder(sources, logs)
        guess = guess_runs(common, selects=selects)  # a run each, as `runs/*.csv` is
        if guess is not None and guess.seeds_known:
            return guess
    _refuse_several_arms(sources, logs_of, selects)
    arms = _arms_of(sources)
    guess = guess_runs(logs, [arm for arm, of in zip(arms, logs_of, strict=True) for _ in of], selects)
    if guess is not None and len(logs) == len(sources) and not any(arm for arm, _ in sources):
        said = f"each of the {len(sources)} sources is an arm; where they are seeds of one, name their folder"
        guess = replace(guess, said=[said, *guess.said])
    return guess


def _names_by_seed(
    sources: Sequence[tuple[str | None, str]],
    logs_of: Sequence[Sequence[Log]],
    pattern: str | None,
    selects: Selects,
) -> list[RunName] | None:
    """As `_names` of runs to pair; None where they do not say their seeds."""
    try:
        return _names(sources, logs_of, pattern, selects, unpaired=False)
    except ComparisonError:
        return None


def _names(
    sources: Sequence[tuple[str | None, str]],
    logs_of: Sequence[Sequence[Log]],
    pattern: str | None,
    selects: Selects,
    *,
    unpaired: bool,
    may_guess: bool = False,
) -> list[RunName]:
    """The run that each log is, in the order of the sources and their logs."""
    logs = [log for logs in logs_of for log in logs]
    if pattern is not None and names_both(pattern) and any(arm for arm, _ in sources):
        raise ComparisonError(
            f"--pattern: got {pattern!r} and sources with a name; allowed: one of them to say the arm; "
            "leave out {arm} or the names"
        )
    by_runs = all(log.identity for log in logs) or (pattern is not None and names_both(pattern))
    if len(sources) == 1 and sources[0][0] is None:
        by_runs = True
    if by_runs and not any(arm for arm, _ in sources):
        return name_runs(logs, pattern, unpaired=unpaired, selects=selects)
    unnamed_files = pattern is None and all(
        arm is None and len(of) == 1 for (arm, _), of in zip(sources, logs_of, strict=True)
    )
    if unnamed_files:  # as `runs/*.csv` is: a run each
        try:
            return name_runs(_named_from_common_folder(sources, logs), selects=selects)
        except ComparisonError:
            if may_guess and len(logs) > 2:
                raise
            pass  # an arm each
    arms = _arms_of(sources)
    together: dict[str, list[Log]] = {}
    for arm, of in zip(arms, logs_of, strict=True):
        together.setdefault(arm, []).extend(of)
    found = {
        id(log): run
        for arm, of in together.items()
        for log, run in zip(of, name_seeds(of, arm, pattern, unpaired=unpaired, selects=selects), strict=True)
    }
    return [found[id(log)] for log in logs]


def _named_from_common_folder(sources: Sequence[tuple[str | None, str]], logs: Sequence[Log]) -> list[Log]:
    paths = [Path(source).resolve() for _, source in sources]
    if not all(path.exists() for path in paths):
        return list(logs)
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [
        log
        if log.run_id
        else replace(log, name=printable(path.relative_to(common).as_posix().replace("\\", "/")))
        for path, log in zip(paths, logs, strict=True)
    ]


def _arms_of(sources: Sequence[tuple[str | None, str]]) -> list[str]:
    """An arm for each source; one without a name goes by its folder or file, or what sets the paths apart.

    Raises ComparisonError where a name that was given is another source's too.
    """
    arms = [arm or _arm_of(source) for arm, source in sources]
    counts = {arm: arms.count(arm) for arm in arms}
    twice = next((arm for arm, count in counts.items() if count > 1 and count != _given(sources, arm)), None)
    if twice is None:
        return arms
    parts = [list(Path(source).resolve().parts) for _, source in sources]
    if not any(arm for arm, _ in sources) and all(Path(source).exists() for _, source in sources):
        while len({of[-1] for of in parts}) == 1:
            parts = [of[:-1] for of in parts]
        apart = [printable(stem(of[-1])) for of in parts]
        if len(set(apart)) == len(apart):
            return apart
    both = [source for arm, (_, source) in zip(arms, sources, strict=True) if arm == twice]
    raise ComparisonError(
        f"sources: got {listed(both)}, which would all be the arm {twice!r}; "
        f"name them, such as baseline={printable(both[0])}"
    )


def _given(sources: Sequence[tuple[str | None, str]], arm: str) -> int:
    return sum(given == arm for given, _ in sources)


def _arm_of(source: str) -> str:
    """The arm that a source without a name is: its folder or file, or the last part of a wandb path."""
    path = (
        source.split(":", 1)[1] if re.match(r"(tb|tensorboard|wandb|csv|jsonl|parquet):", source) else source
    )
    name = Path(path).resolve().name if Path(path).exists() else path.rstrip("/").split("/")[-1]
    return printable(stem(name.rpartition("\\")[2]))


def _arms(
    runs: Mapping[RunName, Log], baseline: str | None, several: bool, fewest: int
) -> tuple[tuple[str, ...], list[str]]:
    """The arms, the baseline first, and what of that is guessed."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    if len(arms) < fewest:
        raise ComparisonError(
            f"arms: got only {listed(arms)}, of {len(runs)} runs; a comparison needs two: add a source, "
            "or say how arms are named, such as --pattern '{arm}-s{seed}'"
        )
    guessed = []
    if baseline is not None:
        if baseline not in arms:
            raise ComparisonError(f"--baseline: got '{printable(baseline)}'; allowed: {listed(arms)}")
        first = baseline
    elif BASELINE in arms:
        first = BASELINE
    elif several or len(arms) == 1:
        first = arms[0]
    else:
        first = guess_baseline(arms)
        others = listed([arm for arm in arms if arm != first])
        guessed = [f"the baseline is {first!r} (--baseline says otherwise: {others})"]
    return (first, *(arm for arm in arms if arm != first)), guessed


def _refuse_twice(sources: Sequence[str], logs_of: Sequence[Sequence[Log]]) -> None:
    """A run that two sources hold would be compared with itself."""
    held: dict[tuple[object, str | None], tuple[int, str]] = {}
    for number, (source, logs) in enumerate(zip(sources, logs_of, strict=True)):
        for log in logs:
            first, place = held.setdefault((_file_of(log.place), log.run_id), (number, log.place))
            if (first, place) != (number, log.place):
                both = f"got {listed([sources[first], source])}, which both hold {printable(log.place)}"
                if first == number:
                    both = f"{printable(place)} and {printable(log.place)} are one file"
                raise ComparisonError(
                    f"sources: {both}; a run compared with itself always agrees: give each arm its own runs"
                )


def _refuse_experiments_as_arms(
    sources: Sequence[tuple[str | None, str]], logs_of: Sequence[Sequence[Log]]
) -> None:
    """A source is to be one arm, and its runs themselves say that they are of several."""
    runs = [log.identity for logs in logs_of for log in logs]
    by_runs = None not in runs and len(set(runs)) == len(runs) and not any(arm for arm, _ in sources)
    if len(sources) == 1 or by_runs:
        return
    for (_, source), logs in zip(sources, logs_of, strict=True):
        arms = list(dict.fromkeys(log.identity.arm for log in logs if log.identity))
        if len(arms) > 1 and all(log.identity for log in logs):
            folder = Path(logs[0].place).parent
            one = f"the folder of one, such as {folder}" if Path(source).is_dir() else "the runs of one"
            raise ComparisonError(
                f"sources: got {printable(source)}, which holds the runs of several arms ({listed(arms)}); "
                f"name {printable(one)}"
            )


def _refuse_several_arms(
    sources: Sequence[tuple[str | None, str]], logs_of: Sequence[Sequence[Log]], selects: Selects
) -> None:
    """Raise ComparisonError for a source, given as one arm, whose runs name several arms and share seeds."""
    for (_, source), logs in zip(sources, logs_of, strict=True):
        try:
            names = name_runs(logs, selects=selects)
        except ComparisonError:
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
            arms = listed(list(names_of))
            raise ComparisonError(
                f"sources: {printable(source)} holds the runs of several arms ({arms}); leave out all but "
                f"one, such as --exclude {shlex.quote(f'{first[:shared]}*')}, or give it alone"
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
        first, s = logs[0], "s" * (len(logs) > 1)
        empty = first.notes[0] if first.notes else "no metric has a number in it"
        needed = "name files that hold a metric's numbers, by step"
        why = next(iter(first.unread.values()), f"{first.place}: {empty}; {needed}")
        raise ComparisonError(f"arms: got {arm!r}, without a number in {len(logs)} run{s}: {why}")


def _refuse_other_reruns(runs: Mapping[RunName, Log], baseline: str) -> None:
    other = next((run for run in runs if run.rerun and run.arm != baseline), None)
    if other is not None:
        raise ComparisonError(
            f"{other}: a same-seed rerun (-aa) of another arm than the baseline {baseline!r}; "
            "only the baseline's show the noise floor: leave it out"
        )


def _experiment_name(sources: Sequence[tuple[str | None, str]], arms: Sequence[str]) -> str:
    """A name that can be a folder's."""
    text = _arm_of(sources[0][1]) if len(sources) == 1 else "-vs-".join(arms)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "comparison"
