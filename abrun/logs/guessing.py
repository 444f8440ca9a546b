"""Guesses of arms, seeds and the baseline for runs whose names match no known pattern.

A guess is used only if it explains every run: each arm has every seed once, and all arms have the same seeds.
If none does, runs are numbered and not paired. The report lists every guess.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from abrun.logs.log import Log
from abrun.logs.naming import SEED_LIMIT, RunFilter, select_all, strip_suffix
from abrun.logs.starts import without_times
from abrun.messages.codes import Code, Reason
from abrun.runs.layout import RunName
from abrun.runs.redaction import list_names

SEPARATORS = r"[/_\-. =@,]+"
NUMBERED = r"([A-Za-z]*)(\d{1,9})"
SEED_WORDS = ("seed", "s")
# Words of a time, a process or a logger in run names, which do not distinguish arms.
START_PART = r"\d{9,}|20\d{6}|\d{6}|\d{8}T\d+|RANK|offline|run|runs|tensorboard|wandb|tb|logs?|events"
SEED_KEYS = ("seed", "data_seed", "rollout_seed", "data_loader_seed", "random_seed")
BASELINE_NAMES = {"baseline", "base", "control", "reference", "ref"}
BASELINE_NAMES |= {"main", "master", "old", "before", "vanilla"}
MAX_ARMS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Guessed name of each log's run."""

    names: list[RunName]
    paired: bool
    seeds_known: bool  # False: runs were only numbered
    guessed: list[Reason]


def guess_runs(
    logs: Sequence[Log], arms: Sequence[str] | None = None, run_filter: RunFilter = select_all
) -> Guess | None:
    """Return the run name of each log; None if no guess explains the runs that `run_filter` selects.

    `arms`: the arm of each log, if known.
    """
    for source, seeds, guessed_arms in _seed_assignments(logs):
        run_arms = list(arms or guessed_arms)
        names = [RunName(arm=arm, seed=seed) for arm, seed in zip(run_arms, seeds, strict=True)]
        if _is_a_grid([name for name in names if run_filter(name)]):
            arm = None if arms else names[0].arm
            guess = Code.SEEDS_FROM(how=source, arm=arm, seed=seeds[0])
            return Guess(names=names, paired=True, seeds_known=True, guessed=[guess])
    groups = list(arms or _arm_groups(logs))
    if 1 < len(set(groups)) <= MAX_ARMS:
        has_one_run_per_arm = len(set(groups)) == len(logs)
        names = [RunName(arm=arm, seed=groups[:index].count(arm)) for index, arm in enumerate(groups)]
        guessed = [] if arms else [Code.ARMS_FROM_NAMES(num_arms=len(set(groups)))]
        if not has_one_run_per_arm:
            guessed.append(Code.NOTHING_SAYS_SEEDS())
        is_known = has_one_run_per_arm
        return Guess(names=names, paired=is_known, seeds_known=is_known, guessed=guessed)
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
    positions = [*range(-1, -shortest - 1, -1), *range(shortest)]
    assignments = []
    for position in positions:
        matches = [re.fullmatch(NUMBERED, words[position], re.ASCII) for words in split_names]
        if not all(matches) or len({match[1] for match in matches if match}) > 1:
            continue
        seeds = [int(match[2]) for match in matches if match]
        previous_words = {
            words[position - 1].lower() if position % len(words) else "" for words in split_names
        }
        is_named = previous_words == {"seed"} or split_names[0][position].lower().startswith(SEED_WORDS)
        arms = [_arm_without_part(words, position % len(words)) for words in split_names]
        text = f"names such as {list_names([logs[0].name])}"
        assignments.append((not is_named, (text, seeds, arms)))
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
