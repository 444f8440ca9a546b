"""Predicted peaks of the shipped recipes for eight GPUs at their full size: one table, on any machine.

    python -m tests.bench.bench_full_size
    python -m tests.bench.bench_full_size --recipes grpo-qwen3-30b-a3b-2n8g-fused-logprobs --memory h100

Each recipe has the architecture that it names, prompts of 128 tokens, and SFT's completions of 512. Peaks are
those of training on one host, whose number of GPUs is `--gpus`; of each device the engine's peak beside what
stays, and the larger of both as a share of its memory.

megatron's memory has no prediction. In its place stands that of dtensor with the same layout, or as much
expert parallelism as dtensor allows.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError
from abrun.experiment.starter.shipped import recipe_files
from abrun.launch.memory.profile import GIB
from abrun.recipe.experiment import BASELINE, Recipe, load_recipe
from abrun.recipe.policy import ARCHITECTURES, Dtensor, Megatron
from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict.peaks import predict_steps, resolve_device_memory
from tests.bench.common import heading, make_parser, markdown_row, write_tokenizer

NUM_TEXTS = 2048  # a step has at most 1,024 prompts
PROMPT_WORDS = 128
FIELDS = {  # of a task's texts, beside the prompt
    "gsm8k": {"answer": "#### 7"},
    "jsonl": {"answer": "7"},
    "completions": {"completion": " ".join(["5"] * 512)},
    "preferences": {"chosen": " ".join(["5"] * 256), "rejected": " ".join(["6"] * 256)},
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
# Shapes of the models' config.json on the Hugging Face hub
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
QWEN2_MATH_7B = {
    **QWEN2_7B,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
QWEN2_1_5B = {**ARCHITECTURES["qwen2.5-1.5b"], "vocab_size": 151_936}
ARCHITECTURE_OF: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B": QWEN2_1_5B,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN2_1_5B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_7B,
    "Qwen/Qwen2.5-Math-7B": QWEN2_MATH_7B,
    "Qwen/Qwen2.5-Math-7B-Instruct": QWEN2_MATH_7B,
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
HEADER = ("recipe", "arm", "GPUs", "micro-batch, tokens", "phase", "peak GiB")


def multi_gpu_recipes() -> list[str]:
    """Return the shipped recipes of abrun's own trainer on one or two hosts of eight GPUs."""
    return [name for name in recipe_files() if re.search("-[12]n8g-", name)]


def load_configs(name: str, folder: Path, gpus: int, sets: Sequence[str]) -> dict[str, OwnRunConfig]:
    """Return the arms of a recipe; write its texts, tokenizer and model without weights to a folder."""
    from transformers import AutoConfig

    declared = load_recipe(recipe_files()[name]).run_config(BASELINE)
    assert isinstance(declared, OwnRunConfig) and declared.model.path is not None
    folder.mkdir(parents=True)
    special: dict[str, Any] = {"bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1}
    architecture = ARCHITECTURE_OF[declared.model.path]
    AutoConfig.for_model(**architecture, **special).save_pretrained(folder / "model")
    template = CHAT_TEMPLATE if declared.model.system_prompt else None
    write_tokenizer(folder / "model", 128, chat_template=template)
    write_texts(declared.task.type, folder / "texts.jsonl")
    overrides = [
        f"model.path={json.dumps(str(folder / 'model'))}",
        f"task.path={json.dumps(str(folder / 'texts.jsonl'))}",
        *("validation=null", "wandb=null", "compare.claims=[]", "controls.aa_reruns=0"),
        f"cluster={json.dumps({'gpus_per_node': gpus})}",
        *sets,
    ]
    recipe = load_recipe(recipe_files()[name], overrides)
    assert isinstance(recipe, Recipe)  # of abrun's own trainer
    configs = {arm: recipe.with_auto_values().run_config(arm) for arm in recipe.arms}
    return {arm: config for arm, config in configs.items() if isinstance(config, OwnRunConfig)}


def write_texts(task: str, file: Path) -> None:
    """Write prompts of as many tokens each, with the fields that a task reads."""
    prompt_key = "question" if task == "gsm8k" else "prompt"
    with file.open("w") as lines:
        for number in range(NUM_TEXTS):
            words = [*map(str, divmod(number, 100)), *["3"] * (PROMPT_WORDS - 2)]
            lines.write(json.dumps({prompt_key: " ".join(words), **FIELDS[task]}) + "\n")


def predictable(config: OwnRunConfig) -> OwnRunConfig:
    """Return the configuration with dtensor in place of megatron."""
    backend = config.policy.backend
    if not isinstance(backend, Megatron):
        return config
    sizes = {
        "tensor_parallel": backend.tensor_parallel,
        "context_parallel": backend.context_parallel,
        "sequence_parallel": backend.sequence_parallel,
    }
    experts = min(backend.expert_parallel, config.cluster.ranks // backend.tensor_parallel)
    stand_in = Dtensor(**sizes, expert_parallel=experts)
    policy = config.policy.model_copy(update={"backend": stand_in})
    tree = config.model_dump(mode="json") | {"policy": policy.model_dump(mode="json")}
    return OwnRunConfig.model_validate(tree)


def predicted_row(recipe: str, arm: str, config: OwnRunConfig, memories: Mapping[str, int]) -> str:
    """Return the line of an arm: its highest peak, and whether it and its engine fit each device."""
    cells: list[str] = []
    for size in memories.values():
        try:
            (prediction,) = predict_steps({arm: predictable(config)}, size)
        except AbrunError as error:
            return markdown_row(recipe, arm, config.cluster.ranks, "-", " ".join(str(error).split()))
        if not cells:
            phase, peak = prediction.highest_peak
            point = f"{prediction.point.num_sequences} x {prediction.point.length:,}"
            cells += [point, phase, f"{peak / GIB:.1f}"]
        share = max(prediction.training_bytes, prediction.sampling_bytes) / size
        cells += [f"{prediction.sampling_bytes / GIB:.1f}", "no" if share > 1 else f"{share:.0%}"]
    stand_in = " (as dtensor)" * isinstance(config.policy.backend, Megatron)
    return markdown_row(recipe, f"{arm}{stand_in}", config.cluster.ranks, *cells)


def main() -> None:
    parser = make_parser(__doc__)
    names = multi_gpu_recipes()
    parser.add_argument("--recipes", nargs="*", choices=names, default=names, metavar="NAME")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], help="key=value for all recipes")
    parser.add_argument("--memory", nargs="*", default=["h100", "h200"], help="of GPUs to predict for")
    asked = parser.parse_args()
    try:
        memories = {name: resolve_device_memory(name) or 0 for name in asked.memory}
    except AbrunError as error:
        parser.error(f"--memory: {error}")
    devices = [title for name in memories for title in (f"{name}: sampling GiB", "share of memory")]
    print(heading(*HEADER, *devices), flush=True)
    with tempfile.TemporaryDirectory() as work:
        for name in asked.recipes:
            try:
                configs = load_configs(name, Path(work) / name, asked.gpus, asked.set)
            except AbrunError as error:  # the other recipes go on
                print(markdown_row(name, " ".join(str(error).split())), flush=True)
                continue
            for arm, config in configs.items():
                print(predicted_row(name, arm, config, memories), flush=True)


if __name__ == "__main__":
    main()
