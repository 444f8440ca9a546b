"""Completions of two runs to the same prompts, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from abrun.logs.completions import read_completions
from abrun.regular_files import is_directory
from abrun.runs.rundir import RunDir
from abrun.runs.samples import Sample

Kept = Mapping[int, tuple[Sample, ...]]  # of one run, by step


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """What two runs said to one prompt; None: that run has kept none of it."""

    step: int
    prompt: str
    left: Sample | None
    right: Sample | None


def samples_in(place: Path) -> Kept:
    """Of a run's folder: abrun's own, or as another trainer has kept them there; none of a single file."""
    if not is_directory(place):
        return {}
    return RunDir(place).samples() or read_completions(place)


def side_by_side(left: Kept, right: Kept, step: int | None = None) -> list[SideBySide]:
    """In the order of steps and of the left run's prompts, then what the right run alone has.

    `step`: of this one alone. Raises StoreError where a file is corrupt.
    """
    both = left, right
    steps = sorted(both[0].keys() | both[1].keys()) if step is None else [step]
    found = []
    for each in steps:
        of_prompt = [{one.prompt: one for one in of.get(each, ())} for of in both]
        found += [
            SideBySide(
                step=each, prompt=prompt, left=of_prompt[0].get(prompt), right=of_prompt[1].get(prompt)
            )
            for prompt in dict.fromkeys([*of_prompt[0], *of_prompt[1]])
        ]
    return found
