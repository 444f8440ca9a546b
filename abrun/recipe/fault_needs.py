"""What a fault needs to be there, and whether a run has it."""

from collections.abc import Callable
from typing import Any

from abrun.recipe.faults import Fault, Need

NEEDS: dict[Need, tuple[Callable[[Any], bool], str]] = {
    "two steps": (lambda run: run.steps > 1, "is seen after the first update; set steps: 2 or more"),
    "groups": (
        lambda run: run.algorithm.group_size > 1,
        "groups of completions; set algorithm.group_size: 2 or more",
    ),
    "GRPO": (lambda run: run.algorithm.type == "grpo", "algorithm.type: grpo"),
    "PPO": (lambda run: run.algorithm.type == "ppo", "algorithm.type: ppo"),
    "right shift": (lambda run: run.algorithm.right_shift, "algorithm.right_shift: true"),
    "several updates": (
        lambda run: run.algorithm.epochs_per_step * run.algorithm.minibatches_per_step > 1,
        "several updates a step; set algorithm.minibatches_per_step: 2 or more",
    ),
    "microbatches": (
        lambda run: bool(run.policy.micro_batch_size or run.policy.micro_batch_tokens),
        "several microbatches; set policy.micro_batch_size",
    ),
    "packing": (lambda run: run.policy.packing, "packed sequences; set policy.packing: true"),
    "a temperature": (
        lambda run: run.rollout.temperature != 1,
        "a temperature; set rollout.temperature to another than 1",
    ),
    "a KL penalty in the loss": (
        lambda run: run.algorithm.kl_coefficient > 0 and run.algorithm.kl_in == "loss",
        "a KL penalty in the loss; set algorithm.kl_coefficient, with kl_in: loss",
    ),
    "an entropy bonus": (
        lambda run: run.algorithm.entropy_coefficient > 0,
        "an entropy bonus; set algorithm.entropy_coefficient",
    ),
    "the torch engine": (lambda run: run.rollout.engine == "torch", "rollout.engine: torch"),
    "the dtensor backend": (
        lambda run: run.policy.backend.type == "dtensor",
        "policy.backend.type: dtensor",
    ),
    "one context rank": (
        lambda run: run.policy.backend.context_parallel == 1,
        "policy.backend.context_parallel: 1",
    ),
    "several data-parallel ranks": (
        lambda run: run.data_parallel > 1,
        "several data-parallel ranks; set cluster.cpu_ranks: 2 (on GPUs: gpus_per_node)",
    ),
    "statistics over the batch": (
        lambda run: (
            run.algorithm.normalize_advantages
            if run.algorithm.type == "ppo"
            else run.algorithm.advantage_baseline == "batch_mean" or run.algorithm.normalize_over == "batch"
        ),
        "advantages whitened over the batch; set algorithm.normalize_over: batch (of PPO: "
        "normalize_advantages: true)",
    ),
    "GSPO": (
        lambda run: run.algorithm.type == "grpo" and run.algorithm.loss == "gspo",
        "algorithm.loss: gspo",
    ),
    "weights of whole sequences": (
        lambda run: (
            run.algorithm.importance_correction is not None
            and run.algorithm.importance_correction.type == "sequence_mask"
            and not run.policy.logprobs.one_pass
        ),
        "importance weights of whole sequences; set algorithm.importance_correction: "
        "{type: sequence_mask, low: 0.99, high: 1.01}, and policy.logprobs.one_pass: false",
    ),
    "a tokenizer of subwords": (
        lambda run: run.model.preset is None,
        "a tokenizer that joins characters, which no preset has; set model.path",
    ),
    "no recorded support": (
        lambda run: not run.rollout.records_support,
        "completions without recorded filters; set rollout.exact_support: false",
    ),
    "vLLM on CPU cores that train": (
        lambda run: (
            run.rollout.engine == "vllm" and not run.rollout.devices and not run.cluster.gpus_per_node
        ),
        "vLLM on the CPU cores that train (on a GPU it sleeps, and its cache goes); set "
        "rollout.engine: vllm, with rollout.devices: null and cluster.gpus_per_node: 0",
    ),
}


def what_it_takes(fault: Fault) -> dict[Need, str]:
    """Each of its needs, with the setting that gives it."""
    return {need: _worded(need) for need in fault.needs}


def lacking(fault: Fault, run: Any) -> str | None:
    """What an OwnRunConfig lacks of what a fault needs, and how it gets it; None: it can be planted."""
    if run.algorithm.type not in ("grpo", "ppo") and not fault.any_algorithm:
        return "needs advantages; set algorithm.type: grpo or ppo"
    return next((_worded(need) for need in fault.needs if not NEEDS[need][0](run)), None)


def _worded(need: Need) -> str:
    return NEEDS[need][1] if need == "two steps" else f"needs {NEEDS[need][1]}"
