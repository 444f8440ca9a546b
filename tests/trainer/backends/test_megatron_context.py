"""Context parallelism on the megatron backend, against one process of plain modules in float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.backends.context import ContextSplit
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.rl.advantages import shift_right
from abrun.trainer.rl.losses import TokenLosses, gspo_loss, loss_weights
from abrun.trainer.rl.metrics import MetricParts, all_reduce
from tests.spawn import run_ranks
from tests.trainer.backends.megatron_policies import gradients, make_backend, network
from tests.trainer.backends.policies import Advised, WeightedLoss, plain_logprobs, some_batch
from tests.trainer.backends.test_megatron_ranks import (
    CHUNKED,
    EXPERTS,
    ONE_PASS,
    OPTIMIZER,
    PACKED,
    PIPELINE,
    SEQUENCE,
    Case,
    assert_near,
    check,
    on_ranks,
    one_process,
    tensor,
)
from tests.trainer.backends.test_megatron_value_model import Plain
from tests.trainer.backends.test_megatron_value_model import check as check_values
from tests.trainer.backends.test_megatron_value_model import train as train_values

CONTEXT = {"context_parallel": 2}
TWO: dict[str, Case] = {
    "rows": ("qwen3", 2, CONTEXT, {"logprobs": CHUNKED, "micro_batch_size": 3}),
    "packed-one-pass": ("qwen2", 2, CONTEXT, PACKED | {"logprobs": ONE_PASS}),
}
MORE_OF_TWO: dict[str, Case] = {
    "dense": ("llama", 2, CONTEXT, {}),
    "checkpointed": ("qwen2", 2, CONTEXT, {"activation_checkpointing": True, "micro_batch_size": 3}),
    "experts": ("qwen3_moe", 2, CONTEXT, {"micro_batch_size": 3}),
    "ep2": ("qwen3_moe", 2, CONTEXT | EXPERTS, PACKED | {"activation_checkpointing": True}),
}
FOUR: dict[str, Case] = {
    "tp2": ("qwen2", 4, CONTEXT | tensor(2), {"logprobs": ONE_PASS, "micro_batch_size": 3}),
    "tp2-sequence": ("qwen3", 4, CONTEXT | SEQUENCE, {"logprobs": CHUNKED, "micro_batch_size": 3}),
    "pp2": ("qwen2", 4, CONTEXT | PIPELINE, {"logprobs": CHUNKED, "micro_batch_size": 2}),
    "dp2": ("llama", 4, CONTEXT, PACKED),
    "cp4": ("qwen3", 4, {"context_parallel": 4}, PACKED),
    "tp2-ep4": ("qwen3_moe", 4, CONTEXT | SEQUENCE | {"expert_parallel": 4}, {"micro_batch_size": 3}),
    "ep2-pp2": ("qwen3_moe", 4, CONTEXT | PIPELINE | EXPERTS, {"micro_batch_size": 2}),
}
VALUES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "own": ("own", CONTEXT, {"micro_batch_size": 3}),
    "shared": ("shared", CONTEXT, PACKED),
}
MORE_VALUES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "own-tp2": ("own", CONTEXT | SEQUENCE, PACKED),
    "shared-tp2": ("shared", CONTEXT | SEQUENCE, {"micro_batch_size": 3}),
    "own-pp2": ("own", CONTEXT | PIPELINE, {"micro_batch_size": 3}),
    "shared-pp2": ("shared", CONTEXT | PIPELINE, {"micro_batch_size": 3}),
}


@dataclass(frozen=True)
class SequenceRatios:
    """GSPO: a ratio of each whole sequence, some of them clipped."""

    weights: Tensor  # [B, S], of the global batch

    @property
    def entropies(self) -> EntropyMode:
        return "none"

    def losses(self, batch: Advised, logprobs: Tensor, entropy: Tensor | None) -> TokenLosses:
        noise = torch.sin(batch.token_ids.float()) / 2
        loss = gspo_loss(
            logprobs,
            (logprobs + noise).detach(),
            batch.advantages,
            batch.token_mask,
            clip_low=0.1,
            clip_high=0.1,
        )
        return TokenLosses(shares=loss.loss * self.weights[: len(batch), : logprobs.shape[1]])

    def metrics(
        self, batch: Advised, logprobs: Tensor, entropy: Tensor | None, losses: TokenLosses
    ) -> MetricParts:
        loss = losses.shares.sum().double()
        return MetricParts(sums={"loss": loss}, maxima={}, minima={})


def sequence_ratios() -> SequenceRatios:
    batch = some_batch()
    counts: Any = {"num_tokens": float(batch.token_mask.sum()), "num_sequences": len(batch)}
    weights = loss_weights(
        batch.token_mask, loss_reduction="sequence_mean", max_completion_tokens=9, **counts
    )
    return SequenceRatios(weights.float())


def of_sequences(cut: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """GSPO's loss, and its gradients."""
    backend, batch = make_backend(cut=cut), some_batch()
    parts = backend.forward_backward(batch[backend.ranks.data_slice(len(batch))], sequence_ratios())
    return all_reduce(parts, backend.ranks.data)["loss"], gradients(backend)


# --- two ranks ---


def on_both(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "trained": on_ranks(rank, world_size, list(TWO.values())),
        "values": {name: train_values(*case) for name, case in VALUES.items()},
        "gspo": of_sequences(CONTEXT),
        "faults": {fault: with_fault(fault) for fault in (None, *FAULTS)},
        "shift in slices": shifted_in_slices(),
    }


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_ranks(on_both, 2)


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_train_as_one_process(case: str, on_two: list[dict[str, Any]]) -> None:
    index = list(TWO).index(case)
    check(TWO[case][0], [of_rank["trained"][index] for of_rank in on_two])


@pytest.mark.parametrize("case", VALUES)
def test_values_are_shifted_as_whole_rows(case: str, on_two: list[dict[str, Any]]) -> None:
    for of_rank in on_two:
        check_values(VALUES[case][0], of_rank["values"][case])


def test_a_sequences_ratio_is_that_of_all_its_tokens(on_two: list[dict[str, Any]]) -> None:
    plain, batch = network(), some_batch()
    logprobs, entropy = plain_logprobs(plain, batch)
    losses = sequence_ratios().losses(batch, logprobs, entropy).shares
    losses.sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for of_rank in on_two:
        loss, found = of_rank["gspo"]
        assert loss == pytest.approx(float(losses.sum().detach()), rel=1e-5)
        assert_near(found, expected, rtol=1e-4, atol=2e-6)


# --- what such a comparison would miss, were it blind ---


def keys_of_own(split: ContextSplit, states: Tensor) -> Tensor:
    whole = states.new_zeros(*states.shape[:-2], len(split.rank_order), states.shape[-1])
    return whole.index_copy(-2, split.local_positions, states)


@contextmanager
def averaged() -> Iterator[None]:
    """Gradients divided by the ranks of the context, of which each has some of the tokens' alone."""
    import abrun.trainer.backends.megatron.parameters as parameters

    reduced = parameters.DistributedDataParallel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            parameters,
            "DistributedDataParallel",
            lambda config, *rest: reduced(replace(config, calculate_per_token_loss=False), *rest),
        )
        yield


def patched(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    @contextmanager
    def entered() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            yield

    return entered


def positions_from_0() -> Any:
    import abrun.trainer.backends.megatron.backend as stages

    def made(positions: Tensor, **more: Any) -> Any:
        return passing(positions=torch.arange(len(positions)), **more)

    passing = stages.MicrobatchParams
    return patched(stages, "MicrobatchParams", made)()


FAULTS: dict[str, Callable[[], Any]] = {
    "averaged": averaged,
    "keys not gathered": patched(ContextSplit, "gather_keys", keys_of_own),
    "positions from 0": positions_from_0,
}


def with_fault(fault: str | None) -> list[float]:
    """Loss and gradient norm of a step."""
    kind, _, cut, policy = TWO["rows"]
    batch = some_batch()
    with FAULTS[fault]() if fault else nullcontext():
        backend = make_backend(kind, temperature=0.7, cut=cut, optimizer=OPTIMIZER, **policy)
        share = batch[backend.ranks.data_slice(len(batch))]
        parts = backend.forward_backward(share, WeightedLoss(float(batch.token_mask.sum())))
        return [all_reduce(parts, backend.ranks.data)["loss"], backend.optimizer_step(0.0)]


def shifted_in_slices() -> dict[str, Any]:
    from abrun.trainer.backends.microbatches import Packing

    gather = Packing.to_full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("abrun.trainer.backends.policy.shift_right", lambda values: values)
        patch.setattr(Packing, "to_full", lambda packing, own: gather(packing, shift_right(own)))
        return train_values(*VALUES["own"])


def test_what_would_be_wrong_is_seen(on_two: list[dict[str, Any]]) -> None:
    """Losses and norms differ, far beyond the tolerance of the tests above, where a rule is broken."""
    expected = one_process(TWO["rows"][0])
    right = [expected["losses"][0], expected["norms"][0]]
    found = dict(on_two[0]["faults"])
    assert found.pop(None) == pytest.approx(right, rel=1e-5)
    for fault, values in found.items():
        assert values != pytest.approx(right, rel=1e-3), fault


def test_a_shift_inside_slices_is_seen(on_two: list[dict[str, Any]]) -> None:
    found, batch = on_two[0]["shift in slices"], some_batch()
    with torch.no_grad():
        expected = Plain(network(), found["head"], 1.0)(batch)
    differs = (found["values"] - expected)[batch.token_mask].abs() > 1e-3
    assert 0 < int(differs.sum()) < differs.numel() / 2  # tokens at borders alone


# --- more ---


@pytest.mark.slow
@pytest.mark.parametrize("cases", [MORE_OF_TWO, FOUR], ids=["two", "four"])
def test_more_cuts_train_as_one_process(cases: dict[str, Case]) -> None:
    ranks = max(size for _, size, *_ in cases.values())
    found = run_ranks(on_ranks, ranks, list(cases.values()), timeout_s=280)
    for index, (kind, *_) in enumerate(cases.values()):
        check(kind, [of_rank[index] for of_rank in found])


def values_on_ranks(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [train_values(*case) for case in MORE_VALUES.values()]


@pytest.mark.slow
def test_values_under_more_cuts_are_those_of_one_process() -> None:
    found = run_ranks(values_on_ranks, 4, timeout_s=280)
    for index, (backbone, *_) in enumerate(MORE_VALUES.values()):
        for of_rank in found:
            check_values(backbone, of_rank[index] | {"head": found[-1][index]["head"]})
