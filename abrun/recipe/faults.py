"""Library of injectable faults, each modelled on a real bug, and the settings that they need.

The table is `faults.toml`; `abrun.trainer.faults` implements the faults under the same names.
"""

import difflib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BeforeValidator, Field

from abrun.recipe.section import FieldError, Positive, Section, rule
from abrun.runs.redaction import shortened

ONE_ULP = "one_ulp"  # the perturbation of controls.ulp_reruns; not a fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Row of the fault library."""

    name: str
    # Part of the training code that the fault wraps
    seam: Literal["engine", "batch", "objective", "head", "optimizer", "setup"]
    does: str  # what the fault does to training
    source: str  # bug report: owner/repository#number
    shows: str  # checks of a comparison that should detect it
    size: float | None = None  # default size; None: the fault has no size
    unit: str = ""  # unit of the size
    most: float | None = None  # maximum size; None: unlimited
    needs: tuple[str, ...] = ()  # keys of NEEDS
    any_algorithm: bool = False  # True: needs no advantages, so SFT and DPO can have it


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LIBRARY = {
    name: Fault(name=name, **{**row, "needs": tuple(row.get("needs", ()))}) for name, row in _ROWS.items()
}
FAULTS = tuple(fault for name, fault in LIBRARY.items() if name != ONE_ULP)

# Name of a need -> whether a run meets it, and a clause with the setting that does
NEEDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "two steps": (lambda run: run.steps > 1, "only shows after the first update; set steps: 2 or more"),
    "groups": (
        lambda run: run.algorithm.group_size > 1,
        "needs groups of completions; set algorithm.group_size: 2 or more",
    ),
    "GRPO": (lambda run: run.algorithm.type == "grpo", "needs algorithm.type: grpo"),
    "PPO": (lambda run: run.algorithm.type == "ppo", "needs algorithm.type: ppo"),
    "right shift": (lambda run: run.algorithm.right_shift, "needs algorithm.right_shift: true"),
    "several updates": (
        lambda run: run.algorithm.epochs_per_step * run.algorithm.minibatches_per_step > 1,
        "needs several updates per step; set algorithm.minibatches_per_step: 2 or more",
    ),
    "microbatches": (
        lambda run: bool(run.policy.micro_batch_size or run.policy.micro_batch_tokens),
        "needs several micro-batches; set policy.micro_batch_size",
    ),
    "packing": (lambda run: run.policy.packing, "needs packed sequences; set policy.packing: true"),
    "a temperature": (
        lambda run: run.rollout.temperature != 1,
        "needs a temperature other than 1; set rollout.temperature",
    ),
    "a KL penalty in the loss": (
        lambda run: run.algorithm.kl_coefficient > 0 and run.algorithm.kl_in == "loss",
        "needs a KL penalty in the loss; set algorithm.kl_coefficient, with kl_in: loss",
    ),
    "an entropy bonus": (
        lambda run: run.algorithm.entropy_coefficient > 0,
        "needs an entropy bonus; set algorithm.entropy_coefficient",
    ),
    "a sampler": (
        lambda run: run.rollout.engine != "recorded",
        "needs completions that the run samples; set rollout.engine: torch",
    ),
    "the torch engine": (lambda run: run.rollout.engine == "torch", "needs rollout.engine: torch"),
    "the dtensor backend": (
        lambda run: run.policy.backend.type == "dtensor",
        "needs policy.backend.type: dtensor",
    ),
    "one context rank": (
        lambda run: run.policy.backend.context_parallel == 1,
        "needs policy.backend.context_parallel: 1",
    ),
    "several data-parallel ranks": (
        lambda run: run.data_parallel > 1,
        "needs several data-parallel ranks; set cluster.cpu_ranks: 2 (on GPUs: gpus_per_node)",
    ),
    "statistics over the batch": (
        lambda run: (
            run.algorithm.normalize_advantages
            if run.algorithm.type == "ppo"
            else run.algorithm.advantage_baseline == "batch_mean" or run.algorithm.normalize_over == "batch"
        ),
        "needs advantages centred or scaled over the batch; set algorithm.normalize_over: batch (with PPO: "
        "normalize_advantages: true)",
    ),
    "GSPO": (
        lambda run: run.algorithm.type == "grpo" and run.algorithm.loss == "gspo",
        "needs algorithm.loss: gspo",
    ),
    "weights of whole sequences": (
        lambda run: (
            run.algorithm.importance_correction is not None
            and run.algorithm.importance_correction.type == "sequence_mask"
            and not run.policy.logprobs.one_pass
        ),
        "needs sequence-level importance weights; set algorithm.importance_correction: "
        "{type: sequence_mask, low: 0.99, high: 1.01}, and policy.logprobs.one_pass: false",
    ),
    "a tokenizer of subwords": (
        lambda run: run.model.preset is None,
        "needs a subword tokenizer, which no preset has; set model.path",
    ),
    "no recorded support": (
        lambda run: not run.rollout.records_support,
        "needs rollouts without recorded support sets; set rollout.exact_support: false",
    ),
    "vLLM on CPU cores that train": (
        lambda run: (
            run.rollout.engine == "vllm" and not run.rollout.devices and not run.cluster.gpus_per_node
        ),
        "needs vLLM on the CPU cores that train (on a GPU, sleep mode drops its cache); set "
        "rollout.engine: vllm, with rollout.devices: null and cluster.gpus_per_node: 0",
    ),
}


def describe_needs(fault: Fault) -> dict[str, str]:
    """Return each need of a fault with the clause on the setting that meets it."""
    return {need: NEEDS[need][1] for need in fault.needs}


def unmet_need(fault: Fault, run: Any) -> str | None:
    """Return the first need of a fault that a run does not meet, with the fix; None if it meets all.

    `run` is an OwnRunConfig.
    """
    if run.algorithm.type not in ("grpo", "ppo") and not fault.any_algorithm:
        return "needs advantages; set algorithm.type: grpo or ppo"
    return next((NEEDS[need][1] for need in fault.needs if not NEEDS[need][0](run)), None)


class InjectedFault(Section):
    """Fault injected into a run: a name listed by `abrun faults`, and its size."""

    name: str
    size: Positive | None = None  # in the fault's unit; null: the fault's default
    draw: int = Field(default=0, ge=0, lt=2**31)  # seed of the fault's random choices

    @rule
    def _check_library(self) -> None:
        fault = LIBRARY.get(self.name)
        if fault is None:
            close_names = difflib.get_close_matches(self.name, LIBRARY, n=1)
            suggestion = f", such as {close_names[0]!r}" if close_names else ""
            raise FieldError(f"got {shortened(self.name)}; allowed: names listed by abrun faults{suggestion}")
        if self.size is not None and fault.size is None:
            raise FieldError(f"got size {self.size:g} with {self.name}, which has no size; drop it")
        if self.size is not None and fault.most is not None and self.size > fault.most:
            raise FieldError(
                f"got size {self.size:g} with {self.name}; allowed: above 0, at most "
                f"{fault.most:g} {fault.unit}"
            )

    @property
    def arm(self) -> str:
        size = "" if self.size is None else f"-{self.size:g}".replace("+", "")
        return f"fault-{self.name}{size}{f'-draw-{self.draw}' if self.draw else ''}"

    @property
    def amount(self) -> float:
        """Return the declared size, else the fault's default, else 1 (a fault without a size)."""
        return self.size or LIBRARY[self.name].size or 1.0


def _expand_fault_name(value: Any) -> Any:
    """Expand `injected_fault: NAME` to a section; return any other value unchanged."""
    return {"name": value} if isinstance(value, str) else value


ACCEPT_FAULT_NAME = BeforeValidator(_expand_fault_name, json_schema_input_type=str | InjectedFault)
ACCEPT_FAULT_NAME_OR_NONE = BeforeValidator(
    _expand_fault_name, json_schema_input_type=str | InjectedFault | None
)
