"""A policy on megatron-core. See abrun.backends.megatron."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from abrun.backends import Decoder, TracedModule, ValueModel
from abrun.backends.head import EntropyMode, HeadOutput, LmHead, check_logprob_kernel, compute_token_logprobs
from abrun.backends.megatron.cpu import emulate_cuda
from abrun.backends.megatron.decoding import WeightlessNetwork, open_decoder
from abrun.backends.megatron.groups import join_groups
from abrun.backends.megatron.library import dtype_of, suppress_warnings
from abrun.backends.megatron.names import WeightNames
from abrun.backends.megatron.network import make_network
from abrun.backends.megatron.parameters import MegatronParameters
from abrun.backends.megatron.routing import MicrobatchRouting, StageRouters
from abrun.backends.megatron.stages import StagedModel, Stages
from abrun.backends.megatron.value_model import MegatronValueModel
from abrun.backends.packing import Packing
from abrun.backends.policy import AuxLossInputs, PolicyBackend
from abrun.backends.ranks import Ranks
from abrun.backends.routing import RouterLoad, check_routing
from abrun.kernels import TokenLoss
from abrun.models import facts_of, published
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import NO_FILTERS, Filters, Megatron, Policy
from abrun.rl.batch import Sequences


class MegatronBackend(StagedModel, PolicyBackend[MicrobatchRouting]):
    """See abrun.backends.Backend, and abrun.backends.make_backend for the arguments."""

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
        dtype = dtype_of(self.settings.dtype)
        network = self._weightless_network.fill(self._full_weights(), dtype, self.ranks.device)
        with open_decoder(network, self._full_head) as decoder:
            yield decoder

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
