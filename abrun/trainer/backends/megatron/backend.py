"""A policy on megatron-core. See abrun.trainer.backends.megatron."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import pad

from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import NO_FILTERS, Filters, Megatron, Policy
from abrun.trainer.backends import B, TracedModule, ValueModel
from abrun.trainer.backends.head import (
    Decoder,
    EntropyMode,
    HeadOutput,
    LmHead,
    check_logprob_kernel,
    compute_token_logprobs,
    init_value_weight,
)
from abrun.trainer.backends.megatron.cpu import emulate_cuda
from abrun.trainer.backends.megatron.library import suppress_warnings
from abrun.trainer.backends.megatron.network import (
    MicrobatchParams,
    is_last_stage,
    join_groups,
    make_network,
    tensor_group,
)
from abrun.trainer.backends.megatron.parameters import VALUE_HEAD, MegatronParameters, WeightNames
from abrun.trainer.backends.megatron.routing import MicrobatchRouting, StageRouters
from abrun.trainer.backends.microbatches import Microbatch, Microbatches, Packing
from abrun.trainer.backends.policy import AuxLossInputs, PolicyBackend, TrainedModel, ValueBackend
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.routing import RouterLoad, check_routing
from abrun.trainer.backends.shards import Piece, ShardSpec
from abrun.trainer.kernels import TokenLoss
from abrun.trainer.models.checks import attention_in_place
from abrun.trainer.models.families import facts_of
from abrun.trainer.models.weights import published
from abrun.trainer.rl.batch import Sequences, sequence_lengths
from abrun.trainer.rl.metrics import MetricParts

# Passes over microbatches through this rank's pipeline stage, on megatron-core's 1F1B schedule.
#
# Every rank of a replica has the same rows, so only hidden states are sent between stages. Letters: B
# sequences, S positions, H hidden size; T tokens of a packed stream.


class Stages:
    """The inputs and outputs of modules on this rank's pipeline stage."""

    def __init__(self, settings: Megatron, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks

    def hidden_states(
        self,
        module: Any,
        token_ids: Tensor,
        packing: Packing | None,
        routing: MicrobatchRouting | None = None,
    ) -> Tensor:
        """Return the stage's output for right-padded rows `token_ids` [B, S].

        With `packing`, they are packed into one stream, and the output covers this rank's T/P tokens of it,
        for P context-parallel ranks. With sequence parallelism, positions are padded to a multiple of the
        tensor-parallel ranks, and the states are sharded by position; `gather_for_sharded_head` and
        `gather_for_replicated_head` gather them.
        """
        if packing is None:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        else:
            token_ids = packing.to_local(packing.pack(token_ids))
            positions = packing.to_local(packing.position_ids)[0]
        num_padding = self._num_padding(token_ids.shape[1])
        params = MicrobatchParams(
            positions=pad(positions, (0, num_padding)), packing=packing, routing=routing
        )
        hidden = module(pad(token_ids, (0, num_padding)), None, None, packed_seq_params=params)
        return hidden.contiguous()  # required to send it to the next stage

    def token_positions(
        self, token_mask: Tensor, packing: Packing | None
    ) -> Tensor:  # [B, S] bool -> [T] int64
        """Return the index in the flattened rows of each token of this rank's layers; -1 for padding."""
        if packing is None:
            rows = torch.arange(token_mask.numel(), device=token_mask.device).view(token_mask.shape)
            positions = torch.arange(token_mask.shape[1], device=token_mask.device)
            token_positions = torch.where(positions < sequence_lengths(token_mask)[:, None], rows, -1)
        else:
            split = packing.split
            token_positions = (
                packing.index[None] if split is None else split.to_local(packing.index[None], -1)
            )
        token_positions = pad(
            token_positions, (0, self._num_padding(token_positions.shape[1])), value=-1
        ).t()  # positions first
        if self._settings.sequence_parallel:
            token_positions = token_positions.chunk(tensor_group().size())[tensor_group().rank()]
        return token_positions.flatten()

    def full_states(self, output: Any, length: int) -> Tensor:  # -> [B, length, H]
        """Return the full states, without gradient, of a module's output [S, B, H], alone or with a bias."""
        states = (output[0] if isinstance(output, tuple) else output).detach()
        if self._settings.sequence_parallel:
            states = gather_from_sequence_parallel_region(states.contiguous(), group=tensor_group())
        return states[:length].transpose(0, 1)

    def gather_for_sharded_head(self, hidden: Tensor, length: int) -> Tensor:  # -> [B, length, H]
        """Return the last stage's full states for a head with a sharded vocabulary.

        Each rank's gradient of them is a partial sum, from its vocabulary shard; the backward pass sums them.
        """
        if not self._settings.sequence_parallel:
            return copy_to_tensor_model_parallel_region(hidden, group=tensor_group())
        return self._gather_sequence(hidden, length, partial_gradients=True)

    def gather_for_replicated_head(self, hidden: Tensor, length: int) -> Tensor:  # -> [B, length, H]
        """Return the last stage's full states for a head that is replicated over tensor-parallel ranks.

        Each rank has their full gradient.
        """
        if not self._settings.sequence_parallel:
            return hidden
        return self._gather_sequence(hidden, length, partial_gradients=False)

    def broadcast_weights(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all stages, in stage order, on every stage. Collective over the pipeline."""
        pipeline = self._ranks.pipeline
        if pipeline is None:
            yield from weights
            return
        for stage in range(pipeline.size()):
            source, is_mine = dist.get_global_rank(pipeline, stage), stage == pipeline.rank()
            while True:
                name, weight = next(weights, ("", None)) if is_mine else ("", None)
                box = [None if weight is None else (name, weight.shape, weight.dtype)]
                dist.broadcast_object_list(box, src=source, group=pipeline)
                if box[0] is None:
                    break
                name, shape, dtype = box[0]
                tensor = (
                    torch.empty(shape, dtype=dtype, device=self._ranks.device) if weight is None else weight
                )
                dist.broadcast(tensor.contiguous() if is_mine else tensor, src=source, group=pipeline)
                yield name, tensor

    def _num_padding(self, length: int) -> int:
        """Return the number of padding tokens that sequence parallelism needs."""
        return -length % self._settings.tensor_parallel if self._settings.sequence_parallel else 0

    def _gather_sequence(self, hidden: Tensor, length: int, *, partial_gradients: bool) -> Tensor:
        tokens_first = hidden.transpose(0, 1).contiguous()  # [S/P, B, H]
        gathered = gather_from_sequence_parallel_region(
            tokens_first, tensor_parallel_output_grad=partial_gradients, group=tensor_group()
        )
        return gathered[:length].transpose(0, 1)


class StagedModel(TrainedModel):
    """A model whose passes run through this rank's stage of `_module`."""

    _stages: Stages
    _module: Any

    @property
    def is_last_stage(self) -> bool:
        return is_last_stage()

    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        """See TrainedModel. Collective; the output is a loss [] or, on earlier stages, the hidden states."""

        def step(remaining: Any, _: Any) -> tuple[Tensor, Any]:
            return forward(next(remaining)), _return_undivided

        with emulate_cuda(self.ranks.device), suppress_warnings():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(microbatches),
                model=[self._module],
                num_microbatches=len(microbatches),
                seq_length=1,  # unused, since lengths vary
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _tensor_from_last_stage(self, tensor: Tensor | None, shape: torch.Size) -> Tensor:
        """Return the last stage's tensor on every stage; others pass None. Collective over the pipeline."""
        tensor = torch.zeros(shape, device=self.ranks.device) if tensor is None else tensor
        if self.ranks.pipeline is not None:
            dist.broadcast(tensor, src=_last_rank(), group=self.ranks.pipeline)
        return tensor

    def _metrics_from_last_stage(self, metrics: MetricParts | None) -> MetricParts:
        """Return the last stage's metrics on every stage; others pass None. Collective over the pipeline."""
        if self.ranks.pipeline is None:
            assert metrics is not None
            return metrics
        box: list[Any] = [None]
        if metrics is not None:
            totals = metrics.sums, metrics.maxima, metrics.minima
            box = [[{key: float(value) for key, value in values.items()} for values in totals]]
        dist.broadcast_object_list(box, src=_last_rank(), group=self.ranks.pipeline)
        sums, maxima, minima = (
            {
                key: torch.tensor(value, dtype=torch.float64, device=self.ranks.device)
                for key, value in values.items()
            }
            for values in box[0]
        )
        return MetricParts(sums=sums, maxima=maxima, minima=minima)


def _last_rank() -> int:
    return parallel_state.get_pipeline_model_parallel_last_rank()


def _return_undivided(output: Tensor, non_loss_data: bool = False) -> tuple[Tensor, Tensor, None]:
    """Return the loss in the form that the schedule does not divide: with a token count of 0."""
    return output, torch.zeros((), dtype=torch.int, device=output.device), None


class MegatronBackend(StagedModel, PolicyBackend[MicrobatchRouting]):
    """See abrun.trainer.backends.Backend, and abrun.trainer.backends.make_backend for the arguments."""

    _parameters: MegatronParameters

    def __init__(
        self,
        load_network: Callable[[], Any],
        policy: Policy,
        ranks: Ranks,
        *,
        temperature: float = 1.0,
        filters: Filters = NO_FILTERS,
        engine_dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        assert isinstance(policy.backend, Megatron)
        check_logprob_kernel(policy.logprobs, ranks.device)
        super().__init__(policy, ranks)
        with emulate_cuda(ranks.device), suppress_warnings():
            join_groups(ranks, policy.backend)
        network = load_network()
        facts = facts_of(network)
        self.model = self._make_module(network, head=True)
        self._routers = StageRouters(self.model, ranks)
        check_routing(policy, network, self._routers.num_layers)
        self._weight_names = WeightNames(self.model, network)
        self._parameters = MegatronParameters(
            self.model,
            self._weight_names.shard_spec,
            policy.optimizer if trainable else None,
            device=ranks.device,
        )
        self._weight_names.load(network, self._parameters.assign)
        settings: dict[str, Any] = {
            "temperature": temperature,
            "filters": filters,
            "scale": facts.logit_scale,
            "softcap": facts.logit_softcap,
        }
        shared: dict[str, Any] = {"group": ranks.tensor, "vocab_size": network.config.vocab_size}
        self._head = LmHead(policy.logprobs, **settings, **shared)
        self._full_head = LmHead(policy.logprobs, engine_dtype=engine_dtype, **settings)
        self._load = load_network
        self._weightless_network = WeightlessNetwork(network)
        self._stages, self._module = Stages(policy.backend, ranks), self._parameters.module

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from published(self._network, self._full_weights())

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """Open a decoder with full weights on every rank; decoding needs no collective."""
        dtype = getattr(torch, self.settings.dtype)
        network = self._weightless_network.fill(self._full_weights(), dtype, self.ranks.device)
        facts, in_place = facts_of(network), getattr(network, "decodes_in_place", False)
        step = partial(self._full_head.decode, facts.base, facts.head.weight)
        with attention_in_place(network) if in_place else nullcontext():
            yield Decoder(step=step, in_place=in_place, collective=False)

    def traced_modules(self) -> Sequence[TracedModule]:
        return [
            TracedModule(name=name, module=module, full_states=self._stages.full_states)
            for name, module in self._weight_names.modules()
        ]

    def make_value_model(self, settings: Ppo, seed: int) -> ValueModel:
        arguments = settings, self.settings, self.ranks, self._stages
        if settings.value_backbone == "shared":
            return MegatronValueModel(*arguments, self._module, None, seed=seed)
        network = self._load()
        return MegatronValueModel(*arguments, self._make_module(network, head=False), network, seed=seed)

    def _make_module(self, network: Any, *, head: bool) -> GPTModel:
        """Make this rank's shard of a transformers network, without its weights."""
        assert isinstance(self.settings.backend, Megatron)
        on_cpu = self.ranks.device.type == "cpu"
        with emulate_cuda(self.ranks.device), suppress_warnings():
            return make_network(
                network, facts_of(network), self.settings, self.settings.backend, on_cpu=on_cpu, head=head
            )

    def _full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full parameter under the network's own name. Collective."""
        return self._stages.broadcast_weights(self._weight_names.full_weights(self._parameters.gather_master))

    @property
    def _network(self) -> Any:
        return self._weightless_network.network

    def _forward(
        self,
        batch: Sequences,
        packing: Packing | None,
        entropies: EntropyMode,
        token_loss: TokenLoss | None,
        records: list[MicrobatchRouting],
        aux_loss_inputs: AuxLossInputs | None,
    ) -> HeadOutput | Tensor:
        routing = None
        if self._routers.num_layers:
            routing = self._routers.start_microbatch(
                batch, self._stages.token_positions(batch.token_mask, packing), aux_loss_inputs
            )
            records.append(routing)
        hidden = self._stages.hidden_states(self._module, batch.token_ids, packing, routing)
        if not self.is_last_stage:
            return hidden
        pack: Callable[[Tensor], Tensor] = packing.pack if packing else lambda rows: rows
        hidden = self._stages.gather_for_sharded_head(
            hidden, packing.num_local_tokens if packing else batch.token_ids.shape[1]
        )
        support = None if batch.support is None else pack(batch.support)
        tokens = pack(batch.token_ids), pack(batch.token_mask)
        output = compute_token_logprobs(
            self._head, hidden, self._weight(), *tokens, entropies, token_loss, packing, support
        )
        return output.map_tokens(packing.unpack) if packing else output

    def _reduce_load(self, records: list[MicrobatchRouting]) -> RouterLoad:
        return self._routers.reduce_load(records)

    def _collect_routes(self, records: list[MicrobatchRouting]) -> list[Tensor]:
        return self._routers.record_routes(records)

    def _weight(self) -> Tensor:
        """Return this rank's rows of the head's weight, on the last stage."""
        model: Any = self.model
        if model.share_embeddings_and_output_weights:
            return model.shared_embedding_or_output_weight()
        return model.output_layer.weight


# The policy as a plain Hugging Face network, to write checkpoints and to decode with a cache.


class WeightlessNetwork:
    """A transformers network without its weights, which megatron-core's model holds."""

    def __init__(self, network: Any) -> None:
        # Keep buffers that a checkpoint lacks, such as the frequencies of rotary embeddings.
        stored = network.state_dict().keys()
        self._buffers = {name: b.clone() for name, b in network.named_buffers() if name not in stored}
        vars(network).pop("checkpoint", None)  # closes its files
        self.network: Any = network.to("meta")
        self.network.tie_weights()

    def fill(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> Any:
        """Return a copy on `device` in evaluation mode, filled with the weights one tensor at a time."""
        network = copy.deepcopy(self.network)
        modules = dict(network.named_modules())
        for name, buffer in self._buffers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(modules[owner], attribute, buffer.to(device))
        missing = dict(network.named_parameters())
        for name, weight in weights:
            owner, _, attribute = name.rpartition(".")
            setattr(modules[owner], attribute, nn.Parameter(weight.to(dtype, copy=True), requires_grad=False))
            del missing[name]
        network.tie_weights()
        assert not missing, f"no weights for {sorted(missing)}"
        return network.eval()


# PPO's value model on megatron-core: a scalar head on its own backbone or on the policy's.


class StageValueHead(MegatronModule):
    """A float32 linear head that maps each hidden state to a scalar, replicated on the last stage's ranks.

    Its weight is drawn with standard deviation 1 / sqrt(H + 1) (arXiv:2009.01325), the same on every rank.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, *, seed: int) -> None:
        super().__init__(config=config)
        if not is_last_stage():
            return
        self.weight = nn.Parameter(init_value_weight(config.hidden_size, seed).to(device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:  # [..., H] -> [...]
        return hidden.float() @ self.weight[0] + self.bias


class MegatronValueModel(StagedModel, ValueBackend):
    """See abrun.trainer.backends.ValueModel.

    `backbone` is either its own module, loaded from the transformers `network`, or the policy's module. In
    the second case `network` is None.
    """

    def __init__(
        self,
        settings: Ppo,
        policy: Policy,
        ranks: Ranks,
        stages: Stages,
        backbone: Any,
        network: Any,
        *,
        seed: int,
    ) -> None:
        assert isinstance(policy.backend, Megatron)
        self.settings, self.ranks, self.right_shift = policy, ranks, settings.right_shift
        self._stages = stages
        self.head = StageValueHead(backbone.config, ranks.device, seed=seed)
        self._coefficient = 1.0
        has_own_backbone = network is not None
        if has_own_backbone:
            backbone.add_module(VALUE_HEAD, self.head)  # in one module, so that one gradient norm covers both
        else:
            self._coefficient = 0.1 if settings.value_coefficient is None else settings.value_coefficient
        self._weight_names = WeightNames(backbone, network) if has_own_backbone else None
        self._parameters = MegatronParameters(
            backbone if has_own_backbone else self.head,
            self._shard_spec,
            settings.value_optimizer,
            device=ranks.device,
            replicated=not has_own_backbone,
        )
        if self._weight_names is not None:
            self._weight_names.load(network, self._parameters.assign)
        self._module = self._parameters.module if has_own_backbone else backbone
        # Pipeline stages wait for each other's gradients, so with a pipeline the gradients are 0 instead.
        self._detached = self._coefficient == 0 and ranks.pipeline is None

    def _shard_spec(self, name: str) -> ShardSpec:
        """Return a parameter's spec, with the same tensor names as the dtensor backend's value model."""
        local_name = name.removeprefix(f"{VALUE_HEAD}.")
        if local_name in ("weight", "bias"):
            return ShardSpec.from_piece(
                f"head.{local_name}", Piece.full(getattr(self.head, local_name).shape)
            )
        assert self._weight_names is not None
        spec = self._weight_names.shard_spec(name)
        return replace(
            spec, pieces=tuple((hf_name.removeprefix("model."), piece) for hf_name, piece in spec.pieces)
        )

    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        with torch.no_grad() if self._detached else nullcontext():
            hidden = self._stages.hidden_states(self._module, batch.token_ids, packing)
        if not self.is_last_stage:
            return hidden
        if hidden.requires_grad and self._coefficient != 1:
            hidden.register_hook(lambda gradient: gradient * self._coefficient)
        length = batch.token_ids.shape[1] if packing is None else packing.num_local_tokens
        return self._to_rows(self.head(self._stages.gather_for_replicated_head(hidden, length)), packing)
