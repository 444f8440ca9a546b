"""The loop around every algorithm: resume, step, record, checkpoint, stop when asked."""

import gc
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from abrun.backends.ranks import Ranks
from abrun.errors import AbrunError, RecipeError
from abrun.processes import progress
from abrun.recipe.run import OwnRunConfig
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir
from abrun.runs.samples import Sample
from abrun.runs.writer import RunWriter
from abrun.train import checkpoint, startup
from abrun.train.branch import Origin, start_from
from abrun.train.lengths import refuse_too_long
from abrun.train.recorder import Recorder, prompts_sha256
from abrun.train.setup import Setup, make_setup
from abrun.train.validation import Validator


class Interrupted(AbrunError):
    """Training stopped because it was asked to; a checkpoint holds everything so far."""


class Algorithm(Protocol):
    """What one step is."""

    samples: Sequence[Sample]  # some completions of the last one, those of the global batch on the first rank

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        ...

    def update(self, batch: Any, step: int) -> dict[str, float]:
        """The part of a step that follows its data: on this rank's `Sequences`, or `RolloutBatch` ones."""
        ...


def train(run: RunDir, record: RunRecord, writer: RunWriter | None, device: torch.device) -> None:
    """Train a run to its end, from its newest checkpoint; rank 0 has the attempt's `writer`.

    Raises Interrupted after a checkpoint when SIGTERM arrived. Every rank calls this.
    """
    config = OwnRunConfig.model_validate(record.config)
    requests = Requests()
    recorder = Recorder(writer, config)
    recorder.event("started", pid=os.getpid())
    setup = make_setup(config, record.name.seed, run.initial_weights, device)
    origin, folder = None, config.checkpoint.start_from
    if folder is not None:
        origin = start_from(folder, setup.learner, setup.ranks, config.steps)
    _refuse_other_prompts(run, setup)
    recorder.environment(config, setup.policy, _prompts(setup), origin and origin.recorded())
    try:
        _train(run, setup, make_algorithm(setup), recorder, requests, writer, origin)
    finally:
        gc.unfreeze()
        setup.sampler.close()


def _train(
    run: RunDir,
    setup: Setup,
    algorithm: Algorithm,
    recorder: Recorder,
    requests: "Requests",
    writer: RunWriter | None,
    origin: Origin | None,
) -> None:
    config, checkpoints, keep = setup.config, run.checkpoints, setup.config.checkpoint.keep
    first = origin.step if origin else 0
    saved = start = checkpoint.restore(checkpoints, setup.learner, setup.ranks, writer, first=first)
    if start > first:
        recorder.event("resumed", step=start)
    refuse_too_long(setup.data, config, first=start + 1)
    validator = Validator(setup, config.validation, recorder, algorithm) if config.validation else None
    if validator and start == first:
        recorder.metrics(first, validator.validate(first))
    setup.phases.collect()
    progress.report_step()
    for step in range(start + 1, config.steps + 1):
        values = algorithm.step(step)
        if step == start + 1:
            startup.stay()
        row = {**values, **_performance(setup, values)}
        if validator and validator.is_due(step):
            row |= validator.validate(step)
        recorder.metrics(step, row)
        recorder.samples(step, algorithm.samples)
        progress.report_step()
        stop, save = requests.collect(setup.ranks)
        if stop or save or step % config.checkpoint.every == 0:
            with setup.phases("checkpointing", memory=False, usual=False):
                checkpoint.save(checkpoints, setup.learner, setup.ranks, step=step, keep=keep, writer=writer)
            saved = step
            recorder.event("checkpoint", step=step)
        if stop and step < config.steps:
            raise Interrupted(f"{run.path}: stopped after step {saved}; launch with --resume to go on")
    progress.report("finishing", in_every_step=False)
    final_weights = None
    if config.checkpoint.final_weights:
        final_weights = checkpoint.save_final(
            run.final_weights, setup.ranks, lambda folder: _write_model(setup, folder), writer
        )
    recorder.finish(config.steps, setup.policy, final_weights)


class Requests:
    """SIGTERM asks for a checkpoint and an end, SIGUSR1 for a checkpoint; all ranks answer together."""

    def __init__(self) -> None:
        self._asked = {signal.SIGTERM: False, signal.SIGUSR1: False}
        for number in self._asked:
            signal.signal(number, self._note)

    def collect(self, ranks: Ranks) -> tuple[bool, bool]:
        """(stop, save) as asked of any rank since the last call. Collective."""
        # Taken before the collective: a signal that arrives while this rank waits in it is for the next call.
        taken, self._asked = self._asked, dict.fromkeys(self._asked, False)
        stop, save = ranks.all_reduce_max_world(list(taken.values()))
        return bool(stop), bool(save)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked[signal.Signals(number)] = True


def make_algorithm(setup: Setup) -> Algorithm:
    """The algorithm that the recipe names, with the fault that it injects; the others are not imported."""
    algorithm = _algorithm_of(setup)
    if setup.config.injected_fault is not None:
        from abrun.train.faults import inject

        inject(setup, algorithm)
    return algorithm


def _algorithm_of(setup: Setup) -> Algorithm:
    settings = setup.config.algorithm
    if settings.type == "grpo":
        from abrun.train.grpo import GrpoAlgorithm

        return GrpoAlgorithm(setup, settings)
    if settings.type == "ppo":
        from abrun.train.ppo import PpoAlgorithm

        assert setup.value_model is not None
        return PpoAlgorithm(setup, settings, setup.value_model)
    if settings.type == "dpo":
        from abrun.train.dpo import DpoAlgorithm

        return DpoAlgorithm(setup, settings)
    from abrun.train.sft import SftAlgorithm

    return SftAlgorithm(setup)


def _performance(setup: Setup, values: dict[str, float]) -> dict[str, float]:
    """Seconds and peaks of the step, the largest over all ranks, and the rates that follow from them."""
    seconds, peaks = setup.phases.collect()
    merged = {**seconds, **peaks}
    result = dict(zip(merged, setup.ranks.all_reduce_max_world(list(merged.values())), strict=True))
    step_time_s = result["timing/train/total_step_time_s"]
    num_tokens, num_samples = values["train/global_valid_toks"], values["train/num_valid_samples"]
    result["performance/tokens_per_sec_per_gpu"] = num_tokens / step_time_s / setup.ranks.size
    result["performance/samples_per_sec"] = num_samples / step_time_s
    return result


def _refuse_other_prompts(run: RunDir, setup: Setup) -> None:
    """Raises RecipeError, on every rank, where a run would go on with other prompts than it began with.

    Collective.
    """
    changed = False
    if setup.ranks.is_first and any(run.checkpoints.glob("*")):
        known = (run.environment() or {}).get("prompts_sha256")
        changed = known not in (None, prompts_sha256(_prompts(setup)))
    if setup.ranks.broadcast_world(changed):
        raise RecipeError(
            "task: got other prompts than those that this run began with, as its file has changed, or the "
            "package that draws them; restore it, or launch under another --name"
        )


def _prompts(setup: Setup) -> Any:
    """All prompts of the run in order, a global batch at a time."""
    for step in range(1, setup.config.steps + 1):
        yield from (example.prompt for example in setup.data.examples(step))


def _write_model(setup: Setup, folder: Path) -> None:
    """Write the trained model as a Hugging Face checkpoint. Collective."""
    setup.policy.save(folder)
    if setup.ranks.is_first:
        setup.data.text.save(folder)
