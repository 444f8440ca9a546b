"""Precision of the LM head: what the trainer scores with, and what the rollout engine samples from."""

from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.recipe.policy import NO_FILTERS, Filters, Logprobs
from abrun.trainer.backends.head import LmHead

draw = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(6, 32, generator=draw).bfloat16()
WEIGHT = torch.randn(50, 32, generator=draw).div(4).bfloat16()
TARGET = torch.arange(6)
EXACT = HIDDEN.double() @ WEIGHT.double().T


def make_head(engine_dtype: str | None = None, filters: Filters = NO_FILTERS, **logprobs: Any) -> LmHead:
    return LmHead(
        Logprobs(**logprobs),
        temperature=1.0,
        filters=filters,
        scale=1.0,
        softcap=None,
        engine_dtype=engine_dtype,
    )


def error(logits: Tensor) -> float:
    return float((logits.double() - EXACT).abs().max())


@pytest.mark.parametrize(
    ("trainer", "engine", "is_exact"),
    [
        ({}, None, False),
        ({}, "float32", True),
        ({"head_dtype": "float32"}, None, True),
        ({"head_dtype": "float32"}, "bfloat16", False),
        ({"logits_dtype": "float32"}, None, False),  # the trainer's logits are not the engine's
    ],
)
def test_an_engine_samples_from_logits_of_its_own_precision(
    trainer: dict[str, Any], engine: str | None, is_exact: bool
) -> None:
    assert (error(make_head(engine, **trainer).compute_logits(HIDDEN, WEIGHT)) < 1e-4) == is_exact


@pytest.mark.parametrize(
    ("impl", "filters"), [("logits", NO_FILTERS), ("chunked", NO_FILTERS), ("logits", Filters(top_k=49))]
)
@pytest.mark.parametrize(
    ("trainer", "is_exact"),
    [({}, False), ({"logits_dtype": "float32"}, True), ({"head_dtype": "float32"}, True)],
)
def test_the_trainer_scores_with_logits_of_its_own_precision(
    impl: str, filters: Filters, trainer: dict[str, Any], is_exact: bool
) -> None:
    """With a filtered sampler as without; the engine's precision does not matter."""
    for engine in (None, "float32"):
        head = make_head(engine, filters, impl=impl, **trainer)
        output = head.compute_logprobs(HIDDEN, WEIGHT, TARGET, "value")
        kept = EXACT
        if filters.drop_tokens:
            dropped = EXACT.argmin(dim=1, keepdim=True)
            kept = EXACT.scatter(1, dropped, float("-inf"))
        exact = kept.log_softmax(1).gather(1, TARGET[:, None])[:, 0]
        assert (float((output.logprobs - exact).abs().max()) < 1e-4) == is_exact
        assert output.entropies is not None and not output.entropies.requires_grad
