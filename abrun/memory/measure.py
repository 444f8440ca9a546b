"""`python -m abrun.memory.measure JOB_DIR`: one rank that measures the peaks of one arm, at several lengths.

A microbatch of random tokens takes the place of the rollouts; everything after them is the trainer's own
code. The first step makes the optimizer's state and is not reported.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from abrun import progress
from abrun.backends.ranks import join_ranks
from abrun.errors import AbrunError
from abrun.launch.probe import read_job, row_writer
from abrun.recipe import Dpo, Grpo, OwnRunConfig
from abrun.train.batches import RandomBatches
from abrun.train.data import check_length
from abrun.train.loop import make_algorithm
from abrun.train.setup import Setup, make_setup


def main() -> int:
    progress.join()
    directory = Path(sys.argv[1])
    job = read_job(directory)
    config = _without_groups(OwnRunConfig.model_validate(job["config"]))
    try:
        setup = make_setup(config, 0, None, join_ranks(job["config"]["cluster"]))
        measure(setup, directory, job["lengths"], job["num_sequences"])
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


def measure(setup: Setup, directory: Path, lengths: list[int], num_sequences: int) -> None:
    """Append a row a length: the largest peak of any rank, by phase, in bytes.

    A length that does not fit the device's memory is the last one.
    """
    ranks, together = setup.ranks, 2 if isinstance(setup.config.algorithm, Dpo) else 1
    check_length(setup.data.text, max(lengths), f"--lengths: got {max(lengths)}")
    vocab_size = len(setup.data.text.tokenizer)
    algorithm = make_algorithm(setup)
    writer = row_writer(directory) if ranks.is_first else None
    for index, length in enumerate([lengths[0], *lengths]):
        setup.phases.collect()
        source = RandomBatches(num_sequences, length, vocab_size, ranks.device, rows_together=together)
        try:
            algorithm.update(source.collect(1)[0], step=1)
        except torch.OutOfMemoryError:
            _, peaks = setup.phases.collect()
            if writer:
                writer.write({"length": length, "out_of_memory": setup.phases.interrupted, **peaks})
            return
        _, peaks = setup.phases.collect()
        largest = dict(zip(peaks, ranks.largest(list(peaks.values())), strict=True))
        if writer and index:
            writer.write({"length": length, **largest})
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def _without_groups(config: OwnRunConfig) -> OwnRunConfig:
    """A random batch has no groups of completions: rewards are then advantages."""
    if not isinstance(config.algorithm, Grpo):
        return config
    alone = {
        "group_size": 1,
        "advantage_baseline": "none",
        "normalize_advantages": False,
        "normalize_over": "group",
    }
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=alone)})


if __name__ == "__main__":
    sys.exit(main())
