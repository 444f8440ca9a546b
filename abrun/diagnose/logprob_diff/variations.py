"""What is changed, one thing at a time: as data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from abrun.errors import RecipeError
from abrun.messages import sentence
from abrun.reasons import Code
from abrun.recipe.merging import merge, overridden
from abrun.recipe.packages import vllm_refusal
from abrun.recipe.policy import Megatron
from abrun.recipe.refusals import validated
from abrun.recipe.run import OwnRunConfig

Method = Literal["trainer", "decode", "vllm"]
Weights = Literal["now", "before"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """One way to score the recorded tokens."""

    method: Method  # a forward pass of the trainer; decoded one by one by the torch engine; by vLLM
    config: OwnRunConfig
    weights: Weights = "now"
    # With filters: of the sets of tokens that the sampler kept, where it told; else of those kept now
    on_recorded_sets: bool = True

    @property
    def has_process(self) -> bool:
        """Whether it needs one of its own: other ranks, or a library that changes a whole process."""
        return self.method == "vllm" or self.config.cluster.ranks > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing changed, or why that cannot be done here."""

    key: str  # a name for files and JSON
    label: str
    kind: Literal[
        "control", "batch shape", "precision", "log-probs", "ranks", "engine", "weights", "sampling"
    ]
    scoring: Scoring | None
    reason: str | None = None  # why there is no scoring


def on_one_rank(config: OwnRunConfig) -> OwnRunConfig:
    """A run's configuration for one rank, whose microbatches are those of each of the run's replicas.

    Nothing that it computes from the same tokens depends on the ranks, up to rounding.
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
            config.algorithm.batch_size * _group(config) // replicas, 1
        )
    if config.rollout.devices:  # whose memory was the engine's alone
        changes["rollout"]["gpu_memory_utilization"] = None
    return changed(config, changes)


def _group(config: OwnRunConfig) -> int:
    return getattr(config.algorithm, "group_size", 1)


def changed(config: OwnRunConfig, changes: Mapping[str, Any]) -> OwnRunConfig:
    """Raises RecipeError where they do not fit."""
    return validated(OwnRunConfig, merge(config.model_dump(mode="json"), changes), "the run, changed")


IN_FLOAT32 = {
    "policy": {"dtype": "float32", "logprobs": {"head_dtype": None, "logits_dtype": None}},
    "rollout": {"head_dtype": None},
}
PLAIN = {"policy": {"logprobs": {"one_pass": False}}}  # which only an update has
TORCH = {"engine": "torch", "gpu_memory_utilization": None, "batch_invariant": False}
ALONE = {"micro_batch_size": 1, "micro_batch_tokens": None, "packing": False, "share_prompts": False}
SHAPES = {
    "alone": ("each sequence alone", ALONE),
    "padded": ("padded microbatches", {"micro_batch_tokens": None, "packing": False, "share_prompts": False}),
    "packed": ("packed microbatches, no prompt shared", {"packing": True, "share_prompts": False}),
}
IMPLEMENTATIONS = {"logits": "dense logits", "chunked": "chunked", "triton": "triton"}


def changes_of(config: OwnRunConfig, sets: Sequence[str]) -> list[Change]:
    """All single changes to a run on one rank. `sets`: the user's own, as key=value. Raises RecipeError."""
    config = changed(config, PLAIN)
    return [
        Change(
            key="again",
            label="nothing changed, from saved weights",
            kind="control",
            scoring=Scoring(method="trainer", config=config),
        ),
        *_shapes(config),
        *_precisions(config),
        *_implementations(config),
        *_ranks(config),
        *_engines(config),
        Change(
            key="weights_before",
            label="the weights before the last update",
            kind="weights",
            scoring=Scoring(method="trainer", config=config, weights="before"),
        ),
        *_sampling(config),
        *(_asked(config, index, override) for index, override in enumerate(sets)),
    ]


def _shapes(config: OwnRunConfig) -> Iterator[Change]:
    for key, (label, changes) in SHAPES.items():
        other = changed(config, {"policy": changes})
        if other != config:
            scoring = Scoring(method="trainer", config=other)
            yield Change(key=key, label=label, kind="batch shape", scoring=scoring)


def _precisions(config: OwnRunConfig) -> Iterator[Change]:
    policy, label = config.policy, "LM head in float32"
    if policy.dtype == "float32":
        for key, each in (("head_float32", label), ("float32", "trainer in float32")):
            yield Change(
                key=key, label=each, kind="precision", scoring=None, reason="the run is in float32 already"
            )
        return
    to, label = ("float32", label) if policy.logprobs.head_dtype is None else (None, "LM head in bfloat16")
    head = changed(config, {"policy": {"logprobs": {"head_dtype": to, "logits_dtype": None}}})
    yield Change(
        key="head_float32" if to else "head_bfloat16",
        label=label,
        kind="precision",
        scoring=Scoring(method="trainer", config=head),
    )
    if policy.head_dtype == "bfloat16":
        logits_dtype = "float32" if policy.logits_dtype == "bfloat16" else "bfloat16"
        rounded = changed(config, {"policy": {"logprobs": {"logits_dtype": logits_dtype}}})
        yield Change(
            key=f"logits_{logits_dtype}",
            label=f"logits in {logits_dtype}",
            kind="precision",
            scoring=Scoring(method="trainer", config=rounded),
        )
    yield Change(
        key="float32",
        label="trainer in float32",
        kind="precision",
        scoring=Scoring(method="trainer", config=changed(config, IN_FLOAT32)),
    )


def _implementations(config: OwnRunConfig) -> Iterator[Change]:
    own = config.policy.logprobs.impl
    for impl, label in IMPLEMENTATIONS.items():
        if impl == own:
            continue
        scoring, reason = None, None
        if config.rollout.filters.drop_tokens:  # and so the run's own is logits
            reason = "min_p, top_k and top_p need whole logits"
        else:
            scoring = Scoring(method="trainer", config=_with_implementation(config, impl))
        yield Change(
            key=f"logprobs_{impl}",
            label=f"log-probs: {label}",
            kind="log-probs",
            scoring=scoring,
            reason=reason,
        )


def _with_implementation(config: OwnRunConfig, impl: str) -> OwnRunConfig:
    logprobs = {"impl": impl, "chunk_size": None, "memory_budget_mib": None, "one_pass": False}
    return changed(config, {"policy": {"logprobs": logprobs}})


def _ranks(config: OwnRunConfig) -> Iterator[Change]:
    cluster = {"gpus_per_node": 2} if config.cluster.gpus_per_node else {"cpu_ranks": 2}
    two = changed(config, {"cluster": cluster, "policy": {"backend": {"tensor_parallel": 2}}})
    yield Change(
        key="tensor_parallel_2",
        label="tensor-parallel over 2 ranks",
        kind="ranks",
        scoring=Scoring(method="trainer", config=two),
    )


def _engines(config: OwnRunConfig) -> Iterator[Change]:
    """The run's own is a control: it has to make of the tokens what it made of them as it drew them."""
    own = config.rollout.engine
    yield Change(
        key="engine_torch",
        label="torch engine, token by token",
        kind="control" if own == "torch" else "engine",
        scoring=Scoring(method="decode", config=changed(config, {"rollout": TORCH})),
    )
    on_gpu = config.cluster.gpus_per_node > 0
    refusal = vllm_refusal(on_gpu=on_gpu)
    reason = sentence(refusal) if refusal else _unscorable(config)
    switches = (False, True) if on_gpu else (False,)
    for invariant in switches:
        scoring = None
        if reason is None:
            rollout = {"engine": "vllm", "batch_invariant": invariant}
            scoring = Scoring(method="vllm", config=changed(config, {"rollout": rollout}))
        yield Change(
            key="engine_vllm_invariant" if invariant else "engine_vllm",
            label="vLLM, whole sequences" + (", batch-invariant" if invariant else ""),
            kind="control" if (own, config.rollout.batch_invariant) == ("vllm", invariant) else "engine",
            scoring=scoring,
            reason=reason,
        )
    if not on_gpu:
        yield Change(
            key="engine_vllm_invariant",
            label="vLLM, whole sequences, batch-invariant",
            kind="engine",
            scoring=None,
            reason="vLLM has such kernels on GPUs only",
        )


def _unscorable(config: OwnRunConfig) -> str | None:
    rollout = config.rollout
    if rollout.temperature == 1 and not rollout.filters.drop_tokens:
        return None
    return "vLLM scores given tokens at temperature 1 and without filters alone"


def _sampling(config: OwnRunConfig) -> Iterator[Change]:
    filters, rollout = config.rollout.filters, config.rollout
    if filters.drop_tokens:
        none = changed(config, {"rollout": {"min_p": 0.0, "top_k": None, "top_p": 1.0}})
        yield Change(
            key="no_filters",
            label="without min_p, top_k and top_p",
            kind="sampling",
            scoring=Scoring(method="trainer", config=none),
        )
    if rollout.temperature != 1:
        one = changed(config, {"rollout": {"temperature": 1.0}})
        yield Change(
            key="temperature_1",
            label="before the temperature",
            kind="sampling",
            scoring=Scoring(method="trainer", config=one),
        )


def _asked(config: OwnRunConfig, index: int, override: str) -> Change:
    tree = overridden(config.model_dump(mode="json"), override)
    asked = validated(OwnRunConfig, tree, f"--set {override.partition('=')[0]}")
    if asked.cluster != config.cluster:
        raise RecipeError(Code.SCORED_ON_ONE_RANK(got=override))
    if _scoring_keys(asked) == _scoring_keys(config):
        raise RecipeError(Code.SCORES_NOT_CHANGED(got=override))
    same = asked.rollout.filters == config.rollout.filters and asked.rollout.records_support
    scoring = Scoring(method="trainer", config=asked, on_recorded_sets=same)
    return Change(key=f"set_{index}", label=override, kind="sampling", scoring=scoring)


def _scoring_keys(config: OwnRunConfig) -> tuple[Any, ...]:
    """What log-probs may depend on; engines are scored in any case."""
    rollout = config.rollout
    return config.policy, config.model, rollout.temperature, rollout.filters, rollout.records_support
