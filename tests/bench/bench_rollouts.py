"""How long the embedded engine takes for a batch of rollouts.

    python -m tests.bench.bench_rollouts                  # one GPU, Qwen2.5-1.5B's architecture in bfloat16
    python -m tests.bench.bench_rollouts --device cpu     # the script's own logic, on a tiny model

Random prompts of one length get the same number of tokens (nothing ends a completion), at temperature 1 over
the whole vocabulary, with each token's log-prob. The first call's seconds are with all that happens in it
(compilation, warm-up); then the median of three. Peaks are with float32 master weights beside the bfloat16
ones, as in training.
"""

import statistics
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM

from abrun.recipe.policy import Model, Policy, Rollout
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.sources import character_tokenizer, preset_config
from abrun.trainer.models.text import Text
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.seeds import Draws
from tests.bench.common import make_parser, seconds_of, sync_of

NUM_CALLS = 3  # after the first


class Shapes(NamedTuple):
    preset: str
    num_prompts: int
    prompt_length: int
    max_new_tokens: int


SHAPES = {"cuda": Shapes("qwen2.5-1.5b", 64, 128, 512), "cpu": Shapes("qwen2-tiny-128", 4, 8, 16)}


def make_engine(shapes: Shapes, device: torch.device) -> TorchEngine:
    torch.manual_seed(0)
    with device:
        config = preset_config(Model.model_validate({"preset": shapes.preset}))
        network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    network.decodes_in_place = True
    backend = DtensorBackend(lambda: network, Policy(dtype="bfloat16"), make_ranks(device, {}))
    text = Text(tokenizer=character_tokenizer(), end_ids=frozenset(), max_positions=None)
    return TorchEngine(Rollout(max_new_tokens=shapes.max_new_tokens), backend, text)


def main() -> None:
    asked = make_parser(__doc__, devices=list(SHAPES)).parse_args()
    shapes, on_gpu = SHAPES[asked.device], asked.device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    engine = make_engine(shapes, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 90, (shapes.num_prompts, shapes.prompt_length), generator=draw).tolist()

    def call() -> None:
        draws = Draws(seed=0, stream="sampling", step=1, rows=range(len(prompts)))
        completions = engine.generate(prompts, draws)
        assert all(len(completion.token_ids) == shapes.max_new_tokens for completion in completions)

    first_s, *later_s = seconds_of(call, 1 + NUM_CALLS, sync=sync_of(asked.device))
    num_tokens, median_s = shapes.num_prompts * shapes.max_new_tokens, statistics.median(later_s)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    print(
        f"{shapes.num_prompts} x {shapes.max_new_tokens} tokens, {shapes.preset}, torch {torch.__version__}"
    )
    print(f"{num_tokens / median_s:.0f} tokens/s, {median_s:.2f} s a call, the first {first_s:.2f} s")
    print(f"peak {peak_gib:.1f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
