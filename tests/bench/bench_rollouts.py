"""How long rollouts take: the embedded engine, transformers' own `generate`, and vLLM where it is installed.

    python -m tests.bench.bench_rollouts                  # one GPU, Qwen2.5-1.5B's architecture in bfloat16
    python -m tests.bench.bench_rollouts --device cpu     # the script's own logic, on a tiny model
    python -m tests.bench.bench_rollouts --only graphs    # one candidate, in this process

Every candidate completes the same random prompts of one length, all with the same number of tokens (nothing
ends a completion), at temperature 1 over the whole vocabulary. Ours and vLLM return each token's log-prob,
`generate` does not. The first call's seconds are with all that happens in it (compilation, warm-up); then the
median of three. Each candidate has a process of its own, and so a peak memory of its own: for ours with
float32 master weights beside the bfloat16 ones, as in training.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.bench.common import make_parser

CANDIDATES = {
    "growing": "ours, operator by operator, growing cache",
    "graphs": "ours: cache in place, CUDA graphs",
    "generate": "transformers generate, dynamic cache",
    "static": "transformers generate, static cache, compiled",
    "vllm": "vLLM",
}
NUM_CALLS = 3  # after the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    preset: str
    num_prompts: int
    prompt_length: int
    max_new_tokens: int


SHAPES = {
    "cuda": Shapes(preset="qwen2.5-1.5b", num_prompts=64, prompt_length=128, max_new_tokens=512),
    "cpu": Shapes(preset="qwen2-tiny-128", num_prompts=4, prompt_length=8, max_new_tokens=16),
}


def some_prompts(shapes: Shapes) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 90, (shapes.num_prompts, shapes.prompt_length), generator=generator).tolist()


def make_network(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    from abrun.recipe.policy import Model
    from abrun.trainer.models.sources import preset_config

    torch.manual_seed(0)
    with device:
        config = preset_config(Model.model_validate({"preset": shapes.preset}))
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def ours(shapes: Shapes, device: torch.device, *, in_place: bool) -> Callable[[int], int]:
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    from abrun.recipe.policy import Policy, Rollout
    from abrun.trainer.backends.dtensor import DtensorBackend
    from abrun.trainer.backends.ranks import make_ranks
    from abrun.trainer.models import Text, character_tokenizer
    from abrun.trainer.rollout.torch_engine import TorchEngine
    from abrun.trainer.seeds import Draws

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1
    )
    network = make_network(shapes, device, torch.float32)
    network.decodes_in_place = in_place
    backend = DtensorBackend(lambda: network, Policy(dtype="bfloat16"), make_ranks(device, {}))
    text = Text(tokenizer=character_tokenizer(), end_ids=frozenset(), max_positions=None)
    engine = TorchEngine(Rollout(max_new_tokens=shapes.max_new_tokens), backend, text)
    prompts = some_prompts(shapes)

    def call(number: int) -> int:
        draws = Draws(seed=0, stream="sampling", step=number, rows=range(len(prompts)))
        return sum(len(completion.token_ids) for completion in engine.generate(prompts, draws))

    return call


def by_generate(shapes: Shapes, device: torch.device, *, cache: str) -> Callable[[int], int]:
    network = make_network(shapes, device, torch.bfloat16)
    prompts = torch.tensor(some_prompts(shapes), device=device)
    settings: dict[str, Any] = {
        "cache_implementation": cache,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": shapes.max_new_tokens,
        "pad_token_id": 0,
    }
    network.generation_config.eos_token_id = None

    def call(number: int) -> int:
        torch.manual_seed(number)
        found = network.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
        return found[:, prompts.shape[1] :].numel()

    return call


def by_vllm(shapes: Shapes, device: torch.device) -> Callable[[int], int]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import vllm  # pyright: ignore[reportMissingImports]

    from abrun.recipe.policy import Model
    from abrun.trainer.models import config_of

    prompts = [{"prompt_token_ids": prompt} for prompt in some_prompts(shapes)]
    length = shapes.prompt_length + shapes.max_new_tokens
    with tempfile.TemporaryDirectory() as folder:
        config_of(Model.model_validate({"preset": shapes.preset})).save_pretrained(folder)
        where: dict[str, Any] = {"gpu_memory_utilization": 0.6}
        if device.type == "cpu":
            where = {"kv_cache_memory_bytes": 32 << 20, "enforce_eager": True}
        llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=length,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
            **where,
        )

    def call(number: int) -> int:
        sampling = vllm.SamplingParams(
            max_tokens=shapes.max_new_tokens, ignore_eos=True, logprobs=0, seed=number, detokenize=False
        )
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return call


def measured(candidate: str, device: torch.device) -> dict[str, float]:
    """Seconds to be ready, of the first call and of the next ones, tokens a second, peak bytes."""
    shapes, start = SHAPES[device.type], time.perf_counter()
    call = {
        "growing": lambda: ours(shapes, device, in_place=False),
        "graphs": lambda: ours(shapes, device, in_place=True),
        "generate": lambda: by_generate(shapes, device, cache="dynamic"),
        "static": lambda: by_generate(shapes, device, cache="static"),
        "vllm": lambda: by_vllm(shapes, device),
    }[candidate]()
    on_gpu, ready_s, seconds, num_tokens = device.type == "cuda", time.perf_counter() - start, [], 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for number in range(1 + NUM_CALLS):
        start = time.perf_counter()
        num_tokens = call(number)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert num_tokens == shapes.num_prompts * shapes.max_new_tokens
    median = statistics.median(seconds[1:])
    return {
        "ready_s": ready_s,
        "first_s": seconds[0],
        "seconds": median,
        "tokens_per_s": num_tokens / median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    parser.add_argument("--only", choices=list(CANDIDATES))
    arguments = parser.parse_args()
    if arguments.only:
        device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
        print(json.dumps(measured(arguments.only, device)))
        return
    shapes = SHAPES[arguments.device]
    print(
        f"{shapes.num_prompts} x {shapes.max_new_tokens} tokens, {shapes.preset}, torch {torch.__version__}"
    )
    print(
        f"{'':48s}{'s a call':>9s}{'tokens/s':>10s}{'1st call':>9s}{'start':>8s}{'GiB':>7s}{'reserved':>9s}"
    )
    for name, title in CANDIDATES.items():
        if name == "vllm" and importlib.util.find_spec("vllm") is None:
            print(f"{title:48s}not installed")
            continue
        command = [
            sys.executable,
            "-m",
            "tests.bench.bench_rollouts",
            "--device",
            arguments.device,
            "--only",
            name,
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            print(f"{title:48s}failed: {ended.stderr.strip()[-600:]}")
            continue
        found = json.loads(ended.stdout.strip().splitlines()[-1])
        print(
            f"{title:48s}{found['seconds']:9.2f}{found['tokens_per_s']:10.0f}{found['first_s']:9.2f}"
            f"{found['ready_s']:8.1f}{found['peak_gib']:7.1f}{found['reserved_gib']:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
