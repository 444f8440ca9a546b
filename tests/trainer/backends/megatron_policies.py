"""Small policies of the families that the megatron backend builds, alike on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from abrun.recipe.policy import Filters, Policy
from abrun.trainer.backends.megatron import check_megatron
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.weights import published
from tests.trainer.backends.policies import CPU

SIZES: dict[str, Any] = {
    "vocab_size": 99,  # which two ranks do not share evenly
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
    "qwen3_moe": {"tie_word_embeddings": False, "head_dim": 8, **EXPERTS},
}


def network(kind: str = "qwen2", **changes: Any) -> Any:
    """The same at every call; norms and biases are not where they are initialised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **changes})
        made = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.train()


def weights_of(made: Any) -> dict[str, Tensor]:
    """As a checkpoint has them."""
    return dict(published(made, made.named_parameters()))


def make_backend(
    kind: str = "qwen2",
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    trainable: bool = True,
    changes: dict[str, Any] | None = None,
    cut: dict[str, Any] | None = None,
    load: Callable[[], Any] | None = None,
    **policy: Any,
) -> Any:
    """On the ranks of the process group, cut as `cut` says; of a small network, or of what `load` makes."""
    check_megatron()
    from abrun.trainer.backends.megatron.backend import MegatronBackend

    settings = Policy.model_validate({"backend": {"type": "megatron", **(cut or {})}, **policy})
    return MegatronBackend(
        load or partial(network, kind, **(changes or {})),
        settings,
        make_ranks(CPU, settings.backend.shape, expert_parallel=settings.backend.expert_groups),
        temperature=temperature,
        filters=Filters(top_p=top_p),
        trainable=trainable,
    )


def gradients(backend: Any) -> dict[str, Tensor]:
    """This stage's gradients by their Hugging Face names, reduced as for a step. Collective."""
    from megatron.core.distributed import finalize_model_grads

    from abrun.trainer.backends.megatron.cpu import emulate_cuda

    with emulate_cuda(CPU):
        finalize_model_grads([backend._parameters.module], None, force_all_reduce=True)
    of_stage = backend._weight_names.full_weights(lambda name: backend.model.get_parameter(name).main_grad)
    return {name: gradient.clone() for name, gradient in backend._stages.broadcast_weights(of_stage)}
