"""Completions of two runs for the same prompts, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from abrun.logs.completions import read_completions
from abrun.runs.files import is_directory
from abrun.runs.lines import Sample
from abrun.runs.rundir import RunDir

SamplesByStep = Mapping[int, tuple[Sample, ...]]  # samples of one run


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePair:
    """Completions of two runs for one prompt; None if a run kept none."""

    step: int
    prompt: str
    left: Sample | None
    right: Sample | None


def read_run_samples(place: Path) -> SamplesByStep:
    """Return the samples in a run's folder, of abrun or of another trainer; empty for a single file."""
    if not is_directory(place):
        return {}
    return RunDir(place).samples() or read_completions(place)


def pair_samples(left: SamplesByStep, right: SamplesByStep, step: int | None = None) -> list[SamplePair]:
    """Return sample pairs by step, in the order of the left run's prompts, then those only the right run has.

    `step`: only this step. Raises StoreError if a file is damaged.
    """
    both = left, right
    steps = sorted(both[0].keys() | both[1].keys()) if step is None else [step]
    sample_pairs = []
    for current_step in steps:
        by_prompt = [{sample.prompt: sample for sample in samples.get(current_step, ())} for samples in both]
        sample_pairs += [
            SamplePair(
                step=current_step,
                prompt=prompt,
                left=by_prompt[0].get(prompt),
                right=by_prompt[1].get(prompt),
            )
            for prompt in dict.fromkeys([*by_prompt[0], *by_prompt[1]])
        ]
    return sample_pairs
