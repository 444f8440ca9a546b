"""Experiments built from runs of other trainers."""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from abrun.errors import ComparisonError
from abrun.logs import Log, prefixes, read_logs
from abrun.logs.aliases import Aliases, RenamedRuns, parse_aliases, recognise_metrics, rename_all
from abrun.logs.guessing import (
    Guess,
    differ_in_one_number,
    differ_only_by_numbers,
    guess_baseline,
    guess_runs,
)
from abrun.logs.naming import RunFilter, has_arm_field, name_runs, name_seeds, strip_suffix
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.logs.recorded.prompts import share_prompts
from abrun.logs.recorded.selection import ReadingOptions, restarted_counter_reasons
from abrun.messages.codes import Code, Reason
from abrun.messages.texts import counted, listed
from abrun.recipe.claims import Compare
from abrun.recipe.experiment import BASELINE
from abrun.runs.layout import RunName
from abrun.runs.redaction import list_names, printable
from abrun.runs.regular_files import exists, is_directory

T = TypeVar("T")
NAMED_SOURCE = r"([^/:=]+)=(.+)"  # ARM=SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of a comparison, their logs, and the options that name and select their runs."""

    named_sources: Sequence[tuple[str | None, str]]  # arm if given, source
    logs_by_source: Sequence[Sequence[Log]]
    aliases: Aliases
    reading: ReadingOptions

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


def read_foreign(sources: Sequence[str], reading: ReadingOptions) -> Sources:
    """Read the logs of all sources. Raises ComparisonError or StoreError."""
    aliases = parse_aliases(reading.aliases)
    named_sources = [_parse_source(source) for source in sources]
    logs_by_source = [
        read_logs(source, group=reading.group, step_column=reading.step_column) for _, source in named_sources
    ]
    _refuse_duplicate_runs(sources, logs_by_source)
    return Sources(
        named_sources=named_sources, logs_by_source=logs_by_source, aliases=aliases, reading=reading
    )


def build_foreign_experiment(sources: Sources, reading: ReadingOptions) -> RecordedExperiment:
    """Return the runs of some sources as an experiment, paired by seed unless `reading` is unpaired.

    Each of several sources is one arm, named by `ARM=SOURCE` or after its folder or file, unless the run
    names contain the arm; one source holds all arms. The baseline is the arm `baseline`, else one named
    "baseline", else that of the first source. Anything else is guessed and listed in `guessed`. Runs outside
    `seeds` or in `exclude` are dropped first and cause no error. With `allows_one_arm` no seeds are guessed;
    with `may_be_one_arm`, runs whose names differ only by a seed are one arm.
    Raises ComparisonError if arms or seeds cannot be determined.
    """
    selection, paired, allows_one_arm = reading.selection, not reading.unpaired, reading.allows_one_arm
    logs_by_source, excluded = selection.without_excluded(sources.logs_by_source)
    sources = replace(sources, logs_by_source=logs_by_source, reading=reading)
    if reading.pattern is None:
        _refuse_experiments_as_arms(sources)
    if allows_one_arm:
        sources = replace(sources, named_sources=_merge_into_one_arm(sources))
    guess = _identify_runs(sources, paired=paired, may_guess=not allows_one_arm)
    if paired and not (guess.paired or reading.may_unpair):
        guess = _identify_runs(sources, paired=True, may_guess=False)
    paired = paired and guess.paired
    named_logs = list(zip(guess.names, sources.logs, strict=True))
    selected, left_out = selection.select(named_logs, excluded, paired=paired and not allows_one_arm)
    _refuse_mixed_axes(selected)
    has_steps = any(log.axis == "steps" for log in selected.values())
    renamed = rename_all([log.metrics for log in selected.values()], sources.aliases, may_recognise=has_steps)
    by_name = _rename_logs(selected, renamed)
    by_name, prompts_left_out = share_prompts(by_name)
    arms, baseline_guesses = _order_arms(by_name, reading, has_several_sources=len(sources.named_sources) > 1)
    by_name, reruns_left_out = _leave_out_other_reruns(by_name, arms)
    _refuse_without_numbers(by_name, arms)
    ordered = sorted(by_name, key=lambda run: (run.seed, arms.index(run.arm), run.rerun))
    guessed = [
        *(Code.LOG_READ_AS(guess=text) for log in by_name.values() for text in log.guesses),
        *guess.guessed,
        *baseline_guesses,
        *(Code.LOG_READ_AS(guess=text) for text in renamed.guessed),
    ]
    return RecordedExperiment(
        name=_experiment_name(sources.named_sources, arms),
        arms=arms,
        compare=Compare(paired=paired),
        runs={run: _make_run(run, by_name[run], seed_is_unknown=not guess.seeds_known) for run in ordered},
        seeds_known=guess.seeds_known,
        guessed=tuple(dict.fromkeys(guessed)),
        renamed=renamed.names,
        left_out=(*left_out, *prompts_left_out, *reruns_left_out, *restarted_counter_reasons(by_name)),
        unselected=(
            *dict.fromkeys(str(run) for run, _ in named_logs if run not in selected),
            *(log.name for log in excluded),
        ),
        versions_differ=reading.versions_differ,
    )


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


def _make_run(name: RunName, log: Log, *, seed_is_unknown: bool) -> RecordedRun:
    identity = log.identity if log.identity == name else None  # None if the user renamed the run
    return RecordedRun(
        **log.recording_fields(),
        name=name,
        status=log.status,
        identity={"arm": identity.arm, "seed": identity.seed, "rerun": identity.rerun} if identity else None,
        notes=(*log.notes, Code.SEED_NOT_KNOWN(place=log.place)) if seed_is_unknown else log.notes,
    )


# --- names ---


def _parse_source(source: str) -> tuple[str | None, str]:
    match = re.fullmatch(NAMED_SOURCE, source, re.DOTALL)
    if match and not exists(Path(source)):
        return printable(match[1]), match[2]
    return None, source


def _identify_runs(sources: Sources, *, paired: bool, may_guess: bool) -> Guess:
    """Return the run name of each log, by `_name_all_runs` or else by a guess."""
    may_guess = may_guess and sources.pattern is None
    try:
        names = _name_all_runs(sources, unpaired=not paired, may_guess=may_guess)
    except ComparisonError:
        may_be_one_arm = sources.reading.may_be_one_arm and sources.pattern is None
        guess = (
            name_one_arm(sources.logs, sources.named_sources, sources.run_filter) if may_be_one_arm else None
        )
        guess = guess or (_guess_names(sources) if may_guess else None)
        if guess is None:
            _refuse_mixed_names(sources)
            raise
        return guess
    seeds_known = paired or names == names_or_none(_name_all_runs, sources, unpaired=False)
    guess = Guess(names=names, paired=paired, seeds_known=seeds_known, guessed=[])
    selected = [run for run in names if sources.run_filter(run)]
    seeds: dict[str, set[int]] = {}
    for run in selected:
        seeds.setdefault(run.arm, set()).add(run.seed)
    if paired and may_guess and len(seeds) > 1 and not set.intersection(*seeds.values()):
        return replace(guess, paired=False, guessed=[Code.ARMS_SHARE_NO_SEED()])
    have_identities = all(log.identity for log in sources.logs)
    if have_identities or sources.pattern is not None or len(names) == len(seeds) or not seeds_known:
        return guess
    source = f"names such as '{printable(sources.logs[0].name)}'"
    first_name = names[0]
    return replace(
        guess, guessed=[Code.SEEDS_FROM(how=source, arm=printable(first_name.arm), seed=first_name.seed)]
    )


def _merge_into_one_arm(sources: Sources) -> Sequence[tuple[str | None, str]]:
    """Name one arm after the folder if the run names contain seeds but no arms.

    Raises ComparisonError if the names differ by more than numbers: they could be two arms.
    """
    logs, named_sources = sources.logs, sources.named_sources
    folders = {source if len(named_sources) == 1 else str(Path(source).parent) for _, source in named_sources}
    if sources.has_arms or len(folders) > 1 or len(named_sources) not in (1, len(logs)):
        return named_sources
    options = {"pattern": sources.pattern, "run_filter": sources.run_filter}
    if names_or_none(name_runs, logs, **options) or not names_or_none(name_seeds, logs, "any", **options):
        return named_sources
    (folder,) = folders
    if len(logs) > 1 and not differ_only_by_numbers(logs):
        names = list_names([log.name for log in logs])
        raise ComparisonError(
            f"arms: the names of the {len(logs)} runs in {printable(folder)} give seeds but no arms, and "
            f"other parts differ ({names}); if they are all one arm, name it: ARM={printable(folder)}"
        )
    return [(arm_from_source(folder), source) for _, source in named_sources]


def _refuse_mixed_names(sources: Sources) -> None:
    """Raise ComparisonError if the runs of the only source have seeds in their names but no arms.

    Their names differ by more than the seed: they could be one arm or several.
    """
    if len(sources.named_sources) > 1 or len(sources.logs) < 2 or sources.pattern is not None:
        return
    names = names_or_none(name_seeds, sources.logs, "any", run_filter=sources.run_filter)
    if names is None:
        return
    source = printable(sources.named_sources[0][1])
    listed = list_names([log.name for log in sources.logs])
    raise ComparisonError(
        f"arms: the names of the {len(sources.logs)} runs in {source} give seeds but no arms, and other "
        f"parts differ ({listed}); if they are all one arm, name it: ARM={source}"
    )


def _guess_names(sources: Sources) -> Guess | None:
    logs, num_sources = sources.logs, len(sources.named_sources)
    if num_sources == 1:
        return guess_runs(logs, run_filter=sources.run_filter)
    if len(logs) == num_sources > 2 and not sources.has_arms:
        guess = guess_runs(_rename_from_common_folder(sources), run_filter=sources.run_filter)
        if guess is not None and guess.seeds_known:  # one run per source, as in `runs/*.csv`
            return guess
    _refuse_several_arms(sources)
    arms = _source_arms(sources)
    arm_of_logs = [
        arm for arm, source_logs in zip(arms, sources.logs_by_source, strict=True) for _ in source_logs
    ]
    guess = guess_runs(logs, arm_of_logs, sources.run_filter)
    if guess is not None and len(logs) == num_sources and not sources.has_arms:
        guess = replace(guess, guessed=[Code.SOURCES_ARE_ARMS(num_sources=num_sources), *guess.guessed])
    return guess


def _name_all_runs(sources: Sources, *, unpaired: bool, may_guess: bool = False) -> list[RunName]:
    """Return the run name of each log, in the order of sources and logs."""
    logs, pattern, run_filter = sources.logs, sources.pattern, sources.run_filter
    names_arm_and_seed = pattern is not None and has_arm_field(pattern)
    if names_arm_and_seed and sources.has_arms:
        raise ComparisonError(
            f"--pattern: got {pattern!r} with {{arm}}, but the sources name their arms; drop {{arm}} or the "
            "names"
        )
    has_identities = pattern is None and _have_distinct_identities(sources)
    has_all_names = has_identities or names_arm_and_seed or len(sources.named_sources) == 1
    if has_all_names and not sources.has_arms:
        return name_runs(logs, pattern, unpaired=unpaired, run_filter=run_filter)
    if (
        pattern is None
        and not sources.has_arms
        and all(len(arm_logs) == 1 for arm_logs in sources.logs_by_source)
    ):
        try:  # one run per source, as in `runs/*.csv`
            return name_runs(_rename_from_common_folder(sources), run_filter=run_filter)
        except ComparisonError:
            if may_guess and len(logs) > 2:
                raise
            pass  # one arm per source
    logs_by_arm: dict[str, list[Log]] = {}
    for arm, arm_logs in zip(_source_arms(sources), sources.logs_by_source, strict=True):
        logs_by_arm.setdefault(arm, []).extend(arm_logs)
    run_by_log = {
        id(log): run
        for arm, arm_logs in logs_by_arm.items()
        for log, run in zip(
            arm_logs,
            name_seeds(arm_logs, arm, pattern, unpaired=unpaired, run_filter=run_filter),
            strict=True,
        )
    }
    return [run_by_log[id(log)] for log in logs]


def _have_distinct_identities(sources: Sources) -> bool:
    """Return True if all runs are run directories of abrun and no two sources hold a run of one name."""
    names = [{log.identity for log in logs} for logs in sources.logs_by_source]
    return None not in set.union(*names) and len(set.union(*names)) == sum(map(len, names))


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


def _source_arms(sources: Sources) -> list[str]:
    """Return an arm for each source: the given name, the folder or file, or the first differing path part.

    Raises ComparisonError if two sources have the same name.
    """
    arms = [arm or arm_from_source(source) for arm, source in sources.named_sources]
    given_arms = [arm for arm, _ in sources.named_sources]
    duplicate = next((arm for arm in arms if 1 < arms.count(arm) != given_arms.count(arm)), None)
    if duplicate is None:
        return arms
    path_parts = [list(Path(source).resolve().parts) for _, source in sources.named_sources]
    if not sources.has_arms and all(exists(Path(source)) for _, source in sources.named_sources):
        while len({path[-1] for path in path_parts}) == 1:
            path_parts = [path[:-1] for path in path_parts]
        distinct_names = [printable(strip_suffix(path[-1])) for path in path_parts]
        if len(set(distinct_names)) == len(distinct_names):
            return distinct_names
    same_name = [
        source for arm, (_, source) in zip(arms, sources.named_sources, strict=True) if arm == duplicate
    ]
    raise ComparisonError(
        f"sources: {list_names(same_name)} would all be named {duplicate!r}; name the arms, such as "
        f"baseline={printable(same_name[0])}"
    )


def _order_arms(
    runs: Mapping[RunName, Log], reading: ReadingOptions, *, has_several_sources: bool
) -> tuple[tuple[str, ...], list[Reason]]:
    """Return the arms, baseline first, and the guesses made about them."""
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
            raise ComparisonError(
                f"--baseline: got '{printable(baseline)}'; allowed: {listed(list_names(arms))}"
            )
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


def _refuse_duplicate_runs(sources: Sequence[str], logs_by_source: Sequence[Sequence[Log]]) -> None:
    """Raise ComparisonError if two sources hold the same run, which would be compared with itself."""
    seen_places: dict[tuple[object, str | None], tuple[int, str]] = {}
    for number, (source, logs) in enumerate(zip(sources, logs_by_source, strict=True)):
        for log in logs:
            first_source, place = seen_places.setdefault(
                (_file_identity(log.place), log.run_id), (number, log.place)
            )
            if (first_source, place) != (number, log.place):
                if first_source == number:
                    places = f"{printable(place)} and {printable(log.place)}"
                    raise ComparisonError(
                        f"sources: {places} are one file, and a run compared with itself always agrees; give "
                        "each arm its own runs"
                    )
                source_names = list_names([sources[first_source], source])
                raise ComparisonError(
                    f"sources: {source_names} both hold {printable(log.place)}, and a run compared with "
                    "itself always agrees; give each arm its own runs"
                )


def _refuse_experiments_as_arms(sources: Sources) -> None:
    """Raise ComparisonError if a source that should be one arm holds runs of several arms of abrun."""
    runs = [log.identity for log in sources.logs]
    has_distinct_runs = None not in runs and len(set(runs)) == len(runs) and not sources.has_arms
    if len(sources.named_sources) == 1 or has_distinct_runs:
        return
    for (_, source), logs in zip(sources.named_sources, sources.logs_by_source, strict=True):
        arms = list(dict.fromkeys(log.identity.arm for log in logs if log.identity))
        if len(arms) > 1 and all(log.identity for log in logs):
            folder = Path(logs[0].place).parent
            example = (
                f"the folder of one, such as {folder}" if is_directory(Path(source)) else "the runs of one"
            )
            raise ComparisonError(
                f"sources: {printable(source)} holds runs of several arms ({list_names(arms)}); give one of "
                f"them, such as {printable(example)}"
            )


def _refuse_several_arms(sources: Sources) -> None:
    """Raise ComparisonError if a source given as one arm has run names with several arms and shared seeds."""
    for (_, source), logs in zip(sources.named_sources, sources.logs_by_source, strict=True):
        names = names_or_none(name_runs, logs, run_filter=sources.run_filter)
        if names is None:
            continue
        names_of: dict[str, list[str]] = {}
        for run, log in zip(names, logs, strict=True):
            names_of.setdefault(run.arm, []).append(log.name)
        if len(names_of) > 1 and len({run.seed for run in names}) < len(set(names)):
            *_, last_arm_names = names_of.values()
            smallest, largest = min(last_arm_names), max(last_arm_names)
            prefix_length = next(
                (
                    index
                    for index, letters in enumerate(zip(smallest, largest, strict=False))
                    if len({*letters}) > 1
                ),
                0,
            )
            problem = shlex.quote(f"{smallest[:prefix_length]}*")
            raise ComparisonError(
                f"sources: {printable(source)} holds runs of several arms ({list_names(list(names_of))}); "
                f"leave out all but one, such as --exclude {problem}, or give this source alone"
            )


def _file_identity(place: str) -> object:
    """Return a key that is the same for every name and link of a file."""
    try:
        status = os.stat(place)
    except (OSError, ValueError):
        return place
    return status.st_dev, status.st_ino


def _refuse_without_numbers(runs: Mapping[RunName, Log], arms: Sequence[str]) -> None:
    """Raise ComparisonError for an arm without any number: these are probably the wrong files.

    A single run without numbers among others is data, and so is a failed run.
    """
    for arm in arms:
        logs = [log for run, log in runs.items() if run.arm == arm]
        if any(log.metrics or log.status != "unknown" for log in logs):
            continue
        first_log = logs[0]
        note = first_log.notes[0] if first_log.notes else Code.NOTHING_NUMERIC()
        reason = next(iter(first_log.unread.values()), Code.NO_NUMBERS(place=first_log.place, note=note))
        raise ComparisonError(f"arms: {arm!r} has no numbers in {counted(len(logs), 'run')}: {reason}")


def _refuse_mixed_axes(runs: Mapping[RunName, Log]) -> None:
    """Raise ComparisonError if some runs have curves and others only scores."""
    places: dict[str, str] = {}
    for log in runs.values():
        places.setdefault(log.axis, log.place)
    if len(places) > 1:
        raise ComparisonError(Code.AXES_MIXED(places=places))


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
            f"{str(unrepeated[0])}: named as an A/A rerun (-aa) of a run that is not here; add that run, or "
            "leave this one out with --exclude"
        )
    return remaining, [Code.RERUNS_LEFT_OUT(runs=[str(run) for run in reruns])] if reruns else []


def _experiment_name(sources: Sequence[tuple[str | None, str]], arms: Sequence[str]) -> str:
    """Return an experiment name that is valid as a folder name."""
    text = arm_from_source(sources[0][1]) if len(sources) == 1 else "-vs-".join(arms)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "comparison"


def name_one_arm(
    logs: Sequence[Log], named_sources: Sequence[tuple[str | None, str]], run_filter: RunFilter
) -> Guess | None:
    """Return the runs of one arm if that is what the sources hold; None if they may hold several.

    One arm is a single run, runs of one given arm, or runs of one folder whose names differ only by numbers
    that give their seeds, or in a single number. Runs without seeds are numbered.
    """
    arms = {arm for arm, _ in named_sources}
    if not logs or len(arms) > 1:
        return None
    (given_arm,) = arms
    if given_arm is None and (1 < len(named_sources) < len(logs) or len(named_sources) == 2):
        return None
    arm = given_arm or _shared_arm(named_sources)
    if arm is None:
        return None
    seeds_known = True
    names = names_or_none(name_seeds, logs, arm, run_filter=run_filter)
    if names is None and (given_arm is not None or differ_in_one_number(logs)):
        seeds_known = False
        names = names_or_none(name_seeds, logs, arm, unpaired=True, run_filter=run_filter)
    is_one_arm = given_arm is not None or len(logs) == 1 or differ_only_by_numbers(logs)
    if names is None or not is_one_arm:
        return None
    return Guess(names=names, paired=seeds_known, seeds_known=seeds_known, guessed=[])


def _shared_arm(named_sources: Sequence[tuple[str | None, str]]) -> str | None:
    """Return the name of the only source, or of the folder that holds all of them; None if there is none."""
    if len(named_sources) == 1:
        return arm_from_source(named_sources[0][1])
    folders = {Path(source).resolve().parent for _, source in named_sources}
    return arm_from_source(str(folders.pop())) if len(folders) == 1 else None


def names_or_none(
    name_rule: Callable[..., list[RunName]], *arguments: Any, **options: Any
) -> list[RunName] | None:
    """Return the names by a rule; None if the rule raises ComparisonError."""
    try:
        return name_rule(*arguments, **options)
    except ComparisonError:
        return None


def arm_from_source(source: str) -> str:
    """Return the arm of a source without a name: its folder or file, or the last part of a wandb path."""
    prefix, colon, rest = source.partition(":")
    path = rest if colon and prefix in prefixes() else source
    name = Path(path).resolve().name if exists(Path(path)) else path.rstrip("/").split("/")[-1]
    return printable(strip_suffix(name.rpartition("\\")[2]))
