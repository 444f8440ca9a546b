"""Identification of the runs in the sources of a comparison: the arm and the seed of each.

Each strategy returns the naming of all runs, or why it gives none, or None if it is not for such sources. The
first naming counts. Strategies read evidence of falling weight: options, the runs' own files, columns and job
types, names, the sources' names, and last a guess that explains every run.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from abrun.errors import ComparisonError
from abrun.logs import Log, prefixes
from abrun.logs.aliases import Aliases
from abrun.logs.naming import (
    Names,
    Naming,
    RunFilter,
    are_indices,
    ask_about_numbers,
    differ_in_one_number,
    differ_only_by_numbers,
    differing_settings,
    find_seed,
    guess_runs,
    name_by_settings,
    name_runs,
    name_seeds,
    names_without_numbers,
    pattern_fields,
    strip_suffix,
)
from abrun.logs.recorded.selection import ReadingOptions
from abrun.messages.codes import Code
from abrun.runs.files import exists
from abrun.runs.layout import RunName
from abrun.runs.redaction import list_names, printable

NAMED_SOURCE = r"([^/:=]+)=(.+)"  # ARM=SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of a comparison, their logs, and the options that name and select their runs."""

    named_sources: Sequence[tuple[str | None, str]]  # arm if given, source
    logs_by_source: Sequence[Sequence[Log]]
    aliases: Aliases
    reading: ReadingOptions
    may_guess: bool = True

    @property
    def logs(self) -> list[Log]:
        return [log for logs in self.logs_by_source for log in logs]

    @property
    def has_arms(self) -> bool:
        return any(arm for arm, _ in self.named_sources)

    @property
    def pattern(self) -> str | None:
        return self.reading.pattern

    @property
    def run_filter(self) -> RunFilter:
        return self.reading.selection.includes

    @property
    def holds_all_arms(self) -> bool:
        """True if the sources together are one set of runs: a single source, or run directories of abrun.

        No two sources may hold a run of one name.
        """
        identities = [{log.identity for log in logs} for logs in self.logs_by_source]
        all_identities = set.union(*identities)
        is_distinct = None not in all_identities and len(all_identities) == sum(map(len, identities))
        return not self.has_arms and (len(self.named_sources) == 1 or is_distinct)

    @property
    def is_one_run_each(self) -> bool:
        """True if each of several unnamed sources is one run, as in `runs/*.csv`."""
        return not self.has_arms and all(len(logs) == 1 for logs in self.logs_by_source)


def parse_source(source: str) -> tuple[str | None, str]:
    """Return the arm of `ARM=SOURCE`, if one is given, and the source."""
    match = re.fullmatch(NAMED_SOURCE, source, re.DOTALL)
    if match and not exists(Path(source)):
        return printable(match[1]), match[2]
    return None, source


def identify_runs(sources: Sources) -> Naming:
    """Return the run name of each log, in the order of sources and logs.

    An assumption that leaves the runs unpaired counts only if `may_unpair` is set. Raises ComparisonError if
    no strategy names all runs.
    """
    reading = sources.reading
    if reading.pattern is None:
        _refuse_experiments_as_arms(sources)
    if reading.allows_one_arm:
        sources = replace(sources, named_sources=_name_lone_arm(sources))
    naming = _try_strategies(replace(sources, may_guess=not reading.allows_one_arm))
    if naming.paired or reading.may_unpair or reading.unpaired:
        return naming
    return _try_strategies(replace(sources, may_guess=False))


def _try_strategies(sources: Sources) -> Naming:
    problem = ""
    for strategy in STRATEGIES:
        outcome = strategy(sources)
        if isinstance(outcome, Naming):
            return _without_indices(outcome, sources)
        problem = outcome or problem
    raise ComparisonError(problem)


def _without_indices(naming: Naming, sources: Sources) -> Naming:
    """Return the naming, unpaired if its seeds may only count jobs; raise ComparisonError if it must pair."""
    reading = sources.reading
    is_stated = reading.unpaired or reading.pattern or reading.seeds_by or reading.allows_one_arm
    if is_stated or not naming.paired or not are_indices(sources.logs, naming.names):
        return naming
    if not sources.may_guess:
        raise ComparisonError(
            f"seeds: the numbers of {list_names([log.name for log in sources.logs], 3)} may only count jobs; "
            "say with --pattern that they are seeds, or pass --unpaired"
        )
    return replace(naming, paired=False, seeds_known=False, guessed=(Code.NOTHING_SAYS_SEEDS(),))


# --- strategies ---


def name_by_pattern(sources: Sources) -> Naming | str | None:
    """Use --pattern, for all runs or for the seeds of each source."""
    pattern = sources.pattern
    if pattern is None:
        return None
    has_arm = "arm" in pattern_fields(pattern)
    if has_arm and sources.has_arms:
        return (
            f"--pattern: got {pattern!r} with {{arm}}, but the sources name their arms; drop {{arm}} or the "
            "names"
        )
    if has_arm or (len(sources.named_sources) == 1 and not sources.has_arms):
        return _as_naming(sources, lambda unpaired: _name_as_one_set(sources, sources.logs, unpaired))
    return _as_naming(sources, lambda unpaired: _name_each_source(sources, unpaired))


def name_by_options(sources: Sources) -> Naming | str | None:
    """Use the settings that --arms-by and --seeds-by name; raise ComparisonError if they name not all."""
    reading = sources.reading
    if not reading.arms_by and not reading.seeds_by:
        return None
    if sources.has_arms and reading.arms_by:
        raise ComparisonError(
            f"--arms-by: got {reading.arms_by!r}, but the sources name their arms; drop it or the names"
        )
    has_source_arms = not reading.arms_by and (len(sources.named_sources) > 1 or sources.has_arms)
    arms = _arms_of_logs(sources) if has_source_arms else None
    if isinstance(arms, str):
        return arms
    naming = name_by_settings(sources.logs, reading.arms_by, reading.seeds_by, arms)
    if isinstance(naming, str):
        raise ComparisonError(naming)
    return naming


def name_by_runs(sources: Sources) -> Naming | str | None:
    """Use what the runs say: run directories, columns, job types, or names with arm and seed."""
    if sources.pattern is not None:
        return None
    if sources.holds_all_arms:
        return _as_naming(sources, lambda unpaired: _name_as_one_set(sources, sources.logs, unpaired))
    if sources.is_one_run_each:
        renamed = _rename_from_common_folder(sources)
        return _as_naming(sources, lambda _: _name_as_one_set(sources, renamed, unpaired=False))
    return None


def name_by_source(sources: Sources) -> Naming | str | None:
    """Take each source as an arm, and seeds from its runs' own files, names or configurations."""
    guesses_seeds = sources.may_guess and sources.is_one_run_each and len(sources.logs) > 2
    if sources.pattern is not None or sources.holds_all_arms or guesses_seeds:
        return None
    return _as_naming(sources, lambda unpaired: _name_each_source(sources, unpaired))


def name_one_arm(sources: Sources) -> Naming | str | None:
    """Take the sources as one arm if that is allowed, and if they do not look like several.

    One arm is a single run, runs of one given arm, or runs of one folder whose names differ only by numbers
    that give their seeds, or in a single number. Runs without seeds are numbered.
    """
    logs, named_sources = sources.logs, sources.named_sources
    arms = {arm for arm, _ in named_sources}
    if not sources.reading.may_be_one_arm or sources.pattern is not None or not logs or len(arms) > 1:
        return None
    (given_arm,) = arms
    if given_arm is None and (1 < len(named_sources) < len(logs) or len(named_sources) == 2):
        return None
    folder = _common_folder(named_sources)
    arm = given_arm or (arm_from_source(folder) if folder else None)
    if arm is None or not (given_arm or len(logs) == 1 or differ_only_by_numbers(logs)):
        return None
    names = name_seeds(logs, arm, run_filter=sources.run_filter)
    if given_arm is None and isinstance(names, str) and all(map(find_seed, logs)):
        return None  # two runs of one seed: there are several arms
    if given_arm is None and (settings := differing_settings(logs)):
        raise ComparisonError(
            f"arms: the runs in {printable(folder or '')} differ in settings ({list_names(settings, 4)}); "
            f"compare them by one with --arms-by, or name the arm that all are: ARM={printable(folder or '')}"
        )
    if not isinstance(names, str):
        return _with_seed_guess(Naming(names=names), logs)
    if given_arm or differ_in_one_number(logs):
        if not sources.reading.unpaired and (
            question := ask_about_numbers(logs, [arm] * len(logs), are_arms=True)
        ):
            return question
        names = name_seeds(logs, arm, unpaired=True, run_filter=sources.run_filter)
    return None if isinstance(names, str) else Naming(names=names, paired=False, seeds_known=False)


def guess_names(sources: Sources) -> Naming | str | None:
    """Guess seeds, and the arms of a single source, from numbers in names or settings."""
    if sources.pattern is not None or not sources.may_guess:
        return None
    logs, num_sources, run_filter = sources.logs, len(sources.named_sources), sources.run_filter
    if num_sources == 1:
        return guess_runs(logs, run_filter=run_filter)
    if num_sources > 2 and sources.is_one_run_each:
        naming = guess_runs(_rename_from_common_folder(sources), run_filter=run_filter)
        if isinstance(naming, Naming) and naming.seeds_known:
            return naming
    if problem := _find_several_arms(sources):
        return problem
    arms = _arms_of_logs(sources)
    if isinstance(arms, str):
        return arms
    naming = guess_runs(logs, arms, run_filter)
    kinds = [
        {re.sub(r"\d+", "", name): log for name, log in zip(names_without_numbers(own), own, strict=True)}
        for own in sources.logs_by_source
    ]
    is_unknown = isinstance(naming, Naming) and not naming.seeds_known
    if is_unknown and len(kinds[0]) > 1 and all(own.keys() == kinds[0].keys() for own in kinds):
        examples = list_names([log.name for log in kinds[0].values()], 4)
        return (
            f"runs: each source holds {examples} or alike, which may be tasks or parts of one training; keep "
            "one kind with --exclude, or pass --unpaired if all are runs of their arm"
        )
    if isinstance(naming, Naming) and len(logs) == num_sources and not sources.has_arms:
        return replace(naming, guessed=(Code.SOURCES_ARE_ARMS(num_sources=num_sources), *naming.guessed))
    return naming


STRATEGIES: tuple[Callable[[Sources], Naming | str | None], ...] = (
    name_by_pattern,
    name_by_options,
    name_by_runs,
    name_by_source,
    name_one_arm,
    guess_names,
)


def _name_as_one_set(sources: Sources, logs: Sequence[Log], unpaired: bool) -> Names:
    return name_runs(logs, sources.pattern, unpaired=unpaired, run_filter=sources.run_filter)


def _name_each_source(sources: Sources, unpaired: bool) -> Names:
    """Return the run names of sources of one arm each; sources of the same given arm are read together."""
    arms, named = _arms_of_logs(sources), dict[int, RunName]()
    if isinstance(arms, str):
        return arms
    for arm in dict.fromkeys(arms):
        logs = {index: log for index, log in enumerate(sources.logs) if arms[index] == arm}
        names = name_seeds(
            [*logs.values()], arm, sources.pattern, unpaired=unpaired, run_filter=sources.run_filter
        )
        if isinstance(names, str):
            return names
        named |= zip(logs, names, strict=True)
    return [named[index] for index in sorted(named)]


def _as_naming(sources: Sources, rule: Callable[[bool], Names]) -> Naming | str:
    """Return the naming by a rule, which takes whether runs may lack seeds.

    Arms that share no seed are not paired, if that may be guessed.
    """
    unpaired = sources.reading.unpaired
    names = rule(unpaired)
    if isinstance(names, str):
        return names
    seeds_known = not unpaired or names == rule(False)
    naming = Naming(names=names, paired=not unpaired, seeds_known=seeds_known)
    seeds: dict[str, set[int]] = {}
    for run in filter(sources.run_filter, names):
        seeds.setdefault(run.arm, set()).add(run.seed)
    may_unpair = not unpaired and sources.may_guess and sources.pattern is None
    if may_unpair and len(seeds) > 1 and not set.intersection(*seeds.values()):
        return replace(naming, paired=False, guessed=(Code.ARMS_SHARE_NO_SEED(),))
    if sources.pattern is not None or len(names) == len(seeds) or not seeds_known:
        return naming
    return _with_seed_guess(naming, sources.logs)


def _with_seed_guess(naming: Naming, logs: Sequence[Log]) -> Naming:
    """Return the naming with what states the seeds, unless the runs' own files do, or there is one run."""
    if len(logs) == 1 or all(log.identity for log in logs):
        return naming
    seed, run = find_seed(logs[0]), naming.names[0]
    source = seed.source if seed else f"names such as '{printable(logs[0].name)}'"
    guess = Code.SEEDS_FROM(how=source, arm=printable(run.arm), seed=run.seed)
    return replace(naming, guessed=(guess,))


# --- sources as arms ---


def arm_from_source(source: str) -> str:
    """Return the arm of a source without a name: its folder or file, or the last part of a wandb path."""
    prefix, colon, rest = source.partition(":")
    path = rest if colon and prefix in prefixes() else source
    name = Path(path).resolve().name if exists(Path(path)) else path.rstrip("/").split("/")[-1]
    return printable(strip_suffix(name.rpartition("\\")[2]))


def _arms_of_logs(sources: Sources) -> list[str] | str:
    """Return the arm of each log, as its source is called, or why that names none."""
    arms = _source_arms(sources)
    if isinstance(arms, str):
        return arms
    return [arm for arm, logs in zip(arms, sources.logs_by_source, strict=True) for _ in logs]


def _source_arms(sources: Sources) -> list[str] | str:
    """Return an arm for each source: the given name, the folder or file, or the first differing path part.

    If two sources have the same name, return the problem.
    """
    named_sources = sources.named_sources
    arms = [arm or arm_from_source(source) for arm, source in named_sources]
    given_arms = [arm for arm, _ in named_sources]
    duplicate = next((arm for arm in arms if 1 < arms.count(arm) != given_arms.count(arm)), None)
    if duplicate is None:
        return arms
    if not sources.has_arms and all(exists(Path(source)) for _, source in named_sources):
        path_parts = [list(Path(source).resolve().parts) for _, source in named_sources]
        while len({path[-1] for path in path_parts}) == 1:
            path_parts = [path[:-1] for path in path_parts]
        distinct_names = [printable(strip_suffix(path[-1])) for path in path_parts]
        if len(set(distinct_names)) == len(distinct_names):
            return distinct_names
    same_name = [source for arm, (_, source) in zip(arms, named_sources, strict=True) if arm == duplicate]
    return (
        f"sources: {list_names(same_name)} would all be named {duplicate!r}; name the arms, such as "
        f"baseline={printable(same_name[0])}"
    )


def _name_lone_arm(sources: Sources) -> Sequence[tuple[str | None, str]]:
    """Name one arm after the folder if the run names contain seeds but no arms.

    Raises ComparisonError if the names differ by more than numbers: they could be two arms.
    """
    logs, named_sources = sources.logs, sources.named_sources
    folder = _common_folder(named_sources)
    if sources.has_arms or folder is None or len(named_sources) not in (1, len(logs)):
        return named_sources
    has_arms = not isinstance(_name_as_one_set(sources, logs, unpaired=False), str)
    names = name_seeds(logs, "any", sources.pattern, run_filter=sources.run_filter)
    if has_arms or isinstance(names, str):
        return named_sources
    if len(logs) > 1 and not differ_only_by_numbers(logs):
        names_text = list_names([log.name for log in logs])
        raise ComparisonError(
            f"arms: the {len(logs)} runs in {printable(folder)} give seeds but no arms, and differ in more "
            f"({names_text}); if all are one arm: ARM={printable(folder)}"
        )
    return [(arm_from_source(folder), source) for _, source in named_sources]


def _common_folder(named_sources: Sequence[tuple[str | None, str]]) -> str | None:
    if len(named_sources) == 1:
        return named_sources[0][1]
    paths = [Path(source) for _, source in named_sources]
    return str(paths[0].parent) if len({path.resolve().parent for path in paths}) == 1 else None


def _rename_from_common_folder(sources: Sources) -> list[Log]:
    logs, paths = sources.logs, [Path(source).resolve() for _, source in sources.named_sources]
    if not all(exists(path) for path in paths):
        return logs
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [
        log
        if log.run_id
        else replace(log, name=printable(path.relative_to(common).as_posix().replace("\\", "/")))
        for path, log in zip(paths, logs, strict=True)
    ]


def _refuse_experiments_as_arms(sources: Sources) -> None:
    """Raise ComparisonError if a source that should be one arm holds runs of several arms of abrun."""
    runs = [log.identity for log in sources.logs]
    has_distinct_runs = None not in runs and len(set(runs)) == len(runs) and not sources.has_arms
    if len(sources.named_sources) == 1 or has_distinct_runs:
        return
    for (_, source), logs in zip(sources.named_sources, sources.logs_by_source, strict=True):
        arms = list(dict.fromkeys(log.identity.arm for log in logs if log.identity))
        if len(arms) > 1 and all(log.identity for log in logs):
            raise ComparisonError(
                f"sources: {printable(source)} holds runs of several arms ({list_names(arms)}); give one, "
                f"such as {printable(str(Path(logs[0].place).parent))}"
            )


def _find_several_arms(sources: Sources) -> str | None:
    """Return a problem if a source given as one arm has run names with several arms and shared seeds."""
    for (_, source), logs in zip(sources.named_sources, sources.logs_by_source, strict=True):
        names = name_runs(logs, run_filter=sources.run_filter)
        if isinstance(names, str):
            continue
        names_of: dict[str, list[str]] = {}
        for run, log in zip(names, logs, strict=True):
            names_of.setdefault(run.arm, []).append(log.name)
        if len(names_of) > 1 and len({run.seed for run in names}) < len(set(names)):
            return (
                f"sources: {printable(source)} holds runs of several arms ({list_names(list(names_of))}); "
                "leave out all but one, or give this source alone"
            )
    return None
