"""A policy on megatron-core: rows in and out, whatever is cut in between. See abrun.backends.megatron."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from abrun.backends import Decoder, ValueModel
from abrun.backends.head import Entropies, Head, HeadOutput, check_available, logprobs_of_tokens
from abrun.backends.megatron.cpu import standing_in
from abrun.backends.megatron.decoding import Skeleton, decoder_of
from abrun.backends.megatron.groups import join
from abrun.backends.megatron.library import dtype_of, quiet
from abrun.backends.megatron.names import Names
from abrun.backends.megatron.network import make_network
from abrun.backends.megatron.routing import Routed, Routing
from abrun.backends.megatron.sharded import Sharded
from abrun.backends.megatron.stages import StagedLoop, Stages
from abrun.backends.megatron.value_model import MegatronValueModel
from abrun.backends.packing import Packing
from abrun.backends.pieces import Held
from abrun.backends.policy import Balance, PolicyBackend
from abrun.backends.ranks import Ranks
from abrun.backends.routing import Load, check_routing
from abrun.kernels import TokenLoss
from abrun.models import facts_of, published
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import NO_FILTERS, Filters, Megatron, Policy
from abrun.rl.batch import Sequences


class MegatronBackend(StagedLoop, PolicyBackend[Routed]):
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
        assert isinstance(policy.backend, Megatron)
        check_available(policy.logprobs, ranks.device)
        super().__init__(policy, ranks)
        with standing_in(ranks.device), quiet():
            join(ranks, policy.backend)
        network = load()
        facts = facts_of(network)
        self.model = self._make_module(network, head=True)
        self._routing = Routing(self.model, ranks)
        check_routing(policy, network, self._routing.num_layers)
        self._sharded = Sharded(
            self.model,
            policy.optimizer if trainable else None,
            distributed=policy.backend.distributed_optimizer,
            device=ranks.device,
        )
        self._names = Names(self.model, network)
        self._names.load(network, self._sharded.assign)
        settings: dict[str, Any] = {
            "temperature": temperature,
            "filters": filters,
            "scale": facts.logit_scale,
            "softcap": facts.logit_softcap,
        }
        shared: dict[str, Any] = {"group": ranks.tensor, "vocab_size": network.config.vocab_size}
        self._head = Head(policy.logprobs, **settings, **shared)
        self._whole_head = Head(policy.logprobs, engine_dtype=engine_dtype, **settings)
        self._load = load
        self._skeleton = Skeleton(network)
        self._stages, self._module = Stages(policy.backend, ranks), self._sharded.module

    def optimizer_step(self, learning_rate: float) -> float:
        return self._sharded.step(learning_rate)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from published(self._network, self._whole())

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """A copy with whole weights on every rank; no collective runs inside."""
        dtype = dtype_of(self.settings.dtype)
        network = self._skeleton.filled(self._whole(), dtype, self.ranks.device)
        with decoder_of(network, self._whole_head) as decoder:
            yield decoder

    def make_value_model(self, settings: Ppo, seed: int) -> ValueModel:
        parts = settings, self.settings, self.ranks, self._stages
        if settings.value_backbone == "shared":
            return MegatronValueModel(*parts, self._module, None, seed=seed)
        network = self._load()
        return MegatronValueModel(*parts, self._make_module(network, head=False), network, seed=seed)

    def local_state(self) -> dict[str, Tensor]:
        return self._sharded.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._sharded.load_local_state(state)

    def pieces(self) -> dict[str, Held]:
        return self._sharded.pieces(self._names.held)

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._sharded.resident_tensors()

    def _make_module(self, network: Any, *, head: bool) -> GPTModel:
        """This rank's part of a transformers network, without its weights."""
        assert isinstance(self.settings.backend, Megatron)
        on_cpu = self.ranks.device.type == "cpu"
        with standing_in(self.ranks.device), quiet():
            return make_network(
                network, facts_of(network), self.settings, self.settings.backend, on_cpu=on_cpu, head=head
            )

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters under the network's own names, whole, one after the other. Collective."""
        return self._stages.each_from_its_stage(self._names.whole(self._sharded.master))

    @property
    def _network(self) -> Any:
        return self._skeleton.network

    def _forward(
        self,
        batch: Sequences,
        packing: Packing | None,
        entropies: Entropies,
        token_loss: TokenLoss | None,
        routed: list[Routed],
        balance: Balance | None,
    ) -> HeadOutput | Tensor:
        of_routers = None
        if self._routing.num_layers:
            of_routers = self._routing.of(batch, self._stages.places(batch.token_mask, packing), balance)
            routed.append(of_routers)
        hidden = self._stages.hidden_states(self._module, batch.token_ids, packing, of_routers)
        if not self.is_last_stage:
            return hidden
        pack: Callable[[Tensor], Tensor] = packing.pack if packing else lambda rows: rows
        hidden = self._stages.for_vocabulary(hidden, packing.num_own if packing else batch.token_ids.shape[1])
        support = None if batch.support is None else pack(batch.support)
        tokens = pack(batch.token_ids), pack(batch.token_mask)
        output = logprobs_of_tokens(
            self._head, hidden, self._weight(), *tokens, entropies, token_loss, packing, support
        )
        return output.mapped(packing.unpack) if packing else output

    def _total_load(self, routed: list[Routed]) -> Load:
        return self._routing.load(routed)

    def _routes(self, routed: list[Routed]) -> list[Tensor]:
        return self._routing.record(routed)

    def _weight(self) -> Tensor:
        """This rank's rows of the head's weight, on the last stage."""
        model: Any = self.model
        if model.share_embeddings_and_output_weights:
            return model.shared_embedding_or_output_weight()
        return model.output_layer.weight
