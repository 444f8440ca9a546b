"""The training loop of all algorithms: resume, step, record, checkpoint, stop on request."""

import gc
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from abrun.errors import AbrunError, RecipeError
from abrun.processes import progress
from abrun.recipe.experiment import parse_stored_own_run
from abrun.runs.lines import Sample
from abrun.runs.records import RunRecord, StartCheckpoint
from abrun.runs.rollouts import RecordedStep
from abrun.runs.rundir import RunDir
from abrun.runs.writer import RunWriter
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.loop import checkpoint
from abrun.trainer.loop.checkpoint import start_from
from abrun.trainer.loop.data import check_example_lengths
from abrun.trainer.loop.recorder import Recorder, prompts_sha256
from abrun.trainer.loop.setup import RunSetup, make_setup
from abrun.trainer.loop.validation import Validator


class Interrupted(AbrunError):
    """Training stopped on request; a checkpoint has all progress."""


class Algorithm(Protocol):
    """Interface of algorithms: one training step."""

    recording: RecordedStep | None  # the rollouts of the last step, with rollout.record
    samples: Sequence[Sample]  # sample completions of the last step; those of the first rank are recorded

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        ...

    def update(self, batch: Any, step: int) -> dict[str, float]:
        """Run the part of a step after its data, on this rank's `Sequences` or `RolloutBatch`."""
        ...


def train(run: RunDir, record: RunRecord, writer: RunWriter | None, device: torch.device) -> None:
    """Train a run to its end, from its newest checkpoint; rank 0 has the attempt's `writer`. Collective.

    Raises Interrupted, after saving a checkpoint, if SIGTERM arrived.
    """
    config = parse_stored_own_run(record.config)
    requests = Requests()
    recorder = Recorder(writer, config)
    recorder.event("started", pid=os.getpid())
    setup = make_setup(config, record.name.seed, run.initial_weights, device, run.path)
    origin, folder = None, config.checkpoint.start_from
    if folder is not None:
        origin = start_from(folder, setup.learner, setup.ranks, config.steps)
    _check_prompts_unchanged(run, setup)
    recorder.environment(config, setup.policy, _iterate_prompts(setup), origin and asdict(origin))
    finished = False
    try:
        _train(run, setup, make_algorithm(setup), recorder, requests, writer, origin)
        finished = True
    finally:
        gc.unfreeze()
        setup.sampler.close(finished=finished)


def _train(
    run: RunDir,
    setup: RunSetup,
    algorithm: Algorithm,
    recorder: Recorder,
    requests: "Requests",
    writer: RunWriter | None,
    origin: StartCheckpoint | None,
) -> None:
    config, checkpoints, keep = setup.config, run.checkpoints, setup.config.checkpoint.keep
    first_step = origin.step if origin else 0
    progress.report("checkpoint restore", in_every_step=False)
    saved = start = checkpoint.restore(checkpoints, setup.learner, setup.ranks, writer, start_step=first_step)
    if start > first_step:
        recorder.event("resumed", step=start)
    check_example_lengths(setup.data, config, first_step=start + 1)
    validator = Validator(setup, config.validation, recorder, algorithm) if config.validation else None
    if validator and start == first_step:
        recorder.metrics(first_step, validator.validate(first_step))
    setup.phases.collect()
    progress.report_step()
    for step in range(start + 1, config.steps + 1):
        values = algorithm.step(step)
        if step == start + 1:
            # Survivors of the first step are compiled code, graphs and engines, which every later collection
            # would traverse (vLLM's sleep triggers one).
            gc.collect()
            gc.freeze()
        row = {**values, **_compute_performance(setup, values)}
        if validator and validator.is_due(step):
            row |= validator.validate(step)
        recorder.rollouts(algorithm.recording)
        recorder.metrics(step, row)
        recorder.samples(step, algorithm.samples)
        progress.report_step()
        stop, save = requests.collect(setup.ranks)
        if stop or save or step % config.checkpoint.every == 0:
            with setup.phases("checkpointing", memory=False, in_every_step=False):
                checkpoint.save(checkpoints, setup.learner, setup.ranks, step=step, keep=keep, writer=writer)
            saved = step
            recorder.event("checkpoint", step=step)
        if stop and step < config.steps:
            raise Interrupted(f"{run.path}: stopped after step {saved}; continue with --resume")
    progress.report("finishing", in_every_step=False)
    final_weights = None
    if config.checkpoint.final_weights:
        final_weights = checkpoint.save_final(
            run.final_weights, setup.ranks, lambda folder: _write_model(setup, folder), writer
        )
    recorder.finish(config.steps, setup.policy, final_weights, setup.recorded_rollouts)


class Requests:
    """Requests by signal: SIGTERM saves a checkpoint and stops, SIGUSR1 saves one; all ranks act together."""

    def __init__(self) -> None:
        self._requested = {signal.SIGTERM: False, signal.SIGUSR1: False}
        for number in self._requested:
            signal.signal(number, self._note)

    def collect(self, ranks: Ranks) -> tuple[bool, bool]:
        """Return (stop, save): whether any rank received a request since the last call. Collective."""
        # Read before the collective: a signal that arrives during it is handled by the next call.
        requested, self._requested = self._requested, dict.fromkeys(self._requested, False)
        stop, save = ranks.all_reduce_max_world(list(requested.values()))
        return bool(stop), bool(save)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested[signal.Signals(number)] = True


def make_algorithm(setup: RunSetup) -> Algorithm:
    """Return the algorithm of the recipe, with its injected fault, if any.

    Modules of other algorithms are not imported.
    """
    settings = setup.config.algorithm
    algorithm: Algorithm
    if settings.type == "grpo":
        from abrun.trainer.loop.grpo import GrpoAlgorithm

        algorithm = GrpoAlgorithm(setup, settings)
    elif settings.type == "ppo":
        from abrun.trainer.loop.ppo import PpoAlgorithm

        assert setup.value_model is not None
        algorithm = PpoAlgorithm(setup, settings, setup.value_model)
    elif settings.type == "dpo":
        from abrun.trainer.loop.dpo import DpoAlgorithm

        algorithm = DpoAlgorithm(setup, settings)
    else:
        from abrun.trainer.loop.sft import SftAlgorithm

        algorithm = SftAlgorithm(setup)
    if setup.config.injected_fault is not None:
        from abrun.trainer.faults import inject

        inject(setup, algorithm)
    return algorithm


def _compute_performance(setup: RunSetup, values: dict[str, float]) -> dict[str, float]:
    """Return times and memory peaks of the step, the maximum over all ranks, and the resulting throughput."""
    seconds, peaks = setup.phases.collect()
    merged = {**seconds, **peaks}
    result = dict(zip(merged, setup.ranks.all_reduce_max_world(list(merged.values())), strict=True))
    step_time_s = result["timing/train/total_step_time_s"]
    num_tokens, num_samples = values["train/global_valid_toks"], values["train/num_valid_samples"]
    result["performance/tokens_per_sec_per_gpu"] = num_tokens / step_time_s / setup.ranks.size
    result["performance/samples_per_sec"] = num_samples / step_time_s
    return result


def _check_prompts_unchanged(run: RunDir, setup: RunSetup) -> None:
    """Raise RecipeError, on all ranks, if a resumed run has other prompts than it began with. Collective."""
    progress.report("prompt check", in_every_step=False)
    changed = False
    if setup.ranks.is_first and any(run.checkpoints.glob("*")):
        recorded_sha256 = (run.environment() or {}).get("prompts_sha256")
        changed = recorded_sha256 not in (None, prompts_sha256(_iterate_prompts(setup)))
    if setup.ranks.broadcast_world(changed):
        raise RecipeError(
            "task: the prompts differ from those that this run began with, because the file or the package "
            "that generates them has changed; restore it, or launch under another --name"
        )


def _iterate_prompts(setup: RunSetup) -> Any:
    """Yield all prompts of the run in order, one global batch at a time."""
    for step in range(1, setup.config.steps + 1):
        yield from (example.prompt for example in setup.data.examples_of_steps(range(step, step + 1)))


def _write_model(setup: RunSetup, folder: Path) -> None:
    """Write the trained model as a Hugging Face checkpoint. Collective."""
    setup.policy.save(folder)
    if setup.ranks.is_first:
        setup.data.text.save(folder)
