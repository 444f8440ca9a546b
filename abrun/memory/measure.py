"""`python -m abrun.memory.measure JOB_DIR`: one rank that measures the peaks of one arm, at several lengths.

A microbatch of random tokens takes the place of the rollouts; everything after them is the trainer's own
code. The first step makes the optimizer's state and is not reported.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from abrun import store
from abrun.backends.ranks import join_ranks
from abrun.errors import AbrunError
from abrun.recipe import RunConfig
from abrun.rl.batch import Batch
from abrun.train.loop import make_algorithm
from abrun.train.setup import Setup, check_length, make_setup


def main() -> int:
    directory = Path(sys.argv[1])
    job = store.read_json(directory / "job.json")
    config = RunConfig.model_validate(job["config"])
    try:
        setup = make_setup(config, 0, None, join_ranks(job["config"]["cluster"]))
        measure(setup, directory, job["lengths"], job["num_sequences"])
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


def measure(setup: Setup, directory: Path, lengths: list[int], num_sequences: int) -> None:
    """Append a line a length to `directory`/peaks.jsonl: the largest peak of any rank, by phase, in bytes.

    A length that does not fit the device's memory is the last one.
    """
    check_length(setup.model, max(lengths), f"--lengths: got {max(lengths)}")
    algorithm = make_algorithm(setup)
    writer = store.LineWriter(directory / "peaks.jsonl") if dist.get_rank() == 0 else None
    for index, length in enumerate([lengths[0], *lengths]):
        setup.phases.collect()
        try:
            algorithm.update(_random_batch(setup, num_sequences, length), step=1)
        except torch.OutOfMemoryError:
            if writer:
                writer.write({"length": length, "out_of_memory": True})
            return
        _, peaks = setup.phases.collect()
        largest = torch.tensor(list(peaks.values()), dtype=torch.float64, device=setup.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if writer and index:
            writer.write({"length": length, **dict(zip(peaks, largest.tolist(), strict=True))})
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def _random_batch(setup: Setup, num_sequences: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    shape = (num_sequences, length)
    token_mask = torch.ones(shape, dtype=torch.bool)
    token_mask[:, 0] = False
    return Batch(
        token_ids=torch.randint(setup.model.network.config.vocab_size, shape, generator=generator),  # pyright: ignore
        token_mask=token_mask,
        advantages=torch.randn(shape, generator=generator),
        inference_logprobs=torch.full(shape, -1.0),
    ).to(setup.device)


if __name__ == "__main__":
    sys.exit(main())
