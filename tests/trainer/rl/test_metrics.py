"""Policy metrics by hand, against plain loops, and with garbage under the mask."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.rl.batch import TrainBatch
from abrun.trainer.rl.losses import PolicyLoss, clipped_policy_loss, gspo_loss
from abrun.trainer.rl.metrics import MetricParts, document_metrics, merge, merge_keys, policy_metrics
from tests.snapshot import Snapshot

Tensors = dict[str, Tensor]


def random_batch(num_sequences: int = 6, length: int = 7) -> Tensors:
    """Everything known of a batch's tokens; the last sequence has no valid token."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inference = -1.0 - normal(num_sequences, length).abs()
    old = inference + 0.2 * normal(num_sequences, length)
    mask = torch.rand(num_sequences, length, generator=generator) > 0.3
    mask[-1] = False
    return {
        "trainer": old + 0.3 * normal(num_sequences, length),
        "old": old,
        "inference": inference,
        "reference": old + 0.2 * normal(num_sequences, length),
        "entropy": normal(num_sequences, length).abs(),
        "advantages": normal(num_sequences, length),
        "mask": mask,
    }


def policy_batch(tensors: Tensors, importance_weights: Tensor | None = None) -> TrainBatch:
    return TrainBatch(
        token_ids=torch.zeros_like(tensors["mask"], dtype=torch.int64),
        token_mask=tensors["mask"],
        advantages=tensors["advantages"],
        inference_logprobs=tensors["inference"],
        old_logprobs=tensors["old"],
        reference_logprobs=None,
        importance_weights=importance_weights,
        loss_weights=tensors["mask"].double(),
    )


def clipped_loss(tensors: Tensors) -> PolicyLoss:
    logprobs = (tensors[name] for name in ("trainer", "old", "advantages", "mask"))
    return clipped_policy_loss(*logprobs, clip_low=0.2, clip_high=0.3)


def parts_of(
    tensors: Tensors,
    num_tokens: float | None = None,
    num_sequences: float | None = None,
    importance_weights: Tensor | None = None,
) -> MetricParts:
    """The contributions of these sequences; counts default to those of these sequences alone."""
    mask = tensors["mask"]
    return policy_metrics(
        policy_batch(tensors, importance_weights),
        tensors["trainer"],
        tensors["entropy"],
        clipped_loss(tensors),
        num_tokens=float(mask.sum()) if num_tokens is None else num_tokens,
        num_sequences=float(mask.any(1).sum()) if num_sequences is None else num_sequences,
    )


def values_of(parts: MetricParts) -> dict[str, float]:
    return {key: value.item() for key, value in (parts.sums | parts.maxima | parts.minima).items()}


def metrics(tensors: Tensors) -> dict[str, float]:
    return values_of(parts_of(tensors))


def test_agrees_with_plain_loops() -> None:
    batch = random_batch()
    tokens: list[list[dict[str, float]]] = []
    for row in range(6):
        sequence = []
        for t in range(7):
            if batch["mask"][row, t]:
                sequence.append({name: values[row, t].item() for name, values in batch.items()})
        if sequence:
            tokens.append(sequence)
    assert len(tokens) == 5

    def k3(x: float) -> float:
        return math.exp(x) - 1 - x

    def spread_over_tokens(formula: Callable[[float, float, float, dict[str, float]], float]) -> list[float]:
        return [
            formula(token["trainer"], token["old"], token["inference"], token)
            for sequence in tokens
            for token in sequence
        ]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def js(c: float, p: float, g: float, _: Any) -> float:
        m = math.log(math.exp(p) / 2 + math.exp(g) / 2)
        return k3(p - m) / 2 + k3(g - m) / 2

    def is_clipped(c: float, p: float, g: float, token: dict[str, float]) -> float:
        ratio, advantage = math.exp(c - p), token["advantages"]
        return float((advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.8))

    ratios = spread_over_tokens(lambda c, p, g, _: math.exp(c - p))
    sequence_errors = [
        mean([math.exp(abs(token["inference"] - token["old"])) for token in sequence]) for sequence in tokens
    ]
    advantages = spread_over_tokens(lambda c, p, g, token: token["advantages"])
    expected = {
        "token_mult_prob_error": mean(spread_over_tokens(lambda c, p, g, _: math.exp(abs(g - p)))),
        "gen_kl_error": mean(spread_over_tokens(lambda c, p, g, _: k3(p - g))),
        "policy_kl_error": mean(spread_over_tokens(lambda c, p, g, _: k3(g - p))),
        "js_divergence_error": mean(spread_over_tokens(js)),
        "sampling_importance_ratio": mean(spread_over_tokens(lambda c, p, g, _: math.exp(p - g))),
        "probs_ratio": mean(ratios),
        "probs_ratio_clamped": mean([min(max(ratio, 0.8), 1.3) for ratio in ratios]),
        "probs_ratio_min": min(ratios),
        "probs_ratio_max": max(ratios),
        "clip_fraction": mean(spread_over_tokens(is_clipped)),
        "approx_entropy": -mean(spread_over_tokens(lambda c, p, g, _: math.exp(c - g) * c)),
        "entropy": mean(spread_over_tokens(lambda c, p, g, token: token["entropy"])),
        "max_seq_mult_prob_error": max(sequence_errors),
        "mean_seq_mult_prob_error": mean(sequence_errors),
        "min_seq_mult_prob_error": min(sequence_errors),
        "advantages/mean": mean(advantages),
        "advantages/min": min(advantages),
        "advantages/max": max(advantages),
    }
    values = metrics(batch)
    assert 0 < values["train/clip_fraction"] < 1
    assert values == pytest.approx({f"train/{key}": value for key, value in expected.items()}, rel=1e-12)


def test_a_nan_that_counts_is_seen() -> None:
    batch = random_batch()
    row, t = batch["mask"].nonzero()[0]
    batch["trainer"][row, t] = math.nan
    values = metrics(batch)
    assert math.isnan(values["train/probs_ratio"]) and math.isnan(values["train/approx_entropy"])


def test_no_gradient_flows() -> None:
    batch = random_batch()
    batch["trainer"].requires_grad_()
    batch["entropy"].requires_grad_()
    parts = parts_of(batch)
    tensors = [*parts.sums.values(), *parts.maxima.values(), *parts.minima.values()]
    assert not any(value.requires_grad for value in tensors)
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in tensors)


def test_merge_adds_and_compares(snapshot: Snapshot) -> None:
    one, two = torch.tensor(1.0).double(), torch.tensor(2.0).double()
    first = MetricParts(sums={"a": one}, maxima={"b": one}, minima={"c": one})
    second = MetricParts(sums={"a": two}, maxima={"b": two}, minima={"c": two})
    assert values_of(merge([first, second])) == {"a": 3.0, "b": 2.0, "c": 1.0}
    other = MetricParts(sums={"a": one, "x": one}, maxima={"b": one}, minima={"c": one})
    with pytest.raises(AssertionError) as refusal:
        merge([first, other])
    snapshot(refusal.value)


# --- level full: Fast-LLM's, a document as much as another ---


def full_parts_of(
    tensors: Tensors, num_tokens: float | None = None, num_sequences: float | None = None
) -> MetricParts:
    """Both levels' contributions; counts default to those of these sequences alone."""
    full = document_metrics(
        policy_batch(tensors),
        tensors["trainer"],
        tensors["entropy"],
        clipped_loss(tensors),
        num_documents=float(tensors["mask"].any(1).sum()) if num_sequences is None else num_sequences,
    )
    return merge_keys(parts_of(tensors, num_tokens, num_sequences), full)


def full(tensors: Tensors) -> dict[str, float]:
    return values_of(full_parts_of(tensors))


def test_documents_agree_with_plain_loops() -> None:
    batch = random_batch()
    documents: list[list[dict[str, float]]] = []
    for row in range(6):
        tokens = [t for t in range(7) if batch["mask"][row, t]]
        if tokens:
            documents.append(
                [{name: values[row, t].item() for name, values in batch.items()} for t in tokens]
            )

    def ratio(token: dict[str, float]) -> float:
        return math.exp(token["trainer"] - token["old"])

    def mean(formula: Callable[[dict[str, float]], float]) -> float:
        return sum(sum(map(formula, tokens)) / len(tokens) for tokens in documents) / len(documents)

    every = [token for tokens in documents for token in tokens]
    expected = {
        "old_logprobs": mean(lambda token: token["old"]),
        "new_logprobs": mean(lambda token: token["trainer"]),
        "ratio_new_old": mean(ratio),
        "kl_new_old": mean(lambda token: ratio(token) - math.log(ratio(token)) - 1),
        "clipped_ratio_fraction": mean(lambda token: float(not 0.8 <= ratio(token) <= 1.3)),
        "advantage": mean(lambda token: token["advantages"]),
        "document_entropy": mean(lambda token: token["entropy"]),
        "ratio_new_old_sum": sum(map(ratio, every)),
        "ratio_new_old_squared_sum": sum(ratio(token) ** 2 for token in every),
        "num_tokens": len(every),
        "max_advantage": max(token["advantages"] for token in every),
        "min_advantage": min(token["advantages"] for token in every),
    }
    values = full(batch)
    assert values.keys() - metrics(batch).keys() == {f"train/{key}" for key in expected}
    for key, value in expected.items():
        assert values[f"train/{key}"] == pytest.approx(value, rel=1e-12), key


def sums_of_gspo(tensors: Tensors) -> dict[str, float]:
    """What level full says of GSPO's ratio, which is a sequence's."""
    old, trainer, mask = (tensors[name] for name in ("old", "trainer", "mask"))
    policy_loss = gspo_loss(trainer, old, tensors["advantages"], mask, clip_low=0.1, clip_high=0.1)
    parts = document_metrics(
        policy_batch(tensors),
        trainer,
        tensors["entropy"],
        policy_loss,
        num_documents=float(mask.any(1).sum()),
    )
    return values_of(parts)


def test_sums_of_gspo_s_ratio_agree_with_plain_loops() -> None:
    """As Fast-LLM's: each sequence's ratio once, whatever its length. Masked garbage counts nowhere."""
    batch = random_batch()
    ratios = []
    for row in range(6):
        tokens = [t for t in range(7) if batch["mask"][row, t]]
        changes = [float(batch["trainer"][row, t] - batch["old"][row, t]) for t in tokens]
        if tokens:
            ratios.append(math.exp(sum(changes) / len(changes)))
    for garbage in (0.0, math.nan, math.inf):
        dirty = {name: values.masked_fill(~batch["mask"], garbage) for name, values in batch.items()}
        values = sums_of_gspo(dirty | {"mask": batch["mask"]})
        assert values["train/num_segments"] == len(ratios) == 5
        assert values["train/ratio_new_old_sum"] == pytest.approx(sum(ratios), rel=1e-12)
        squares = sum(ratio**2 for ratio in ratios)
        assert values["train/ratio_new_old_squared_sum"] == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_garbage_does_not_leak_into_documents(garbage: float) -> None:
    batch = random_batch()
    dirty = {name: values.masked_fill(~batch["mask"], garbage) for name, values in batch.items()}
    dirty["mask"] = batch["mask"]
    assert full(dirty) == full(batch)


def test_the_importance_ratio_is_reported_after_its_correction() -> None:
    batch = random_batch()
    weights = torch.where(batch["mask"], 2.0, math.nan)
    parts = parts_of(batch, importance_weights=weights)
    assert parts.sums["train/sampling_importance_ratio"].item() == pytest.approx(2.0)
