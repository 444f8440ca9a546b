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
from typing import Any, Literal, NamedTuple, TypeGuard

from abrun.errors import ComparisonError
from abrun.logs.log import Log
from abrun.logs.starts import merge_starts, without_times
from abrun.logs.step_parts import PROCESS
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
_SEED, _RERUN = r"(?P<seed>\d{1,10})", r"(?P<rerun>\d{1,9})"
# Seeds at the end of a name or of its first folders: after a word, a bare number, or after a word or a folder
_WORD = r"(?:seed[-_=]?|s)"
_NAMED_SEED, _BARE_SEED, _NAMED_OR_FOLDER = (
    re.compile(f"{prefix}{_SEED}(?:-aa{_RERUN})?", re.DOTALL | re.ASCII)
    for prefix in (
        rf"(?:(?P<arm>.+)[/\-_.])?{_WORD}",
        r"(?:(?P<arm>.+)[/\-_.])?",
        rf"(?P<arm>.+)(?:[/\-_.]{_WORD}|/)",
    )
)
SEED_KEYS = ("seed", "data_seed", "rollout_seed", "data_loader_seed", "random_seed")
SEED_LIMIT = 2**31
# Words whose number counts checkpoints, processes, or starts and jobs: never seeds
CHECKPOINT = r"(?:(?:global|train|training)[-_]?)?(?:checkpoint|ckpt|steps?|epoch|iter|iteration)"
# A checkpoint without a number, in the name of its scores
EVALUATED = re.compile(
    rf"(?<![A-Za-z0-9])({CHECKPOINT}[-_])?(?P<word>best|last|latest|final)([-_]({CHECKPOINT}|model))?(?![A-Za-z0-9])",
    re.IGNORECASE,
)
START = "version|attempt|try|trial|start|restart|job|jobid|task|part"
NO_SEED = re.compile(f"{PROCESS}|{CHECKPOINT}|{START}|env", re.IGNORECASE)
JOB_ID = re.compile(r"\d{4,8}")  # of Slurm, in front of the index in an array of jobs: `48211_0`
_START_NUMBER = re.compile(rf"(?<![A-Za-z0-9])({START})[-_]?\d+(?![A-Za-z0-9.])", re.IGNORECASE)
_RUN_COUNTS = re.compile(rf"(.*\.)?seed|s|run|rep|id|{NO_SEED.pattern}", re.IGNORECASE)
PART_NUMBER = re.compile(rf"(?<![A-Za-z])(?:{PROCESS}|{CHECKPOINT})[-_=. ]?\d+", re.IGNORECASE)
# The end of a Kubernetes pod's name, from its generator's alphabet: `job-7c9f6d-x2k4p`
_POD = re.compile(r"(-[{0}]{{6,10}})?-([{0}]{{5}}|[{0}]{{8}})(?=/|$)".format("b-df-hj-np-tv-xz2456789"))
# Words of launchers in front of a name: the number of Hydra's job, and Lightning's folder
_LAUNCHER = re.compile(r"(?<![^/])(\d+_(?=[\w.]+=)|lightning_logs/)")
SEPARATORS = r"[/_\-. =@,]+"
# Words of a time, a process or a logger in run names, which do not distinguish arms.
_START_PART = re.compile(
    r"\d{9,}|20\d{6}|\d{6}|\d{8}T\d+|RANK|offline|run|runs|tensorboard|wandb|tb|logs?|events"
)
_UNNAMED = re.compile(rf"(?i:(seed|s|run|rep)?\d*)|{_START_PART.pattern}")  # or numbers
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

    The rules are `pattern`, the runs' own files, wandb's job types as arms, and the ends of names. Unpaired
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
    for names in _name_by_ends(logs):
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
        "(dates and times are neither); describe the names, or give each arm's folder; runs of "
        "a single arm: ARM=FOLDER"
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


def _name_by_ends(logs: Sequence[Log]) -> Iterator[list[RunName]]:
    """Yield the names by arms and seeds at the end of every log's name."""
    is_configured = any(seed.kind == "setting" for log in logs if (seed := find_seed(log)))
    for regex in [_NAMED_SEED] if is_configured else [_NAMED_OR_FOLDER, _NAMED_SEED]:
        names = [log.identity or _find_in_name(regex, log) for log in logs]
        if names and all(name and name.arm for name in names):
            yield [name for name in names if name]


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
                f"{logs_with_name[1].place}; leave one out, or describe the names with --pattern"
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
        unnamed = [log.name for log in logs if find_seed(log) is None]
        return (
            f"seeds: {arm}: no seed in the name or config of {list_names(unnamed)}; say where they are, "
            "or pass --unpaired if the runs have no seeds"
        )
    return _check_distinct(logs, names, run_filter)


def _name_by_seeds(logs: Sequence[Log], arms: Sequence[str], *, unpaired: bool) -> list[RunName] | None:
    """Return the run names of known arms by their logs' seeds; None if a log has no seed.

    With `unpaired`, runs without seeds, or that share a seed, are numbered instead.
    """
    seeds = [find_seed(log) for log in logs]
    names = [
        RunName(arm=arm, seed=seed.number, rerun=seed.rerun)
        for arm, seed in zip(arms, seeds, strict=True)
        if seed is not None
    ]
    is_complete = len(names) == len(logs)
    if unpaired and not (is_complete and len(set(names)) == len(names)):
        return _number_runs(arms)
    return names if is_complete else None


def _number_runs(arms: Sequence[str]) -> list[RunName]:
    return [RunName(arm=arm, seed=arms[:index].count(arm)) for index, arm in enumerate(arms)]


class Seed(NamedTuple):
    """Seed of a run, and what states it."""

    number: int
    rerun: int
    kind: Literal["files", "name", "setting", "number"]  # number: a bare one in the name
    place: str  # the key of the setting, or the name

    @property
    def source(self) -> str:
        """What states the seed, for a sentence that begins "seeds from"."""
        kinds = {"files": "their own files", "setting": f"{self.place} in the settings"}
        return kinds.get(self.kind, f"names such as '{printable(self.place)}'")


def find_seed(log: Log) -> Seed | None:
    """Return the seed of a log: from its own files, a name that says so, its settings, or a bare number.

    A setting comes before a bare number, which may count starts, jobs or processes.
    """
    if log.identity:
        return Seed(log.identity.seed, log.identity.rerun, "files", log.place)
    if run := _find_in_name(_NAMED_SEED, log):
        return Seed(run.seed, run.rerun, "name", log.name)
    settings = {
        key: value
        for key, value in (log.config or {}).items()
        if _last_part(key) == "seed" and _is_seed(value)
    }
    if "seed" in settings or len({*settings.values()}) == 1:
        key = "seed" if "seed" in settings else next(iter(settings))
        return Seed(settings[key], 0, "setting", key)
    run = _find_in_name(_BARE_SEED, log)
    is_seed = run and not _counts_something(log.name, run.seed)
    return Seed(run.seed, run.rerun, "number", log.name) if run and is_seed else None


def _counts_something(name: str, number: int) -> bool:
    """Return True if a number of a name is a process's, a start's or a checkpoint's, or part of a decimal."""
    counter = rf"(?<![A-Za-z])({NO_SEED.pattern})[-_=. ]?|(?<!\d){JOB_ID.pattern}_"
    counted = rf"({counter}|\d\.\d*|\de-)0*{number}(-aa\d+)?(/|$)"
    return re.search(counted, without_times(strip_suffix(name)), re.IGNORECASE) is not None


# --- patterns ---


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
        name = _match(_compile_pattern(pattern), log.name)
        if name is None:
            return (
                f"--pattern: got {pattern!r}, which does not match '{printable(log.name)}' ({log.place}); "
                "change the pattern, or remove that run from the sources"
            )
        names.append(name if arm is None else replace(name, arm=arm))
    if "seed" not in needed:
        return _number_runs([name.arm for name in names])
    return _check_distinct(logs, names, run_filter)


def matches(pattern: str, name: str) -> bool:
    """Return True if a pattern matches a name, or the leading folders of it."""
    return _match(_compile_pattern(pattern), name) is not None


def _find_in_name(regex: re.Pattern[str], log: Log) -> RunName | None:
    return _match(regex, without_times(strip_suffix(log.name)))


def _match(regex: re.Pattern[str], name: str) -> RunName | None:
    """Return the run that a pattern finds in a name, or in the fewest leading folders of it."""
    folders = strip_suffix(name).split("/")
    for count in range(1, len(folders) + 1):
        match = regex.fullmatch("/".join(folders[:count]))
        values = match.groupdict() if match else {}
        seed = int(values.get("seed") or 0)
        if match and seed < SEED_LIMIT:
            return RunName(arm=values.get("arm") or "", seed=seed, rerun=int(values.get("rerun") or 0))
    return None


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    groups = {"arm": "(?P<arm>.+)", "seed": _SEED, "rerun": _RERUN}
    regex = ""
    for literal, name, _, _ in string.Formatter().parse(pattern):
        regex += ".*".join(re.escape(fragment) for fragment in literal.split("*"))
        regex += groups[name] if name else ""
    return re.compile(regex, re.DOTALL | re.ASCII)


# --- settings that the user names ---


def name_by_settings(
    logs: Sequence[Log], arms_by: str | None, seeds_by: str | None, arms: Sequence[str] | None
) -> Naming | str:
    """Return the run names by a setting that holds the arm, the seed, or both, or why it names not all.

    `arms`: the arm of each log, if known.
    """
    for option, key in (("--arms-by", arms_by), ("--seeds-by", seeds_by)):
        unnamed_logs = [log.name for log in logs if key and find_setting(log, key) is None]
        if unnamed_logs:
            problem = f"got '{printable(key or '')}', which is no setting of {list_names(unnamed_logs, 3)}"
            return f"{option}: {problem}; they differ in {list_names(varying_settings(logs), 8) or 'none'}"
    if arms_by:
        arms = [f"{_last_part(arms_by)}={find_setting(log, arms_by)}" for log in logs]
    arms = arms or _arm_groups(logs)
    if seeds_by:
        names = []
        for arm, seed in zip(arms, (find_setting(log, seeds_by) for log in logs), strict=True):
            if not _is_seed(seed):
                problem = f"got {printable(str(seed))} as {printable(seeds_by)}"
                return f"--seeds-by: {problem}; allowed: whole numbers"
            names.append(RunName(arm=arm, seed=seed))
        source = Code.SEEDS_FROM(how=f"setting {seeds_by}", arm=arms[0], seed=names[0].seed)
        return Naming(names=names, guessed=(source,))
    by_seeds = _name_by_seeds(logs, arms, unpaired=False)
    if by_seeds and len(set(by_seeds)) == len(by_seeds):
        return Naming(names=by_seeds)
    return guess_runs(logs, arms) or Naming(names=_number_runs(arms), paired=False, seeds_known=False)


def varying_settings(logs: Sequence[Log]) -> list[str]:
    """Return the settings that are not the same in all logs."""
    keys = dict.fromkeys(key for log in logs for key in log.config or {})
    return [key for key in keys if len({repr((log.config or {}).get(key)) for log in logs}) > 1]


def find_setting(log: Log, key: str) -> Any:
    """Return a setting by its key, or by the end of the only key that ends so; None without one."""
    settings = log.config or {}
    keys = [key] if key in settings else [name for name in settings if name.endswith(f".{key}")]
    return settings[keys[0]] if len(keys) == 1 else None


# --- guesses ---


def guess_runs(
    logs: Sequence[Log], arms: Sequence[str] | None = None, run_filter: RunFilter = select_all
) -> Naming | str | None:
    """Return the run name of each log, or a question; None if no guess explains the runs.

    `arms`: the arm of each log, if known. Only runs that `run_filter` selects must be explained.
    """
    for evidence in _seed_evidence(logs):
        namings: dict[tuple[RunName, ...], Naming] = {}
        for source, seeds, arm_candidates in evidence:
            for run_arms in [arms] if arms else arm_candidates:
                names = [RunName(arm=arm, seed=seed) for arm, seed in zip(run_arms, seeds, strict=True)]
                if _is_a_grid([name for name in names if run_filter(name)]):
                    guess = Code.SEEDS_FROM(how=source, arm=None if arms else names[0].arm, seed=seeds[0])
                    namings.setdefault(tuple(names), Naming(names=names, guessed=(guess,)))
                    break
        if len(namings) > 1:
            first, second, *_ = (str(names[0]) for names in namings)
            return (
                f"arms and seeds: '{printable(logs[0].name)}' may be {first} or {second}; "
                "describe the names with --pattern"
            )
        if namings:
            return next(iter(namings.values()))
    groups = list(arms or _arm_groups(logs))
    num_arms = len(set(groups))
    if not 1 < num_arms <= MAX_ARMS:
        return None
    if not _kinds(logs) and (question := ask_about_numbers(logs, groups, are_arms=arms is not None)):
        return question
    guessed = () if arms else (Code.ARMS_FROM_NAMES(num_arms=num_arms),)
    if num_arms == len(logs):
        return Naming(names=_number_runs(groups), guessed=guessed)
    guessed = (*guessed, Code.NOTHING_SAYS_SEEDS())
    return Naming(names=_number_runs(groups), paired=False, seeds_known=False, guessed=guessed)


def ask_about_numbers(logs: Sequence[Log], groups: Sequence[str], *, are_arms: bool) -> str | None:
    """Return a question if runs of one group differ in a process's or checkpoint's number: they may be one.

    If the groups are no known arms: also if they differ in several numbers, and may be several arms.
    """
    for group in dict.fromkeys(groups):
        names = [log for log, own in zip(logs, groups, strict=True) if own == group]
        examples = list_names([log.name for log in names], 3)
        if len(names) > 1 and len({PART_NUMBER.sub("", log.name) for log in names}) == 1:
            return (
                f"runs: {examples} differ in the number of a process or checkpoint; keep one with --exclude, "
                "or pass --unpaired if each is a training of its own"
            )
        if not are_arms and len({*_shortened_names(names)}) > 1 and not differ_in_one_number(names):
            return (
                f"arms: {examples} differ in several numbers; say which are arms and which are runs with "
                "--pattern, or give the folder of each arm: ARM=FOLDER"
            )
    return None


def guess_baseline(arms: Sequence[str]) -> str:
    """Return the only arm with a baseline-like name, else the first arm."""
    baseline_like = [
        arm for arm in arms if {word.lower() for word in re.split(SEPARATORS, arm)} & BASELINE_NAMES
    ]
    return baseline_like[0] if len(baseline_like) == 1 else arms[0]


def differ_only_by_numbers(logs: Sequence[Log]) -> bool:
    """Return True if run names differ only by numbers, so that they can be one arm."""
    kinds = {(log.job_type, log.group) for log in logs}
    return len(kinds) == 1 and len(set(names_without_numbers(logs))) == 1


def differ_in_one_number(logs: Sequence[Log]) -> bool:
    """Return True if run names are the same but for one number, as of reruns."""
    names = _shortened_names(logs)
    split_names = [re.split(r"(\d+)", name) for name in names]
    if len({len(words) for words in split_names}) != 1 or not differ_only_by_numbers(logs):
        return False
    if 1 < len({*names}) < len(names):
        return False  # the second number is a time
    varying = [index for index, words in enumerate(zip(*split_names, strict=True)) if len({*words}) > 1]
    return not varying or (len(varying) == 1 and varying[0] % 2 == 1)


Evidence = list[tuple[str, list[int], list[list[str]]]]  # source, seeds, possible arms; likelier ones first


def _seed_evidence(logs: Sequence[Log]) -> Iterator[Evidence]:
    """Yield possible seeds by falling weight: named in names, settings, and other numbers of the names."""
    kinds = _kinds(logs)
    # Words are at 0, 2, 4...
    split_names = [re.split(f"({SEPARATORS})", name) for name in _shortened_names(logs)]
    shortest = min(map(len, split_names), default=0)
    by_weight: dict[int, Evidence] = {0: [], 1: [], 2: []}
    for position in (*range(-1, -shortest - 1, -2), *range(0, shortest, 2)):
        places = [(words, position % len(words)) for words in split_names]
        numbers = [_seed_word(words, place) for words, place in places]
        if not all(numbers) or len({number[1].lower() for number in numbers if number}) > 1:
            continue
        seeds = [int(number[2]) for number in numbers if number]
        words_before = {words[place - 2].lower() if place else "" for words, place in places}
        word = split_names[0][places[0][1]].lower()
        weight = 0 if words_before == {"seed"} or word.startswith("s") else 1 if word.isdigit() else 2
        arms = [_cut_word(words, place) for words, place in places]
        by_weight[weight].append((f"names such as {list_names([logs[0].name])}", seeds, [*kinds, arms]))
    yield by_weight[0]
    keys = {key for log in logs for key in log.config or {} if _last_part(key) in SEED_KEYS}
    for key in sorted(keys, key=lambda key: (SEED_KEYS.index(_last_part(key)), len(key), key)):
        seeds = [value for log in logs if _is_seed(value := (log.config or {}).get(key))]
        if len(seeds) == len(logs):
            arm_keys = differing_settings(logs, seeds)
            arms = [",".join(f"{key}={(log.config or {}).get(key)}" for key in arm_keys) for log in logs]
            arm_candidates = [_arm_groups(logs), [arm or "run" for arm in arms]]
            yield [(f"{key} in the settings", seeds, arm_candidates)]
    yield by_weight[1]
    yield by_weight[2]


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _is_seed(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < SEED_LIMIT


def _seed_word(words: Sequence[str], place: int) -> re.Match[str] | None:
    """Return the letters and the number of a word that may be a seed.

    The number of a process, a start or a checkpoint is none, nor are the parts of a version or a decimal.
    """
    match = re.fullmatch(r"([A-Za-z]*)(\d{1,9})", words[place], re.ASCII)
    counted = match and (match[1] or (words[place - 2] if place else ""))
    is_index = place > 1 and words[place - 1] == "_" and JOB_ID.fullmatch(words[place - 2])
    is_counted = is_index or _is_decimal(words, place) or NO_SEED.fullmatch(counted or "")
    return None if is_counted else match


def are_indices(logs: Sequence[Log], names: Sequence[RunName]) -> bool:
    """Return True if all seeds are numbers of folders that every arm counts from 0, as arrays of jobs are.

    Nobody says then that they are seeds: runs of one number may have nothing in common.
    """
    numbers: dict[str, list[int]] = {}
    for log, name in zip(logs, names, strict=True):
        seed = find_seed(log)
        if seed is None or seed.kind != "number" or not re.search(rf"(^|/){seed.number}(/|$)", log.name):
            return False
        numbers.setdefault(name.arm, []).append(name.seed)
    return all(len(seeds) > 1 and sorted(seeds) == [*range(len(seeds))] for seeds in numbers.values())


def _is_decimal(words: Sequence[str], place: int) -> bool:
    """Return True for a part of a version or a decimal, such as 8 in 0.8 or 4 in 3e-4.

    Separators lie between words.
    """
    joined = "".join(words[place - 2 : place]) if place > 1 else ""
    is_after_digits = re.search(r"\d(\.|e-)$", joined, re.IGNORECASE)
    is_before_digits = place + 2 < len(words) and words[place + 1] == "." and words[place + 2][:1].isdigit()
    return words[place].isdigit() and bool(is_after_digits or is_before_digits)


def _kinds(logs: Sequence[Log]) -> list[list[str]]:
    """Return wandb's job types and groups where they differ between the logs."""
    kinds = ([log.job_type for log in logs], [log.group for log in logs])
    return [
        [kind or "" for kind in run_kinds] for run_kinds in kinds if all(run_kinds) and len({*run_kinds}) > 1
    ]


def _cut_word(words: Sequence[str], place: int) -> str:
    """Return a name, of words and separators, without one word and the word `seed` before it."""
    start = place - 2 if place and words[place - 2].lower() == "seed" else place
    head, tail = words[: max(0, start)], words[place + 1 :]  # one of the separators between them remains
    words = [*head, *tail[1:]] if not head or head[-1] == "/" else [*head[:-1], *tail]
    while len(words) > 2 and _START_PART.fullmatch(words[-1]):
        words = words[:-2]
    return "".join(words).strip("/_-. =@,") or "run"


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
    """Return an arm for each log: its job type or group, a name that runs share, or one without numbers."""
    if kinds := _kinds(logs):
        return kinds[0]
    names, without_numbers = _shortened_names(logs), names_without_numbers(logs)
    are_numbered = len(set(without_numbers)) == 1  # names that only the number of a run distinguishes
    if (1 < len({*names}) < len(names) and not are_numbered) or len(logs) == 2:
        return names
    if not are_numbered and all(without_numbers):
        return without_numbers
    return [name or "run" for name in without_numbers]


def differing_settings(logs: Sequence[Log], seeds: Sequence[int] | None = None) -> list[str]:
    """Return the settings that differ between runs of one seed, but not in every log as run names do.

    Without `seeds`: those that differ between any runs, and fractions even if they differ in every log.
    """
    configs = [log.config or {} for log in logs]
    differing_keys = []
    keys = {key for config in configs for key in config}
    for key in sorted(key for key in keys if _last_part(key) not in SEED_KEYS):
        values = [repr(config.get(key)) for config in configs]
        groups = seeds or [0] * len(logs)
        varies_in_a_seed = len({*zip(groups, values, strict=True)}) > len({*groups})
        are_fractions = seeds is None and all(type(config.get(key)) is float for config in configs)
        if varies_in_a_seed and (are_fractions or len({*values}) <= len(logs) // 2):
            differing_keys.append(key)
    return differing_keys


def _shortened_names(logs: Sequence[Log]) -> list[str]:
    """Return the names without times or the ends of pods' names, and without a file name that all share."""
    names = [_LAUNCHER.sub("", without_times(strip_suffix(log.name))) for log in logs]
    pods = [match[0] for name in names if (match := _POD.search(name))]
    if len({*pods}) == len(names) > 1 and re.search(r"\d", "".join(pods)):
        names = [_POD.sub("", name) for name in names]
    while len({name.rpartition("/")[2] for name in names}) == 1 and all("/" in name for name in names):
        names = [name.rpartition("/")[0] for name in names]
    return names


def names_without_numbers(logs: Sequence[Log]) -> list[str]:
    """Return the names as they are written, without words that are numbers, times or loggers.

    The number of a setting, such as 32 in `batch=32`, remains.
    """
    cut_names = []
    for name in _shortened_names(logs):
        words = re.split(f"({SEPARATORS})", _START_NUMBER.sub("", name))
        cut_name = ""
        for place in range(0, len(words), 2):
            is_setting = place and words[place - 1] == "=" and not _RUN_COUNTS.fullmatch(words[place - 2])
            if is_setting or _is_decimal(words, place) or not _UNNAMED.fullmatch(words[place]):
                cut_name += "".join(words[max(place - 1, 0) : place + 1])
        cut_names.append(cut_name.strip("/_-. =@,"))
    return cut_names
