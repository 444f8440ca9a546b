"""Completions of the arms for the same prompts, for the page: one seed, a few steps, long texts cut."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType, group
from rich.text import Text

from abrun.errors import StoreError
from abrun.logs.completions import SamplePair, SamplesByStep, read_run_samples
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.report.present.tables import Table, columns
from abrun.runs.lines import Sample
from abrun.runs.redaction import display_safe

MAX_STEPS = 8  # including the first and the last
MAX_PROMPTS = 4  # per step
MAX_CHARACTERS = 1500  # per text, from its beginning and its end


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCompletions:
    """One prompt and each arm's completion of it; None if the arm did not keep one."""

    prompt: str
    completions: list[dict[str, Any] | None]  # in the order of `ReportedCompletions.arms`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCompletions:
    """Completions of the first seed for which two arms kept some, or why they cannot be read."""

    seed: int | None
    arms: list[int]  # indices into the experiment's arms, the baseline first
    steps: list[tuple[int, list[PromptCompletions]]]
    num_steps: int  # with completions in all these arms; `steps` has some of them
    problem: str | None = None


def collect_completions(experiment: RecordedExperiment) -> ReportedCompletions | None:
    """Return completions to show side by side; None if no seed has any in two arms."""
    try:
        for seed in experiment.arm(experiment.baseline):
            samples_by_arm = {
                arm: samples for arm in experiment.arms if (samples := _read_samples(experiment, arm, seed))
            }
            if experiment.baseline in samples_by_arm and len(samples_by_arm) > 1:
                return _collect_seed(experiment, seed, samples_by_arm)
    except StoreError as error:
        problem = display_safe(str(error))
        return ReportedCompletions(seed=None, arms=[], steps=[], num_steps=0, problem=problem)
    return None


def _read_samples(experiment: RecordedExperiment, arm: str, seed: int) -> SamplesByStep:
    run = experiment.arm(arm).get(seed)
    return read_run_samples(Path(run.place)) if run and not run.thinned else {}


def _collect_seed(
    experiment: RecordedExperiment, seed: int, samples_by_arm: Mapping[str, SamplesByStep]
) -> ReportedCompletions | None:
    shared_steps = sorted(set.intersection(*(set(samples) for samples in samples_by_arm.values())))
    if not shared_steps:
        return None
    places = np.linspace(0, len(shared_steps) - 1, min(MAX_STEPS, len(shared_steps)))
    steps = [shared_steps[place] for place in np.unique(places.round().astype(int))]
    return ReportedCompletions(
        seed=seed,
        arms=[experiment.arms.index(arm) for arm in samples_by_arm],
        steps=[
            (step, _align_prompts(samples[step] for samples in samples_by_arm.values())) for step in steps
        ],
        num_steps=len(shared_steps),
    )


def _align_prompts(samples_of_arms: Iterable[tuple[Sample, ...]]) -> list[PromptCompletions]:
    by_prompt = [{sample.prompt: sample for sample in samples} for samples in samples_of_arms]
    prompts = list(dict.fromkeys(prompt for samples in by_prompt for prompt in samples))
    # Prompts that all arms have come first
    prompts.sort(key=lambda prompt: -sum(prompt in samples for samples in by_prompt))
    aligned = []
    for prompt in prompts[:MAX_PROMPTS]:
        completions: list[dict[str, Any] | None] = [None] * len(by_prompt)
        for index, samples in enumerate(by_prompt):
            if sample := samples.get(prompt):
                content = asdict(sample) | {"text": _shorten_text(sample.text)}
                completions[index] = {key: value for key, value in content.items() if key != "prompt"}
        aligned.append(PromptCompletions(prompt=_shorten_text(prompt), completions=completions))
    return aligned


def _shorten_text(text: str) -> str:
    """Keep the beginning and the end of a long text: the answer is usually at the end."""
    num_cut = len(text) - MAX_CHARACTERS
    if num_cut > 0:
        head, tail = text[: MAX_CHARACTERS * 2 // 3], text[-(MAX_CHARACTERS // 3) :]
        text = f"{head}\n[{num_cut} characters left out]\n{tail}"
    return _clean_lines(text)


# Completions of one run, or of two runs side by side, for a terminal.


@group()
def render_samples(names: Sequence[str], pairs: Sequence[SamplePair]) -> Iterator[RenderableType]:
    """Return the completions of one or two runs with these names."""
    for pair in pairs:
        yield Text(f"step {pair.step}: {display_safe(' '.join(pair.prompt.split()))}", style="bold")
        samples = (pair.left, pair.right)[: len(names)]
        rows = [
            [Text("not kept" if sample is None else _clean_lines(sample.text)) for sample in samples],
            [Text("" if sample is None else _sample_facts(sample), style="dim") for sample in samples],
        ]
        yield Table(columns(*names, fold=True), rows).to_rich(padding=(0, 1), expand=len(names) > 1)
        yield Text("")


def _sample_facts(sample: Sample) -> str:
    facts = [
        "reward unknown" if sample.reward is None else f"reward {sample.reward:.3g}",
        "" if sample.logprob_error is None else f"log-prob error {sample.logprob_error:.2g}",
        "" if sample.num_tokens is None else f"{sample.num_tokens} tokens",
        "truncated" if sample.truncated else "",
    ]
    return ", ".join(filter(None, facts))


def _clean_lines(text: str) -> str:
    return "\n".join(display_safe(line) for line in text.splitlines())
