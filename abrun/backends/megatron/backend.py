"""A policy on megatron-core: rows in and out, whatever is cut in between. See abrun.backends.megatron."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from abrun.backends import B, Decoder, Objective, ValueModel
from abrun.backends.head import IGNORED, Entropies, Head, HeadOutput, check_available
from abrun.backends.megatron.cpu import standing_in
from abrun.backends.megatron.decoding import Skeleton, decoder_of
from abrun.backends.megatron.groups import is_last_stage, join
from abrun.backends.megatron.library import dtype_of, quiet
from abrun.backends.megatron.names import Names
from abrun.backends.megatron.network import make_network
from abrun.backends.megatron.routing import Routed, Routing
from abrun.backends.megatron.sharded import Sharded
from abrun.backends.megatron.stages import Stages
from abrun.backends.megatron.value_model import MegatronValueModel
from abrun.backends.microbatches import Microbatch, Microbatches
from abrun.backends.packing import Packing
from abrun.backends.pieces import Held
from abrun.backends.ranks import Ranks
from abrun.backends.routing import Load, check_routing
from abrun.kernels import TokenLoss
from abrun.models import facts_of, open_network, published, save_network
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import NO_FILTERS, Filters, Megatron, Policy
from abrun.recipe.run import OwnRunConfig
from abrun.rl.batch import Sequences
from abrun.rl.metrics import MetricParts, merge, together


def make_backend(
    config: OwnRunConfig, ranks: Ranks, *, weights: Path | None, seed: int, trainable: bool = True
) -> "MegatronBackend":
    """See abrun.backends.make_backend."""
    temperature, filters = config.trained_distribution

    def load() -> Any:
        decodes = trainable and config.decodes
        return open_network(config.model, weights=weights, seed=seed, decodes=decodes)

    return MegatronBackend(
        load,
        config.policy,
        ranks,
        temperature=temperature,
        filters=filters,
        engine_dtype=config.rollout.head_dtype,
        trainable=trainable,
    )


class MegatronBackend:
    """See abrun.backends.Backend.

    `load` makes a transformers network with the run's initial weights, on the CPU and alike on every rank, or
    on the meta device with a `checkpoint` to read them from: the policy's, and that of a value model with a
    backbone of its own.
    Log-probs are of the distribution that a sampler at `temperature` with `filters` draws from; the sampler's
    own LM head runs in `engine_dtype`.
    """

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
        self.settings, self.ranks = policy, ranks
        self.around_forward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        with standing_in(ranks.device), quiet():
            join(ranks, policy.backend)
        network = load()
        facts = facts_of(network)
        self.model = self._network(network, head=True)
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
        self._stages = Stages(policy.backend, ranks)

    def logprobs(self, batch: Sequences) -> Tensor:
        return self._passed(batch)[0]

    def routed_logprobs(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        logprobs, routed, each = self._passed(batch)
        return logprobs, each.in_rows(self._routing.record(routed))

    def forward_backward(self, batch: B, objective: Objective[B]) -> MetricParts:
        coefficient = self.settings.router_aux_loss_coefficient
        balance = (coefficient, self._whole_load(batch)) if coefficient else None
        found: list[MetricParts] = []
        routed: list[Routed] = []

        def forward(part: Microbatch[B]) -> Tensor:
            microbatch, packing = part
            with self.around_forward():
                hidden = self._hidden_states(microbatch, packing, routed, balance)
                if not is_last_stage():
                    return hidden
                loss, output = self._loss(microbatch, packing, hidden, objective)
            output = output.mapped(Tensor.detach)
            found.append(objective.metrics(microbatch, output.logprobs, output.entropies))
            return loss

        each = Microbatches(batch, self.settings, self.ranks)
        self._stages.run(self._sharded.module, each, forward, backward=True)
        metrics = self._stages.metrics_from_last(merge(found) if found else None)
        return together(metrics, self._routing.load(routed).metrics()) if routed else metrics

    def optimizer_step(self, learning_rate: float) -> float:
        return self._sharded.step(learning_rate)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from published(self._skeleton.network, self._whole())

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        """A copy with whole weights on every rank; no collective runs inside."""
        dtype = dtype_of(self.settings.dtype)
        network = self._skeleton.filled(self._whole(), dtype, self.ranks.device)
        with decoder_of(network, self._whole_head) as decoder:
            yield decoder

    def save(self, directory: Path) -> None:
        weights = {}
        for name, weight in self._whole():
            if self.ranks.is_first:
                weights[name] = weight.cpu()
        if self.ranks.is_first:
            save_network(self._skeleton.network, directory, weights.items())

    def make_value_model(self, settings: Ppo, seed: int) -> ValueModel:
        parts = settings, self.settings, self.ranks, self._stages
        if settings.value_backbone == "shared":
            return MegatronValueModel(*parts, self._sharded.module, None, seed=seed)
        network = self._load()
        return MegatronValueModel(*parts, self._network(network, head=False), network, seed=seed)

    def local_state(self) -> dict[str, Tensor]:
        return self._sharded.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._sharded.load_local_state(state)

    def pieces(self) -> dict[str, Held]:
        return self._sharded.pieces(self._names.held)

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._sharded.resident_tensors()

    def _network(self, network: Any, *, head: bool) -> GPTModel:
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

    def _passed(self, batch: Sequences) -> tuple[Tensor, list[Routed], Microbatches[Sequences]]:
        """Log-probs [B, S], and what routers made of all microbatches, which these are, without gradient."""
        found: list[Tensor] = []
        routed: list[Routed] = []

        def forward(part: Microbatch[Sequences]) -> Tensor:
            microbatch, packing = part
            hidden = self._hidden_states(microbatch, packing, routed)
            if is_last_stage():
                found.append(self._judged(microbatch, packing, hidden, "none").logprobs)
            return hidden

        each = Microbatches(batch, self.settings, self.ranks)
        with torch.no_grad():
            self._stages.run(self._sharded.module, each, forward, backward=False)
        # Only the last stage has some, on all of its data-parallel ranks.
        zeros = torch.zeros(batch.token_ids.shape, device=self.ranks.device)
        logprobs = self._stages.tensor_from_last(each.in_rows(found) if found else zeros)
        return logprobs, routed, each

    def _whole_load(self, batch: Sequences) -> Load:
        """Of the global batch, before its first gradient: a pass more, as no part of it knows the others."""
        return self._routing.load(self._passed(batch)[1])

    def _hidden_states(
        self,
        batch: Sequences,
        packing: Packing | None,
        routed: list[Routed],
        balance: tuple[float, Load] | None = None,
    ) -> Tensor:
        """What this stage gives; with experts, what routers make of the microbatch joins `routed`."""
        of_routers = None
        if self._routing.num_layers:
            places = self._stages.places(batch.token_mask, packing)
            of_routers = self._routing.of(batch, places, balance)
            routed.append(of_routers)
        return self._stages.hidden_states(self._sharded.module, batch.token_ids, packing, of_routers)

    def _loss(
        self, batch: B, packing: Packing | None, hidden: Tensor, objective: Objective[B]
    ) -> tuple[Tensor, HeadOutput]:
        """The loss [] of the backward pass, log-probs and entropies [B, S]."""
        if not self.settings.logprobs.one_pass:
            output = self._judged(batch, packing, hidden, objective.entropies)
            return objective.losses(batch, output.logprobs, output.entropies).sum(), output
        tokens = (batch.mapped(packing.pack) if packing else batch).predicted_tokens()
        if packing and packing.split:
            tokens = tokens.mapped(packing.split.cut)

        def losses(logprobs: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
            return objective.losses(tokens[part], logprobs, entropy)

        output = self._judged(batch, packing, hidden, objective.entropies, losses)
        assert output.loss is not None
        return output.loss, output

    def _judged(
        self,
        batch: Sequences,
        packing: Packing | None,
        hidden: Tensor,
        entropies: Entropies,
        token_loss: TokenLoss | None = None,
    ) -> HeadOutput:
        """Log-probs and entropies [B, S] from the last stage's hidden states; see `Head.judge`."""
        ids, mask, support = batch.token_ids, batch.token_mask, batch.support
        if packing is not None:
            ids, mask = packing.pack(ids), packing.pack(mask)
            support = None if support is None else packing.pack(support)
        support = None if support is None else support[:, 1:]
        target = torch.where(mask, ids, IGNORED)[:, 1:]
        split = packing.split if packing else None
        if packing is None or split is None:
            hidden = self._stages.for_vocabulary(hidden, ids.shape[1])[:, :-1]
        else:
            target = split.cut(target, IGNORED)
            support = None if support is None else packing.own(support)
            hidden = self._stages.for_vocabulary(hidden, target.shape[1])
        output = self._head.judge(hidden, self._weight(), target, entropies, token_loss, support)
        if split is not None:
            output = output.mapped(lambda values: split.whole(values)[:, : ids.shape[1] - 1])
        output = output.mapped(lambda values: nn.functional.pad(values, (1, 0)))
        return output if packing is None else output.mapped(packing.unpack)

    def _weight(self) -> Tensor:
        """This rank's rows of the head's weight, on the last stage."""
        model: Any = self.model
        if model.share_embeddings_and_output_weights:
            return model.shared_embedding_or_output_weight()
        return model.output_layer.weight
