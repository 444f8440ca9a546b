"""Arms, seeds and the baseline of runs whose names follow no usual pattern: what is guessed is said.

A guess stands only where it explains every run: each arm has every seed once, and the same seeds as the
others. Where none does, runs are numbered, which pairs nothing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from abrun.logs.log import Log, listed
from abrun.logs.naming import LARGEST_SEED, Selects, every_run, stem
from abrun.logs.starts import without_moments
from abrun.reasons import Code, Reason
from abrun.runs.layout import RunName

BETWEEN = r"[/_\-. =@,]+"
NUMBERED = r"([A-Za-z]*)(\d{1,9})"
SEED_WORDS = ("seed", "s")
# Parts of a time, a process, or what a logger adds to every run's name: they tell no arm from another.
OF_A_START = r"\d{9,}|20\d{6}|\d{6}|\d{8}T\d+|RANK|offline|run|runs|tensorboard|wandb|tb|logs?|events"
SEED_KEYS = ("seed", "data_seed", "rollout_seed", "data_loader_seed", "random_seed")
BASELINES = ("baseline", "base", "control", "reference", "ref", "main", "master", "old", "before", "vanilla")
MOST_ARMS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Which run each log is."""

    names: list[RunName]
    paired: bool
    seeds_known: bool  # False: they are numbers only
    guessed: list[Reason]


def guess_runs(
    logs: Sequence[Log], arms: Sequence[str] | None = None, selects: Selects = every_run
) -> Guess | None:
    """The run that each log is; None: nothing explains those that `selects` takes.

    `arms`: of each log, where known.
    """
    for how, seeds, found_arms in _assignments(logs):
        of_arm = list(arms or found_arms)
        names = [RunName(arm=arm, seed=seed) for arm, seed in zip(of_arm, seeds, strict=True)]
        if _is_a_grid([name for name in names if selects(name)]):
            arm = None if arms else names[0].arm
            guess = Code.SEEDS_FROM(how=how, arm=arm, seed=seeds[0])
            return Guess(names=names, paired=True, seeds_known=True, guessed=[guess])
    groups = list(arms or _groups(logs))
    if 1 < len(set(groups)) <= MOST_ARMS:
        single = len(set(groups)) == len(logs)
        names = [RunName(arm=arm, seed=groups[:index].count(arm)) for index, arm in enumerate(groups)]
        guessed = [] if arms else [Code.ARMS_FROM_NAMES(num_arms=len(set(groups)))]
        if not single:
            guessed.append(Code.NOTHING_SAYS_SEEDS())
        return Guess(names=names, paired=single, seeds_known=single, guessed=guessed)
    return None


def guess_baseline(arms: Sequence[str]) -> str:
    """The one arm that is called like a baseline, else the first."""
    called = [arm for arm in arms if {part.lower() for part in re.split(BETWEEN, arm)} & {*BASELINES}]
    return called[0] if len(called) == 1 else arms[0]


def told_by_numbers(logs: Sequence[Log]) -> bool:
    """Whether nothing but numbers tells runs apart: they are of one arm."""
    kinds = {(log.job_type, log.group) for log in logs}
    return len(kinds) == 1 and len(set(_without_numbers(logs))) == 1


def _assignments(logs: Sequence[Log]) -> Iterator[tuple[str, list[int], list[str]]]:
    """Ways to read all seeds, the likeliest first, and the arms that are left: how, seeds, arms."""
    parts = [re.split(BETWEEN, name) for name in _names(logs)]
    shortest = min(map(len, parts), default=0)
    places = [*range(-1, -shortest - 1, -1), *range(shortest)]
    found = []
    for place in places:
        matches = [re.fullmatch(NUMBERED, part[place], re.ASCII) for part in parts]
        if not all(matches) or len({match[1] for match in matches if match}) > 1:
            continue
        seeds = [int(match[2]) for match in matches if match]
        before = {part[place - 1].lower() if place % len(part) else "" for part in parts}
        is_named = before == {"seed"} or parts[0][place].lower().startswith(SEED_WORDS)
        arms = [_arm_without(part, place % len(part)) for part in parts]
        text = f"names such as {listed([logs[0].name])}"
        found.append((not is_named, (text, seeds, arms)))
    yield from (one for _, one in sorted(found, key=lambda one: one[0]))
    keys = {key for log in logs for key in log.config or {} if key.rsplit(".", 1)[-1] in SEED_KEYS}
    settings = _settings(logs, keys)
    for key in sorted(keys, key=lambda key: (SEED_KEYS.index(key.rsplit(".", 1)[-1]), len(key), key)):
        values = [(log.config or {}).get(key) for log in logs]
        if all(type(value) is int and 0 <= value < LARGEST_SEED for value in values):
            seeds = [int(value or 0) for value in values]
            yield f"{key} in the configurations", seeds, _groups(logs)
            yield f"{key} and what else differs in the configurations", seeds, settings


def _is_a_grid(names: Sequence[RunName]) -> bool:
    """Whether every arm has the same seeds, two or more, each once."""
    seeds = {arm: sorted(name.seed for name in names if name.arm == arm) for arm in {n.arm for n in names}}
    first = next(iter(seeds.values()), [])
    return (
        1 < len(seeds) <= MOST_ARMS
        and len(set(names)) == len(names) > len(seeds)
        and all(one == first for one in seeds.values())
    )


def _groups(logs: Sequence[Log]) -> list[str]:
    """An arm for each log: wandb's job type or group where they differ, else its name without numbers."""
    for kinds in ([log.job_type for log in logs], [log.group for log in logs]):
        if all(kinds) and len(set(kinds)) > 1:
            return [kind or "" for kind in kinds]
    without = _without_numbers(logs)
    if len(set(without)) > 1 and all(without):
        return without
    return _names(logs) if len(logs) == 2 else without


def _settings(logs: Sequence[Log], seed_keys: set[str]) -> list[str]:
    """An arm for each log: the settings that differ, but not in every log, as run names and folders do."""
    configs = [log.config or {} for log in logs]
    differ = []
    for key in sorted({key for config in configs for key in config} - seed_keys):
        values = {repr(config.get(key)) for config in configs}
        if 1 < len(values) <= len(logs) // 2:
            differ.append(key)
    return [",".join(f"{key}={config.get(key)}" for key in differ) or "run" for config in configs]


def _names(logs: Sequence[Log]) -> list[str]:
    """The names without times, and without the name of the file where that of all is the same."""
    names = [without_moments(stem(log.name)) for log in logs]
    while len({name.rpartition("/")[2] for name in names}) == 1 and all("/" in name for name in names):
        names = [name.rpartition("/")[0] for name in names]
    return names


def _without_numbers(logs: Sequence[Log]) -> list[str]:
    parts = [re.split(BETWEEN, name) for name in _names(logs)]
    return ["-".join(part for part in of if not _tells_nothing(part, numbers=True)) for of in parts]


def _arm_without(parts: Sequence[str], place: int) -> str:
    kept = [part for index, part in enumerate(parts) if index != place and not _tells_nothing(part)]
    if len(kept) > 1 and kept[-1].lower() == "seed":
        kept.pop()
    return "-".join(part for part in kept if part.lower() != "seed") or "run"


def _tells_nothing(part: str, numbers: bool = False) -> bool:
    plain = numbers and re.fullmatch(r"(seed|s|run|rep)?\d*", part, re.IGNORECASE)
    return bool(plain or re.fullmatch(OF_A_START, part))
