"""Claims in the comment at the head of a recipe, checked against the runs that the recipe plans.

`CLAIMS` has a pattern for every claim that headers make, and what it demands of the resolved arms. `SUBJECTS`
are words that always make a claim: a header is refused if no pattern covers one.
"""

import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from abrun.experiment.plan import make_plan
from abrun.recipe.experiment import BASELINE, CommandRecipe, Declared, Recipe
from abrun.recipe.presets import PRESET_EXPERTS
from abrun.recipe.reading import dotted

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
N = rf"(\d[\d,]*|(?i:{'|'.join(WORDS[1:])}))"
ERROR = "train/token_mult_prob_error"
EXPERTS = {"Qwen3-30B-A3B": 128}  # of checkpoints, by the end of their names


def number(text: str) -> int:
    return WORDS.index(text.lower()) if text.lower() in WORDS else int(text.replace(",", ""))


def header(path: Path) -> str:
    """Return the leading comment of a recipe in one line."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.lstrip("#").strip() for line in comment)


class Arms:
    """The resolved values of a recipe's arms, by dotted key."""

    def __init__(self, recipe: Declared) -> None:
        plan = make_plan(recipe)
        configs = {run.name.arm: run.config for run in plan.runs if not run.is_control}
        self.recipe: Any = recipe
        self.configs: dict[str, Any] = configs
        self.values = {arm: dotted(config.model_dump(mode="json")) for arm, config in configs.items()}
        self.differences = {arm: set(plan.treatment_diff[arm]) for arm in recipe.arms if arm != BASELINE}

    @property
    def is_ours(self) -> bool:
        return isinstance(self.recipe, Recipe)

    def all(self, **values: Any) -> bool:
        """Return whether all arms have these values; `__` in a name stands for a dot."""
        return all(self._has(arm, values) for arm in self.values)

    def baseline(self, **values: Any) -> bool:
        return self._has(BASELINE, values)

    def treatments(self, **values: Any) -> bool:
        return all(self._has(arm, values) for arm in self.values if arm != BASELINE)

    def some(self, **values: Any) -> bool:
        """Return whether an arm besides the baseline has these values."""
        return any(self._has(arm, values) for arm in self.values if arm != BASELINE)

    def _has(self, arm: str, values: dict[str, Any]) -> bool:
        return all(self.values[arm].get(name.replace("__", ".")) == value for name, value in values.items())

    @property
    def updates(self) -> set[int]:
        return {config.algorithm.num_updates for config in self.configs.values()}

    def claims(self, metric: str, **fields: Any) -> bool:
        """Return whether the comparison has a claim on a metric with these fields."""
        return any(
            one.metric == metric and all(getattr(one, name) == value for name, value in fields.items())
            for one in self.recipe.compare.primary
        )

    def of_grpo(self, **values: Any) -> bool:
        return self.all(algorithm__type="grpo", **{f"algorithm__{name}": values[name] for name in values})


Check = Callable[[Arms, re.Match[str]], bool]
IMPL, TP = "policy__logprobs__impl", "policy__backend__tensor_parallel"
HEAD, LOGITS = "policy__logprobs__head_dtype", "policy__logprobs__logits_dtype"
ENGINE_HEAD = "rollout__head_dtype"
BACKEND, CP, EP = (
    "policy__backend__type",
    "policy__backend__context_parallel",
    "policy__backend__expert_parallel",
)


def fused(arms: Arms, arm: str) -> bool:
    return arms.values[arm]["policy.logprobs.impl"] in ("chunked", "triton")


def by_algorithm(arms: Arms, **values: Any) -> bool:
    """Return whether all arms have an algorithm; of another trainer, whether its command names it."""
    if arms.is_ours:
        return arms.all(**{f"algorithm__{name}": value for name, value in values.items()})
    name = values.get("loss") or values["type"]
    return all(str(name) in " ".join(config.trainer.argv).lower() for config in arms.configs.values())


def other_backend(arms: Arms) -> bool:
    return arms.baseline(**{BACKEND: "dtensor"}) and arms.treatments(**{BACKEND: "megatron"})


def experts(arms: Arms, arm: str) -> float:
    """Return how many of a layer's experts a rank holds."""
    return PRESET_EXPERTS[arms.recipe.model.preset] / arms.values[arm]["policy.backend.expert_parallel"]


FUSED = r"(?: \(Triton(, one pass)?\))?(?:, loss and both gradients in (one pass) of Triton kernels,)?"

# In order: where a longer pattern has taken its words, no later one reads them again.
CLAIMS: dict[str, Check] = {
    # --- machines and parallelism ---
    rf"{N} nodes? of {N} GPUs": lambda arms, m: arms.all(
        cluster__nodes=number(m[1]), cluster__gpus_per_node=number(m[2])
    ),
    rf"{N} GPU a run": lambda arms, m: arms.all(cluster__nodes=1, cluster__gpus_per_node=number(m[1])),
    rf"on {N} ranks": lambda arms, m: all(of.cluster.ranks == number(m[1]) for of in arms.configs.values()),
    rf"tensor-parallel over {N} GPUs": lambda arms, m: arms.all(**{TP: number(m[1])}),
    "with sequence parallelism": lambda arms, m: arms.all(policy__backend__sequence_parallel=True),
    rf"sequences cut over {N} GPUs(?: \(context parallelism {N}\))?": lambda arms, m: (
        arms.baseline(**{CP: 1})
        and arms.treatments(**{CP: number(m[1])})
        and number(m[2] or m[1]) == number(m[1])
        and arms.recipe.cluster.gpus_per_node > 0
    ),
    "whole sequences on each against sequences cut over both": lambda arms, m: (
        arms.baseline(**{CP: 1}) and arms.treatments(**{CP: arms.recipe.cluster.ranks})
    ),
    "whole on each, with half of the samples, against cut over both": lambda arms, m: (
        arms.baseline(**{TP: 1}) and arms.treatments(**{TP: arms.recipe.cluster.ranks})
    ),
    rf"all {N} experts of a layer on each, against {N} on each": lambda arms, m: (
        experts(arms, BASELINE) == number(m[1]) and experts(arms, "treatment") == number(m[2])
    ),
    rf"all layers on each rank, against a pipeline of {N} stages": lambda arms, m: (
        arms.baseline(policy__backend__pipeline_parallel=1, **{TP: 1})
        and arms.treatments(policy__backend__pipeline_parallel=number(m[1]))
    ),
    "FSDP2(?: and DTensor)? against (?:Megatron|megatron-core)": lambda arms, m: other_backend(arms),
    r"on megatron-core as on FSDP2 \(dtensor\)": lambda arms, m: other_backend(arms),
    "(?:trained )?with Megatron": lambda arms, m: arms.all(**{BACKEND: "megatron"}),
    # --- models ---
    rf"mixture of {N} experts": lambda arms, m: EXPERTS[Path(arms.recipe.model.path).name] == number(m[1]),
    "mixture of experts": lambda arms, m: arms.recipe.model.preset in PRESET_EXPERTS,
    rf"Qwen2 of {N} layers": lambda arms, m: (
        arms.recipe.model.architecture["num_hidden_layers"] == number(m[1])
        and arms.recipe.model.preset.startswith("qwen2")
    ),
    r"(\d+)B model": lambda arms, m: f"-{m[1]}B" in arms.recipe.model.path,
    rf"vocabulary of {N} tokens": lambda arms, m: (
        arms.recipe.model.architecture["vocab_size"] == number(m[1])
    ),
    rf"logits of {N} tokens": lambda arms, m: arms.all(policy__micro_batch_tokens=number(m[1])),
    "system prompt": lambda arms, m: bool(arms.recipe.model.system_prompt),
    r"judge \(math-verify\)": lambda arms, m: arms.all(task__answer="math_verify"),
    # --- log-probs and precision ---
    "dense logits against the fused head in Triton": lambda arms, m: (
        arms.baseline(**{IMPL: "logits"}) and arms.treatments(**{IMPL: "triton"})
    ),
    "dense against fused log-probs": lambda arms, m: (
        arms.baseline(**{IMPL: "logits"}) and fused(arms, "treatment")
    ),
    "from whole logits, or fused and chunked": lambda arms, m: (
        arms.baseline(**{IMPL: "logits"}) and arms.treatments(**{IMPL: "chunked"})
    ),
    rf"fused LM head{FUSED}": (
        lambda arms, m: (
            not arms.is_ours
            or (
                arms.baseline(**{IMPL: "logits"})
                and ("Triton" not in m[0] or arms.treatments(**{IMPL: "triton"}))
                and arms.treatments(policy__logprobs__one_pass=bool(m[1] or m[2]))
            )
        )
    ),
    r"All arms have the fused head \(Triton\) with float32 logits": lambda arms, m: arms.all(
        **{IMPL: "triton", LOGITS: "float32"}
    ),
    "fused head keeps the logits": lambda arms, m: all(fused(arms, arm) for arm in arms.values),
    "engine rounds its logits to bfloat16, and whose trainer does not": lambda arms, m: (
        arms.all(policy__dtype="bfloat16", **{LOGITS: "float32"})
        and arms.baseline(**{HEAD: None, ENGINE_HEAD: None})
    ),
    "The trainer's logits are float32 in all arms": lambda arms, m: arms.all(**{LOGITS: "float32"}),
    "(?:float32 LM head|LM head in float32)": lambda arms, m: (
        arms.baseline(**{HEAD: None, ENGINE_HEAD: None})
        and arms.some(**{HEAD: "float32", ENGINE_HEAD: None})
        and arms.some(**{HEAD: None, ENGINE_HEAD: "float32"})
    ),
    "bfloat16 policy": lambda arms, m: arms.all(policy__dtype="bfloat16"),
    r"SmolLM2-135M-Instruct in (bfloat16|float32)": lambda arms, m: arms.all(policy__dtype=m[1]),
    "In float32, where a wrong normaliser is seen at step one": lambda arms, m: (
        arms.all(policy__dtype="float32") and arms.recipe.compare.step_one
    ),
    "its head is float32|value head and its moments in bfloat16 instead of float32": lambda arms, m: (
        arms.baseline(algorithm__value_head_dtype="float32")
        and arms.some(algorithm__value_head_dtype="bfloat16")
    ),
    "packing, compiled layers, weights kept gathered and the fused kernels": lambda arms, m: (
        arms.treatments(policy__packing=True, policy__compile=True, policy__backend__keep_gathered=True)
        and fused(arms, "treatment")
    ),
    "Packed microbatches in which every completion brings its prompt along, against": lambda arms, m: (
        arms.all(policy__packing=True)
        and arms.baseline(policy__share_prompts=False)
        and arms.treatments(policy__share_prompts=True)
    ),
    # --- algorithms ---
    "GSPO": lambda arms, m: (
        arms.of_grpo(loss="gspo", loss_reduction="sequence_mean") and min(arms.updates) > 1
    ),
    "CISPO": lambda arms, m: arms.of_grpo(loss="cispo"),
    r"DAPO \(arXiv:2503.14476\): a wider upper clip bound, and groups without signal": lambda arms, m: (
        arms.of_grpo(loss="clipped")
        and arms.recipe.algorithm.dynamic_sampling is not None
        and arms.recipe.algorithm.clip_high > arms.recipe.algorithm.clip_low
    ),
    r"Dr\.GRPO": lambda arms, m: arms.of_grpo(
        loss="clipped", normalize_advantages=False, loss_reduction="sequence_sum_constant"
    ),
    r"RLOO \(arXiv:2402.14740\), with a KL penalty in the reward": lambda arms, m: (
        arms.of_grpo(loss="reinforce", advantage_baseline="leave_one_out", kl_in="reward")
        and arms.recipe.algorithm.kl_coefficient > 0
    ),
    r"REINFORCE\+\+ \(arXiv:2501.03262\): each token's advantage is the reward less the KL that follows it": (
        lambda arms, m: (
            arms.of_grpo(advantage_baseline="batch_mean", kl_in="reward_to_go")
            and arms.recipe.algorithm.kl_coefficient > 0
        )
    ),
    r"PPO(?: \(arXiv:1707.06347\))?(?:: a value model of its own| with a value model|'s value model)": (
        lambda arms, m: arms.all(algorithm__type="ppo", algorithm__value_backbone="own")
    ),
    "off-by-one in the value model": lambda arms, m: arms.all(algorithm__type="ppo"),
    "DPO": lambda arms, m: by_algorithm(arms, type="dpo"),
    "GRPO": lambda arms, m: by_algorithm(arms, type="grpo", **({"loss": "clipped"} if arms.is_ours else {})),
    "[Ss]upervised fine-tuning": lambda arms, m: by_algorithm(arms, type="sft"),
    "from random weights": lambda arms, m: (
        arms.recipe.model.preset is not None and arms.recipe.warm_start is None
    ),
    "the reference is the warm start|supervised warm start": lambda arms, m: (
        arms.recipe.warm_start is not None
    ),
    "with one update the ratio would be 1": lambda arms, m: min(arms.updates) > 1,
    rf"{N} updates": lambda arms, m: arms.updates == {number(m[1])},
    rf"{N} minibatches a step": lambda arms, m: arms.all(algorithm__minibatches_per_step=number(m[1])),
    "several microbatches and updates, .*, a KL penalty and an entropy bonus": lambda arms, m: (
        min(arms.updates) > 1
        and arms.all(policy__packing=True)
        and arms.recipe.policy.micro_batch_size is not None
        and arms.recipe.rollout.temperature != 1
        and min(arms.recipe.algorithm.kl_coefficient, arms.recipe.algorithm.entropy_coefficient) > 0
    ),
    rf"on {N} documents, drawn as {N} prompts with {N} completions each": lambda arms, m: arms.all(
        algorithm__documents_per_step=number(m[1]),
        algorithm__prompts_per_step=number(m[2]),
        algorithm__group_size=number(m[3]),
    ),
    "a fixed number of documents a step": lambda arms, m: (
        arms.recipe.algorithm.documents_per_step is not None
    ),
    rf"a step has {N} prompts": lambda arms, m: arms.all(algorithm__prompts_per_step=number(m[1])),
    "The clip range is the paper's": lambda arms, m: arms.of_grpo(loss="gspo", clip_low=3e-4, clip_high=4e-4),
    r"clipped at a norm of ([\d.]+\d)": lambda arms, m: arms.all(
        policy__optimizer__max_grad_norm=float(m[1])
    ),
    r"learning rate is (\de-\d)": lambda arms, m: arms.all(policy__optimizer__learning_rate=float(m[1])),
    "without the right shift|computed before the token": lambda arms, m: (
        arms.baseline(algorithm__right_shift=True) and arms.some(algorithm__right_shift=False)
    ),
    "computed before it; in the treatment it is the one computed after it": lambda arms, m: (
        arms.baseline(algorithm__right_shift=True) and arms.treatments(algorithm__right_shift=False)
    ),
    # --- rollouts ---
    "sampled with vLLM on the same GPUs": lambda arms, m: arms.all(
        rollout__engine="vllm", rollout__devices=None
    ),
    "vLLM's FlashInfer kernels for experts are off": lambda arms, m: arms.all(
        trainer__env__VLLM_USE_FLASHINFER_MOE_FP16="0", trainer__env__VLLM_USE_FLASHINFER_MOE_FP8="0"
    ),
    "by the policy's own modules against rollouts by vLLM": lambda arms, m: (
        arms.baseline(rollout__engine="torch") and arms.treatments(rollout__engine="vllm")
    ),
    "with vLLM as the rollout engine as with the embedded one": lambda arms, m: (
        arms.baseline(rollout__engine="torch") and arms.treatments(rollout__engine="vllm")
    ),
    "vLLM's batch-invariant kernels": lambda arms, m: arms.some(rollout__batch_invariant=True),
    # --- comparisons ---
    rf"{N} pairs can show": lambda arms, m: len(arms.recipe.seeds) == number(m[1]),
    "the first step is not compared": lambda arms, m: not arms.recipe.compare.step_one,
    "the first step cannot agree": lambda arms, m: not arms.recipe.compare.step_one,
    "step one is equal": lambda arms, m: arms.recipe.compare.step_one,
    r"excess over 1 is claimed to be lower at the first step, and the reward": lambda arms, m: (
        arms.claims(ERROR, window="steps 1-1", below="1x") and arms.claims("train/reward")
    ),
    r"at the first step, the excess of token_mult_prob_error over 1 goes down": lambda arms, m: arms.claims(
        ERROR, window="steps 1-1", below="1x"
    ),
    "stays within half of its level": lambda arms, m: arms.claims("train/gen_kl_error", margin="50%"),
    r"rewards of the second half of the steps within (0\.\d+) of each other": lambda arms, m: arms.claims(
        "train/reward", window="last 50%", margin=float(m[1])
    ),
    "a fault planted in the treatment": lambda arms, m: bool(
        arms.configs["treatment"].planted_fault and not arms.configs[BASELINE].planted_fault
    ),
    "at two learning rates": lambda arms, m: (
        arms.differences == {"treatment": {"trainer.parameters.learning_rate"}}
    ),
}

SUBJECTS = re.compile(
    rf"\b{N}[- ](?:nodes?|GPUs?|ranks?|updates?|minibatch(?:es)?|prompts?|completions?|documents?|seeds|pairs"
    r"|stages|layers|experts|tokens)\b"
    r"|\b(?:tensor|context|expert|pipeline|data|sequence)[- ]parallel(?:ism)?\b|\b(?:TP|CP|EP|PP|SP) ?\d+"
    r"|\b(?:bfloat16|bf16|float32|fp32|float16|float64)\b"
    r"|\b(?:GSPO|CISPO|DAPO|RLOO|PPO|DPO|SFT|(?:Dr\.)?GRPO)\b|REINFORCE\+\+|[Ss]upervised fine-tuning"
    r"|\b(?:Megatron|megatron-core|FSDP2|DTensor|vLLM|Triton|Liger)\b"
    r"|\b(?:step one|first step)\b|\bKL penalty\b|\bwarm start\b|\bseveral updates\b"
)
DIFFERS = re.compile(r"(?:The arms differ|Arm ([\w-]+) differs) in (`[^`]+`(?:(?:, | and )`[^`]+`)*)[.:]")
# What is no claim on the plan: code, names of files and of other projects' recipes, and what others found
SET_ASIDE = re.compile(r"`[^`]*`|\S*/\S*|\S+_\S+_\S+|\S+\.(?:yaml|py|sh)\b|abrun launch \S+( --set \S+)*")


def header_problems(text: str, recipe: Recipe | CommandRecipe) -> list[str]:
    """Return what a header says that the recipe's resolved arms do not have, and what cannot be checked."""
    arms, problems = Arms(recipe), []
    named = {arm or "treatment": set(re.findall("`([^`]+)`", keys)) for arm, keys in DIFFERS.findall(text)}
    if named != arms.differences:
        problems.append(f"names {named} as what differs, and the dry run lists {arms.differences}")
    text = re.split(r"Without a model hub|Claimed elsewhere", text)[0]
    text = SET_ASIDE.sub(lambda part: part[0] if "mult_prob_error" in part[0] else "_", DIFFERS.sub("", text))
    covered: list[tuple[int, int]] = []
    for pattern, check in CLAIMS.items():
        for found in re.finditer(rf"(?<![\w-])(?:{pattern})", text):
            if any(first < found.end() and found.start() < last for first, last in covered):
                continue
            covered.append(found.span())
            if not check(arms, found):
                problems.append(f"says {found[0]!r}, which the arms are not")
    for found in SUBJECTS.finditer(text):
        if not any(first <= found.start() and found.end() <= last for first, last in covered):
            problems.append(f"says {found[0]!r}, for which tests/recipe_headers.py has no pattern")
    return problems
