"""The trained model: its weights, where it runs, how it is optimised, how it samples."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from abrun.recipe.section import Count, Fraction, NonNegative, Positive, Section


class Model(Section):
    """Which weights: a named preset with random weights, or a checkpoint (local folder or hub name)."""

    preset: Literal["qwen2-tiny", "qwen2-wide-vocab", "qwen2.5-1.5b"] | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.preset is None) == (self.path is None):
            got = "neither" if self.preset is None else "both"
            raise ValueError(f"model: got {got} of preset and path; give exactly one (the other null)")
        return self


class Dtensor(Section):
    """PyTorch's own parallelism: FSDP2 over all ranks."""

    type: Literal["dtensor"] = "dtensor"


class Logprobs(Section):
    """How log-probs are computed from hidden states, and a loss of them; see abrun.kernels."""

    impl: Literal["logits", "chunked", "triton"] = "logits"
    chunk_size: Count | None = None  # vocabulary rows; None: as many as the memory budget allows
    memory_budget_mib: Count | None = None  # None: the kernel's own, 512
    one_pass: bool = False  # the loss and both gradients in one pass; for losses known token by token
    head_dtype: Literal["float32"] | None = None

    @model_validator(mode="after")
    def _settings_fit_the_path(self) -> Self:
        dense, fused = self.impl == "logits", "use impl: chunked or triton"
        refusals = [
            (
                dense and self.chunk_size is not None,
                f"chunk_size: got {self.chunk_size} with impl 'logits', which has no chunks; {fused}, "
                "or chunk_size: null",
            ),
            (
                dense and self.memory_budget_mib is not None,
                f"memory_budget_mib: got {self.memory_budget_mib} with impl 'logits', which has none; "
                f"{fused}, or memory_budget_mib: null",
            ),
            (
                dense and self.one_pass,
                "one_pass: got true with impl 'logits', whose dense path has one pass already; "
                f"{fused}, or one_pass: false",
            ),
            (
                self.one_pass and self.chunk_size is not None,
                f"chunk_size: got {self.chunk_size} with one_pass, which holds the whole vocabulary's "
                "logits of some tokens; use memory_budget_mib, or chunk_size: null",
            ),
        ]
        for refused, message in refusals:
            if refused:
                raise ValueError(f"policy.logprobs.{message}")
        return self


class Optimizer(Section):
    """AdamW; weight decay on matrices only, not on norms and biases; the learning rate warms up linearly."""

    learning_rate: Positive = 1e-6
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Positive = 1.0


class Policy(Section):
    """The trained model: where it runs, at which precision, and how it is optimised."""

    backend: Dtensor = Dtensor()
    logprobs: Logprobs = Logprobs()
    optimizer: Optimizer = Optimizer()
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_size: Count | None = None  # sequences a rank; None: the rank's whole share at once
    packing: bool = False  # sequences of a microbatch one after the other, without padding
    micro_batch_tokens: Count | None = None  # with packing: at most so many a microbatch, or one sequence
    activation_checkpointing: bool = False

    @model_validator(mode="after")
    def _one_size_of_microbatches(self) -> Self:
        if self.micro_batch_tokens is not None and not self.packing:
            raise ValueError(
                f"policy.micro_batch_tokens: got {self.micro_batch_tokens} without packing; use packing: "
                "true, or micro_batch_size"
            )
        if self.micro_batch_tokens is not None and self.micro_batch_size is not None:
            raise ValueError(
                f"policy.micro_batch_tokens: got {self.micro_batch_tokens} with micro_batch_size "
                f"{self.micro_batch_size}; give one of the two (the other null)"
            )
        return self


class Rollout(Section):
    """How completions are sampled."""

    engine: Literal["torch"] = "torch"
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Count = 512
    batch_size: Count | None = None  # sequences generated at once on a rank; None: all
