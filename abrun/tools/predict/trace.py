"""`python -m abrun.tools.predict.trace FD`: predicts the peaks of an arm's step on a fake GPU.

A message on the socket FD has the directory of a job, and a pipe for the process that does it: a fork of this
one, which has imported everything. The fork writes its pid, and at its end its exit code.

Random tokens replace the rollouts, as in trainer.memory.measure; everything else is the trainer's own code. A
job with `longest` only asks for the length of the arm's longest sequence.
"""

import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from abrun.errors import AbrunError, RecipeError
from abrun.experiment.probe import LOG, open_row_writer, read_job, report_refusal
from abrun.processes import die_with_parent, reap_orphans, run_to_end
from abrun.recipe.algorithms import PolicyGradientSettings, Ppo
from abrun.recipe.run import OwnRunConfig, largest_microbatch, set_microbatch_size
from abrun.runs.files import open_log
from abrun.tools.predict.fake_device import REFERENCE, WEIGHTS, AllocationTracker, fake_gpu, group_by_kind
from abrun.trainer.backends import make_backend
from abrun.trainer.backends.dtensor.fsdp import DTYPES
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.data import max_sampled_tokens, sequence_lengths_of
from abrun.trainer.loop.setup import Learner, RunSetup
from abrun.trainer.memory.measure import make_random_batch
from abrun.trainer.models.families import max_positions_of
from abrun.trainer.models.text import load_text
from abrun.trainer.models.weights import config_of
from abrun.trainer.rollout.vllm.startup import cache_bytes
from abrun.trainer.tasks import make_task
from abrun.trainer.training import make_algorithm

MAX_PATH_BYTES = 4096
MAX_EXAMPLES = 4096  # of a task, searched for the longest
NUM_TOKENS = 100  # vocabulary of the random batches
# Of a decoding step, in float32: scaled, filtered, sorted, as probabilities and their sums
NUM_LOGITS_COPIES = 6


class FakePhases:
    """Replacement of `abrun.trainer.loop.phases.Phases` that records the peak of each phase by kind."""

    def __init__(self, allocations: AllocationTracker) -> None:
        self._allocations = allocations
        self.interrupted: str | None = None
        self.peaks: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str, *, memory: bool = True, in_every_step: bool = True) -> Iterator[None]:
        if not memory:
            yield
            return
        self._allocations.reset_peak()
        yield
        self._allocations.resolve_replacement()
        if self._allocations.peak_bytes > sum(self.peaks.get(phase, {}).values()):
            self.peaks[phase] = dict(self._allocations.peak_by_kind)

    def add_resident(self, resident: Any) -> None:
        """Do nothing: `trace` assigns resident tensors to their kind itself."""


def trace(
    config: OwnRunConfig, lengths: list[int], num_sequences: int, master_dtype: str = "float32"
) -> Iterator[dict[str, Any]]:
    """Yield a row of the first rank for each length.

    A row has `by_phase` (bytes at the peak of each phase, by kind), `experts` (True for mixture-of-experts
    models) and `vllm` (bytes of weights and cache of an engine on the same devices, or None). `num_sequences`
    is per micro-batch; `master_dtype` is the dtype of weights, gradients and AdamW moments.
    Raises RecipeError if a length exceeds the model's context length.
    """
    max_positions = max_positions_of(config_of(config.model))
    if max_positions and max(lengths) > max_positions:
        raise RecipeError(
            f"--lengths: got {max(lengths)}; allowed: at most {max_positions} tokens, the model's context "
            "length"
        )
    run_config, config = config, set_microbatch_size(config, num_sequences)
    with fake_gpu(config.cluster.ranks, DTYPES[master_dtype]) as allocations:
        setup, phases = _make_setup(config, allocations)
        algorithm: Any = make_algorithm(setup)
        # Creates the optimizer state before the first step, as in a resumed run
        setup.learner.load_local_state(dict.fromkeys(setup.learner.shard_specs(), torch.zeros(())))
        for kind, tensors in group_by_kind(setup.learner.local_state()).items():
            allocations.assign_kind(tensors, kind)
        reference = getattr(algorithm, "reference", None)
        if reference is not None:
            allocations.assign_kind(group_by_kind(reference.local_state())[WEIGHTS], REFERENCE)
        has_experts = any(".experts." in name for name in setup.learner.local_state())
        common_fields = {
            "num_sequences": num_sequences,
            "experts": has_experts,
            "vllm": _estimate_vllm_bytes(run_config, setup.policy),
        }
        for length in lengths:
            phases.peaks = {}
            algorithm.update(
                make_random_batch(config, length, num_sequences, NUM_TOKENS, setup.ranks.device), step=1
            )
            yield {**common_fields, "length": length, "by_phase": phases.peaks}


def _estimate_vllm_bytes(config: OwnRunConfig, policy: Any) -> dict[str, int | None] | None:
    """Return the engine's bytes, or None without vLLM on the training devices.

    A cache of None means that vLLM takes a share of the device memory.
    """
    if config.rollout.engine != "vllm" or config.rollout.devices:
        return None
    itemsize = getattr(torch, config.policy.dtype).itemsize
    weights = itemsize * sum(weight.numel() for weight in policy.module.network.parameters())
    cache = cache_bytes(config, config.cluster.ranks, config_of(config.model))
    return {"weights": weights // config.rollout.tensor_parallel, "cache": cache}


def _make_setup(config: OwnRunConfig, allocations: AllocationTracker) -> tuple[RunSetup, FakePhases]:
    """Return a setup like trainer.loop.setup.make_setup, but without task and tokenizer, and its phases."""
    backend = config.policy.backend
    ranks = make_ranks(torch.device("cpu"), backend.shape, expert_parallel=backend.expert_groups)
    policy = make_backend(config, ranks, weights=None, seed=0)
    algorithm, value_model = config.algorithm, None
    if isinstance(algorithm, Ppo):
        value_model = policy.make_value_model(algorithm, 0)
    fake_phases = FakePhases(allocations)
    phases: Any = fake_phases
    unused: Any = None
    setup = RunSetup(
        config=config,
        seed=0,
        initial_weights=None,
        ranks=ranks,
        data=unused,
        policy=policy,
        value_model=value_model,
        learner=Learner(policy, value_model, config.policy.optimizer, phases, config.steps),
        sampler=unused,
        phases=phases,
    )
    return setup, fake_phases


def find_longest_sequence(config: OwnRunConfig) -> int:
    """Return the length in tokens of a run's longest expected sequence, from the examples of its task."""
    text, task = load_text(config.model, weights=None), make_task(config.task)
    examples = task.examples(0, 0, min(config.steps * config.algorithm.batch_size, MAX_EXAMPLES))
    max_tokens = max(sequence_lengths_of(text, examples, max_sampled_tokens(config)))
    return min(max_tokens, text.max_positions or max_tokens)


def estimate_decoding_bytes(config: OwnRunConfig) -> int:
    """Return the bytes of sampling a step's rollouts from the policy's own modules; 0 with another engine."""
    if not config.decodes_with_policy or not isinstance(config.algorithm, PolicyGradientSettings):
        return 0
    text = config_of(config.model).get_text_config(decoder=True)
    num_sequences = config.algorithm.batch_size * getattr(config.algorithm, "group_size", 1)
    num_rows = math.ceil(num_sequences / config.data_parallel)
    num_rows = min(config.rollout.batch_size or num_rows, num_rows)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = getattr(torch, config.policy.dtype).itemsize
    token_bytes = 2 * text.num_hidden_layers * heads * head_dim * itemsize
    # A cache that grows exists twice
    cache = 2 * num_rows * find_longest_sequence(config) * token_bytes
    return cache + NUM_LOGITS_COPIES * num_rows * text.vocab_size * 4


def find_largest_microbatch(config: OwnRunConfig) -> tuple[int, int]:
    """Return the number and length in tokens of the sequences in a rank's largest expected micro-batch."""
    max_positions = max_positions_of(config_of(config.model))
    return largest_microbatch(config, find_longest_sequence(config), max_positions)


def main() -> None:
    questions, own_pid = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: reap_orphans(()))  # no fork stays as a zombie
    while True:
        message, pipes, _, _ = socket.recv_fds(questions, MAX_PATH_BYTES, 1)
        if not message:  # the client is gone
            return
        if os.fork() == 0:
            break
        os.close(pipes[0])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL, own_pid)
    os.write(pipes[0], b"%d\n" % os.getpid())
    directory = Path(os.fsdecode(message))
    with open_log(directory / LOG) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.write(pipes[0], b"%d\n" % answer(directory))


def answer(directory: Path) -> int:
    """Do the job in a directory; return the exit code."""
    job = read_job(directory)
    writer = open_row_writer(directory)
    try:
        config = OwnRunConfig.model_validate(job["config"])
        if job.get("longest"):
            max_positions = max_positions_of(config_of(config.model))
            writer.write({"longest": find_longest_sequence(config), "max_positions": max_positions})
            return 0
        decoding: dict[str, int] = {}
        if "lengths" not in job:  # use the run's own micro-batch
            num_sequences, length = find_largest_microbatch(config)
            job |= {"lengths": [length], "num_sequences": num_sequences}
            decoding = {"decoding": estimate_decoding_bytes(config)}
        master_dtype = job.get("master_dtype", "float32")
        for row in trace(config, job["lengths"], job["num_sequences"], master_dtype):
            writer.write(row | decoding)
    except AbrunError as error:
        return report_refusal(error)
    return 0


if __name__ == "__main__":
    run_to_end(main)
