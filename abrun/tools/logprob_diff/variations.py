"""The single changes by which recorded tokens are scored, as data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from abrun.errors import RecipeError
from abrun.recipe.extras import vllm_refusal
from abrun.recipe.merging import apply_override, merge
from abrun.recipe.policy import Megatron
from abrun.recipe.refusals import validated
from abrun.recipe.run import OwnRunConfig

Method = Literal["trainer", "decode", "vllm"]
Weights = Literal["now", "before"]
Kind = Literal["control", "batch shape", "precision", "log-probs", "ranks", "engine", "weights", "sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """One way to score the recorded tokens."""

    method: Method  # trainer: one forward pass; decode: token by token in the torch engine; vllm: by vLLM
    config: OwnRunConfig
    weights: Weights = "now"
    # With filters: renormalise over the sampler's recorded token sets if known, else over recomputed ones.
    on_recorded_sets: bool = True

    @property
    def has_process(self) -> bool:
        """Return True if it needs a process of its own: for several ranks, or for vLLM."""
        return self.method == "vllm" or self.config.cluster.ranks > 1

    def as_job(self) -> dict[str, Any]:
        """Return the scoring as abrun.tools.logprob_diff.measure reads it."""
        return {
            "config": self.config.model_dump(mode="json"),
            "method": self.method,
            "weights": self.weights,
            "on_recorded_sets": self.on_recorded_sets,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One changed setting, or why it cannot be measured here."""

    key: str  # a name for files and JSON
    label: str
    kind: Kind
    scoring: Scoring | None
    reason: str | None = None  # why there is no scoring


def on_one_rank(config: OwnRunConfig) -> OwnRunConfig:
    """Return a run's configuration for one rank, with the micro-batches of one of its replicas.

    Up to rounding, results for given tokens do not depend on the number of ranks.
    """
    policy, replicas = config.policy, config.data_parallel
    backend: dict[str, Any] = {"tensor_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    backend["sequence_parallel"] = False
    if isinstance(policy.backend, Megatron):
        backend["pipeline_parallel"] = 1
    changes: dict[str, Any] = {
        "cluster": {"nodes": 1, "gpus_per_node": min(config.cluster.gpus_per_node, 1), "cpu_ranks": 1},
        "policy": {"backend": backend},
        "rollout": {"tensor_parallel": 1, "devices": None},
        "wandb": None,
    }
    if replicas > 1 and policy.micro_batch_size is None and policy.micro_batch_tokens is None:
        changes["policy"]["micro_batch_size"] = max(
            config.algorithm.batch_size * getattr(config.algorithm, "group_size", 1) // replicas, 1
        )
    if config.rollout.devices:  # the engine had these devices to itself
        changes["rollout"]["gpu_memory_utilization"] = None
    return with_changes(config, changes)


def with_changes(config: OwnRunConfig, changes: Mapping[str, Any]) -> OwnRunConfig:
    """Return the configuration with changes. Raises RecipeError if they are not valid together."""
    return validated(OwnRunConfig, merge(config.model_dump(mode="json"), changes), "the run, changed")


IN_FLOAT32 = {
    "policy": {"dtype": "float32", "logprobs": {"head_dtype": None, "logits_dtype": None}},
    "rollout": {"head_dtype": None},
}
PLAIN = {"policy": {"logprobs": {"one_pass": False}}}  # only updates use one_pass
TORCH = {"engine": "torch", "gpu_memory_utilization": None, "batch_invariant": False}
ALONE = {"micro_batch_size": 1, "micro_batch_tokens": None, "packing": False, "share_prompts": False}
SHAPES = {
    "alone": ("each sequence alone", ALONE),
    "padded": ("padded microbatches", {"micro_batch_tokens": None, "packing": False, "share_prompts": False}),
    "packed": ("packed microbatches, no prompt shared", {"packing": True, "share_prompts": False}),
}
IMPLEMENTATIONS = {"logits": "dense logits", "chunked": "chunked", "triton": "triton"}


def variations_of(config: OwnRunConfig, sets: Sequence[str]) -> list[Variation]:
    """Return the single changes to a run on one rank. `sets`: the user's key=value. Raises RecipeError."""
    config = with_changes(config, PLAIN)
    scoring_before = Scoring(method="trainer", config=config, weights="before")
    return [
        _trainer("again", "nothing changed, from saved weights", "control", config),
        *_shapes(config),
        *_precisions(config),
        *_implementations(config),
        *_ranks(config),
        *_engines(config),
        Variation(
            key="weights_before",
            label="the weights before the last update",
            kind="weights",
            scoring=scoring_before,
        ),
        *_sampling(config),
        *(_override(config, index, override) for index, override in enumerate(sets)),
    ]


def _trainer(
    key: str, label: str, kind: Kind, config: OwnRunConfig, *changes: Mapping[str, Any]
) -> Variation:
    """Return a variation that the trainer's forward pass scores."""
    for change in changes:
        config = with_changes(config, change)
    return Variation(key=key, label=label, kind=kind, scoring=Scoring(method="trainer", config=config))


def _shapes(config: OwnRunConfig) -> Iterator[Variation]:
    for key, (label, changes) in SHAPES.items():
        change = _trainer(key, label, "batch shape", config, {"policy": changes})
        if change.scoring and change.scoring.config != config:
            yield change


def _precisions(config: OwnRunConfig) -> Iterator[Variation]:
    policy, in_float32 = config.policy, "trainer in float32"
    if policy.dtype == "float32":
        reason = "the run is in float32 already"
        for key, label in (("head_float32", "LM head in float32"), ("float32", in_float32)):
            yield Variation(key=key, label=label, kind="precision", scoring=None, reason=reason)
        return
    dtype = "float32" if policy.logprobs.head_dtype is None else "bfloat16"
    head = {"head_dtype": "float32" if dtype == "float32" else None, "logits_dtype": None}
    yield _trainer(
        f"head_{dtype}", f"LM head in {dtype}", "precision", config, {"policy": {"logprobs": head}}
    )
    if policy.head_dtype == "bfloat16":
        dtype = "float32" if policy.logits_dtype == "bfloat16" else "bfloat16"
        logits = {"policy": {"logprobs": {"logits_dtype": dtype}}}
        yield _trainer(f"logits_{dtype}", f"logits in {dtype}", "precision", config, logits)
    yield _trainer("float32", in_float32, "precision", config, IN_FLOAT32)


def _implementations(config: OwnRunConfig) -> Iterator[Variation]:
    for impl, label in IMPLEMENTATIONS.items():
        key, label = f"logprobs_{impl}", f"log-probs: {label}"
        if impl == config.policy.logprobs.impl:
            continue
        if config.rollout.filters.drop_tokens:  # filters require impl: logits
            reason = "min_p, top_k and top_p need all logits"
            yield Variation(key=key, label=label, kind="log-probs", scoring=None, reason=reason)
        else:
            logprobs = {"impl": impl, "chunk_size": None, "one_pass": False}
            yield _trainer(key, label, "log-probs", config, {"policy": {"logprobs": logprobs}})


def _ranks(config: OwnRunConfig) -> Iterator[Variation]:
    cluster = {"gpus_per_node": 2} if config.cluster.gpus_per_node else {"cpu_ranks": 2}
    two = {"cluster": cluster, "policy": {"backend": {"tensor_parallel": 2}}}
    yield _trainer("tensor_parallel_2", "tensor-parallel over 2 ranks", "ranks", config, two)


def _engines(config: OwnRunConfig) -> Iterator[Variation]:
    """Yield each engine; the run's own is a control, which must reproduce its recorded log-probs."""
    engine, on_gpu = config.rollout.engine, config.cluster.gpus_per_node > 0
    yield Variation(
        key="engine_torch",
        label="torch engine, token by token",
        kind="control" if engine == "torch" else "engine",
        scoring=Scoring(method="decode", config=with_changes(config, {"rollout": TORCH})),
    )
    refusal = vllm_refusal(on_gpu=on_gpu)
    if refusal is None and (config.rollout.temperature != 1 or config.rollout.filters.drop_tokens):
        refusal = "vLLM scores given tokens only at temperature 1 and without filters"
    for invariant in (False, True):
        no_kernels = "vLLM has batch-invariant kernels only for GPUs" if invariant and not on_gpu else None
        reason = no_kernels or refusal
        rollout = {"engine": "vllm", "batch_invariant": invariant}
        is_control = (engine, config.rollout.batch_invariant) == ("vllm", invariant)
        yield Variation(
            key="engine_vllm" + "_invariant" * invariant,
            label="vLLM, whole sequences" + ", batch-invariant" * invariant,
            kind="control" if is_control else "engine",
            scoring=None
            if reason
            else Scoring(method="vllm", config=with_changes(config, {"rollout": rollout})),
            reason=reason,
        )


def _sampling(config: OwnRunConfig) -> Iterator[Variation]:
    if config.rollout.filters.drop_tokens:
        unfiltered = {"rollout": {"min_p": 0.0, "top_k": None, "top_p": 1.0}}
        yield _trainer("no_filters", "without min_p, top_k and top_p", "sampling", config, unfiltered)
    if config.rollout.temperature != 1:
        untempered = {"rollout": {"temperature": 1.0}}
        yield _trainer("temperature_1", "before the temperature", "sampling", config, untempered)


def _override(config: OwnRunConfig, index: int, override: str) -> Variation:
    tree = apply_override(config.model_dump(mode="json"), override)
    overridden_config = validated(OwnRunConfig, tree, f"--set {override.partition('=')[0]}")
    if overridden_config.cluster != config.cluster:
        raise RecipeError(
            f"--set: got {override!r}, but tokens are scored on one rank; leave cluster as it is"
        )
    if _scoring_keys(overridden_config) == _scoring_keys(config):
        raise RecipeError(
            f"--set: got {override!r}, which does not change how this trainer scores tokens; set a key of "
            "policy or model, or rollout.temperature, min_p, top_k, top_p or exact_support"
        )
    same_filters = (
        overridden_config.rollout.filters == config.rollout.filters
        and overridden_config.rollout.records_support
    )
    scoring = Scoring(method="trainer", config=overridden_config, on_recorded_sets=same_filters)
    return Variation(key=f"set_{index}", label=override, kind="sampling", scoring=scoring)


def _scoring_keys(config: OwnRunConfig) -> tuple[Any, ...]:
    """Return the settings that log-probs may depend on, without the engine, which is always scored."""
    rollout = config.rollout
    return config.policy, config.model, rollout.temperature, rollout.filters, rollout.records_support
