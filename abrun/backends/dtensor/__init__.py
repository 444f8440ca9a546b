"""The dtensor backend: FSDP2 (`fully_shard`) over the data-parallel ranks, on gloo or nccl.

The log-prob kernel is called inside the root module's forward, so that FSDP's hooks see an ordinary forward
and the head's weight is whole when the kernel needs it.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from abrun.backends import B, Decoder
from abrun.backends.attention import enable_streams, hidden_states
from abrun.backends.dtensor.experts import spread_experts
from abrun.backends.dtensor.fsdp import (
    ShardedParameters,
    forget_gathered,
    gathered_once,
    keeps_gathered,
    materialise,
    shard,
    shard_layers,
)
from abrun.backends.dtensor.layers import prepare_layers, take_liger_kernels
from abrun.backends.dtensor.routing import Routing
from abrun.backends.dtensor.tensor_parallel import TensorParallel, own_part
from abrun.backends.dtensor.value_model import DtensorValueModel
from abrun.backends.head import Entropies, Head, HeadOutput, check_available, logprobs_of_tokens
from abrun.backends.microbatches import Microbatch, Microbatches
from abrun.backends.packing import Packing
from abrun.backends.pieces import Held
from abrun.backends.policy import Balance, PolicyBackend
from abrun.backends.ranks import Ranks
from abrun.backends.routing import Load, check_routing, route_dtype
from abrun.kernels import TokenLoss
from abrun.models import (
    Facts,
    attention_in_place,
    facts_of,
    persistent_buffers,
    published,
)
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import NO_FILTERS, Filters, Policy
from abrun.rl.batch import Sequences, sequence_lengths


class PolicyModule(nn.Module):
    """A causal language model whose forward ends in log-probs, or in a loss of them, not in logits."""

    def __init__(self, network: nn.Module, facts: Facts, head: Head) -> None:
        super().__init__()
        self.network: Any = network
        self._facts, self.head = facts, head

    @property
    def base(self) -> Any:
        """The network's layers, without its head."""
        return self._facts.base

    def forward(
        self,
        token_ids: Tensor,  # [B, S] right-padded, or [1, S] packed
        token_mask: Tensor,  # [B, S] bool
        entropies: Entropies,
        token_loss: TokenLoss | None = None,
        packing: Packing | None = None,
        support: Tensor | None = None,  # [B, S, W], see abrun.rl.sampling
    ) -> HeadOutput:
        """See abrun.backends.head.logprobs_of_tokens."""
        hidden = hidden_states(self.base, token_ids, packing)
        weight = own_part(self._facts.head.weight)
        return logprobs_of_tokens(
            self.head, hidden, weight, token_ids, token_mask, entropies, token_loss, packing, support
        )

    def hidden_states(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        """For a value head on this backbone; see abrun.backends.attention.hidden_states."""
        return hidden_states(self.base, token_ids, packing)

    def decode(
        self, token_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """See abrun.backends.Decoder."""
        weight = own_part(self._facts.head.weight)
        return self.head.decode(self.base, weight, token_ids, attention_mask, position_ids, cache)


class Routed(NamedTuple):
    """What routers did with a microbatch."""

    load: Load
    routes: Tensor | None  # [b, s, L * K]; None: of a pass with gradient


class DtensorBackend(PolicyBackend[Routed]):
    """See abrun.backends.Backend, and abrun.backends.make_backend for the arguments."""

    def __init__(
        self,
        load: Callable[[], Any],
        policy: Policy,
        ranks: Ranks,
        *,
        temperature: float = 1.0,
        filters: Filters = NO_FILTERS,
        engine_dtype: str | None = None,
        trainable: bool = True,
    ) -> None:
        check_available(policy.logprobs, ranks.device)
        super().__init__(policy, ranks)
        self._load = load
        network = load()
        enable_streams(network, policy)
        take_liger_kernels(network, policy)
        facts = facts_of(network)
        head = Head(
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
        self._tensor = (
            TensorParallel(ranks.mesh["tensor_parallel"], sequence_parallel=policy.backend.sequence_parallel)
            if ranks.tensor
            else None
        )
        if self._tensor:
            self._tensor.spread(network, facts, experts_are_spread=ranks.experts is not None)
        self._hidden_size = facts.head.in_features
        self._routing = Routing(network)
        check_routing(policy, network, self._routing.num_layers)
        self._experts = spread_experts(network, ranks, policy.dtype)
        prepare_layers(facts.layers, policy)
        shard_layers(facts.layers, ranks.weights, policy.dtype)
        # FSDP keeps the root's weights gathered until the backward pass, which a frozen policy never has.
        shard(self.module, ranks.weights, policy.dtype, reshard_after_forward=None if trainable else True)
        materialise(self.module, network, ranks.device)
        for method in ("hidden_states", "decode"):
            register_fsdp_forward_method(self.module, method)
        self.module.train()
        self.module.requires_grad_(trainable)
        self._parameters = ShardedParameters(
            dict(self.module.named_parameters()), policy.optimizer if trainable else None
        )

    def optimizer_step(self, learning_rate: float) -> float:
        return self._parameters.step(learning_rate)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from published(self._network, itertools.chain(self._whole(), persistent_buffers(self._network)))

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """Weights are gathered over data-parallel ranks, which then need not decode alike.

        Tensor-parallel ones decode the same rows to the same step, each with its part of the weights.
        """
        network = self._network
        in_place = getattr(network, "decodes_in_place", False)
        sharded = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        for part in sharded:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        if self.ranks.device.type == "cuda":
            self._gathered = torch.cuda.current_stream().record_event()
        self.module.eval()
        try:
            with contextlib.ExitStack() as gathered:
                if self.settings.compile:
                    gathered.enter_context(torch.compiler.set_stance("force_eager"))
                if self._tensor:
                    gathered.enter_context(self._tensor.whole_sequences())
                for experts in self._experts:
                    gathered.enter_context(experts.gathered())
                if in_place:
                    gathered.enter_context(attention_in_place(network))
                yield Decoder(step=self._decode, in_place=in_place, collective=self._tensor is not None)
        finally:
            self.module.train()
            for part in sharded:
                part.set_reshard_after_forward(part is not self.module, recurse=False)
                part.reshard()

    def make_value_model(self, settings: Ppo, seed: int) -> DtensorValueModel:
        backbone = self._load() if settings.value_backbone == "own" else self.module.hidden_states
        return DtensorValueModel(
            settings,
            self.settings,
            self.ranks,
            backbone,
            self._hidden_size,
            tensor=self._tensor,
            seed=seed,
        )

    def local_state(self) -> dict[str, Tensor]:
        return self._parameters.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._parameters.load_local_state(state)
        forget_gathered(self.module)

    def pieces(self) -> dict[str, Held]:
        return self._parameters.pieces("network.")

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._parameters.resident_tensors()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters under the network's own names, whole, one after the other. Collective."""
        return ((name.removeprefix("network."), weight) for name, weight in self._parameters.whole())

    def _decode(self, *inputs: Any) -> tuple[Tensor, Any]:
        if self.ranks.device.type == "cuda":
            # All weights are here. Without an event FSDP makes its streams wait for this one, and a CUDA
            # graph that is being recorded takes in whatever does.
            root: Any = self.module
            root.set_post_optim_event(self._gathered)
        return self.module.decode(*inputs)

    @property
    def _network(self) -> Any:
        return self.module.network

    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        keeps = backward and keeps_gathered(self.settings)
        for microbatch in gathered_once(self.module, microbatches) if keeps else microbatches:
            # Around the backward pass, too, which may compute layers again
            with self._routing.replayed(_of_tokens(microbatch.batch.routes, microbatch.packing)):
                loss = forward(microbatch)
                if backward:
                    loss.backward()

    def _forward(
        self,
        batch: Sequences,
        packing: Packing | None,
        entropies: Entropies,
        token_loss: TokenLoss | None,
        routed: list[Routed],
        balance: Balance | None,
    ) -> HeadOutput:
        pack: Callable[[Tensor], Tensor] = packing.pack if packing else lambda rows: rows
        support = None if batch.support is None else pack(batch.support)
        with self._routing.seen() as seen:
            output = self.module(
                pack(batch.token_ids), pack(batch.token_mask), entropies, token_loss, packing, support
            )
        if packing:
            output = output.mapped(packing.unpack)
        if seen:
            with torch.set_grad_enabled(balance is not None):
                load = Load.of(seen, _counted(batch, packing))
            if balance is not None:
                coefficient, whole = balance
                share = coefficient * load.imbalance(whole.counts, whole.num_tokens)
                output = output._replace(balance=share)
            routes = None if torch.is_grad_enabled() else self._rows_of_routes(seen, batch, packing)
            routed.append(Routed(load.detached(), routes))
        return output

    def _total_load(self, routed: list[Routed]) -> Load:
        loads = (each.load for each in routed)
        return functools.reduce(operator.add, loads).over(self.ranks.weights.get_group())

    def _routes(self, routed: list[Routed]) -> list[Tensor]:
        return [each.routes for each in routed if each.routes is not None]

    def _rows_of_routes(
        self, seen: list[tuple[Tensor, Tensor]], batch: Sequences, packing: Packing | None
    ) -> Tensor:  # [b, s, L * K]
        dtype = route_dtype(self._routing.num_experts)
        route = (1 + torch.cat([chosen for _, chosen in seen], dim=1)).to(dtype)
        if packing:
            return packing.unpack_prompts(packing.whole(route[None]))
        return route.view(*batch.token_ids.shape, -1)


def _of_tokens(routes: Tensor | None, packing: Packing | None) -> Tensor | None:  # [B, S, R] -> [T, R]
    if routes is None:
        return None
    return (packing.own(packing.pack(routes)) if packing else routes).flatten(0, 1)


def _counted(batch: Sequences, packing: Packing | None) -> Tensor:  # [T] float64
    """Of each token of a pass how many sequences have it, prompts included: 0 where it is padding."""
    positions = torch.arange(batch.token_mask.shape[1], device=batch.token_mask.device)
    real = (positions < sequence_lengths(batch.token_mask)[:, None]).double()
    return (packing.own(packing.pack(packing.counted(real))) if packing else real).flatten()
