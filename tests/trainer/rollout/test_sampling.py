"""Sampling by inverting the cumulative distribution, and the nucleus filter, against plain loops."""

import math

import pytest
import torch

from abrun.recipe.policy import Filters
from abrun.trainer.rl.sampling import filter_logits, filtered_logprobs, sample, sample_greedily

IGNORED = -100


def plain_top_p(logits: list[float], top_p: float) -> list[float]:
    """Probabilities of the nucleus of one distribution, renormalised; 0 outside."""
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    probabilities = [weight / sum(weights) for weight in weights]
    kept, total = set(), 0.0
    for token in sorted(range(len(logits)), key=lambda i: -logits[i]):
        kept.add(token)
        total += probabilities[token]
        if total >= top_p:
            break
    return [p / total if i in kept else 0.0 for i, p in enumerate(probabilities)]


def some_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_target_outside_the_nucleus_joins_it() -> None:
    logits = torch.tensor([[4.0, 3.0, -5.0]])
    filters = Filters(top_p=0.5)
    logprobs, _ = filtered_logprobs(logits, torch.tensor([2]), filters=filters, ignore_index=IGNORED)
    assert float(logprobs) == pytest.approx(-5.0 - math.log(math.exp(4) + math.exp(-5)), abs=1e-6)


def test_ignored_targets_have_no_logprob_no_entropy_and_no_gradient() -> None:
    logits = some_logits(2, 3, 7).requires_grad_()
    target = torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, 0]])
    logprobs, entropy = filtered_logprobs(logits, target, filters=Filters(top_p=0.9), ignore_index=IGNORED)
    ignored = target == IGNORED
    assert (logprobs[ignored] == 0).all() and (entropy[ignored] == 0).all()
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert (logits.grad[ignored] == 0).all() and (logits.grad[~ignored] != 0).any(dim=-1).all()


def test_gradient_of_filtered_logprobs_is_softmax_inside_the_nucleus() -> None:
    logits = some_logits(1, 9).double().requires_grad_()
    target = logits.detach().argmax(dim=-1)
    logprobs, _ = filtered_logprobs(logits, target, filters=Filters(top_p=0.8), ignore_index=IGNORED)
    logprobs.sum().backward()
    expected = -torch.tensor(plain_top_p(logits.detach()[0].tolist(), 0.8), dtype=torch.float64)
    expected[target] += 1
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], expected)


def test_a_draw_is_where_the_uniform_falls_in_the_cumulative_distribution() -> None:
    logits = torch.tensor([0.25, 0.25, 0.5]).log().expand(6, -1)
    uniform = torch.tensor([0.0, 0.249, 0.251, 0.499, 0.501, 0.999], dtype=torch.float64)
    assert sample(logits, uniform)[0].tolist() == [0, 0, 1, 1, 2, 2]


def test_the_ends_of_the_unit_interval() -> None:
    below_one = math.nextafter(1.0, 0.0)
    nothing = float("-inf")
    rows = torch.tensor(
        [
            [nothing, 1.0, nothing, 2.0, nothing],
            [0.0, nothing, nothing, nothing, nothing],
            [1.0, 2.0, 3.0, 4.0, 5.0],
        ]
    )
    # 1.0 itself stands for a product that was rounded up to the last entry of the cumulative distribution.
    for uniform, expected in ((0.0, [1, 0, 0]), (below_one, [3, 0, 4]), (1.0, [3, 0, 4])):
        tokens, logprobs = sample(rows, torch.full((3,), uniform, dtype=torch.float64))
        assert tokens.tolist() == expected
        assert logprobs.isfinite().all()


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = some_logits(64, 99)
    uniform = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    together, _ = sample(logits, uniform, Filters(top_p=0.9))
    alone = [int(sample(logits[i : i + 1], uniform[i : i + 1], Filters(top_p=0.9))[0]) for i in range(64)]
    assert together.tolist() == alone


def test_the_first_of_equally_likely_tokens_is_the_most_likely_one() -> None:
    tokens, logprobs = sample_greedily(torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 3.0], [-1.0, -2.0, -0.5]]))
    assert tokens.tolist() == [1, 0, 2] and logprobs.tolist() == [0, 0, 0]


def plainly(logits: list[float], filters: Filters) -> list[float]:
    """Probabilities after min_p, then top_k, then top_p, each renormalised; 0 outside."""
    shares = plain_top_p(logits, 1.0)
    kept = [p if p >= filters.min_p * max(shares) else 0.0 for p in shares]
    if filters.top_k is not None:
        least = sorted(kept, reverse=True)[min(filters.top_k, len(kept)) - 1]
        kept = [p if p >= least else 0.0 for p in kept]
    return plain_top_p([math.log(p) if p > 0 else -math.inf for p in kept], filters.top_p)


@pytest.mark.parametrize(
    "filters",
    [
        Filters(top_p=0.5),
        Filters(min_p=0.1),
        Filters(top_k=1),
        Filters(top_k=4),
        Filters(top_k=99),
        Filters(min_p=0.05, top_k=5, top_p=0.7),
    ],
    ids=str,
)
def test_filters_one_after_the_other_are_those_of_a_plain_loop(filters: Filters) -> None:
    logits = some_logits(300, 13)
    uniform = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = sample(logits, uniform, filters)
    judged, entropy = filtered_logprobs(logits, tokens, filters=filters, ignore_index=IGNORED)
    torch.testing.assert_close(judged, logprobs)
    for row, token, logprob, nats in zip(logits.tolist(), tokens, logprobs, entropy, strict=True):
        expected = plainly(row, filters)
        assert float(logprob) == pytest.approx(math.log(expected[int(token)]), abs=1e-5)
        assert float(nats) == pytest.approx(-sum(p * math.log(p) for p in expected if p > 0), abs=1e-5)
    dropped = sum(p == 0 for row in logits.tolist() for p in plainly(row, filters))
    assert (dropped > 0) == (filters.top_k != 99)


def test_tokens_as_likely_as_the_last_of_the_k_are_kept() -> None:
    kept = filter_logits(torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]), Filters(top_k=2))
    assert (kept > -math.inf).tolist() == [False, True, True, True, False]
