"""Names of the runs of a single arm, for sources that hold no other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from abrun.errors import ComparisonError
from abrun.logs import PREFIXES, Log
from abrun.logs.guessing import Guess, differ_in_one_number, differ_only_by_numbers
from abrun.logs.naming import RunFilter, name_seeds, strip_suffix
from abrun.redaction import printable
from abrun.regular_files import exists
from abrun.runs.layout import RunName


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
    path = rest if colon and prefix in PREFIXES else source
    name = Path(path).resolve().name if exists(Path(path)) else path.rstrip("/").split("/")[-1]
    return printable(strip_suffix(name.rpartition("\\")[2]))
