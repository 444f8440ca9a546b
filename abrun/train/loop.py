"""The loop around every algorithm: resume, step, record, checkpoint, stop when asked."""

import os
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from abrun import store
from abrun.errors import AbrunError
from abrun.recipe import RunConfig
from abrun.rl.batch import Batch
from abrun.train import checkpoint
from abrun.train.recorder import Recorder
from abrun.train.setup import Setup, make_setup
from abrun.train.validation import Validator


class Interrupted(AbrunError):
    """Training stopped because it was asked to; a checkpoint holds everything so far."""


class Algorithm(Protocol):
    """What one step is."""

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        ...

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """The part of a step that follows the rollouts, on this rank's `batch`."""
        ...


def train(directory: Path, device: torch.device) -> None:
    """Train the run described by `directory`/config.json to its end, from its newest checkpoint.

    Raises Interrupted after a checkpoint when SIGTERM arrived. Every rank calls this.
    """
    record = store.read_json(directory / "config.json")
    config = RunConfig.model_validate(record["config"])
    requests = Requests(device)
    recorder = Recorder(directory, config, record)
    try:
        recorder.event("started", pid=os.getpid())
        weights = record["initial_weights"]
        setup = make_setup(config, record["seed"], directory / weights if weights else None, device)
        recorder.environment(config, device, _prompts(setup))
        _train(setup, make_algorithm(setup), recorder, requests)
    except Interrupted:
        recorder.event("interrupted")
        raise
    except AbrunError as error:
        recorder.failed(str(error))
        raise


def _train(setup: Setup, algorithm: Algorithm, recorder: Recorder, requests: "Requests") -> None:
    config, checkpoints = setup.config, recorder.directory / "checkpoints"
    saved = start = checkpoint.restore(checkpoints, setup)
    if start:
        recorder.event("resumed", step=start)
    validator = Validator(setup, config.validation, recorder, algorithm) if config.validation else None
    if validator and start == 0:
        recorder.metrics(0, validator.validate(0))
    setup.phases.collect()
    for step in range(start + 1, config.steps + 1):
        values = algorithm.step(step)
        row = {**values, **_performance(setup, values)}
        if validator and validator.is_due(step):
            row |= validator.validate(step)
        recorder.metrics(step, row)
        stop, save = requests.collect()
        if stop or save or step % config.checkpoint.every == 0:
            with setup.phases("checkpointing", memory=False):
                checkpoint.save(checkpoints, setup, step, config.checkpoint.keep)
            saved = step
            recorder.event("checkpoint", step=step)
        if stop and step < config.steps:
            raise Interrupted(
                f"{recorder.directory}: stopped after step {saved}; launch with --resume to go on"
            )
    if config.checkpoint.final_weights:
        _save_final_weights(setup, checkpoints / "final")
    recorder.finish(config.steps)


class Requests:
    """SIGTERM asks for a checkpoint and an end, SIGUSR1 for a checkpoint; all ranks answer together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = {signal.SIGTERM: False, signal.SIGUSR1: False}
        for number in self._asked:
            signal.signal(number, self._note)

    def collect(self) -> tuple[bool, bool]:
        """(stop, save) as asked of any rank since the last call. Collective."""
        # Taken before the collective: a signal that arrives while this rank waits in it is for the next call.
        taken, self._asked = self._asked, dict.fromkeys(self._asked, False)
        asked = torch.tensor(list(taken.values()), dtype=torch.int32, device=self._device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        stop, save = asked.bool().tolist()
        return stop, save

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked[signal.Signals(number)] = True


def make_algorithm(setup: Setup) -> Algorithm:
    """The algorithm that the recipe names."""
    if setup.config.algorithm.type == "grpo":
        from abrun.train.group_relative import GroupRelative

        return GroupRelative(setup)
    if setup.config.algorithm.type == "ppo":
        from abrun.train.actor_critic import ActorCritic

        return ActorCritic(setup)
    if setup.config.algorithm.type == "dpo":
        from abrun.train.preference import Preference

        return Preference(setup)
    from abrun.train.supervised import Supervised

    return Supervised(setup)


def _performance(setup: Setup, values: dict[str, float]) -> dict[str, float]:
    """Seconds and peaks of the step, the largest over all ranks, and the rates that follow from them."""
    seconds, peaks = setup.phases.collect()
    merged = {**seconds, **peaks}
    largest = torch.tensor(list(merged.values()), dtype=torch.float64, device=setup.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    result = dict(zip(merged, largest.tolist(), strict=True))
    step_time_s = result["timing/train/total_step_time_s"]
    num_tokens, num_samples = values["train/global_valid_toks"], values["train/num_valid_samples"]
    result["performance/tokens_per_sec_per_gpu"] = num_tokens / step_time_s / dist.get_world_size()
    result["performance/samples_per_sec"] = num_samples / step_time_s
    return result


def _prompts(setup: Setup) -> Any:
    """All prompts of the run in order, a global batch at a time."""
    for step in range(1, setup.config.steps + 1):
        yield from (example.prompt for example in setup.global_examples(step))


def _save_final_weights(setup: Setup, final: Path) -> None:
    """Write the trained model as a Hugging Face checkpoint, whole or not at all. Collective."""
    weights = setup.backend.full_weights()
    if dist.get_rank() == 0:
        partial = final.with_name(".final.partial")
        with store.explained(partial):
            shutil.rmtree(partial, ignore_errors=True)
            setup.model.save(partial, weights)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
    dist.barrier()
