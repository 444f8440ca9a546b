"""Recipes at their full size with random weights: memory beside its prediction, seconds by part, differences.

    python -m tests.bench.bench_full_size                           # two recipes, five steps of each arm
    python -m tests.bench.bench_full_size --recipes grpo-qwen3-30b-a3b-2n8g-fused-logprobs --steps 3
    python -m tests.bench.bench_full_size --predict-only --memory h100 h200    # on any machine, all recipes
    python -m tests.bench.bench_full_size --device cpu              # the script's logic, on tiny models

Each recipe is launched by `abrun launch` with one seed on one host, whose number of GPUs is `--gpus`. Weights
are random, of the architecture that the recipe names; they end no completion before its limit. Prompts have
128 tokens, SFT's completions 512. Claims, validation, A/A runs and uploads are off. Seconds are medians of
the steps after the first two, each part's on its slowest rank. Peaks and predictions are those of training.

megatron's memory has no prediction. In its place stands that of dtensor with the same layout, or as much
expert parallelism as dtensor allows.
"""

import json
import re
import statistics
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError
from abrun.experiment.plan import diff_configs
from abrun.experiment.starter.shipped import recipe_files
from abrun.launch.memory.cells import GIB
from abrun.recipe.experiment import BASELINE, Recipe, load_recipe
from abrun.recipe.policy import ARCHITECTURES, Dtensor, Megatron
from abrun.recipe.run import OwnRunConfig
from abrun.runs.experiment import list_experiments, run_dir
from abrun.runs.metric_names import TOKEN_MULT_PROB_ERROR
from abrun.runs.rundir import RunDir
from abrun.tools.predict.peaks import PeakPrediction, predict_steps, query_gpus, resolve_device_memory
from tests.bench.common import heading, make_parser, markdown_row, write_tokenizer, write_weights
from tests.bench.launches import REPOSITORY, STEP_TIME, finished_runs, last_log_lines, launch
from tests.bench.step_abrun import TRAINING
from tests.test_recipe_headers import named_differences

WARM_UP = 2  # steps
NUM_TEXTS = 2048  # a step has at most 1,024 prompts
PROMPT_WORDS = {"cuda": 128, "cpu": 8}
FIELDS = {  # of a task's texts, beside the prompt
    "gsm8k": {"answer": "#### 7"},
    "jsonl": {"answer": "7"},
    "completions": {"completion": " ".join(["5"] * 512)},
    "preferences": {"chosen": " ".join(["5"] * 256), "rejected": " ".join(["6"] * 256)},
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
LAUNCHED = ("grpo-qwen2.5-math-7b-1n8g-fused-logprobs", "ppo-qwen2.5-1.5b-1n8g-megatron")
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
TINY = {"qwen2": "qwen2-tiny-128", "qwen3_moe": "qwen3-moe-tiny-128"}
PARTS = (
    *("generation", "logprobs", "values", "forward_backward", "value_forward_backward"),
    *("optimizer", "value_optimizer"),
)
HEADER = (
    *("recipe", "arm", "steps", "s a step", *PARTS, "else"),
    *("peak GiB", "predicted GiB", "error", TOKEN_MULT_PROB_ERROR, ""),
)
PREDICTED_HEADER = ("recipe", "arm", "GPUs", "micro-batch, tokens", "phase", "peak GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One recipe with its random model and texts."""

    path: Path
    recipe: Recipe
    overrides: Sequence[str]

    def config(self, arm: str) -> OwnRunConfig:
        config = self.recipe.with_auto_values().run_config(arm)
        assert isinstance(config, OwnRunConfig)
        return config


def multi_gpu_recipes() -> list[str]:
    """Return the shipped recipes of abrun's own trainer on one or two hosts of eight GPUs."""
    return [name for name in recipe_files() if re.search("-[12]n8g-", name)]


def make_trial(name: str, work: Path, asked: Any) -> Trial:
    """Write the texts, the tokenizer and the configuration of a recipe's model, but no weights."""
    from transformers import AutoConfig

    path, folder = recipe_files()[name], work / name
    folder.mkdir(parents=True)
    recipe = load_own_recipe(path)
    declared = recipe.run_config(BASELINE)
    assert isinstance(declared, OwnRunConfig) and declared.model.path is not None
    architecture = ARCHITECTURE_OF[declared.model.path]
    if asked.device == "cpu":
        architecture = {**ARCHITECTURES[TINY[architecture["model_type"]]], "vocab_size": 128}
    if asked.layers:
        architecture = {**architecture, "num_hidden_layers": asked.layers}
    special: dict[str, Any] = {"bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1}
    AutoConfig.for_model(**architecture, **special).save_pretrained(folder / "model")
    template = CHAT_TEMPLATE if declared.model.system_prompt else None
    write_tokenizer(folder / "model", 128, chat_template=template)
    write_texts(declared.task.type, folder / "texts.jsonl", PROMPT_WORDS[asked.device])
    cluster = {"gpus_per_node": asked.gpus} if asked.device == "cuda" else {"cpu_ranks": 2}
    overrides = [
        f"model.path={json.dumps(str(folder / 'model'))}",
        f"task.path={json.dumps(str(folder / 'texts.jsonl'))}",
        "validation=null",
        "wandb=null",
        "seeds=[0]",
        "compare.claims=[]",
        "controls.aa_reruns=0",
        f"steps={asked.steps}",
        f"checkpoint.every={asked.steps}",
        f"cluster={json.dumps(cluster)}",
        *(small_overrides(recipe, declared) if asked.device == "cpu" else []),
        *asked.set,
    ]
    return Trial(path=path, recipe=load_own_recipe(path, overrides), overrides=overrides)


def load_own_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    recipe = load_recipe(path, overrides)
    assert isinstance(recipe, Recipe)  # of abrun's own trainer
    return recipe


def small_overrides(recipe: Recipe, declared: OwnRunConfig) -> list[str]:
    """Return what a CPU trains of a recipe in seconds."""
    overrides = ["policy.dtype=float32", "policy.compile=false", "policy.micro_batch_tokens=256"]
    if declared.samples_completions:
        sizes = ["algorithm.prompts_per_step=8", "rollout.max_new_tokens=8"]
        overrides += [*sizes, "rollout.engine=torch", "rollout.tensor_parallel=1"]
    else:
        overrides += ["algorithm.batch_size=16"]
    if declared.policy.backend.expert_parallel > 1:
        overrides += ["policy.backend.expert_parallel=2"]
    for arm in recipe.arms:
        config = recipe.run_config(arm)
        if isinstance(config, OwnRunConfig) and config.policy.logprobs.impl == "triton":
            overrides += [f"arms.{arm}.policy.logprobs.impl=chunked"]
    return overrides


def write_texts(task: str, file: Path, prompt_words: int) -> None:
    """Write prompts of as many tokens each, with the fields that a task reads."""
    prompt_key = "question" if task == "gsm8k" else "prompt"
    with file.open("w") as lines:
        for number in range(NUM_TEXTS):
            words = [*map(str, divmod(number, 100)), *["3"] * (prompt_words - 2)]
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


def predict(trial: Trial, device_bytes: int) -> dict[str, PeakPrediction | str]:
    """Return each arm's prediction, or why it has none."""
    predictions: dict[str, PeakPrediction | str] = {}
    for arm in trial.recipe.arms:
        try:
            predictions[arm] = predict_steps({arm: predictable(trial.config(arm))}, device_bytes)[0]
        except AbrunError as error:
            predictions[arm] = " ".join(str(error).split())
    return predictions


def predicted_rows(trial: Trial, memories: Mapping[str, int]) -> list[str]:
    """Return a row for each arm: whether its training fits each device, and its engine beside what stays."""
    rows = []
    by_device = {name: predict(trial, size) for name, size in memories.items()}
    for arm in trial.recipe.arms:
        config, cells = trial.config(arm), list[str]()
        first = next(iter(by_device.values()))[arm]
        if isinstance(first, str):
            rows.append(markdown_row(trial.path.stem, arm, config.cluster.ranks, "-", first))
            continue
        for name, size in memories.items():
            prediction = by_device[name][arm]
            assert isinstance(prediction, PeakPrediction)
            share = max(prediction.training_bytes, prediction.sampling_bytes) / size
            cells += [f"{prediction.sampling_bytes / GIB:.1f}", "no" if share > 1 else f"{share:.0%}"]
        phase, peak = first.highest_peak
        stand_in = " (as dtensor)" * isinstance(config.policy.backend, Megatron)
        point = f"{first.point.num_sequences} x {first.point.length:,}"
        place = [trial.path.stem, f"{arm}{stand_in}", config.cluster.ranks, point, phase]
        rows.append(markdown_row(*place, f"{peak / GIB:.1f}", *cells))
    return rows


def measure(trial: Trial, work: Path, asked: Any, device_bytes: int | None) -> list[str]:
    """Launch a recipe; return a row for each arm that has finished, and the differences of the runs."""
    from transformers import AutoConfig

    folder = work / trial.path.stem
    write_weights(AutoConfig.from_pretrained(folder / "model"), folder / "model", asked.device)
    sets = [word for override in trial.overrides for word in ("--set", override)]
    outcome = launch([str(trial.path), *sets], checkout=REPOSITORY, work=folder, limit_s=asked.limit)
    predictions = predict(trial, device_bytes) if device_bytes else {}
    experiments = list_experiments(folder / "runs")
    runs = {
        name.arm: RunDir(run_dir(experiment, name))
        for experiment in experiments
        for name in finished_runs(experiment)
    }
    rows = [measured_row(trial.path.stem, arm, run, predictions.get(arm)) for arm, run in runs.items()]
    missing = [arm for arm in trial.recipe.arms if arm not in runs]
    lines = [
        *rows,
        *differences(trial, runs),
        f"launch: {outcome.wall_s:.0f} s, exit code {outcome.exit_code}",
    ]
    if missing:
        lines += [f"not finished: {', '.join(missing)}; the log ends:", *last_log_lines(folder)]
    return lines


def measured_row(recipe: str, arm: str, run: RunDir, prediction: PeakPrediction | str | None) -> str:
    metrics = run.metrics()

    def median(key: str) -> float:
        values = metrics[key].values[WARM_UP:] if key in metrics else []
        return statistics.median(map(float, values)) if len(values) else 0.0

    step_s = median(STEP_TIME)
    seconds = [median(f"timing/train/{part}_s") for part in PARTS]
    peaks = [
        float(max(metrics[key].values))
        for part in TRAINING
        if (key := f"memory/{part}/peak_allocated_bytes") in metrics
    ]
    sizes, note = ["-", "-", "-"], prediction if isinstance(prediction, str) else ""
    if peaks:
        sizes[0] = f"{max(peaks) / GIB:.1f}"
    if isinstance(prediction, PeakPrediction):
        expected = prediction.training_bytes
        sizes[1] = f"{expected / GIB:.1f}"
        sizes[2] = f"{expected / max(peaks) - 1:+.1%}" if peaks else "-"
    mismatch = metrics.get(TOKEN_MULT_PROB_ERROR)
    error = f"{float(max(mismatch.values)):.5f}" if mismatch else "-"
    parts = [f"{value:.2f}" for value in [*seconds, step_s - sum(seconds)]]
    place = [recipe, arm, len(metrics[STEP_TIME].values)]
    return markdown_row(*place, f"{step_s:.2f}", *parts, *sizes, error, note)


def differences(trial: Trial, runs: Mapping[str, RunDir]) -> list[str]:
    """Return a line for each arm: the keys in which its run differs, and those that the header lacks."""
    if BASELINE not in runs:
        return []
    named = named_differences(trial.path)
    configs = {arm: OwnRunConfig.model_validate(run.record().config) for arm, run in runs.items()}
    lines = []
    for arm in runs:
        if arm == BASELINE:
            continue
        keys = set(diff_configs(configs[BASELINE], configs[arm]))
        unnamed = sorted(keys - named.get(arm, set()))
        judgement = f"the header lacks {', '.join(unnamed)}" if unnamed else "as the header says"
        lines.append(f"arm {arm} differs in {', '.join(sorted(keys)) or 'nothing'}: {judgement}")
    return lines


def device_sizes(parser: ArgumentParser, names: Sequence[str]) -> dict[str, int]:
    try:
        return {name: resolve_device_memory(name) or 0 for name in names}
    except AbrunError as error:
        parser.error(f"--memory: {error}")


def main() -> int:
    parser = make_parser(__doc__, devices=["cuda", "cpu"])
    parser.add_argument("--recipes", nargs="*", choices=multi_gpu_recipes(), metavar="NAME")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, help="of the model, for one that does not fit")
    parser.add_argument("--set", action="append", default=[], help="key=value for all recipes")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a launch")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--memory", nargs="*", default=["h100", "h200"], help="of GPUs to predict for")
    asked = parser.parse_args()
    if asked.steps <= WARM_UP:
        parser.error(f"--steps: got {asked.steps}, but the first {WARM_UP} are not measured; use more")
    names = asked.recipes or (multi_gpu_recipes() if asked.predict_only else LAUNCHED)
    print(f"{asked.device} x {asked.gpus}: {'; '.join(query_gpus('name,driver_version')) or 'no GPU'}\n")
    if asked.predict_only:
        memories = device_sizes(parser, asked.memory)
        devices = [title for name in memories for title in (f"{name}: sampling GiB", "share of memory")]
        print(heading(*PREDICTED_HEADER, *devices), flush=True)
    else:
        memories = {}
        print(heading(*HEADER), flush=True)
    device_bytes = resolve_device_memory(None) if asked.device == "cuda" else None
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            try:
                trial = make_trial(name, Path(work), asked)
                lines = (
                    predicted_rows(trial, memories)
                    if asked.predict_only
                    else measure(trial, Path(work), asked, device_bytes)
                )
            except (AbrunError, RuntimeError) as error:  # the other recipes go on
                lines = [markdown_row(name, " ".join(str(error).split()))]
                failed += 1
            print("\n".join(lines), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
