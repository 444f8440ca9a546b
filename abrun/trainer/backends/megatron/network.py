"""A Hugging Face network's architecture as megatron-core's GPTModel, without Transformer Engine.

Letters: S positions, B sequences, D head size, P tensor-parallel ranks. megatron-core puts positions first:
[S, B, ...].
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from abrun.errors import RecipeError
from abrun.recipe.families import PLAIN_DECODERS, megatron_misfit
from abrun.recipe.policy import Megatron, Policy
from abrun.trainer.backends.attention import attend_in_stream
from abrun.trainer.backends.megatron.routing import MicrobatchRouting
from abrun.trainer.backends.microbatches import Packing
from abrun.trainer.backends.ranks import COLLECTIVE_TIMEOUT, Ranks
from abrun.trainer.models.families import Facts, attends_to_all

# megatron-core's process groups, global to the process and separate from those of `Ranks`.

_joined: tuple[Any, Megatron] | None = None  # the world group and settings that the groups were made of


def join_groups(ranks: Ranks, settings: Megatron) -> None:
    """Make megatron-core's process groups for the recipe's layout, unless they exist. Collective.

    megatron-core refuses context parallelism without Transformer Engine. So it is told that the ranks of a
    context are data-parallel replicas: it sums gradients and shards the optimizer's state over them.
    """
    global _joined
    if _joined == (dist.group.WORLD, settings) and parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_parallel,
        pipeline_model_parallel_size=settings.pipeline_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        expert_tensor_parallel_size=1,  # tensor parallelism does not shard experts
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    if ranks.device.type == "cuda":  # megatron-core swaps CUDA generators around dropout
        model_parallel_cuda_manual_seed(0)
    replica = ranks.weight_mesh.get_local_rank()
    assert parallel_state.get_data_parallel_rank() == replica, (
        "megatron-core numbers data-parallel ranks differently"
    )
    assert parallel_state.get_tensor_model_parallel_rank() == (ranks.tensor.rank() if ranks.tensor else 0)
    assert parallel_state.get_pipeline_model_parallel_rank() == (
        ranks.pipeline.rank() if ranks.pipeline else 0
    )
    _joined = dist.group.WORLD, settings


def is_last_stage() -> bool:
    """Return whether this rank's pipeline stage is the last, which computes log-probs and values."""
    return parallel_state.is_pipeline_last_stage()


def tensor_group() -> dist.ProcessGroup:
    group: Any = parallel_state.get_tensor_model_parallel_group()
    return group


def expert_group() -> dist.ProcessGroup:
    group: Any = parallel_state.get_expert_model_parallel_group()
    return group


def return_hidden_states(hidden: Tensor, *, weight: Any = None, **unused: Any) -> tuple[Tensor, None]:
    """Return the last hidden states unchanged: replaces GPTModel's LM head, because abrun has its own.

    The signature is that of ColumnParallelLinear.forward. Newer versions have an argument for this,
    `output_processor`, but 0.16 and 0.17 do not, so all versions are treated alike.
    """
    unexpected = [name for name, value in unused.items() if value is not None]
    assert not unexpected, f"megatron-core called its output layer with unsupported arguments: {unexpected}"
    return hidden, None


class IdentityHead(nn.Module):
    """A placeholder for the LM head of a network without one."""

    forward = staticmethod(return_hidden_states)


class DetachPaddingRows:
    """An embedding hook that blocks the padding token's gradient, as torch's `padding_idx` does."""

    def __init__(self, padding: int, settings: Megatron) -> None:
        self._padding, self._sequence_parallel = padding, settings.sequence_parallel

    def __call__(self, module: Any, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        is_padding = inputs[0] == self._padding  # [B, S]
        if self._sequence_parallel:  # this rank's tokens: [S/P, B, H]
            group = tensor_group()
            is_padding = is_padding.t().chunk(group.size())[group.rank()]
        return torch.where(is_padding[..., None], embedded.detach(), embedded)


class RMSNorm(nn.RMSNorm):
    """RMSNorm with sequence parallelism, which megatron-core's refuses without Transformer Engine or apex."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # Each rank sees some of the tokens, so gradients are summed over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(kw_only=True)
class MicrobatchParams(PackedSeqParams):
    """A microbatch's data for every layer, also when layers are recomputed.

    megatron-core passes it on without reading it. RotaryEmbedding, CausalAttention and the routers read it.
    """

    positions: Tensor  # [S] int64, each token's position in its sequence
    packing: Packing | None = None  # of a stream; tokens after its local ones are padding
    routing: MicrobatchRouting | None = None  # input and output of the routers; None: not recorded


class RotaryEmbedding(nn.Module):
    """Rotary embeddings with the model family's (scaled) frequencies, at each token's own position."""

    def __init__(self, frequencies: Tensor) -> None:  # [D/2]
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, hidden: Any, config: Any, packed_seq_params: MicrobatchParams
    ) -> Tensor:
        """Return the positions: megatron-core calls `forward` with this result, usually a length."""
        return packed_seq_params.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:  # [S] -> [S, 1, 1, D]
        frequencies: Any = self.frequencies
        angles = torch.outer(positions.to(frequencies.dtype), frequencies)
        return torch.cat([angles, angles], dim=1)[:, None, None]


class CausalAttention(MegatronModule):
    """Causal attention with torch's kernels; megatron-core's own materialises all S x S scores."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [S, B, heads, D]; for a stream B is 1
        key: Tensor,  # [S, B, key heads, D]
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: MicrobatchParams,
        **_: Any,
    ) -> Tensor:  # [S, B, heads * D]
        """Compute attention. Rows are right-padded, so no real token sees padding and no mask is needed."""
        assert attention_mask is None
        packing = packed_seq_params.packing
        q, k, v = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        if packing is None:
            return self._causal(q, k, v).transpose(0, 1).flatten(2)
        num_tokens = packing.num_local_tokens
        q, k, v = (states[:, :, :num_tokens] for states in (q, k, v))
        output = attend_in_stream(q, k, v, packing, self._scale, self._causal)
        return F.pad(output.transpose(0, 1).flatten(2), (0, 0, 0, 0, 0, len(query) - num_tokens))

    def _causal(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:  # [B, S, heads, D]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        ).transpose(1, 2)


def make_network(
    network: Any, facts: Facts, policy: Policy, settings: Megatron, *, on_cpu: bool, head: bool = True
) -> GPTModel:
    """Build this rank's shard of a transformers network, with uninitialised weights.

    With `head` False it has no LM head. Its output is hidden states: on the last stage [B, S, H], or, with
    sequence parallelism, [B, S/P, H]. Raises RecipeError if the network is not supported or does
    not fit the layout.
    """
    misfit = megatron_misfit(network.config.to_dict(), settings)
    if misfit:
        raise RecipeError(misfit)
    _check_supported(network, facts)
    config = _transformer_config(network.config, policy, settings, on_cpu)
    layer: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    submodules = layer.submodules
    attention = submodules.self_attention.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = CausalAttention
    norm: Any = RMSNorm
    block: Any = TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm
    )
    num_shards = settings.tensor_parallel
    model: Any = GPTModel(
        config,
        block,
        vocab_size=-network.config.vocab_size // num_shards * -num_shards,  # rounded up to a multiple
        max_sequence_length=network.config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=is_last_stage(),
        share_embeddings_and_output_weights=head and network.config.tie_word_embeddings,
        position_embedding_type="rope",
    )
    device = next(model.parameters()).device
    model.rotary_pos_emb = RotaryEmbedding(_rotary_embedding(facts).inv_freq.detach().clone().to(device))
    base: Any = facts.base
    padding = base.get_input_embeddings().padding_idx
    if model.pre_process and padding is not None:
        model.embedding.word_embeddings.register_forward_hook(DetachPaddingRows(padding, settings))
    assert not getattr(config, "use_mup", False), "use_mup scales logits, which abrun's head would do again"
    if is_last_stage() and head:
        model.output_layer.forward = return_hidden_states
    elif is_last_stage():
        model.output_layer = IdentityHead()
    return model


def _rotary_embedding(facts: Facts) -> Any:
    return getattr(facts.base, "rotary_emb", None)


def _transformer_config(config: Any, policy: Policy, settings: Megatron, on_cpu: bool) -> TransformerConfig:
    dtype = getattr(torch, policy.dtype)
    values: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type == "qwen2",
        "qk_layernorm": config.model_type.startswith("qwen3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": settings.tensor_parallel,
        "pipeline_model_parallel_size": settings.pipeline_parallel,
        "expert_model_parallel_size": settings.expert_parallel,
        "sequence_parallel": settings.sequence_parallel,
        "variable_seq_lengths": True,  # microbatches differ in length
        "moe_token_dispatcher_type": "alltoall",  # the one that supports variable lengths
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": on_cpu,
        # Otherwise parameters are not marked as sharded, and the gradient norm misses some of them.
        "perform_initialization": True,
        "init_method": _uninitialised,
        "output_layer_init_method": _uninitialised,
        "embedding_init_method": _uninitialised,
        # Keeps the sum over tokens, ranks and microbatches: megatron-core then divides by nothing.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }
    if policy.activation_checkpointing == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.model_type == "qwen3_moe":
        values |= {
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            # The softmax of the chosen scores equals their softmax over all experts, renormalised to sum 1.
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
        }
    field_names = (field.name for field in fields(TransformerConfig) if field.name in values)
    return TransformerConfig(**{name: values[name] for name in field_names})


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _uninitialised(weight: Tensor) -> Tensor:
    """Leave the weight uninitialised, because every weight is loaded."""
    return weight


def _check_supported(network: Any, facts: Facts) -> None:
    """Raise RecipeError for a model that GPTModel, as configured here, would compute differently."""
    config, kind = network.config, type(network).__name__
    layers = config.num_hidden_layers
    differences = {
        "attention_bias": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "sliding attention": not attends_to_all(config),
        "an activation other than silu": getattr(config, "hidden_act", "silu") != "silu",
        "scaled logits": facts.logit_scale != 1 or facts.logit_softcap is not None,
        "layers without experts": config.model_type == "qwen3_moe"
        and bool(config.mlp_only_layers or config.decoder_sparse_step != 1 or not layers),
        "scaled rotary embeddings": getattr(_rotary_embedding(facts), "attention_scaling", 1.0) != 1.0
        or getattr(_rotary_embedding(facts), "rope_type", "default") not in ("default", "linear", "llama3"),
    }
    for feature, differs in differences.items():
        if differs:
            raise RecipeError(
                f"policy.backend.type: got 'megatron' with {kind}, which it does not support ({feature}); "
                f"use type: dtensor, or a model of {', '.join(PLAIN_DECODERS)}"
            )
