"""Faults that a recipe can inject in its runs, each after a real bug, and what each needs to be there.

The library is `faults.toml`; what the faults do is in `abrun.train.faults`, by the same names.
"""

import difflib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from abrun.recipe.section import FieldError, Positive, Section
from abrun.redaction import shortened

ONE_ULP = "one_ulp"  # no fault: what controls.ulp_reruns injects


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the library."""

    name: str
    seam: Literal["engine", "batch", "objective", "head", "optimizer", "setup"]
    does: str
    source: str  # the bug report: owner/repository#number
    shows: str  # where it should be seen
    size: float | None = None  # how much of it, where nothing is said; None: it has no size
    unit: str = ""  # what a size counts
    most: float | None = None  # the largest size; None: any
    needs: tuple[str, ...] = ()  # keys of NEEDS
    any_algorithm: bool = False  # SFT and DPO can have it, too: nothing in it is a policy gradient's


def _read(path: Path) -> dict[str, Fault]:
    rows = tomllib.loads(path.read_text(encoding="utf-8")).items()
    return {name: Fault(name=name, **{**row, "needs": tuple(row.get("needs", ()))}) for name, row in rows}


LIBRARY = _read(Path(__file__).with_suffix(".toml"))
FAULTS = tuple(fault for name, fault in LIBRARY.items() if name != ONE_ULP)

# What a fault can need: whether a run has it, and how it gets it
NEEDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "two steps": (lambda run: run.steps > 1, "is seen after the first update; set steps: 2 or more"),
    "groups": (
        lambda run: run.algorithm.group_size > 1,
        "needs groups of completions; set algorithm.group_size: 2 or more",
    ),
    "GRPO": (lambda run: run.algorithm.type == "grpo", "needs algorithm.type: grpo"),
    "PPO": (lambda run: run.algorithm.type == "ppo", "needs algorithm.type: ppo"),
    "right shift": (lambda run: run.algorithm.right_shift, "needs algorithm.right_shift: true"),
    "several updates": (
        lambda run: run.algorithm.epochs_per_step * run.algorithm.minibatches_per_step > 1,
        "needs several updates a step; set algorithm.minibatches_per_step: 2 or more",
    ),
    "microbatches": (
        lambda run: bool(run.policy.micro_batch_size or run.policy.micro_batch_tokens),
        "needs several microbatches; set policy.micro_batch_size",
    ),
    "packing": (lambda run: run.policy.packing, "needs packed sequences; set policy.packing: true"),
    "a temperature": (
        lambda run: run.rollout.temperature != 1,
        "needs a temperature; set rollout.temperature to another than 1",
    ),
    "a KL penalty in the loss": (
        lambda run: run.algorithm.kl_coefficient > 0 and run.algorithm.kl_in == "loss",
        "needs a KL penalty in the loss; set algorithm.kl_coefficient, with kl_in: loss",
    ),
    "an entropy bonus": (
        lambda run: run.algorithm.entropy_coefficient > 0,
        "needs an entropy bonus; set algorithm.entropy_coefficient",
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
        "needs advantages whitened over the batch; set algorithm.normalize_over: batch (of PPO: "
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
        "needs importance weights of whole sequences; set algorithm.importance_correction: "
        "{type: sequence_mask, low: 0.99, high: 1.01}, and policy.logprobs.one_pass: false",
    ),
    "a tokenizer of subwords": (
        lambda run: run.model.preset is None,
        "needs a tokenizer that joins characters, which no preset has; set model.path",
    ),
    "no recorded support": (
        lambda run: not run.rollout.records_support,
        "needs completions without recorded filters; set rollout.exact_support: false",
    ),
    "vLLM on CPU cores that train": (
        lambda run: (
            run.rollout.engine == "vllm" and not run.rollout.devices and not run.cluster.gpus_per_node
        ),
        "needs vLLM on the CPU cores that train (on a GPU it sleeps, and its cache goes); set "
        "rollout.engine: vllm, with rollout.devices: null and cluster.gpus_per_node: 0",
    ),
}


def what_it_takes(fault: Fault) -> dict[str, str]:
    """Each of its needs, with the setting that gives it."""
    return {need: NEEDS[need][1] for need in fault.needs}


def lacking(fault: Fault, run: Any) -> str | None:
    """What an OwnRunConfig lacks of what a fault needs, and how it gets it; None: it can be injected."""
    if run.algorithm.type not in ("grpo", "ppo") and not fault.any_algorithm:
        return "needs advantages; set algorithm.type: grpo or ppo"
    return next((NEEDS[need][1] for need in fault.needs if not NEEDS[need][0](run)), None)


class InjectedFault(Section):
    """What is broken on purpose in a run: a name of `abrun faults`, and how much of it."""

    name: str
    size: Positive | None = None  # in the fault's own unit; null: its default
    draw: int = Field(default=0, ge=0, lt=2**31)  # other ones draw otherwise, where chance has a part

    @model_validator(mode="after")
    def _is_in_the_library(self) -> Self:
        fault = LIBRARY.get(self.name)
        if fault is None:
            close = difflib.get_close_matches(self.name, LIBRARY, n=1)
            meant = f", such as {close[0]!r}" if close else ""
            raise FieldError(f"got {shortened(self.name)}; allowed: the names that abrun faults lists{meant}")
        if self.size is not None and fault.size is None:
            raise FieldError(f"got size {self.size:g} with {self.name}, which has none; drop it")
        if self.size is not None and fault.most is not None and self.size > fault.most:
            raise FieldError(
                f"got size {self.size:g} with {self.name}; allowed: above 0, at most "
                f"{fault.most:g} {fault.unit}"
            )
        return self

    @property
    def arm(self) -> str:
        """Of the runs that have it as a control."""
        size = "" if self.size is None else f"-{self.size:g}".replace("+", "")
        return f"fault-{self.name}{size}{f'-draw-{self.draw}' if self.draw else ''}"

    @property
    def amount(self) -> float:
        """The size, or the fault's default; 1 where it has none."""
        return self.size or LIBRARY[self.name].size or 1.0


def _named(value: Any) -> Any:
    """`injected_fault: NAME` as the section that it stands for."""
    return {"name": value} if isinstance(value, str) else value


NAMED = BeforeValidator(_named, json_schema_input_type=str | InjectedFault)
NAMED_OR_NONE = BeforeValidator(_named, json_schema_input_type=str | InjectedFault | None)
