"""The dtensor backend: FSDP2 (`fully_shard`) over the data-parallel ranks, on gloo or nccl.

The log-prob kernel runs inside the root module's forward, so that FSDP's hooks see an ordinary forward and
the head's weight is gathered when the kernel needs it.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import NO_FILTERS, Filters, Policy
from abrun.trainer.backends import B, TracedModule
from abrun.trainer.backends.attention import hidden_states
from abrun.trainer.backends.dtensor.experts import shard_experts
from abrun.trainer.backends.dtensor.fsdp import (
    DTYPES,
    ShardedParameters,
    free_gathered,
    gather_once,
    keeps_gathered,
    local_shard,
    materialise,
    shard,
    shard_layers,
)
from abrun.trainer.backends.dtensor.layers import load_checked, prepare_layers
from abrun.trainer.backends.dtensor.tensor_parallel import TensorParallel
from abrun.trainer.backends.head import (
    Decoder,
    EntropyMode,
    HeadOutput,
    LmHead,
    check_logprob_kernel,
    compute_token_logprobs,
    init_value_weight,
)
from abrun.trainer.backends.microbatches import Microbatch, Microbatches, Packing
from abrun.trainer.backends.policy import AuxLossInputs, PolicyBackend, ValueBackend
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.routing import RouterChoice, RouterLoad, check_routing, route_dtype
from abrun.trainer.kernels import TokenLoss
from abrun.trainer.models.checks import attention_in_place
from abrun.trainer.models.families import Facts, facts_of, persistent_buffers, routers_of
from abrun.trainer.models.weights import published
from abrun.trainer.rl.batch import Sequences, sequence_lengths


class PolicyModule(nn.Module):
    """A causal language model whose forward returns log-probs, or a loss of them, instead of logits."""

    def __init__(self, network: nn.Module, facts: Facts, head: LmHead) -> None:
        super().__init__()
        self.network: Any = network
        self.facts, self.head = facts, head

    @property
    def base(self) -> Any:
        """Return the network without its LM head."""
        return self.facts.base

    def forward(
        self,
        token_ids: Tensor,  # [B, S] right-padded, or [1, S] packed
        token_mask: Tensor,  # [B, S] bool
        entropies: EntropyMode,
        token_loss: TokenLoss | None = None,
        packing: Packing | None = None,
        support: Tensor | None = None,  # [B, S, W], see abrun.trainer.rl.sampling
    ) -> HeadOutput:
        """See abrun.trainer.backends.head.compute_token_logprobs."""
        hidden = hidden_states(self.base, token_ids, packing)
        weight = local_shard(self.facts.head.weight)
        return compute_token_logprobs(
            self.head, hidden, weight, token_ids, token_mask, entropies, token_loss, packing, support
        )

    def hidden_states(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        """Return hidden states for a value head on this backbone: see abrun.trainer.backends.attention."""
        return hidden_states(self.base, token_ids, packing)

    def decode(
        self, token_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """See abrun.trainer.backends.Decoder."""
        weight = local_shard(self.facts.head.weight)
        return self.head.decode(self.base, weight, token_ids, attention_mask, position_ids, cache)


class RoutingRecord(NamedTuple):
    """The routing of one microbatch."""

    load: RouterLoad
    routes: Tensor | None  # [b, s, L * K]; None in a pass with gradient


# PPO's value model on the dtensor backend: a scalar head on its own backbone or on the policy's.

HiddenStates = Callable[[Tensor, Packing | None], Tensor]


class Backbone(nn.Module):
    """A language model without its head."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        return hidden_states(self.base_model, token_ids, packing)


class LinearValueHead(nn.Linear):
    """A linear head that maps each hidden state to a scalar."""

    def forward(self, input: Tensor) -> Tensor:  # [..., H] -> [...]
        return input @ self.weight[0] + self.bias


class DtensorValueModel(ValueBackend):
    """See abrun.trainer.backends.ValueModel.

    `backbone` is its own network, from `load_checked`, or the function that returns the policy's hidden
    states.
    """

    def __init__(
        self,
        settings: Ppo,
        policy: Policy,
        ranks: Ranks,
        backbone: nn.Module | HiddenStates,
        hidden_size: int,
        *,
        tensor: TensorParallel | None,
        seed: int,
    ) -> None:
        self.settings, self.ranks, self.right_shift = policy, ranks, settings.right_shift
        self._tensor_parallel = tensor
        self._coefficient = 1.0
        # float32, unless the recipe tests how much bfloat16 master weights and moments lose by rounding.
        dtype = DTYPES[settings.value_head_dtype]
        self.head = LinearValueHead(hidden_size, 1)
        self.head.weight = nn.Parameter(init_value_weight(hidden_size, seed).to(ranks.device, dtype))
        self.head.bias = nn.Parameter(torch.zeros(1, device=ranks.device, dtype=dtype))
        if tensor:
            tensor.replicate(self.head)
        # Gathered in its own dtype, whatever the backbone's compute dtype.
        shard(self.head, ranks.weight_mesh, settings.value_head_dtype)
        trained = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        if isinstance(backbone, nn.Module):
            self._hidden_states = self._shard_backbone(backbone)
            trained |= dict(self._hidden_states.named_parameters())
        else:
            self._hidden_states = backbone
            self._coefficient = 0.1 if settings.value_coefficient is None else settings.value_coefficient
        self._parameters = ShardedParameters(trained, settings.value_optimizer, prefix="base_model.")

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        super().load_local_state(state)
        for module in (self.head, self._hidden_states):
            if isinstance(module, nn.Module):  # the policy frees its own backbone
                free_gathered(module)

    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        backbone = self._hidden_states
        remaining: Iterable[Microbatch[B]] = microbatches
        if backward and keeps_gathered(self.settings) and isinstance(backbone, nn.Module):
            remaining = gather_once(backbone, microbatches)
        for microbatch in remaining:
            loss = forward(microbatch)
            if backward:
                loss.backward()

    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        token_ids = packing.pack(batch.token_ids) if packing else batch.token_ids
        return self._to_rows(self.head(self._backbone_states(token_ids, packing)).float(), packing)

    def _backbone_states(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        if self._coefficient == 0:
            with torch.no_grad():
                return self._hidden_states(token_ids, packing)
        hidden = self._hidden_states(token_ids, packing)
        # Every tensor-parallel rank computes the full loss, and the gradients of the states are summed.
        share = self._coefficient / (self._tensor_parallel.size if self._tensor_parallel else 1)
        if hidden.requires_grad and share != 1:
            hidden.register_hook(lambda gradient: gradient * share)
        return hidden

    def _shard_backbone(self, network: Any) -> Backbone:
        facts = facts_of(network)
        module = Backbone(facts.base)
        if not facts.head.weight.is_meta:
            module.to(self.ranks.device)
        if self._tensor_parallel:
            self._tensor_parallel.shard_network(
                network, facts, experts_are_sharded=self.ranks.expert_mesh is not None
            )
        shard_experts(network, self.ranks, self.settings.dtype)
        prepare_layers(facts.layers, self.settings)
        shard_layers(facts.layers, self.ranks.weight_mesh, self.settings.dtype)
        shard(module, self.ranks.weight_mesh, self.settings.dtype)
        materialise(module, network, self.ranks.device)
        return module.train()


class DtensorBackend(PolicyBackend[RoutingRecord]):
    """See abrun.trainer.backends.Backend, and abrun.trainer.backends.make_backend for the arguments."""

    _parameters: ShardedParameters

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
        check_logprob_kernel(policy.logprobs, ranks.device)
        super().__init__(policy, ranks)
        self._load = load_network
        network = load_checked(load_network, policy)
        facts = facts_of(network)
        head = LmHead(
            policy.logprobs,
            temperature=temperature,
            filters=filters,
            scale=facts.logit_scale,
            softcap=facts.logit_softcap,
            engine_dtype=engine_dtype,
            vocab_size=facts.head.out_features,
            group=ranks.tensor,
        )
        self.module = PolicyModule(network, facts, head)
        if not facts.head.weight.is_meta:
            self.module.to(ranks.device)
        self._tensor_parallel = (
            TensorParallel(ranks.mesh["tensor_parallel"], sequence_parallel=policy.backend.sequence_parallel)
            if ranks.tensor
            else None
        )
        if self._tensor_parallel:
            self._tensor_parallel.shard_network(
                network, facts, experts_are_sharded=ranks.expert_mesh is not None
            )
        self._hidden_size = facts.head.in_features
        self._routers = Routers(network)
        check_routing(policy, network, self._routers.num_layers)
        self._experts = shard_experts(network, ranks, policy.dtype)
        prepare_layers(facts.layers, policy)
        shard_layers(facts.layers, ranks.weight_mesh, policy.dtype)
        # FSDP keeps the root's weights gathered until the backward pass, which a frozen policy never has.
        shard(self.module, ranks.weight_mesh, policy.dtype, reshard_after_forward=None if trainable else True)
        materialise(self.module, network, ranks.device)
        for method in ("hidden_states", "decode"):
            register_fsdp_forward_method(self.module, method)
        self.module.train()
        self.module.requires_grad_(trainable)
        self._parameters = ShardedParameters(
            dict(self.module.named_parameters()), policy.optimizer if trainable else None, prefix="network."
        )

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from published(
            self._network, itertools.chain(self._full_weights(), persistent_buffers(self._network))
        )

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """Gather weights over the data-parallel ranks, which can then decode independently of each other.

        Tensor-parallel ranks decode the same rows for the same number of steps, each with its weight shards.
        """
        network = self._network
        in_place = getattr(network, "decodes_in_place", False)
        fsdp_modules = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        for fsdp_module in fsdp_modules:
            fsdp_module.set_reshard_after_forward(False, recurse=False)
            fsdp_module.unshard()
        if self.ranks.device.type == "cuda":
            self._gathered = torch.cuda.current_stream().record_event()
        self.module.eval()
        try:
            with contextlib.ExitStack() as stack:
                if self.settings.compile:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                if self._tensor_parallel:
                    stack.enter_context(self._tensor_parallel.with_full_sequences())
                for experts in self._experts:
                    stack.enter_context(experts.with_all_experts())
                if in_place:
                    stack.enter_context(attention_in_place(network))
                yield Decoder(
                    step=self._decode, in_place=in_place, collective=self._tensor_parallel is not None
                )
        finally:
            self.module.train()
            for fsdp_module in fsdp_modules:
                fsdp_module.set_reshard_after_forward(fsdp_module is not self.module, recurse=False)
                fsdp_module.reshard()

    def make_value_model(self, settings: Ppo, seed: int) -> DtensorValueModel:
        is_own = settings.value_backbone == "own"
        backbone = load_checked(self._load, self.settings) if is_own else self.module.hidden_states
        return DtensorValueModel(
            settings,
            self.settings,
            self.ranks,
            backbone,
            self._hidden_size,
            tensor=self._tensor_parallel,
            seed=seed,
        )

    def traced_modules(self) -> Sequence[TracedModule]:
        def full_states(output: Any, length: int) -> Tensor:
            states = output[0] if isinstance(output, tuple) else output
            return self._tensor_parallel.full_states(states, length) if self._tensor_parallel else states

        network = self._network
        names = {module: name for name, module in network.named_modules()}
        facts: Any = self.module.facts
        layers, is_compiled = [*facts.layers], self.settings.compile
        parts = layers if is_compiled else [part for layer in layers for part in (*layer.children(), layer)]
        norm = getattr(facts.base, "norm", None)
        modules = [facts.base.get_input_embeddings(), *parts, *([] if norm is None else [norm])]
        return [
            TracedModule(
                name=names[module],
                module=module,
                full_states=full_states,
                is_compiled=is_compiled and module in layers,
            )
            for module in modules
        ]

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        super().load_local_state(state)
        free_gathered(self.module)

    def _full_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._parameters.full_weights()

    def _decode(self, *inputs: Any) -> tuple[Tensor, Any]:
        if self.ranks.device.type == "cuda":
            # All weights are gathered. Without an event, FSDP's streams would wait for the current stream,
            # and a CUDA graph that is being captured would include them.
            root: Any = self.module
            root.set_post_optim_event(self._gathered)
        return self.module.decode(*inputs)

    @property
    def _network(self) -> Any:
        return self.module.network

    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        gathers_once = backward and keeps_gathered(self.settings)
        for microbatch in gather_once(self.module, microbatches) if gathers_once else microbatches:
            # Also around the backward pass, which may recompute layers.
            with self._routers.replay(_pack_routes(microbatch.batch.routes, microbatch.packing)):
                loss = forward(microbatch)
                if backward:
                    loss.backward()

    def _forward(
        self,
        batch: Sequences,
        packing: Packing | None,
        entropies: EntropyMode,
        token_loss: TokenLoss | None,
        records: list[RoutingRecord],
        aux_loss_inputs: AuxLossInputs | None,
    ) -> HeadOutput:
        pack: Callable[[Tensor], Tensor] = packing.pack if packing else lambda rows: rows
        support = None if batch.support is None else pack(batch.support)
        with self._routers.record() as choices:
            output = self.module(
                pack(batch.token_ids), pack(batch.token_mask), entropies, token_loss, packing, support
            )
        if packing:
            output = output.map_tokens(packing.unpack)
        if choices:
            with torch.set_grad_enabled(aux_loss_inputs is not None):
                load = RouterLoad.from_choices(choices, _count_sequences(batch, packing))
            if aux_loss_inputs is not None:
                coefficient, global_load = aux_loss_inputs
                aux_loss = coefficient * load.balance_loss(global_load.counts, global_load.num_tokens)
                output = output._replace(aux_loss=aux_loss)
            routes = None if torch.is_grad_enabled() else self._record_routes(choices, batch, packing)
            records.append(RoutingRecord(load.detached(), routes))
        return output

    def _reduce_load(self, records: list[RoutingRecord]) -> RouterLoad:
        loads = (record.load for record in records)
        return functools.reduce(operator.add, loads).all_reduce(self.ranks.weight_mesh.get_group())

    def _collect_routes(self, records: list[RoutingRecord]) -> list[Tensor]:
        return [record.routes for record in records if record.routes is not None]

    def _record_routes(
        self, choices: list[tuple[Tensor, Tensor]], batch: Sequences, packing: Packing | None
    ) -> Tensor:  # [b, s, L * K]
        dtype = route_dtype(self._routers.num_experts)
        route = (1 + torch.cat([chosen for _, chosen in choices], dim=1)).to(dtype)
        if packing:
            return packing.unpack_with_prompts(packing.to_full(route[None]))
        return route.view(*batch.token_ids.shape, -1)


def _pack_routes(
    routes: Tensor | None,  # [B, S, L * K]
    packing: Packing | None,
) -> Tensor | None:  # [T, L * K]
    if routes is None:
        return None
    return (packing.to_local(packing.pack(routes)) if packing else routes).flatten(0, 1)


def _count_sequences(batch: Sequences, packing: Packing | None) -> Tensor:  # [T] float64
    """Return the number of sequences that contain each token, prompts included; 0 for padding."""
    positions = torch.arange(batch.token_mask.shape[1], device=batch.token_mask.device)
    is_real = (positions < sequence_lengths(batch.token_mask)[:, None]).double()
    return (packing.to_local(packing.pack(packing.merge_counts(is_real))) if packing else is_real).flatten()


# The routers of a transformers network: recording and replaying their choices. See trainer.backends.routing.
# Letters: L layers with a router, T tokens of a forward pass (flattened rows, or a packed stream), E
# experts of a layer, K experts per token.


class Routers:
    """The routers of one network, whose choices can be recorded and replayed."""

    def __init__(self, network: nn.Module) -> None:
        routers = routers_of(network)
        self.num_layers = len(routers)
        self.num_experts, self.top_k = (routers[0].num_experts, routers[0].top_k) if routers else (0, 0)
        self._choices: list[tuple[Tensor, Tensor]] | None = None
        self._replayed_routes: Tensor | None = None  # [T, L, K]
        for layer, router in enumerate(routers):
            router.forward = partial(self._route, layer, router.forward)

    @contextlib.contextmanager
    def record(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Record one forward pass: for each layer, probabilities [T, E] and chosen experts [T, K]."""
        self._choices = []
        try:
            yield self._choices
        finally:
            self._choices = None

    @contextlib.contextmanager
    def replay(self, routes: Tensor | None) -> Iterator[None]:
        """Route tokens to the experts in `routes` [T, L * K] while the context is open; None: no replay.

        Recomputed layers are included. Each expert is weighted with the router's current probability, which
        has a gradient. Padding has no recorded route, so the router decides.
        """
        self._replayed_routes = (
            None if routes is None else routes.view(len(routes), self.num_layers, self.top_k)
        )
        try:
            yield
        finally:
            self._replayed_routes = None

    def _route(self, layer: int, forward: Any, *inputs: Any) -> Any:
        with RouterChoice(
            None if self._replayed_routes is None else self._replayed_routes[:, layer].long()
        ) as choice:
            outputs = forward(*inputs)
        if self._choices is not None:
            assert choice.decision is not None
            self._choices.append(choice.decision)
        return outputs
