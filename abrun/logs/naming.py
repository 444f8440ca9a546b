"""Arms, seeds and A/A reruns of runs, by their own files, their job types, their names or their settings.

A rule names every run, or returns the reason why it does not apply. Rules that read what a name states come
first. A guess is used only if it explains every run: each arm has every seed once, and all arms have the same
seeds; or else runs are numbered and not paired. The report lists every guess.
"""

import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from abrun.errors import ComparisonError
from abrun.logs.log import Log
from abrun.logs.starts import merge_starts, without_times
from abrun.messages.codes import Code, Reason
from abrun.runs.layout import RunName
from abrun.runs.redaction import list_names, printable

SUFFIXES = {  # suffixes of files that hold runs -> format
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".wandb": "wandb",
    ".json": "json",  # only if it holds a list of rows
    **dict.fromkeys((".log", ".txt", ".out"), "console"),
}
# The first that matches every name, with the fewest leading folders, is used. Each may end in -aa{rerun}.
DEFAULT_PATTERNS = (
    *(f"{{arm}}{mark}{word}{{seed}}" for mark in "/-_" for word in ("seed-", "seed_", "seed", "seed=", "s")),
    *("{arm}.seed{seed}", "{arm}.s{seed}", "{arm}/{seed}"),
)
# For a known arm: `seed-0`, `s0`, `0`, or one of these at the end of the name.
SEED_PATTERNS = ("seed-{seed}", "seed_{seed}", "seed{seed}", "seed={seed}", "s{seed}", "{seed}")
SEED_KEYS = ("seed", "data_seed", "rollout_seed", "data_loader_seed", "random_seed")
SEED_LIMIT = 2**31
SEPARATORS = r"[/_\-. =@,]+"
# Words of a time, a process or a logger in run names, which do not distinguish arms.
START_PART = r"\d{9,}|20\d{6}|\d{6}|\d{8}T\d+|RANK|offline|run|runs|tensorboard|wandb|tb|logs?|events"
BASELINE_NAMES = {"baseline", "base", "control", "reference", "ref"}
BASELINE_NAMES |= {"main", "master", "old", "before", "vanilla"}
MAX_ARMS = 16

RunFilter = Callable[[RunName], bool]  # True for a run that is compared
Names = list[RunName] | str  # of each log in order, or why a rule does not name all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Run name of each log, and what was assumed to find it."""

    names: list[RunName]
    paired: bool = True
    seeds_known: bool = True  # False: runs were only numbered
    guessed: tuple[Reason, ...] = ()


def select_all(_: RunName) -> bool:
    return True


# --- all arms at once ---


def name_runs(
    logs: Sequence[Log],
    pattern: str | None = None,
    *,
    unpaired: bool = False,
    run_filter: RunFilter = select_all,
) -> Names:
    """Return the run name of each log, by the first rule that names all of them, or why none does.

    The rules are `pattern`, the runs' own files, wandb's job types as arms, and DEFAULT_PATTERNS. Unpaired
    runs need no seed in a pattern or job type: the runs of an arm are then numbered. Logs may share a name if
    they are starts of one run; no two selected logs may be the same run. `run_filter` selects. Raises
    ComparisonError for a pattern that is none.
    """
    if pattern is not None:
        needs_seed = not unpaired or "seed" in pattern_fields(pattern)
        return _name_by_pattern(logs, pattern, ("arm", "seed") if needs_seed else ("arm",), run_filter)
    if logs and all(log.identity for log in logs):
        return _check_distinct(logs, _identities(logs), run_filter)
    job_types = [log.job_type for log in logs if log.job_type]
    if len(job_types) == len(logs) and len(set(job_types)) > 1:
        names = _name_by_seeds(logs, job_types, unpaired=unpaired)
        if names:
            return _check_distinct(logs, names, run_filter)
    collision = ""
    for names in _name_by_default_patterns(logs):
        checked = _check_distinct(logs, names, run_filter)
        if not isinstance(checked, str):
            return checked
        collision = collision or checked
    unseeded = [log for log in logs if log.axis != "steps" and log.job_type and not log.identity]
    if unseeded and not collision:
        return (
            f"seeds: {unseeded[0].place}: its rows name arms but no seeds; add a column 'seed' to pair the "
            "runs, or pass --unpaired"
        )
    return collision or (
        f"arms and seeds: no known pattern matches the run names {list_names([log.name for log in logs])} "
        "(dates and times do not count as arm or seed); describe the names, for example --pattern "
        "'{arm}-s{seed}', or give each arm's folder; runs of a single arm: ARM=FOLDER"
    )


def _identities(logs: Sequence[Log]) -> list[RunName]:
    """Return the run names that run directories of abrun state.

    Runs of several experiments can have one name: then the folder of an arm also names its experiment.
    """
    names = [log.identity for log in logs if log.identity]
    folders = [log.name.rpartition("/")[0] for log in logs]
    if len(set(names)) == len(names) or not all(folders):
        return names
    return [replace(name, arm=folder) for name, folder in zip(names, folders, strict=True)]


def _name_by_default_patterns(logs: Sequence[Log]) -> list[list[RunName]]:
    """Return the names by each default pattern that matches every log, fewest leading folders first."""
    candidates = []
    for pattern in DEFAULT_PATTERNS:
        matches = [_match_with_rerun(pattern, log) for log in logs]
        names = [log.identity or (match and match.run) for log, match in zip(logs, matches, strict=True)]
        if logs and all(names):
            num_folders = sum(match.folders for match in matches if match)
            candidates.append((num_folders, [name for name in names if name]))
    return [names for _, names in sorted(candidates, key=lambda candidate: candidate[0])]


def _check_distinct(logs: Sequence[Log], names: Sequence[RunName], run_filter: RunFilter) -> Names:
    """Return the names, or a problem if two selected logs that are no starts of one run share one."""
    logs_of: dict[RunName, list[Log]] = {}
    for name, log in zip(names, logs, strict=True):
        if run_filter(name):
            logs_of.setdefault(name, []).append(log)
    for name, logs_with_name in logs_of.items():
        if len(logs_with_name) > 1 and merge_starts(logs_with_name, str(name)) is None:
            return (
                f"{printable(str(name))}: got two runs of that name, {logs_with_name[0].place} and "
                f"{logs_with_name[1].place}; leave one out with --exclude, describe the names, for example "
                "--pattern '{arm}-s{seed}', or name the folder of each arm: ARM=FOLDER"
            )
    return list(names)


# --- seeds of one arm ---


def name_seeds(
    logs: Sequence[Log],
    arm: str,
    pattern: str | None = None,
    *,
    unpaired: bool = False,
    run_filter: RunFilter = select_all,
) -> Names:
    """Return the run name of each log of a known arm; a single log without a seed is seed 0.

    Unpaired runs without seeds, or that share one, are numbered. `run_filter` as in `name_runs`.
    """
    if pattern is not None:
        return _name_by_pattern(logs, pattern, ("seed",), run_filter, arm)
    names = _name_by_seeds(logs, [arm] * len(logs), unpaired=unpaired or len(logs) == 1)
    if names is None:
        unnamed = [log.name for log in logs if _find_seed(log) is None]
        return (
            f"seeds: {arm}: no seed in the name or config of {list_names(unnamed)}; describe the names, for "
            "example --pattern '*-s{seed}', or pass --unpaired if the runs have no seeds"
        )
    return _check_distinct(logs, names, run_filter)


def _name_by_seeds(logs: Sequence[Log], arms: Sequence[str], *, unpaired: bool) -> list[RunName] | None:
    """Return the run names of known arms by their logs' seeds; None if a log has no seed.

    With `unpaired`, runs without seeds, or that share a seed, are numbered instead.
    """
    seeds = [_find_seed(log) for log in logs]
    seeded_runs = [(arm, *seed) for arm, seed in zip(arms, seeds, strict=True) if seed]
    names = [RunName(arm=arm, seed=seed, rerun=rerun) for arm, seed, rerun in seeded_runs]
    is_complete = len(names) == len(logs)
    if unpaired and not (is_complete and len(set(names)) == len(names)):
        return _number_runs(arms)
    return names if is_complete else None


def _number_runs(arms: Sequence[str]) -> list[RunName]:
    """Number the runs of each arm from 0, in the order of the logs."""
    return [RunName(arm=arm, seed=arms[:index].count(arm)) for index, arm in enumerate(arms)]


def _find_seed(log: Log) -> tuple[int, int] | None:
    """Return seed and rerun of a log: from its own files, its name, or the `seed` of its configuration."""
    if log.identity:
        return log.identity.seed, log.identity.rerun
    if seed_and_rerun := _seed_in_name(log, SEED_PATTERNS[:-1]):
        return seed_and_rerun
    values = {
        key: value
        for key, value in (log.config or {}).items()
        if key.rsplit(".", 1)[-1] == "seed" and type(value) is int and 0 <= value < SEED_LIMIT
    }
    if "seed" in values:
        return values["seed"], 0
    if len(set(values.values())) == 1:
        return next(iter(values.values())), 0
    return _seed_in_name(log, SEED_PATTERNS[-1:])  # a bare number may count starts


def _seed_in_name(log: Log, patterns: Sequence[str]) -> tuple[int, int] | None:
    for pattern in patterns:
        for prefix in ("", "*/", "*-", "*_", "*."):
            if match := _match_with_rerun(prefix + pattern, log):
                return match.run.seed, match.run.rerun
    return None


# --- patterns ---


class NameMatch(NamedTuple):
    """Run that a pattern finds in a name; its arm is empty if the pattern has none."""

    run: RunName
    folders: int  # number of leading folders of the name that were used


def strip_suffix(name: str) -> str:
    """Return a name without the suffixes of its file format and compression."""
    unpacked = name[: -len(".gz")] if name.lower().endswith(".gz") else name
    return next((unpacked[: -len(end)] for end in SUFFIXES if unpacked.lower().endswith(end)), name)


def pattern_fields(pattern: str) -> list[str]:
    """Return the fields of a pattern, in order. Raises ComparisonError for a text that is no pattern."""
    try:
        segments = list(string.Formatter().parse(pattern))
    except ValueError as error:
        raise ComparisonError(
            f"--pattern: got {pattern!r}: {error}; example: '{{arm}}-s{{seed}}'; double literal braces"
        ) from None
    fields = [name for _, name, form, conversion in segments if name is not None]
    formatted = [name for _, name, form, conversion in segments if name is not None and (form or conversion)]
    unknown = [name for name in fields if name not in ("arm", "seed", "rerun")] + formatted
    if unknown or len(set(fields)) < len(fields):
        raise ComparisonError(
            f"--pattern: got {pattern!r}; allowed: {{arm}}, {{seed}} and {{rerun}}, each once, "
            "'*' for anything, and text"
        )
    return fields


def _name_by_pattern(
    logs: Sequence[Log], pattern: str, needed: Sequence[str], run_filter: RunFilter, arm: str | None = None
) -> Names:
    """Return the run name of each log by a pattern with the needed fields; `arm`: whose runs they are.

    Without a seed among the needed fields the runs of an arm are numbered.
    """
    fields = pattern_fields(pattern)
    if missing := [name for name in needed if name not in fields]:
        return f"--pattern: got {pattern!r}, which lacks {{{missing[0]}}}; example: '{{arm}}-s{{seed}}'"
    names: list[RunName] = []
    for log in logs:
        match = _match(pattern, log.name)
        if match is None:
            return (
                f"--pattern: got {pattern!r}, which does not match '{printable(log.name)}' ({log.place}); "
                "change the pattern, or remove that run from the sources"
            )
        names.append(match.run if arm is None else replace(match.run, arm=arm))
    if "seed" not in needed:
        return _number_runs([name.arm for name in names])
    return _check_distinct(logs, names, run_filter)


def _match_with_rerun(pattern: str, log: Log) -> NameMatch | None:
    """Return the run that a default pattern, which may end in -aa{rerun}, finds in a log's name."""
    return _match(pattern, without_times(strip_suffix(log.name)), allows_reruns=True)


def _match(pattern: str, name: str, *, allows_reruns: bool = False) -> NameMatch | None:
    """Match a name, or the fewest leading folders of it, with a pattern."""
    regex = _compile_pattern(pattern, allows_reruns)
    folders = strip_suffix(name).split("/")
    for count in range(1, len(folders) + 1):
        match = regex.fullmatch("/".join(folders[:count]))
        values = match.groupdict() if match else {}
        seed = int(values.get("seed") or 0)
        if match and seed < SEED_LIMIT:
            run = RunName(arm=values.get("arm") or "", seed=seed, rerun=int(values.get("rerun") or 0))
            return NameMatch(run, count)
    return None


@cache
def _compile_pattern(pattern: str, allows_reruns: bool) -> re.Pattern[str]:
    groups = {"arm": "(?P<arm>.+)", "seed": r"(?P<seed>\d{1,10})", "rerun": r"(?P<rerun>\d{1,9})"}
    regex = ""
    for literal, name, _, _ in string.Formatter().parse(pattern):
        regex += ".*".join(re.escape(fragment) for fragment in literal.split("*"))
        regex += groups[name] if name else ""
    if allows_reruns and "{rerun}" not in pattern:
        regex += r"(?:-aa(?P<rerun>\d{1,9}))?"
    return re.compile(regex, re.DOTALL | re.ASCII)


# --- guesses ---


def guess_runs(
    logs: Sequence[Log], arms: Sequence[str] | None = None, run_filter: RunFilter = select_all
) -> Naming | None:
    """Return the run name of each log; None if no guess explains the runs that `run_filter` selects.

    `arms`: the arm of each log, if known.
    """
    for source, seeds, guessed_arms in _seed_assignments(logs):
        run_arms = list(arms or guessed_arms)
        names = [RunName(arm=arm, seed=seed) for arm, seed in zip(run_arms, seeds, strict=True)]
        if _is_a_grid([name for name in names if run_filter(name)]):
            arm = None if arms else names[0].arm
            return Naming(names=names, guessed=(Code.SEEDS_FROM(how=source, arm=arm, seed=seeds[0]),))
    groups = list(arms or _arm_groups(logs))
    num_arms = len(set(groups))
    if not 1 < num_arms <= MAX_ARMS:
        return None
    guessed = () if arms else (Code.ARMS_FROM_NAMES(num_arms=num_arms),)
    if num_arms == len(logs):
        return Naming(names=_number_runs(groups), guessed=guessed)
    guessed = (*guessed, Code.NOTHING_SAYS_SEEDS())
    return Naming(names=_number_runs(groups), paired=False, seeds_known=False, guessed=guessed)


def guess_baseline(arms: Sequence[str]) -> str:
    """Return the only arm with a baseline-like name, else the first arm."""
    baseline_like = [
        arm for arm in arms if {word.lower() for word in re.split(SEPARATORS, arm)} & BASELINE_NAMES
    ]
    return baseline_like[0] if len(baseline_like) == 1 else arms[0]


def differ_only_by_numbers(logs: Sequence[Log]) -> bool:
    """Return True if run names differ only by numbers, so that they can be one arm."""
    kinds = {(log.job_type, log.group) for log in logs}
    return len(kinds) == 1 and len(set(_names_without_numbers(logs))) == 1


def differ_in_one_number(logs: Sequence[Log]) -> bool:
    """Return True if run names are the same but for one number, as of reruns."""
    split_names = [re.split(r"(\d+)", name) for name in _shortened_names(logs)]
    if len({len(words) for words in split_names}) != 1 or not differ_only_by_numbers(logs):
        return False
    varying = [index for index, words in enumerate(zip(*split_names, strict=True)) if len({*words}) > 1]
    return len(varying) == 1 and varying[0] % 2 == 1


def _seed_assignments(logs: Sequence[Log]) -> Iterator[tuple[str, list[int], list[str]]]:
    """Yield possible assignments, the likeliest first: source of the seeds, seeds, and arms."""
    split_names = [re.split(SEPARATORS, name) for name in _shortened_names(logs)]
    shortest = min(map(len, split_names), default=0)
    assignments = []
    for position in (*range(-1, -shortest - 1, -1), *range(shortest)):
        numbers = [re.fullmatch(r"([A-Za-z]*)(\d{1,9})", words[position], re.ASCII) for words in split_names]
        if not all(numbers) or len({number[1] for number in numbers if number}) > 1:
            continue
        seeds = [int(number[2]) for number in numbers if number]
        previous_words = {
            words[position - 1].lower() if position % len(words) else "" for words in split_names
        }
        is_named = previous_words == {"seed"} or split_names[0][position].lower().startswith(("seed", "s"))
        arms = [_arm_without_part(words, position % len(words)) for words in split_names]
        assignments.append((not is_named, (f"names such as {list_names([logs[0].name])}", seeds, arms)))
    yield from (assignment for _, assignment in sorted(assignments, key=lambda assignment: assignment[0]))
    keys = {key for log in logs for key in log.config or {} if key.rsplit(".", 1)[-1] in SEED_KEYS}
    settings = _differing_settings(logs, keys)
    for key in sorted(keys, key=lambda key: (SEED_KEYS.index(key.rsplit(".", 1)[-1]), len(key), key)):
        values = [(log.config or {}).get(key) for log in logs]
        if all(type(value) is int and 0 <= value < SEED_LIMIT for value in values):
            seeds = [int(value or 0) for value in values]
            yield f"{key} in the configurations", seeds, _arm_groups(logs)
            yield f"{key} and what else differs in the configurations", seeds, settings


def _is_a_grid(names: Sequence[RunName]) -> bool:
    """Return True if every arm has the same seeds, at least two, each once."""
    seeds = {arm: sorted(name.seed for name in names if name.arm == arm) for arm in {n.arm for n in names}}
    first_seeds = next(iter(seeds.values()), [])
    return (
        1 < len(seeds) <= MAX_ARMS
        and len(set(names)) == len(names) > len(seeds)
        and all(arm_seeds == first_seeds for arm_seeds in seeds.values())
    )


def _arm_groups(logs: Sequence[Log]) -> list[str]:
    """Return an arm for each log: wandb's job type or group if they differ, else the name without numbers."""
    for kinds in ([log.job_type for log in logs], [log.group for log in logs]):
        if all(kinds) and len(set(kinds)) > 1:
            return [kind or "" for kind in kinds]
    names = _names_without_numbers(logs)
    if len(set(names)) > 1 and all(names):
        return names
    return _shortened_names(logs) if len(logs) == 2 else [name or "run" for name in names]


def _differing_settings(logs: Sequence[Log], seed_keys: set[str]) -> list[str]:
    """Return an arm for each log: its values of the settings that differ between groups of logs.

    Settings that differ in every log, as run names and folders do, are ignored.
    """
    configs = [log.config or {} for log in logs]
    differing_keys = []
    for key in sorted({key for config in configs for key in config} - seed_keys):
        values = {repr(config.get(key)) for config in configs}
        if 1 < len(values) <= len(logs) // 2:
            differing_keys.append(key)
    return [",".join(f"{key}={config.get(key)}" for key in differing_keys) or "run" for config in configs]


def _shortened_names(logs: Sequence[Log]) -> list[str]:
    """Return the names without times, and without a file name that all of them share."""
    names = [without_times(strip_suffix(log.name)) for log in logs]
    while len({name.rpartition("/")[2] for name in names}) == 1 and all("/" in name for name in names):
        names = [name.rpartition("/")[0] for name in names]
    return names


def _names_without_numbers(logs: Sequence[Log]) -> list[str]:
    split_names = [re.split(SEPARATORS, name) for name in _shortened_names(logs)]
    return [
        "-".join(word for word in words if not _is_uninformative(word, numbers=True)) for words in split_names
    ]


def _arm_without_part(words: Sequence[str], position: int) -> str:
    arm_words = [
        word for index, word in enumerate(words) if index != position and not _is_uninformative(word)
    ]
    if len(arm_words) > 1 and arm_words[-1].lower() == "seed":
        arm_words.pop()
    return "-".join(word for word in arm_words if word.lower() != "seed") or "run"


def _is_uninformative(word: str, numbers: bool = False) -> bool:
    is_number = numbers and re.fullmatch(r"(seed|s|run|rep)?\d*", word, re.IGNORECASE)
    return bool(is_number or re.fullmatch(START_PART, word))
