"""Extraction of arms, seeds and A/A reruns from run names."""

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from abrun.errors import ComparisonError
from abrun.logs.log import Log
from abrun.logs.starts import merge_starts, without_times
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
}
# The first that matches every name, with the fewest leading folders, is used. Each may end in -aa{rerun}.
DEFAULT_PATTERNS = (
    *(f"{{arm}}{mark}{word}{{seed}}" for mark in "/-_" for word in ("seed-", "seed_", "seed", "seed=", "s")),
    *("{arm}.seed{seed}", "{arm}.s{seed}", "{arm}/{seed}"),
)
# For a known arm: `seed-0`, `s0`, `0`, or one of these at the end of the name.
SEED_PATTERNS = ("seed-{seed}", "seed_{seed}", "seed{seed}", "seed={seed}", "s{seed}", "{seed}")
SEED_LIMIT = 2**31


class NameMatch(NamedTuple):
    """Fields of a name that matched a pattern."""

    arm: str | None
    seed: int
    rerun: int
    folders: int  # number of leading folders of the name that were used


Matcher = Callable[[str], NameMatch | None]
RunFilter = Callable[[RunName], bool]  # True for a run that is compared


def select_all(_: RunName) -> bool:
    return True


def name_runs(
    logs: Sequence[Log],
    pattern: str | None = None,
    *,
    unpaired: bool = False,
    run_filter: RunFilter = select_all,
) -> list[RunName]:
    """Return the run name of each log, by the first rule that names all of them.

    The rules are `pattern`, the runs' own files, wandb's job types as arms, and DEFAULT_PATTERNS. Unpaired
    runs need no seed in a pattern or job type: the runs of an arm are then numbered. Logs may share a name if
    they are starts of one run. Raises ComparisonError if no rule fits, or if two selected logs are the same
    run. `run_filter` selects.
    """
    if pattern is not None:
        needs_seed = not unpaired or "seed" in _pattern_fields(pattern)
        matcher = _make_matcher(pattern, needs_arm=True, needs_seed=needs_seed)
        names = [_match_or_raise(log, matcher, pattern) for log in logs]
        if not needs_seed:
            return _number_runs([name.arm for name in names])
        return _check_distinct(logs, names, run_filter)
    if logs and all(log.identity for log in logs):
        return _check_distinct(logs, _identities(logs), run_filter)
    job_types = [log.job_type for log in logs if log.job_type]
    if len(job_types) == len(logs) and len(set(job_types)) > 1:
        names = _name_by_seeds(logs, job_types, unpaired=unpaired)
        if names:
            return _check_distinct(logs, names, run_filter)
    collision = None
    for names in _name_by_default_patterns(logs):
        try:
            return _check_distinct(logs, names, run_filter)
        except ComparisonError as error:
            collision = collision or error
    unseeded = [log for log in logs if log.axis != "steps" and log.job_type and not log.identity]
    if unseeded and not collision:
        raise ComparisonError(
            f"seeds: {unseeded[0].place}: its rows name arms but no seeds; add a column 'seed' to pair the "
            "runs, or pass --unpaired"
        )
    raise collision or ComparisonError(
        f"arms and seeds: no known pattern matches the run names {list_names([log.name for log in logs])} "
        "(dates and times do not count as arm or seed); describe the names, for example --pattern "
        "'{arm}-s{seed}', or give each arm's folder; runs of a single arm: ARM=FOLDER"
    )


def name_seeds(
    logs: Sequence[Log],
    arm: str,
    pattern: str | None = None,
    *,
    unpaired: bool = False,
    run_filter: RunFilter = select_all,
) -> list[RunName]:
    """Return the run name of each log of a known arm; a single log without a seed is seed 0.

    Unpaired runs without seeds, or that share one, are numbered. `run_filter` as in `name_runs`.
    """
    if pattern is not None:
        matcher = _make_matcher(pattern, needs_arm=False)
        names = [_match_or_raise(log, matcher, pattern, arm) for log in logs]
        return _check_distinct(logs, names, run_filter)
    names = _name_by_seeds(logs, [arm] * len(logs), unpaired=unpaired or len(logs) == 1)
    if names is None:
        unnamed = [log.name for log in logs if _find_seed(log) is None]
        raise ComparisonError(
            f"seeds: {arm}: no seed in the name or config of {list_names(unnamed)}; describe the names, for "
            "example --pattern '*-s{seed}', or pass --unpaired if the runs have no seeds"
        )
    return _check_distinct(logs, names, run_filter)


def _identities(logs: Sequence[Log]) -> list[RunName]:
    """Return the run names that run directories of abrun state.

    Runs of several experiments can have one name: then the folder of an arm also names its experiment.
    """
    names = [log.identity for log in logs if log.identity]
    folders = [log.name.rpartition("/")[0] for log in logs]
    if len(set(names)) == len(names) or not all(folders):
        return names
    return [replace(name, arm=folder) for name, folder in zip(names, folders, strict=True)]


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


def has_arm_field(pattern: str) -> bool:
    """Return True if a pattern contains the arm."""
    return "arm" in _pattern_fields(pattern)


def strip_suffix(name: str) -> str:
    """Return a name without the suffixes of its file format and compression."""
    unpacked = name[: -len(".gz")] if name.lower().endswith(".gz") else name
    return next((unpacked[: -len(end)] for end in SUFFIXES if unpacked.lower().endswith(end)), name)


# --- one run ---


def _name_by_default_patterns(logs: Sequence[Log]) -> list[list[RunName]]:
    """Return the names by each default pattern that matches every log, fewest leading folders first."""
    candidates = []
    for pattern in DEFAULT_PATTERNS:
        matcher = _make_matcher(pattern, needs_arm=True, allows_reruns=True)
        matches = [matcher(without_times(strip_suffix(log.name))) for log in logs]
        if logs and all(match or log.identity for match, log in zip(matches, logs, strict=True)):
            names = [log.identity or _to_run_name(match) for match, log in zip(matches, logs, strict=True)]
            num_folders = sum(match.folders for match in matches if match)
            candidates.append((num_folders, [name for name in names if name]))
    return [names for _, names in sorted(candidates, key=lambda match: match[0])]


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
    name = without_times(strip_suffix(log.name))
    for pattern in patterns:
        for prefix in ("", "*/", "*-", "*_", "*."):
            if match := _make_matcher(prefix + pattern, needs_arm=False, allows_reruns=True)(name):
                return match.seed, match.rerun
    return None


def _to_run_name(match: NameMatch | None, arm: str | None = None) -> RunName | None:
    if match is None:
        return None
    return RunName(arm=arm if arm is not None else match.arm or "", seed=match.seed, rerun=match.rerun)


def _match_or_raise(log: Log, matcher: Matcher, pattern: str, arm: str | None = None) -> RunName:
    name = _to_run_name(matcher(log.name), arm)
    if name is None:
        raise ComparisonError(
            f"--pattern: got {pattern!r}, which does not match '{printable(log.name)}' ({log.place}); "
            "change the pattern, or remove that run from the sources"
        )
    return name


def _check_distinct(logs: Sequence[Log], names: Sequence[RunName], run_filter: RunFilter) -> list[RunName]:
    logs_of: dict[RunName, list[Log]] = {}
    for name, log in zip(names, logs, strict=True):
        if run_filter(name):
            logs_of.setdefault(name, []).append(log)
    for name, logs_with_name in logs_of.items():
        if len(logs_with_name) > 1 and merge_starts(logs_with_name, str(name)) is None:
            raise ComparisonError(
                f"{printable(str(name))}: got two runs of that name, {logs_with_name[0].place} and "
                f"{logs_with_name[1].place}; leave one out with --exclude, describe the names, for example "
                "--pattern '{arm}-s{seed}', or name the folder of each arm: ARM=FOLDER"
            )
    return list(names)


# --- patterns ---


def _pattern_fields(pattern: str) -> list[str]:
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


def _make_matcher(
    pattern: str, *, needs_arm: bool, needs_seed: bool = True, allows_reruns: bool = False
) -> Matcher:
    """Return a function that matches a name, or the fewest leading folders of it, against a pattern."""
    fields = _pattern_fields(pattern)
    needed = {"arm": needs_arm, "seed": needs_seed}
    missing = [name for name, needs in needed.items() if needs and name not in fields]
    if missing:
        raise ComparisonError(
            f"--pattern: got {pattern!r}, which lacks {{{missing[0]}}}; example: '{{arm}}-s{{seed}}'"
        )
    groups = {"arm": "(?P<arm>.+)", "seed": r"(?P<seed>\d{1,10})", "rerun": r"(?P<rerun>\d{1,9})"}
    regex = ""
    for literal, name, _, _ in string.Formatter().parse(pattern):
        regex += ".*".join(re.escape(fragment) for fragment in literal.split("*"))
        regex += groups[name] if name else ""
    if allows_reruns and "rerun" not in fields:
        regex += r"(?:-aa(?P<rerun>\d{1,9}))?"
    compiled = re.compile(regex, re.DOTALL | re.ASCII)

    def match(name: str) -> NameMatch | None:
        folders = strip_suffix(name).split("/")
        for count in range(1, len(folders) + 1):
            regex_match = compiled.fullmatch("/".join(folders[:count]))
            values = regex_match.groupdict() if regex_match else {}
            seed = int(values.get("seed") or 0)
            if regex_match and seed < SEED_LIMIT:
                return NameMatch(values.get("arm"), seed, int(values.get("rerun") or 0), count)
        return None

    return match
