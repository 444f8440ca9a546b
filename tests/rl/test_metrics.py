"""Policy metrics by hand, against plain loops, and with garbage under the mask."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.rl.batch import TrainBatch
from abrun.rl.losses import clipped_policy_loss, gspo_loss
from abrun.rl.metrics import MetricParts, document_metrics, merge, merge_keys, policy_metrics
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


def parts_of(
    tensors: Tensors, num_tokens: float | None = None, num_sequences: float | None = None
) -> MetricParts:
    """The contributions of these sequences; counts default to those of these sequences alone."""
    mask = tensors["mask"]
    policy_loss = clipped_policy_loss(
        tensors["trainer"], tensors["old"], tensors["advantages"], mask, clip_low=0.2, clip_high=0.3
    )
    batch = policy_batch(tensors)
    return policy_metrics(
        batch,
        tensors["trainer"],
        tensors["entropy"],
        policy_loss,
        num_tokens=float(mask.sum()) if num_tokens is None else num_tokens,
        num_sequences=float(mask.any(1).sum()) if num_sequences is None else num_sequences,
    )


def values_of(parts: MetricParts) -> dict[str, float]:
    return {key: value.item() for key, value in (parts.sums | parts.maxima | parts.minima).items()}


def metrics(tensors: Tensors) -> dict[str, float]:
    return values_of(parts_of(tensors))


def test_three_tokens_by_hand() -> None:
    # Probabilities of three tokens, the last of them masked; the two that count are a sequence of two.
    def logs(*probabilities: float) -> Tensor:
        return torch.tensor([probabilities]).double().log()

    values = metrics(
        {
            "trainer": logs(0.6, 0.1, 0.9),
            "old": logs(0.4, 0.2, 0.9),
            "inference": logs(0.2, 0.25, 0.1),
            "entropy": torch.tensor([[1.0, 0.5, 9.0]]),
            "advantages": torch.tensor([[2.0, 1.0, 9.0]]),
            "mask": torch.tensor([[True, True, False]]),
        }
    )
    log = math.log
    expected = {
        "token_mult_prob_error": (0.4 / 0.2 + 0.25 / 0.2) / 2,
        "gen_kl_error": ((2 - 1 - log(2)) + (0.8 - 1 - log(0.8))) / 2,
        "policy_kl_error": ((0.5 - 1 + log(2)) + (1.25 - 1 - log(1.25))) / 2,
        # Midpoints 0.3 and 0.225.
        "js_divergence_error": (
            (0.4 / 0.3 - 1 - log(0.4 / 0.3))
            + (0.2 / 0.3 - 1 - log(0.2 / 0.3))
            + (0.2 / 0.225 - 1 - log(0.2 / 0.225))
            + (0.25 / 0.225 - 1 - log(0.25 / 0.225))
        )
        / 4,
        "sampling_importance_ratio": (2.0 + 0.8) / 2,
        "probs_ratio": (1.5 + 0.5) / 2,
        "probs_ratio_clamped": (1.3 + 0.8) / 2,
        "probs_ratio_min": 0.5,
        "probs_ratio_max": 1.5,
        "clip_fraction": 0.5,  # 0.5 is outside the range, but its advantage is positive
        "approx_entropy": -(3.0 * log(0.6) + 0.4 * log(0.1)) / 2,
        "entropy": 0.75,
        "max_seq_mult_prob_error": 1.625,
        "mean_seq_mult_prob_error": 1.625,
        "min_seq_mult_prob_error": 1.625,
        "advantages/mean": 1.5,
        "advantages/min": 1.0,
        "advantages/max": 2.0,
    }
    assert values == pytest.approx({f"train/{key}": value for key, value in expected.items()}, rel=1e-7)


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

    def over_tokens(formula: Callable[[float, float, float, dict[str, float]], float]) -> list[float]:
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

    ratios = over_tokens(lambda c, p, g, _: math.exp(c - p))
    sequence_errors = [
        mean([math.exp(abs(token["inference"] - token["old"])) for token in sequence]) for sequence in tokens
    ]
    advantages = over_tokens(lambda c, p, g, token: token["advantages"])
    expected = {
        "token_mult_prob_error": mean(over_tokens(lambda c, p, g, _: math.exp(abs(g - p)))),
        "gen_kl_error": mean(over_tokens(lambda c, p, g, _: k3(p - g))),
        "policy_kl_error": mean(over_tokens(lambda c, p, g, _: k3(g - p))),
        "js_divergence_error": mean(over_tokens(js)),
        "sampling_importance_ratio": mean(over_tokens(lambda c, p, g, _: math.exp(p - g))),
        "probs_ratio": mean(ratios),
        "probs_ratio_clamped": mean([min(max(ratio, 0.8), 1.3) for ratio in ratios]),
        "probs_ratio_min": min(ratios),
        "probs_ratio_max": max(ratios),
        "clip_fraction": mean(over_tokens(is_clipped)),
        "approx_entropy": -mean(over_tokens(lambda c, p, g, _: math.exp(c - g) * c)),
        "entropy": mean(over_tokens(lambda c, p, g, token: token["entropy"])),
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


def test_an_engine_and_a_policy_that_agree() -> None:
    """One policy everywhere: no error, ratio 1, nothing clipped."""
    batch = random_batch()
    for name in ("trainer", "old"):
        batch[name] = batch["inference"]
    values = metrics(batch)
    for key in ("gen_kl_error", "policy_kl_error", "clip_fraction"):
        assert values[f"train/{key}"] == 0
    assert abs(values["train/js_divergence_error"]) < 1e-15
    for key in ("token_mult_prob_error", "sampling_importance_ratio", "probs_ratio", "probs_ratio_clamped"):
        assert values[f"train/{key}"] == pytest.approx(1, rel=1e-15)
    assert values["train/probs_ratio_min"] == values["train/probs_ratio_max"] == 1


def test_a_few_bad_sequences_show_in_the_sequence_maximum() -> None:
    batch = random_batch(50, 7)
    for name in ("trainer", "old"):
        batch[name] = batch["inference"].clone()
    batch["old"][3, batch["mask"][3].nonzero()[0]] += 3.0
    values = metrics(batch)
    assert values["train/token_mult_prob_error"] < 1.15
    assert values["train/max_seq_mult_prob_error"] > 3
    assert values["train/min_seq_mult_prob_error"] == 1


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_garbage_does_not_leak(garbage: float) -> None:
    batch = random_batch()
    dirty = {name: values.masked_fill(~batch["mask"], garbage) for name, values in batch.items()}
    dirty["mask"] = batch["mask"]
    assert metrics(dirty) == metrics(batch)
    assert all(map(math.isfinite, metrics(batch).values()))


def test_a_nan_that_counts_is_seen() -> None:
    batch = random_batch()
    row, t = batch["mask"].nonzero()[0]
    batch["trainer"][row, t] = math.nan
    values = metrics(batch)
    assert math.isnan(values["train/probs_ratio"]) and math.isnan(values["train/approx_entropy"])


@pytest.mark.parametrize("num_sequences", [0, 2])
def test_a_microbatch_without_tokens_adds_nothing(num_sequences: int) -> None:
    batch = random_batch()
    num_tokens = float(batch["mask"].sum())
    full = parts_of(batch, num_tokens, 5)
    nothing = {name: values[:num_sequences].clone() for name, values in batch.items()}
    nothing["mask"] = torch.zeros_like(nothing["mask"])
    empty = parts_of(nothing, num_tokens, 5)
    assert set(map(float, empty.sums.values())) == {0.0}
    assert set(map(float, empty.maxima.values())) == {-math.inf}
    assert set(map(float, empty.minima.values())) == {math.inf}
    assert values_of(merge([empty, full, empty])) == values_of(full)


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
    mask = tensors["mask"]
    policy_loss = clipped_policy_loss(
        tensors["trainer"], tensors["old"], tensors["advantages"], mask, clip_low=0.2, clip_high=0.3
    )
    batch = policy_batch(tensors)
    full = document_metrics(
        batch,
        tensors["trainer"],
        tensors["entropy"],
        policy_loss,
        num_documents=float(mask.any(1).sum()) if num_sequences is None else num_sequences,
    )
    return merge_keys(parts_of(tensors, num_tokens, num_sequences), full)


def full(tensors: Tensors) -> dict[str, float]:
    return values_of(full_parts_of(tensors))


def test_documents_by_hand() -> None:
    """A document of one token, and one of two; a third token is masked."""

    def logs(*rows: list[float]) -> Tensor:
        return torch.tensor(rows).double().log()

    values = full(
        {
            "trainer": logs([0.4, 0.9], [0.3, 0.1]),
            "old": logs([0.2, 0.9], [0.2, 0.2]),
            "inference": logs([0.2, 0.9], [0.2, 0.2]),
            "entropy": torch.tensor([[1.0, 9.0], [0.5, 0.1]]),
            "advantages": torch.tensor([[2.0, 9.0], [-1.0, -3.0]]),
            "mask": torch.tensor([[True, False], [True, True]]),
        }
    )
    log = math.log
    expected = {
        "old_logprobs": (log(0.2) + (log(0.2) + log(0.2)) / 2) / 2,
        "new_logprobs": (log(0.4) + (log(0.3) + log(0.1)) / 2) / 2,
        "ratio_new_old": (2.0 + (1.5 + 0.5) / 2) / 2,
        "kl_new_old": ((2 - log(2) - 1) + ((1.5 - log(1.5) - 1) + (0.5 - log(0.5) - 1)) / 2) / 2,
        "clipped_ratio_fraction": 1.0,  # 2, 1.5 and 0.5 are all outside, whatever their advantage
        "advantage": (2.0 + (-1.0 - 3.0) / 2) / 2,
        "document_entropy": (1.0 + (0.5 + 0.1) / 2) / 2,
        "ratio_new_old_sum": 4.0,
        "ratio_new_old_squared_sum": 4.0 + 2.25 + 0.25,
        "num_tokens": 3.0,
        "max_advantage": 2.0,
        "min_advantage": -3.0,
    }
    found = {key: values[f"train/{key}"] for key in expected}
    assert found == pytest.approx(expected, rel=1e-6)
    assert values["train/entropy"] == pytest.approx((1.0 + 0.5 + 0.1) / 3, rel=1e-6)  # over tokens
    assert values["train/clip_fraction"] == pytest.approx(2 / 3)  # where the clipped branch is active


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


def test_sums_of_gspo_s_ratio_are_over_sequences_by_hand() -> None:
    """A sequence of one token, ratio 2, and one of two tokens, ratio sqrt(1.5 * 0.5); a third is masked."""

    def logs(*rows: list[float]) -> Tensor:
        return torch.tensor(rows).double().log()

    values = sums_of_gspo(
        {
            "trainer": logs([0.4, 0.9], [0.3, 0.1], [0.3, 0.1]),
            "old": logs([0.2, 0.9], [0.2, 0.2], [0.9, 0.9]),
            "inference": logs([0.2, 0.9], [0.2, 0.2], [0.9, 0.9]),
            "entropy": torch.ones(3, 2),
            "advantages": torch.ones(3, 2).double(),
            "mask": torch.tensor([[True, False], [True, True], [False, False]]),
        }
    )
    assert values["train/ratio_new_old_sum"] == pytest.approx(2.0 + math.sqrt(0.75))
    assert values["train/ratio_new_old_squared_sum"] == pytest.approx(4.0 + 0.75)
    assert (values["train/num_segments"], values["train/num_tokens"]) == (2.0, 3.0)
    assert values["train/ratio_new_old"] == pytest.approx((2.0 + math.sqrt(0.75)) / 2)


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
    mask = batch["mask"]
    weights = torch.where(mask, 2.0, math.nan)
    policy_loss = clipped_policy_loss(
        batch["trainer"], batch["old"], batch["advantages"], mask, clip_low=0.2, clip_high=0.3
    )
    parts = policy_metrics(
        policy_batch(batch, importance_weights=weights),
        batch["trainer"],
        batch["entropy"],
        policy_loss,
        num_tokens=float(mask.sum()),
        num_sequences=5,
    )
    assert parts.sums["train/sampling_importance_ratio"].item() == pytest.approx(2.0)
