"""Gradient reduction by megatron-core, and its AdamW, for policies and value models.

Gradients are sums over tokens, microbatches and ranks, divided by nothing (`calculate_per_token_loss`). They
are reduced once per optimizer step, regardless of the number of passes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from abrun.recipe.policy import Optimizer
from abrun.trainer.backends.megatron.cpu import emulate_cuda
from abrun.trainer.backends.megatron.library import suppress_warnings
from abrun.trainer.backends.megatron.network import expert_group, head_dim, tensor_group
from abrun.trainer.backends.policy import empty_adamw_state
from abrun.trainer.backends.ranks import all_gather
from abrun.trainer.backends.shards import Piece, ShardSpec, optimizer_specs
from abrun.trainer.models.weights import read_slice


class MegatronParameters:
    """The parameters of a megatron-core module with their optimizer; without an optimizer they are frozen.

    `shard_spec_of` returns the spec of a parameter, given its name in the module. `replicated`: every rank of
    a replica has the full module and its full gradients.
    """

    def __init__(
        self,
        module: Any,
        shard_spec_of: Callable[[str], ShardSpec],
        optimizer: Optimizer | None,
        *,
        device: torch.device,
        replicated: bool = False,
    ) -> None:
        self._replicated, self._shard_spec_of = replicated, shard_spec_of
        self.module: Any = module  # the pipeline schedule calls it
        self._device, self._parameters = device, dict(module.named_parameters())
        self._optimizer: Any = None
        if optimizer is None:
            module.requires_grad_(False)
            return
        with emulate_cuda(device), suppress_warnings():
            # No parameter prefetch: it is triggered by calls of modules, and the head is never called.
            reduction = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                use_distributed_optimizer=True,  # its state is sharded over data-parallel ranks
            )
            self.module = DistributedDataParallel(module.config, reduction, module)
            self._optimizer = _adamw(self.module, optimizer)

    @torch.no_grad()
    def assign(self, name: str, value: Tensor) -> None:
        """Set this rank's shard of a parameter and, if it is not float32, of its master weight."""
        parameter: Any = self._parameters[name]
        parameter.copy_(value)
        master = getattr(parameter, "main_param", None)
        if master is not None:
            master.copy_(value.flatten()[self._master_range(parameter)].view_as(master))

    @torch.no_grad()
    def gather_master(self, name: str) -> Tensor:
        """Return this rank's shard of a parameter's float32 master weight. Collective over replicas."""
        parameter: Any = self._parameters[name]
        if not hasattr(parameter, "main_param"):
            return parameter.detach()
        full = torch.zeros(parameter.numel(), device=parameter.device)
        if parameter.main_param is not None:
            full[self._master_range(parameter)] = parameter.main_param.detach().flatten()
        # Each rank has some elements and 0 elsewhere: an integer sum merges the bits
        dist.all_reduce(full.view(torch.int32), group=self._find_optimizer(parameter).data_parallel_group)
        return full.view_as(parameter)

    def _master_range(self, parameter: Tensor) -> slice:
        """Return the range of elements whose master weights this rank holds; may be empty."""
        try:
            element_range = self._find_optimizer(parameter)._get_model_param_range_map(parameter)["param"]
        except KeyError:
            return slice(0, 0)
        return slice(element_range.start, element_range.end)

    def _find_optimizer(self, parameter: Tensor) -> Any:
        """Return the parameter's optimizer: there is one for experts and one for all other parameters."""
        is_expert = not getattr(parameter, "allreduce", True)
        return next(
            optimizer
            for optimizer in self._optimizer.chained_optimizers
            if optimizer.param_groups and optimizer.param_groups[0]["is_expert_parallel"] == is_expert
        )

    def optimizer_step(self, learning_rate: float) -> float:
        """Reduce the gradients, then see abrun.trainer.backends.Trainable."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with emulate_cuda(self._device), suppress_warnings():
            if self._replicated:
                self.module.finish_grad_sync()
            else:
                finalize_model_grads([self.module], None)
            _, norm, _ = self._optimizer.step()
            self.module.zero_grad_buffer()
            self._optimizer.zero_grad()
        return float(norm)

    def local_state(self) -> dict[str, Tensor]:
        """See abrun.trainer.backends.Trainable."""
        state = {f"weights/{name}": parameter.detach() for name, parameter in self._parameters.items()}
        return state | dict(self._optimizer_state())

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """See abrun.trainer.backends.Trainable."""
        for index, (torch_optimizer, parameter) in enumerate(self._optimized_parameters()):
            torch_optimizer.state.pop(parameter, None)
            if f"optimizer/step/{index}" in state:
                torch_optimizer.state[parameter] = empty_adamw_state(parameter)
        with torch.no_grad():
            for name, tensor in self.local_state().items():
                tensor.copy_(state[name])

    def shard_specs(self) -> dict[str, ShardSpec]:
        """See abrun.trainer.backends.Trainable."""
        specs, parameters = {}, {}
        for name, parameter in self._parameters.items():
            spec = replace(self._shard_spec_of(name), is_rounded_copy=hasattr(parameter, "main_param"))
            specs[f"weights/{name}"] = spec.with_prefix("weights/")
            parameters[self._optimized_tensor(parameter).data_ptr()] = name, parameter
        for index, (_, tensor) in enumerate(self._optimized_parameters()):
            name, parameter = parameters[tensor.data_ptr()]
            master_range = self._master_range(parameter)
            spec = replace(
                self._shard_spec_of(name),
                flat_range=(master_range.start, master_range.stop),
            )
            if hasattr(parameter, "main_param"):
                specs[f"optimizer/master/{index}"] = spec.with_prefix("weights/")
            for key, state_spec in optimizer_specs(spec).items():
                specs[f"optimizer/{key}/{index}"] = state_spec.with_prefix(f"optimizer/{key}/")
        return specs

    def _optimized_tensor(self, parameter: Any) -> Tensor:
        """Return the tensor that the optimizer updates: the master weight, or a view of the parameter."""
        if getattr(parameter, "main_param", None) is not None:
            return parameter.main_param
        return parameter.detach().flatten()[self._master_range(parameter)]

    def resident_tensors(self) -> Sequence[Tensor]:
        """See abrun.trainer.backends.Trainable."""
        gradients = [p.main_grad for p in self._parameters.values() if hasattr(p, "main_grad")]
        return [*self.local_state().values(), *gradients]

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's state, named by the parameter's index in the optimizer."""
        weights = {_storage(parameter) for parameter in self._parameters.values()}
        for index, (torch_optimizer, parameter) in enumerate(self._optimized_parameters()):
            if _storage(parameter) not in weights:
                yield f"optimizer/master/{index}", parameter.detach()
            for key, value in torch_optimizer.state.get(parameter, {}).items():
                yield f"optimizer/{key}/{index}", value

    def _optimized_parameters(self) -> Iterator[tuple[Any, Tensor]]:
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for optimizer in chained if self._optimizer is not None else ():
            torch_optimizer = optimizer.optimizer
            for group in torch_optimizer.param_groups if torch_optimizer is not None else ():
                yield from ((torch_optimizer, parameter) for parameter in group["params"])


def _adamw(module: Any, settings: Optimizer) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.max_grad_norm,
        bf16=module.config.bf16,
        params_dtype=module.config.params_dtype,
        use_distributed_optimizer=True,
    )
    # Use torch's AdamW, as the dtensor backend does, even if Transformer Engine or apex is installed.
    original = megatron_optimizer.USING_PYTORCH_OPTIMIZER
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        optimizer = get_megatron_optimizer(config, [module], use_gloo_process_groups=False)
    finally:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = original
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]  # 0 for norms and biases; normally its scheduler applies it
        group |= {"fused": True, "foreach": False}
    return optimizer


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# The conversion of weights between Hugging Face's tensors and megatron-core's parameters, bit for bit.
#
# Letters: G groups of query heads that share keys, Q query heads in each, D width of a head, H hidden
# size, I width of an MLP, E experts, V vocabulary.

VALUE_HEAD = "value_head"  # module of a value model, without a counterpart in Hugging Face's networks
LAYER, EXPERT = "decoder.layers.", "mlp.experts.local_experts."


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """The Hugging Face tensors of a megatron-core parameter, and its tensor-parallel sharding."""

    hf_names: tuple[str, ...]
    sharding: Literal["rows", "columns", "rows_of_halves", "not"] = "not"
    expert: int | None = None  # index into the E experts that one Hugging Face tensor holds


class WeightNames:
    """The mapping between one model's parameters on this rank and Hugging Face's tensors."""

    def __init__(self, model: Any, network: Any) -> None:
        self._model: Any = model
        self._config: Any = network.config
        self._shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
        self._head_dim = head_dim(self._config)
        self._tensor_group, self._expert_group = tensor_group(), expert_group()
        self._parameters: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if not name.startswith(VALUE_HEAD)
        }

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the modules of this stage whose outputs are states, under Hugging Face's names, by depth."""
        if self._model.pre_process:
            yield "model.embed_tokens", self._model.embedding
        for layer in self._model.decoder.layers:
            prefix = f"model.layers.{layer.layer_number - 1}"
            for name, hf_name in _LAYER_MODULES.items():
                yield f"{prefix}.{hf_name}", getattr(layer, name)
            yield prefix, layer
        if self._model.decoder.final_layernorm is not None:
            yield "model.norm", self._model.decoder.final_layernorm

    @torch.no_grad()
    def load(self, network: Any, assign: Callable[[str, Tensor], None]) -> None:
        """Assign this rank's shard of each parameter, reading nothing else of the `network`."""
        for name in self._parameters:
            spec = self.shard_spec(name)
            assign(
                name,
                spec.assemble([read_slice(network, hf_name, piece.slices) for hf_name, piece in spec.pieces]),
            )

    def shard_spec(self, name: str) -> ShardSpec:
        """Return the spec of this rank's shard of a parameter."""
        source = self._find_source(name)
        return ShardSpec(
            pieces=tuple(
                (hf_name, self._local_piece(self._shapes[hf_name], source)) for hf_name in source.hf_names
            ),
            shape=tuple(self._parameters[name].shape),
            head_dim=self._qkv_head_dim(name),
        )

    @torch.no_grad()
    def full_weights(self, read_local: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield this stage's full weights under Hugging Face's names. Collective over the stage's ranks.

        `read_local` returns this rank's shard of a parameter.
        """
        for name in self._parameters:
            source = self._find_source(name)
            if EXPERT in name:
                if f"{EXPERT}0." in name:
                    yield source.hf_names[0], self._all_experts(name, read_local)
            # The first stage exports a tied embedding, of which the last stage has a copy.
            elif name != "output_layer.weight" or not self._config.tie_word_embeddings:
                full_weight = _unshard(read_local(name), source, self._tensor_group)
                pieces = tuple((hf_name, Piece.full(self._shapes[hf_name])) for hf_name in source.hf_names)
                spec = ShardSpec(
                    pieces=pieces, shape=tuple(full_weight.shape), head_dim=self._qkv_head_dim(name)
                )
                yield from zip(source.hf_names, spec.split(full_weight), strict=True)

    def _qkv_head_dim(self, name: str) -> int | None:
        """Return the head size if the parameter combines query, key and value projections, else None."""
        return self._head_dim if "linear_qkv" in name else None

    def _all_experts(self, first_name: str, read_local: Callable[[str], Tensor]) -> Tensor:  # [E, ...]
        prefix, _, suffix = first_name.partition(f"{EXPERT}0.")
        count = self._config.num_experts // self._expert_group.size()
        local = torch.stack([read_local(f"{prefix}{EXPERT}{index}.{suffix}") for index in range(count)])
        return all_gather(local, 0, self._expert_group)

    def _local_piece(self, shape: tuple[int, ...], source: ParameterSource) -> Piece:
        slices = [slice(0, size) for size in shape]
        if source.expert is not None:
            slices[0] = slice(source.expert, source.expert + 1)
        elif source.sharding != "not":
            dim = 1 if source.sharding == "columns" else 0
            size = -(-shape[dim] // self._tensor_group.size())
            start = min(self._tensor_group.rank() * size, shape[dim])
            slices[dim] = slice(start, min(start + size, shape[dim]))
        return Piece(shape, tuple(slices))

    def _find_source(self, name: str) -> ParameterSource:
        if not name.startswith(LAYER):
            embedding = "model.embed_tokens.weight"
            head = embedding if self._config.tie_word_embeddings else "lm_head.weight"
            return {
                "embedding.word_embeddings.weight": ParameterSource((embedding,), "rows"),
                "decoder.final_layernorm.weight": ParameterSource(("model.norm.weight",)),
                "output_layer.weight": ParameterSource((head,), "rows"),
            }[name]
        index, _, layer_name = name.removeprefix(LAYER).partition(".")
        number = self._model.decoder.layers[int(index)].layer_number - 1  # index over all stages
        prefix = f"model.layers.{number}."
        if layer_name.startswith(EXPERT):
            local, kind = layer_name.removeprefix(EXPERT).split(".")[:2]
            first_expert = self._expert_group.rank() * self._config.num_experts // self._expert_group.size()
            projection = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[kind]
            return ParameterSource((f"{prefix}mlp.experts.{projection}",), expert=first_expert + int(local))
        source = _LAYER_SOURCES[layer_name]
        return ParameterSource(tuple(prefix + hf_name for hf_name in source.hf_names), source.sharding)


_LAYER_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention": "self_attn",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp": "mlp",
}
_LAYER_SOURCES = {
    "input_layernorm.weight": ParameterSource(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ParameterSource(("post_attention_layernorm.weight",)),
    **{
        f"self_attention.linear_qkv.{kind}": ParameterSource(
            tuple(f"self_attn.{letter}_proj.{kind}" for letter in "qkv"), "rows"
        )
        for kind in ("weight", "bias")
    },
    "self_attention.linear_proj.weight": ParameterSource(("self_attn.o_proj.weight",), "columns"),
    "self_attention.q_layernorm.weight": ParameterSource(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ParameterSource(("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": ParameterSource(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows_of_halves"
    ),
    "mlp.linear_fc2.weight": ParameterSource(("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": ParameterSource(("mlp.gate.weight",)),
}


def _unshard(shard: Tensor, source: ParameterSource, group: dist.ProcessGroup) -> Tensor:
    """Return the full parameter of all ranks' shards. Collective."""
    if source.sharding == "not" or group.size() == 1:
        return shard.detach()
    if source.sharding == "rows_of_halves":  # each shard has rows of both halves
        return all_gather(shard.unflatten(0, (2, -1)), 1, group).flatten(0, 1)
    return all_gather(shard, 1 if source.sharding == "columns" else 0, group)
