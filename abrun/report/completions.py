"""What the arms said to the same prompts, as the page holds it: of one seed, of some steps, texts cut."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from abrun.errors import StoreError
from abrun.recorded.experiment import RecordedExperiment
from abrun.recorded.samples import SamplesByStep, read_run_samples
from abrun.redaction import shown
from abrun.runs.samples import Sample

MOST_STEPS = 8  # the first and the last among them
MOST_PROMPTS = 4  # of a step
MOST_CHARACTERS = 1500  # of a text, from its beginning and its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and what each arm said to it; None: the arm has kept none of it."""

    prompt: str
    said: list[dict[str, Any] | None]  # by arm, in the order of `Completions.arms`


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Of the first seed of which the baseline and a treatment have kept some; or why they cannot be read."""

    seed: int | None
    arms: list[int]  # indices, the baseline first
    steps: list[tuple[int, list[Prompt]]]
    num_steps: int  # that all of them kept, of which these are
    problem: str | None = None


def completions(experiment: RecordedExperiment) -> Completions | None:
    """None where no seed has any in two arms, as of runs that another framework logged."""
    try:
        for seed in experiment.arm(experiment.baseline):
            kept = {arm: samples for arm in experiment.arms if (samples := _kept(experiment, arm, seed))}
            if experiment.baseline in kept and len(kept) > 1:
                return _of_seed(experiment, seed, kept)
    except StoreError as error:
        return Completions(seed=None, arms=[], steps=[], num_steps=0, problem=shown(str(error)))
    return None


def _kept(experiment: RecordedExperiment, arm: str, seed: int) -> SamplesByStep:
    run = experiment.arm(arm).get(seed)
    return read_run_samples(Path(run.place)) if run and not run.thinned else {}


def _of_seed(
    experiment: RecordedExperiment, seed: int, kept: Mapping[str, SamplesByStep]
) -> Completions | None:
    shared = sorted(set.intersection(*(set(samples) for samples in kept.values())))
    if not shared:
        return None
    chosen = np.unique(np.linspace(0, len(shared) - 1, min(MOST_STEPS, len(shared))).round().astype(int))
    return Completions(
        seed=seed,
        arms=[experiment.arms.index(arm) for arm in kept],
        steps=[(shared[at], _prompts([samples[shared[at]] for samples in kept.values()])) for at in chosen],
        num_steps=len(shared),
    )


def _prompts(of_arms: Iterable[tuple[Sample, ...]]) -> list[Prompt]:
    said = [{one.prompt: one for one in samples} for samples in of_arms]
    prompts = list(dict.fromkeys(prompt for one in said for prompt in one))
    prompts.sort(key=lambda prompt: -sum(prompt in one for one in said))  # those that all have come first
    return [
        Prompt(prompt=_text(prompt), said=[_said(one.get(prompt)) for one in said])
        for prompt in prompts[:MOST_PROMPTS]
    ]


def _said(one: Sample | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {key: value for key, value in asdict(one).items() if key != "prompt"} | {"text": _text(one.text)}


def _text(text: str) -> str:
    """Lines stay lines; of a long text its beginning and its end, where the answer is."""
    cut = len(text) - MOST_CHARACTERS
    if cut > 0:
        head, tail = text[: MOST_CHARACTERS * 2 // 3], text[-(MOST_CHARACTERS // 3) :]
        text = f"{head}\n[{cut} characters left out]\n{tail}"
    return "\n".join(shown(line) for line in text.splitlines())
