"""A command that names the runs, for sources whose arms or seeds cannot be told: found by trying options."""

import glob
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from abrun.errors import ComparisonError
from abrun.logs import Log
from abrun.logs.naming import (
    NO_SEED,
    PART_NUMBER,
    SEED_KEYS,
    SEPARATORS,
    find_setting,
    strip_suffix,
    varying_settings,
)
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.logs.recorded.identify import Sources
from abrun.logs.recorded.selection import ReadingOptions

MAX_TRIALS, MAX_KEYS = 40, 4


def suggest_command(
    sources: Sources, reading: ReadingOptions, build: Callable[[Sources, ReadingOptions], RecordedExperiment]
) -> str:
    """Return the command of the first options with which `build` names the runs; for a reference, one arm."""
    is_one_arm, plain = reading.allows_one_arm, replace(reading, pattern=None, arms_by=None, seeds_by=None)
    as_one_arm = replace(sources, named_sources=[("new", source) for _, source in sources.named_sources])
    for tried_sources in (as_one_arm,) if is_one_arm and not sources.has_arms else (sources,):
        for changes, needs_grid in islice(_candidates(sources.logs, reading), MAX_TRIALS):
            tried = replace(plain, **changes)
            try:
                experiment = build(tried_sources, tried)
            except ComparisonError:
                continue
            if len(experiment.arms) == 1 if is_one_arm else not needs_grid or _is_grid(experiment):
                names = [f"{arm}={source}" if arm else source for arm, source in tried_sources.named_sources]
                return shlex.join(["abrun", "compare", *names, *tried.to_words()])
    return "abrun compare SOURCES --list"


def _is_grid(experiment: RecordedExperiment) -> bool:
    seeds = [{run.seed for run in experiment.runs if run.arm == arm} for arm in experiment.arms]
    return len(seeds) > 1 and all(arm_seeds == seeds[0] for arm_seeds in seeds)


def _candidates(logs: Sequence[Log], reading: ReadingOptions) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield options, the likelier first, and whether only a grid of arms and seeds confirms them."""
    by_settings = [(settings, False) for settings in _settings(logs, reading)]
    as_they_are = [({}, False)]
    yield from by_settings + as_they_are if reading.arms_by or reading.seeds_by else as_they_are + by_settings
    yield from (({"pattern": pattern}, True) for pattern in _patterns(logs))
    parts = [log.name for log in logs if PART_NUMBER.search(log.name)]
    last_parts = {PART_NUMBER.sub("", name): name for name in parts}
    if len(last_parts) < len({*parts}):
        excluded = [glob.escape(name) for name in dict.fromkeys(parts) if name not in last_parts.values()]
        yield {"exclude": (*reading.exclude, *excluded)}, False
    names_of = defaultdict[str, list[str]](list)
    for log in logs:
        for word in {*re.split(SEPARATORS, strip_suffix(log.name))} - {""}:
            names_of[word].append(log.name)
    rare_words = sorted(
        (word for word in names_of if len(names_of[word]) < len(logs)),
        key=lambda word: (len(names_of[word]), word),
    )
    for word in rare_words[: MAX_TRIALS // 3]:
        leads = all(name.startswith(word) for name in names_of[word])
        yield {"exclude": (*reading.exclude, f"{'' if leads else '*'}{glob.escape(word)}*")}, True
    yield {"unpaired": True}, False
    yield {"pattern": "{arm}", "unpaired": True}, False


def _settings(logs: Sequence[Log], reading: ReadingOptions) -> Iterator[Mapping[str, Any]]:
    keys, arms_by = varying_settings(logs), reading.arms_by
    seed_keys = [key for key in keys if key.rpartition(".")[2] in SEED_KEYS]
    if reading.seeds_by:  # perhaps under another name
        seed_keys += [key for key in keys if all(type(find_setting(log, key)) is int for log in logs)]
    seed_keys = [*dict.fromkeys(seed_keys)][:MAX_KEYS]
    num_values = {key: len({repr(find_setting(log, key)) for log in logs}) for key in keys}
    arm_keys = sorted(
        (key for key in keys if key not in seed_keys), key=lambda key: (key != arms_by, num_values[key])
    )
    for key in arm_keys[:MAX_KEYS]:
        yield from ({"arms_by": key, "seeds_by": seeds_by} for seeds_by in (*seed_keys, None))
    yield from ({"seeds_by": key} for key in seed_keys)


def _patterns(logs: Sequence[Log]) -> Iterator[str]:
    """Yield patterns that take one differing word of the names as the seed, and another as the arm."""
    split_names = [re.split(f"({SEPARATORS})", strip_suffix(log.name)) for log in logs]
    if len({len(words) for words in split_names}) != 1:
        return
    columns = [*zip(*split_names, strict=True)]
    varying = [place for place, words in enumerate(columns) if len({*words}) > 1]
    fixed = [re.sub(r"([{}])", r"\1\1", words[0]) for words in columns]
    for seed_place in reversed(varying):
        numbers = [re.fullmatch(r"([A-Za-z]*)\d{1,9}", word) for word in columns[seed_place]]
        heads = {match[1] for match in numbers if match}
        counted = fixed[seed_place - 2] if seed_place > 1 else ""
        if not all(numbers) or len(heads) != 1 or NO_SEED.fullmatch("".join(heads) or counted):
            continue
        for arm_place in [*(place for place in varying if place != seed_place), None]:
            words = ["*" if place in varying else word for place, word in enumerate(fixed)]
            words[seed_place] = "".join(heads) + "{seed}"
            if arm_place is not None:
                words[arm_place] = "{arm}"
            yield re.sub(r"\*+", "*", "".join(words))
