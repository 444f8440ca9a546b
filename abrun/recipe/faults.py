"""Faults that a recipe can plant in its runs, each after a real bug, and what each needs to be there.

What they do is in `abrun.train.faults`, by the same names.
"""

import difflib
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from abrun.recipe.refusals import shortened
from abrun.recipe.section import FieldError, Positive, Section

Seam = Literal["engine", "batch", "objective", "head", "optimizer", "setup"]
Need = Literal[
    "two steps",
    "groups",
    "GRPO",
    "PPO",
    "right shift",
    "several updates",
    "microbatches",
    "packing",
    "a temperature",
    "a KL penalty in the loss",
    "an entropy bonus",
    "the torch engine",
    "the dtensor backend",
    "one context rank",
    "several data-parallel ranks",
    "statistics over the batch",
    "GSPO",
    "weights of whole sequences",
    "a tokenizer of subwords",
    "no recorded support",
    "vLLM on CPU cores that train",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the library."""

    name: str
    seam: Seam
    does: str
    source: str  # the bug report: owner/repository#number
    shows: str  # where it should be seen
    size: float | None = None  # how much of it, where nothing is said; None: it has no size
    unit: str = ""  # what a size counts
    most: float | None = None  # the largest size; None: any
    needs: tuple[Need, ...] = ()
    any_algorithm: bool = False  # SFT and DPO can have it, too: nothing in it is a policy gradient's


FAULTS = (
    Fault(
        name="flipped_advantages",
        seam="batch",
        does="the advantage has the wrong sign at every second position",
        source="fla-org/flash-linear-attention#1076",
        shows="step one: loss and grad_norm; reward falls",
    ),
    Fault(
        name="stale_rollout_weights",
        seam="engine",
        does="the rollout engine samples with the weights of earlier steps",
        source="huggingface/trl#5312",
        shows="guard: token_mult_prob_error from step two; one step late passes it",
        size=4,
        unit="steps late",
        needs=("two steps", "the torch engine"),
    ),
    Fault(
        name="microbatch_mean",
        seam="objective",
        does="the loss is a mean over microbatches of their own means",
        source="huggingface/transformers#34191",
        shows="step one: grad_norm, where completions differ in length",
        size=1,
        unit="of the way to that mean",
        most=1,
        needs=("microbatches",),
    ),
    Fault(
        name="upstream_gradient_first",
        seam="head",
        does="the head's backward scales all tokens by the gradient of the first one",
        source="linkedin/Liger-Kernel#968",
        shows="step one: grad_norm, with the loss unchanged",
        size=1,
        unit="of the way to that gradient",
        most=1,
    ),
    Fault(
        name="fused_drops_term",
        seam="head",
        does="the entropy bonus never reaches the gradient",
        source="linkedin/Liger-Kernel#1082",
        shows="step one: grad_norm in float32 alone, with the loss unchanged",
        size=1,
        unit="of the term's gradient",
        most=1,
        needs=("an entropy bonus",),
    ),
    Fault(
        name="adam_step_ahead",
        seam="optimizer",
        does="Adam's counter of steps is ahead, so that the first updates are too small",
        source="NVIDIA/Megatron-LM#5974",
        shows="from step two: little",
        size=1,
        unit="steps ahead",
        needs=("two steps",),
        any_algorithm=True,
    ),
    Fault(
        name="late_half_batch",
        seam="batch",
        does="from step two on, the last rows of a batch have no gradient",
        source="NVIDIA-NeMo/RL#3282",
        shows="from step two: grad_norm; step one proves nothing",
        size=0.5,
        unit="of the rows",
        most=1,
        needs=("two steps",),
    ),
    Fault(
        name="last_microbatch_only",
        seam="objective",
        does="gradients are overwritten and not accumulated: those of the last microbatch stay",
        source="ServiceNow/Fast-LLM#550",
        shows="step one: grad_norm, with the loss unchanged",
        size=1,
        unit="of the other gradients lost",
        most=1,
        needs=("microbatches",),
        any_algorithm=True,
    ),
    Fault(
        name="value_unshifted",
        seam="setup",
        does="a token's value is that of the state after it",
        source="NVIDIA-NeMo/RL#2837",
        shows="step one: critic/loss and grad_norm",
        needs=("PPO", "right shift"),
    ),
    Fault(
        name="rewards_of_other_rows",
        seam="batch",
        does="rewards are attached to other rows than those that earned them",
        source="verl-project/verl#2185",
        shows="step one: loss and grad_norm",
        size=1,
        unit="of the rows",
        most=1,
    ),
    Fault(
        name="attention_across_packed",
        seam="head",
        does="attention in a packed stream does not stop at the border of a sequence",
        source="AI-Hypercomputer/maxtext#4476",
        shows="step one: token_mult_prob_error and entropy",
        needs=("packing", "the dtensor backend", "one context rank"),
        any_algorithm=True,
    ),
    Fault(
        name="temperature_missing",
        seam="head",
        does="the trainer's log-probs are without the sampler's temperature",
        source="NVIDIA-NeMo/RL#316",
        shows="step one: token_mult_prob_error and grad_norm",
        needs=("a temperature", "the dtensor backend"),
    ),
    Fault(
        name="kl_without_gradient",
        seam="objective",
        does="the loss has the KL penalty, and the gradient has not",
        source="NovaSky-AI/SkyRL#1340",
        shows="from step two: little; train/kl_penalty as a claim shows it",
        size=1,
        unit="of the penalty's gradient",
        most=1,
        needs=("two steps", "a KL penalty in the loss"),
    ),
    Fault(
        name="old_logprobs_from_current",
        seam="objective",
        does="the ratio is that of the policy to itself, so that nothing is ever clipped",
        source="radixark/miles#1829",
        shows="step one: loss, grad_norm, probs_ratio",
        size=1,
        unit="of the way to that ratio",
        most=1,
        needs=("several updates",),
    ),
    Fault(
        name="first_rollout_stats",
        seam="batch",
        does="the baseline of a group is its first completion's reward",
        source="ServiceNow/PipelineRL#54",
        shows="step one: loss and grad_norm",
        size=1,
        unit="of the groups",
        most=1,
        needs=("GRPO", "groups"),
    ),
    Fault(
        name="copied_completions",
        seam="engine",
        does="completions of a group are copies, since their draws have the same seed",
        source="NVIDIA-NeMo/RL#53",
        shows="step one: reward and grad_norm",
        size=0.5,
        unit="of a group's completions",
        most=1,
        needs=("groups",),
    ),
    Fault(
        name="eos_not_trained",
        seam="batch",
        does="the end token is masked as padding, so that the policy never learns to stop",
        source="huggingface/trl#976",
        shows="step one: grad_norm; lengths later",
        size=1,
        unit="of the sequences",
        most=1,
    ),
    Fault(
        name="bf16_moments",
        seam="optimizer",
        does="Adam's moments (size 1), and the master weights too (size 2), are kept in bfloat16",
        source="areal-project/AReaL#1292",
        shows="moments: nothing; with weights, step two, and the reward where updates are small",
        size=2,
        unit="kinds of tensors",
        most=2,
        needs=("two steps",),
        any_algorithm=True,
    ),
    Fault(
        name="kl_sign",
        seam="objective",
        does="the KL to the reference is rewarded and not penalised",
        source="Unakar/Logic-RL#58",
        shows="from step two: little at a small coefficient",
        needs=("two steps", "a KL penalty in the loss"),
    ),
    Fault(
        name="misgrouped",
        seam="batch",
        does="groups are cut at the wrong rows",
        source="areal-project/AReaL#1419",
        shows="step one: loss and grad_norm",
        size=1,
        unit="rows off",
        needs=("GRPO", "groups"),
    ),
    Fault(
        name="padding_in_denominator",
        seam="batch",
        does="padding counts in the number of tokens that the loss is divided by",
        source="PrimeIntellect-ai/prime-rl#674",
        shows="step one: loss and grad_norm; Adam and clipping take the factor out",
        size=1,
        unit="of the padding",
        most=1,
    ),
    Fault(
        name="dual_clip_everywhere",
        seam="objective",
        does="the bound of the dual clip is applied to positive advantages too",
        source="thu-ml/tianshou#433",
        shows="step one: grad_norm",
        size=3,
        unit="as the bound",
    ),
    Fault(
        name="schedule_by_ranks",
        seam="optimizer",
        does="the learning rate's schedule runs as many times too fast as there are ranks",
        source="huggingface/transformers#24088",
        shows="train/lr at once, which step one does not read; reward later",
        size=4,
        unit="times too fast",
        any_algorithm=True,
    ),
    Fault(
        name="partial_weight_sync",
        seam="engine",
        does="some tensors of the engine keep their first weights",
        source="NovaSky-AI/SkyRL#1680",
        shows="guard: token_mult_prob_error, slowly",
        size=0.5,
        unit="of the tensors",
        most=1,
        needs=("two steps", "the torch engine"),
    ),
    Fault(
        name="forced_eos",
        seam="engine",
        does="the last token of a truncated completion is overwritten by the end token",
        source="OpenRLHF/OpenRLHF#238",
        shows="token_mult_prob_error, where completions are truncated",
        size=1,
        unit="of the sequences",
        most=1,
    ),
    Fault(
        name="critic_mask_of_other_rows",
        seam="setup",
        does="the critic's values are masked by other rows' masks",
        source="verl-project/verl#1440",
        shows="step one: loss and critic/loss, where completions differ in length",
        size=1,
        unit="rows off",
        needs=("PPO",),
    ),
    Fault(
        name="labels_off_by_one",
        seam="head",
        does="the trainer judges each state by the token that led to it",
        source="NVIDIA/Megatron-LM#5682",
        shows="step one: token_mult_prob_error and entropy's gradient",
        needs=("the dtensor backend",),
        any_algorithm=True,
    ),
    Fault(
        name="dropout_on",
        seam="setup",
        does="attention has dropout while the policy trains",
        source="huggingface/trl#3234",
        shows="step one: token_mult_prob_error and grad_norm",
        size=0.1,
        unit="dropped",
        most=1,
        needs=("the dtensor backend",),
        any_algorithm=True,
    ),
    Fault(
        name="rope_bf16",
        seam="head",
        does="the trainer's rotary frequencies are rounded to bfloat16",
        source="huggingface/transformers#29285",
        shows="token_mult_prob_error at some hundred tokens; nothing below",
        needs=("the dtensor backend",),
        any_algorithm=True,
    ),
    Fault(
        name="rank_mean",
        seam="objective",
        does="the loss is a mean over ranks of their own means",
        source="PrimeIntellect-ai/prime-rl#2358",
        shows="step one: grad_norm and loss, where ranks differ in tokens",
        size=1,
        unit="of the way to that mean",
        most=1,
        needs=("several data-parallel ranks",),
    ),
    Fault(
        name="whiten_per_rank",
        seam="batch",
        does="mean and spread of the advantages are those of a rank's own share of the batch",
        source="THUDM/slime#2235",
        shows="step one: loss and grad_norm, little",
        needs=("several data-parallel ranks", "statistics over the batch"),
    ),
    Fault(
        name="local_grad_norm",
        seam="optimizer",
        does="each rank clips the gradient by the norm of its own shard, and reports that",
        source="areal-project/AReaL#312",
        shows="step one: grad_norm, with the loss unchanged",
        needs=("several data-parallel ranks", "the dtensor backend"),
        any_algorithm=True,
    ),
    Fault(
        name="gspo_padding",
        seam="objective",
        does="padding counts in the mean of a sequence's log-ratios",
        source="areal-project/AReaL#1346",
        shows="step one: grad_norm, where completions differ in length; the loss where ratios have left 1",
        size=1,
        unit="of the padding",
        most=1,
        needs=("GSPO",),
    ),
    Fault(
        name="sequence_weight_sum",
        seam="objective",
        does="a sequence is kept or left out by the product of its importance weights, not by their mean",
        source="huggingface/trl#5814",
        shows="step one: grad_norm, where the engine differs from the trainer; else nothing",
        needs=("weights of whole sequences",),
    ),
    Fault(
        name="temperature_on_logprobs",
        seam="engine",
        does="the engine's log-probs are divided by the temperature, and not its logits",
        source="PrimeIntellect-ai/prime-rl#697",
        shows="step one: token_mult_prob_error and approx_entropy; reward only where a correction uses them",
        needs=("a temperature", "the torch engine"),
    ),
    Fault(
        name="retokenised",
        seam="engine",
        does="a completion is turned into text and into tokens again, which need not be those drawn",
        source="NovaSky-AI/SkyRL#123",
        shows="step one: token_mult_prob_error",
        size=1,
        unit="of the sequences",
        most=1,
        needs=("a tokenizer of subwords", "no recorded support"),
    ),
    Fault(
        name="stale_prefix_cache",
        seam="engine",
        does="the engine's prefix cache keeps keys and values of earlier weights",
        source="PrimeIntellect-ai/prime-rl#1650",
        shows="token_mult_prob_error from step two, where prompts of 128 tokens or more recur",
        size=16,
        unit="syncs without a reset",
        needs=("two steps", "vLLM on CPU cores that train"),
    ),
)
ONE_ULP = "one_ulp"
CONTROLS = (
    Fault(
        name=ONE_ULP,
        seam="setup",
        does="each initial weight is moved to a neighbouring number, up or down by chance: no fault",
        source="controls.ulp_reruns",
        shows="what one ULP grows into",
        size=1,
        unit="ULP",
        any_algorithm=True,
    ),
)
LIBRARY = {fault.name: fault for fault in (*FAULTS, *CONTROLS)}


class PlantedFault(Section):
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
    """`planted_fault: NAME` as the section that it stands for."""
    return {"name": value} if isinstance(value, str) else value


NAMED = BeforeValidator(_named, json_schema_input_type=str | PlantedFault)
NAMED_OR_NONE = BeforeValidator(_named, json_schema_input_type=str | PlantedFault | None)
