"""Table of all rules that involve several fields of a recipe: the field, the condition, problem and fix.

A rule is listed under the section whose fields it reads and checked once that section is valid by itself.
`Section` reports the first broken rule; rules of base classes come first. To find the rule that refuses
`liger` with tensor parallelism, search for "policy.liger".
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from abrun.recipe.presets import EXPERTS_BY_PRESET
from abrun.runs.redaction import shortened, yaml_text


@dataclass(frozen=True, slots=True)
class RecipeRule:
    """Rule over several fields of a section.

    `broken` takes the section and returns something true if it breaks the rule. `field` and `problem` are
    templates over `got` (the field's value), attributes of the section, and the mapping that `broken` may
    return.
    """

    field: str  # dotted key for the message; "": the section itself
    broken: Callable[[Any], Any]
    problem: str  # the problem; after the semicolon the fix

    def refusal(self, section: Any) -> tuple[str, str] | None:
        """Return the field and its problem; None if the section obeys the rule."""
        violation = self.broken(section)
        if not violation:
            return None
        values = _TemplateValues(section, violation if isinstance(violation, Mapping) else {})
        field = self.field.format_map(values)
        values.setdefault("got", _value_at(section, field.split(".")))
        values["got"] = shortened(values["got"])
        return field, self.problem.format_map(values)


class _TemplateValues(dict[str, Any]):
    """Values for a template: a mapping, with attributes of the section as fallback."""

    def __init__(self, section: Any, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.section = section

    def __missing__(self, name: str) -> Any:
        return getattr(self.section, name)


def _value_at(section: Any, names: list[str]) -> Any:
    """Return the value at a dotted key, which may begin with the path of the section itself."""
    value = section
    for name in names:
        value = getattr(value, name, section)
    return value


def find_broken_rule(
    section: Any, rules: Mapping[str, tuple[RecipeRule, ...]] | None = None
) -> tuple[str, str] | None:
    """Return the field and problem of the first rule that a section breaks; None if it obeys all."""
    classes = reversed(type(section).__mro__)
    rules = RULES if rules is None else rules
    refusals = (rule.refusal(section) for model in classes for rule in rules.get(model.__name__, ()))
    return next(filter(None, refusals), None)


# vLLM raises lower temperatures to the minimum and refuses higher ones
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
VLLM_RANGE = f"with engine 'vllm', which samples at {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
GROUP_BASELINES = ("group_mean", "leave_one_out")
ONE_PASS_PROBLEM = "with policy.logprobs.one_pass, which needs a per-token loss, but a token's loss in"
POLICY_GRADIENTS = ("grpo", "ppo")
COMPILE_REMEDY = "use compile: false, or type: dtensor without tensor, context and expert parallelism"


def _out_of_range(temperature: float) -> bool:
    return not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE


def _find_replica_misfit(run: Any) -> Any:
    shape, ranks = run.policy.backend.shape, run.cluster.ranks
    replica = math.prod(shape.values())
    factors = " x ".join(f"{name} {size}" for name, size in shape.items())
    return ranks % replica and {"parts": factors, "replica": replica, "ranks": ranks}


def _find_uneven_experts(run: Any) -> Any:
    available = run.policy.backend.ranks_of_experts(run.cluster.ranks)
    return available % run.policy.backend.expert_parallel and {"available": available}


def _indivisible(size: int, unit: int) -> Any:
    return size % unit and {"unit": unit}


def _count_prompt_shares(run: Any) -> int:
    """Return the number of equal shares into which the prompts of a step are divided."""
    return run.data_parallel * run.algorithm.minibatches_per_step


def _find_filter_without_logits(run: Any) -> Any:
    filters, policy = run.trained_distribution[1], run.policy
    if not filters.drop_tokens or policy.logprobs.impl == "logits":
        return None
    off = type(filters)()
    name = next(
        filter_name
        for filter_name in ("min_p", "top_k", "top_p")
        if getattr(filters, filter_name) != getattr(off, filter_name)
    )
    one_pass = " with one_pass: false" * policy.logprobs.one_pass
    return {"name": name, "off": yaml_text(getattr(off, name)), "one_pass": one_pass}


def _make_expert_rule(field: str, off: Any) -> RecipeRule:
    def broken(run: Any) -> bool:
        unknown = run.model.preset is None or run.model.preset in EXPERTS_BY_PRESET
        return not unknown and _value_at(run.policy, field.split(".")) != off

    remedy = f"use {field.split('.')[-1]}: {yaml_text(off)}"
    problem = "got {got} with model.preset {model.preset!r}, which has no experts; " + remedy
    return RecipeRule(f"policy.{field}", broken, problem)


def _find_claim_of_one_seed(recipe: Any) -> Any:
    claim = next((claim for claim in recipe.compare.claims if not claim.exact), None)
    return claim and len(recipe.seeds) == 1 and {"bound": claim.bound}


def _find_paired_feature(compare: Any) -> Any:
    claims = ["exact" for claim in compare.claims if claim.exact]
    claims += ["final_weights" for claim in compare.claims if claim.metric == "final_weights"]
    needing = ["interim"] * bool(compare.interim) + claims
    return needing and not compare.paired and {"needing": needing[0]}


# fmt: off
RULES: dict[str, tuple[RecipeRule, ...]] = {
    "Model": (
        RecipeRule("model",
             lambda model: ((model.preset is None) == (model.path is None)
                 and {"which": "neither" if model.preset is None else "both"}),
             "got {which} of preset and path; give exactly one (and set the other to null)"),
        RecipeRule("model.shape.{name}",
             lambda model: (model.preset is None
                 and next(({"name": name} for name in model.shape.model_dump(exclude_none=True)), None)),
             "got {got} with model.path, a checkpoint whose shape is fixed; use {name}: null, or a preset"),
    ),
    "ClusterConfig": (
        RecipeRule("cluster.cpu_ranks", lambda cluster: cluster.gpus_per_node and cluster.cpu_ranks > 1,
             "got {got} with gpus_per_node {gpus_per_node}; a run trains on GPUs or on CPU cores: drop one "
             "of the two"),
        RecipeRule("cluster.runs_per_gpu",
             lambda cluster: cluster.runs_per_gpu > 1 and not cluster.gpus_per_node,
             "got {got} with gpus_per_node 0, which leaves no GPU to share; use 1 (--jobs sets the number of "
             "parallel runs on CPU cores)"),
        RecipeRule("cluster.runs_per_gpu",
             lambda cluster: cluster.runs_per_gpu > 1 and cluster.nodes > 1,
             "got {got} with nodes {nodes}, but only runs of one node share GPUs; use 1"),
    ),
    "Layout": (
        RecipeRule("policy.backend.sequence_parallel",
             lambda backend: backend.sequence_parallel and backend.tensor_parallel == 1,
             "got true with tensor_parallel 1, which shards nothing; use sequence_parallel: false, or "
             "tensor_parallel: 2 or more"),
    ),
    "Megatron": (
        RecipeRule("policy.backend.sequence_parallel",
             lambda backend: (backend.expert_parallel > 1 and backend.tensor_parallel > 1
                 and not backend.sequence_parallel),
             "got false with expert_parallel {expert_parallel} and tensor_parallel {tensor_parallel}, which "
             "megatron-core refuses to train; use sequence_parallel: true"),
    ),
    "Logprobs": (
        RecipeRule("policy.logprobs.chunk_size",
             lambda logprobs: logprobs.impl == "logits" and logprobs.chunk_size is not None,
             "got {got} with impl 'logits', which has no chunks; use impl: chunked or triton, or chunk_size: "
             "null"),
        RecipeRule("policy.logprobs.one_pass",
             lambda logprobs: logprobs.impl == "logits" and logprobs.one_pass,
             "got true with impl 'logits', which already computes one pass; use impl: chunked or "
             "triton, or one_pass: false"),
        RecipeRule("policy.logprobs.chunk_size",
             lambda logprobs: logprobs.one_pass and logprobs.chunk_size is not None,
             "got {got} with one_pass, which chunks tokens and not the vocabulary; use "
             "chunk_size: null"),
    ),
    "Optimizer": (
        RecipeRule("", lambda optimizer: optimizer.min_learning_rate and optimizer.schedule == "constant",
             "got min_learning_rate {min_learning_rate} with schedule 'constant', which never decays; use "
             "schedule: linear or cosine, or min_learning_rate: 0.0"),
        RecipeRule("", lambda optimizer: optimizer.min_learning_rate > optimizer.learning_rate,
             "got min_learning_rate {min_learning_rate} above learning_rate {learning_rate}; use a smaller "
             "one"),
    ),
    "Policy": (
        RecipeRule("policy.logprobs.logits_dtype",
             lambda policy: policy.logits_dtype == "bfloat16" and policy.head_dtype == "float32",
             "got 'bfloat16' with a head in float32; use logits_dtype: float32, or null"),
        RecipeRule("policy.compile", lambda policy: policy.compile and policy.backend.type != "dtensor",
             f"got true with backend {{backend.type!r}}; {COMPILE_REMEDY}"),
        RecipeRule("policy.compile", lambda policy: policy.compile and policy.backend.is_spread,
             f"got true with backend {{backend.type!r}} and several ranks per replica; {COMPILE_REMEDY}"),
        RecipeRule("policy.liger", lambda policy: policy.liger and policy.compile,
             "got true with compile: true, which generates its own kernels; use liger: false, or compile: "
             "false on dtensor"),
        RecipeRule("policy.liger", lambda policy: policy.liger and policy.backend.type != "dtensor",
             "got true with backend {backend.type!r}, which has its own kernels; use liger: false, or "
             "compile: false on dtensor"),
        RecipeRule("policy.liger", lambda policy: policy.liger and policy.backend.tensor_parallel > 1,
             "got true with tensor_parallel {backend.tensor_parallel}, but Liger kernels are untested on "
             "sharded layers; use liger: false, or tensor_parallel: 1"),
        RecipeRule("policy.activation_checkpointing",
             lambda policy: policy.activation_checkpointing == "selective" and not policy.compile,
             "got 'selective' without compile; use compile: true, or 'none' or 'full'"),
        RecipeRule("policy.share_prompts", lambda policy: policy.share_prompts and not policy.packing,
             "got true without packing; use packing: true, or share_prompts: false"),
        RecipeRule("policy.share_prompts",
             lambda policy: policy.share_prompts and policy.backend.type != "dtensor",
             "got true with backend {backend.type!r}; use type: dtensor, or share_prompts: false"),
        RecipeRule("policy.share_prompts",
             lambda policy: policy.share_prompts and policy.backend.context_parallel > 1,
             "got true with context_parallel {backend.context_parallel}; use context_parallel: 1, or "
             "share_prompts: false"),
        RecipeRule("policy.micro_batch_tokens",
             lambda policy: policy.micro_batch_tokens is not None and not policy.packing,
             "got {got} without packing; use packing: true, or micro_batch_size"),
        RecipeRule("policy.micro_batch_tokens",
             lambda policy: policy.micro_batch_tokens is not None and policy.micro_batch_size is not None,
             "got {got} with micro_batch_size {micro_batch_size}; give one of the two (the other null)"),
    ),
    "Rollout": (
        RecipeRule("rollout.tensor_parallel",
             lambda rollout: rollout.engine == "torch" and rollout.tensor_parallel > 1,
             "got {got} with engine 'torch', which samples on every rank with unsharded weights; use engine: "
             "vllm, or tensor_parallel: 1"),
        RecipeRule("rollout.devices",
             lambda rollout: rollout.engine == "torch" and rollout.devices is not None,
             "got {got} with engine 'torch', which samples from the policy's own modules; use engine: vllm, "
             "or devices: null"),
        RecipeRule("rollout.tensor_parallel",
             lambda rollout: rollout.devices is not None and rollout.devices % rollout.tensor_parallel,
             "got {got} with devices {devices}; use a divisor of {devices}"),
        RecipeRule("rollout.gpu_memory_utilization",
             lambda rollout: rollout.engine == "torch" and rollout.gpu_memory_utilization is not None,
             "got {got} with engine 'torch', which reserves no memory; use engine: vllm, or "
             "gpu_memory_utilization: null"),
        RecipeRule("rollout.batch_invariant",
             lambda rollout: rollout.engine == "torch" and rollout.batch_invariant,
             "got true with engine 'torch', which has no such kernels; use engine: vllm, or batch_invariant: "
             "false"),
        RecipeRule("rollout.from",
             lambda rollout: rollout.engine != "recorded" and rollout.source is not None,
             "got {got} with engine {engine!r}, which samples; use engine: recorded, or from: null"),
        RecipeRule("rollout.from",
             lambda rollout: rollout.engine == "recorded" and rollout.source is None,
             "got null with engine 'recorded'; give an arm that records, or the path of recorded rollouts"),
        RecipeRule("rollout.exact_support",
             lambda rollout: (rollout.record or rollout.engine == "recorded") and rollout.records_support,
             "got {got} with filters and recorded rollouts, which do not hold the kept sets; use "
             "exact_support: false"),
        RecipeRule("rollout.temperature",
             lambda rollout: rollout.engine == "vllm" and _out_of_range(rollout.temperature),
             f"got {{got}} {VLLM_RANGE}; use a value in this range, or engine: torch"),
    ),
    "Problems": (
        RecipeRule("task.answer",
             lambda task: (task.answer is not None and task.verifier is not None
                 and {"judge": shortened(task.verifier)}),
             "got {got} with verifier {judge}, which replaces it; use answer: null, or verifier: null"),
    ),
    "ImportanceCorrection": (
        RecipeRule("algorithm.importance_correction.low", lambda correction: correction.low > correction.high,
             "got {got} above high, {high}; use a low bound below the high one"),
    ),
    "PolicyGradientSettings": (
        RecipeRule("algorithm.kl_estimator",
             lambda algorithm: algorithm.kl_in != "loss" and algorithm.kl_estimator == "k3+",
             "got 'k3+' with kl_in {kl_in!r}, but it differs from k3 only in its gradient, which a reward "
             "does not have; use kl_estimator: k3, or kl_in: loss"),
        RecipeRule("algorithm.ratio",
             lambda algorithm: algorithm.ratio == "on_policy" and algorithm.num_updates > 1,
             "got 'on_policy' with {num_updates} optimizer steps per rollout batch, of which only the first "
             "is on policy; use ratio: old, or epochs_per_step: 1 and minibatches_per_step: 1"),
        RecipeRule("algorithm.documents_per_step",
             lambda algorithm: (algorithm.documents_per_step is not None
                 and algorithm.documents_per_step < algorithm.prompts_per_step * algorithm.group_size
                 and not algorithm.selects_groups
                 and {"draw": algorithm.prompts_per_step * algorithm.group_size}),
             "got {got}, less than the {draw} completions of one draw (prompts_per_step {prompts_per_step} x "
             "group_size {group_size}); use {draw} or more, or smaller draws"),
    ),
    "Grpo": (
        RecipeRule("algorithm.group_size",
             lambda algorithm: (algorithm.group_size == 1
                 and (algorithm.advantage_baseline in GROUP_BASELINES or (algorithm.normalize_advantages
                 and algorithm.normalize_over == "group"))),
             "got 1 with group-relative advantages, which would all be zero; use 2 or more, or set "
             "advantage_baseline: none and normalize_advantages: false, or batch_mean with normalize_over: "
             "batch"),
        RecipeRule("algorithm.kl_in",
             lambda algorithm: (algorithm.kl_in == "reward_to_go"
                 and algorithm.advantage_baseline in GROUP_BASELINES),
             "got 'reward_to_go', which gives each token its own reward, with advantage_baseline "
             "{advantage_baseline!r} of a group's sequences; use advantage_baseline: batch_mean or none, or "
             "kl_in: reward"),
        RecipeRule("algorithm.kl_in",
             lambda algorithm: (algorithm.kl_in == "reward_to_go" and algorithm.normalize_advantages
                 and algorithm.normalize_over == "group"),
             "got 'reward_to_go', which gives each token its own reward, with normalize_over 'group'; use "
             "normalize_over: batch, or normalize_advantages: false, or kl_in: reward"),
        RecipeRule("algorithm.normalize_over",
             lambda algorithm: algorithm.normalize_over != "group" and not algorithm.normalize_advantages,
             "got {got} with normalize_advantages false; use normalize_advantages: true, or normalize_over: "
             "group"),
        RecipeRule("algorithm.normalize_over",
             lambda algorithm: (algorithm.normalize_over == "leave_one_out"
                 and algorithm.advantage_baseline != "leave_one_out"),
             "got 'leave_one_out' with advantage_baseline {advantage_baseline!r}; use advantage_baseline: "
             "leave_one_out, or normalize_over: group"),
        RecipeRule("algorithm.group_size",
             lambda algorithm: algorithm.normalize_over == "leave_one_out" and algorithm.group_size < 3,
             "got {got} with normalize_over 'leave_one_out', but the std of a single other completion is "
             "undefined; use 3 or more, or normalize_over: group"),
        RecipeRule("algorithm.dual_clip",
             lambda algorithm: algorithm.dual_clip is not None and algorithm.loss not in ("clipped", "gspo"),
             "got {got} with loss {loss!r}, which has no dual clip; use loss: clipped or gspo, or "
             "dual_clip: null"),
        RecipeRule("algorithm.dynamic_sampling",
             lambda algorithm: (algorithm.dynamic_sampling is not None
                 and algorithm.advantage_baseline not in GROUP_BASELINES),
             "set with advantage_baseline {advantage_baseline!r}, where groups of equal rewards do have a "
             "signal; use group_mean or leave_one_out, or dynamic_sampling: null"),
    ),
    "Ppo": (
        RecipeRule("algorithm.value_coefficient",
             lambda algorithm: algorithm.value_coefficient is not None and algorithm.value_backbone == "own",
             "got {got} with value_backbone 'own', where the optimizer (Adam) almost cancels a loss "
             "factor; use value_optimizer.learning_rate and value_coefficient: null, or value_backbone: "
             "shared"),
    ),
    "OwnRunConfig": (
        RecipeRule("cluster.runs_per_gpu",
             lambda run: run.cluster.runs_per_gpu > 1 and run.engine_devices,
             "got {got} with rollout.devices {rollout.devices}, whose engines take whole GPUs; use 1, or "
             "rollout.devices: null"),
        RecipeRule("rollout.gpu_memory_utilization",
             lambda run: run.cluster.runs_per_gpu > 1 and run.rollout.gpu_memory_utilization,
             "got {got} with cluster.runs_per_gpu {cluster.runs_per_gpu}, whose runs get equal shares; use "
             "null, or cluster.runs_per_gpu: 1"),
        RecipeRule("policy.backend", _find_replica_misfit,
             "got {parts} = {replica} ranks per replica, for {ranks} ranks; use sizes whose product divides "
             "{ranks}, or other cluster sizes"),
        RecipeRule("policy.backend.tensor_parallel",
             lambda run: _indivisible(run.cluster.ranks_per_node, run.policy.backend.tensor_parallel),
             "got {got} for {cluster.ranks_per_node} ranks per node, but such a group must fit one node; use "
             "a divisor of {cluster.ranks_per_node}"),
        RecipeRule("rollout.tensor_parallel",
             lambda run: (not run.rollout.devices
                 and _indivisible(run.cluster.ranks_per_node, run.rollout.tensor_parallel)),
             "got {got} for {cluster.ranks_per_node} ranks per node, but such a group must fit one node; use "
             "a divisor of {cluster.ranks_per_node}"),
        RecipeRule("policy.backend.expert_parallel", _find_uneven_experts,
             "got {got} for {available} ranks available to a layer's experts; use a divisor of "
             "{available}"),
        RecipeRule("algorithm.prompts_per_step",
             lambda run: (run.algorithm.type in POLICY_GRADIENTS
                 and _indivisible(run.algorithm.prompts_per_step, _count_prompt_shares(run))),
             "got {got} for {data_parallel} data-parallel ranks and minibatches_per_step "
             "{algorithm.minibatches_per_step}; use a multiple of {unit}, or other cluster sizes"),
        RecipeRule("algorithm.documents_per_step",
             lambda run: (run.algorithm.type == "grpo" and run.algorithm.dynamic_sampling
                 and run.algorithm.documents_per_step
                and _indivisible(run.algorithm.documents_per_step,
                     _count_prompt_shares(run) * run.algorithm.group_size)),
             "got {got} for groups of {algorithm.group_size}, {data_parallel} data-parallel ranks and "
             "minibatches_per_step {algorithm.minibatches_per_step}; use a multiple of {unit}"),
        RecipeRule("algorithm.batch_size",
             lambda run: (run.algorithm.type in ("sft", "dpo")
                 and _indivisible(run.algorithm.batch_size, run.data_parallel)),
             "got {got} for {data_parallel} data-parallel ranks; use a multiple of {data_parallel}, or other "
             "cluster sizes"),
        RecipeRule("warm_start.batch_size",
             lambda run: run.warm_start and _indivisible(run.warm_start.batch_size, run.data_parallel),
             "got {got} for {data_parallel} data-parallel ranks; use a multiple of {data_parallel}"),
        RecipeRule("rollout.{name}", _find_filter_without_logits,
             "got {got} with policy.logprobs.impl {policy.logprobs.impl!r}, which never holds the logits to "
             "filter; use {name}: {off}, or impl: logits{one_pass}"),
        RecipeRule("rollout.head_dtype",
             lambda run: run.rollout.head_dtype == "bfloat16" and run.policy.dtype == "float32",
             "got 'bfloat16' with policy.dtype 'float32'; use head_dtype: null, or policy.dtype: bfloat16"),
        RecipeRule("algorithm.overlong_punishment.buffer",
             lambda run: (run.algorithm.type in POLICY_GRADIENTS and run.algorithm.overlong_punishment
                 and run.algorithm.overlong_punishment.buffer > run.rollout.max_new_tokens),
             "got {got}, more than rollout.max_new_tokens {rollout.max_new_tokens}; use "
             "{rollout.max_new_tokens} or less"),
        RecipeRule("algorithm.value_head_dtype",
             lambda run: (run.algorithm.type == "ppo" and run.algorithm.value_head_dtype != "float32"
                 and run.policy.backend.type == "megatron"),
             "got {got} with policy.backend.type 'megatron', whose masters are float32; use float32"),
        RecipeRule("injected_fault", lambda run: run.unmet_fault_need and {"got": run.injected_fault.name},
             "got {got}, which {unmet_fault_need}, or injected_fault: null"),
        RecipeRule("validation.num_prompts",
             lambda run: run.validation and _indivisible(run.validation.num_prompts, run.data_parallel),
             "got {got} for {data_parallel} data-parallel ranks; use a multiple of {data_parallel}"),
        RecipeRule("validation",
             lambda run: (run.validation and run.rollout.engine == "recorded" and run.samples_completions
                 and {"got": "a validation by completions"}),
             "got {got} with rollout.engine 'recorded', which samples none; use validation: null"),
        RecipeRule("validation.path",
             lambda run: run.validation and run.validation.path is not None and not hasattr(run.task, "path"),
             "got {got} with task.type {task.type!r}, whose prompts are generated; use path: null"),
        RecipeRule("validation.temperature",
             lambda run: (run.validation and run.validation.temperature and run.rollout.engine == "vllm"
                 and _out_of_range(run.validation.temperature)),
             f"got {{got}} {VLLM_RANGE}; use a value in this range, or 0, or engine: torch"),
        RecipeRule("rollout.batch_invariant",
             lambda run: run.rollout.batch_invariant and not run.cluster.gpus_per_node,
             "got true with cluster.gpus_per_node: 0, but vLLM has no such kernels for CPUs; use "
             "batch_invariant: false, or GPUs"),
        RecipeRule("algorithm.loss",
             lambda run: (run.policy.logprobs.one_pass and run.algorithm.type == "grpo"
                 and run.algorithm.loss == "gspo"),
             f"got 'gspo' {ONE_PASS_PROBLEM} GSPO depends on the whole sequence; use one_pass: false"),
        RecipeRule("algorithm.type", lambda run: run.policy.logprobs.one_pass and run.algorithm.type == "dpo",
             f"got 'dpo' {ONE_PASS_PROBLEM} DPO depends on both completions of a pair; use one_pass: false"),
        RecipeRule("task.type",
             lambda run: (run.algorithm.type in POLICY_GRADIENTS
                 and run.task.type in ("completions", "preferences")),
             "got {got} with algorithm.type {algorithm.type!r}, which needs a task that scores "
             "completions; use arithmetic, word_problems, reasoning_gym, gsm8k or jsonl"),
        RecipeRule("task.type",
             lambda run: run.algorithm.type == "dpo" and run.task.type not in ("arithmetic", "preferences"),
             "got {got} with algorithm.type 'dpo', which needs pairs of completions; use preferences or "
             "arithmetic"),
        RecipeRule("policy.micro_batch_size",
             lambda run: run.algorithm.type == "dpo" and (run.policy.micro_batch_size or 0) % 2,
             "got {got} with algorithm.type 'dpo', which keeps pairs together; use an even number of "
             "sequences"),
        _make_expert_rule("backend.expert_parallel", off=1),
        _make_expert_rule("router_aux_loss_coefficient", off=0.0),
        _make_expert_rule("replay_routing", off=False),
        RecipeRule("policy.backend.expert_parallel",
             lambda run: run.model.architecture.get("num_experts", 0) % run.policy.backend.expert_parallel,
             "got {got} with model.preset {model.preset!r}, whose layers have "
             "{model.architecture[num_experts]} experts; use a divisor of {model.architecture[num_experts]}"),
        RecipeRule("policy.replay_routing",
             lambda run: run.policy.replay_routing and run.algorithm.type not in POLICY_GRADIENTS,
             "got true with algorithm.type {algorithm.type!r}, which has no old log-prob pass to record "
             "routes in; use replay_routing: false"),
    ),
    "Compare": (
        RecipeRule("", _find_paired_feature,
             "got paired: false with {needing}, which needs pairs; drop one of the two"),
    ),
    "ExperimentDeclaration": (
        RecipeRule("arms",
             lambda recipe: (len(recipe.arms) < 2 and recipe.compare.reference is None
                 and not recipe.controls.faults and {"got": [*recipe.arms]}),
             "got {got}; an experiment needs an arm named 'baseline' and at least one other arm, or a "
             "frozen reference (compare.reference)"),
        RecipeRule("arms",
             lambda recipe: (recipe.arms.keys() & recipe.control_arms.keys()
                 and {"got": min(recipe.arms.keys() & recipe.control_arms.keys())}),
             "got {got}, which is the name of a control arm; choose another name"),
        RecipeRule("compare.interim",
             lambda recipe: (recipe.compare.interim and recipe.compare.interim[-1] != len(recipe.seeds)
                 and {"seeds": len(recipe.seeds), "interim": recipe.compare.interim}),
             "got {interim} with {seeds} seeds; the last analysis uses all pairs: end with {seeds}"),
        RecipeRule("seeds", lambda recipe: len(set(recipe.seeds)) < len(recipe.seeds),
             "got {got} with a duplicate seed; list each seed once"),
        RecipeRule("seeds", _find_claim_of_one_seed,
             "got one seed with {bound} (compare.claims), which needs the spread over seeds; use two or "
             "more, or compare.claims: [] for the step-one check alone"),
    ),
}
# Rules of new recipes alone: earlier versions launched recipes that break them
NEW_RULES: dict[str, tuple[RecipeRule, ...]] = {
    "OwnRunConfig": (
        RecipeRule("algorithm.kl_estimator",
             lambda run: (run.algorithm.type in POLICY_GRADIENTS and run.algorithm.kl_coefficient > 0
                 and (run.algorithm.kl_in, run.algorithm.kl_estimator) == ("loss", "k1")),
             "got 'k1' with kl_in 'loss', where its expected gradient is zero; use kl_estimator: k2, k3 or "
             "k3+, or kl_in: reward"),
    ),
}
# fmt: on
