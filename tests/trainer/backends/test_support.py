"""Log-probs on the sets of tokens that a sampler kept, however a batch is cut, against plain logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.rl.batch import Sequences
from abrun.trainer.rl.sampling import pack_bits, unpack_bits
from tests.spawn import run_ranks
from tests.trainer.backends import megatron_policies, policies
from tests.trainer.backends.policies import Advised, WeightedLoss, some_batch

VOCAB, TEMPERATURE, TOP_P = 99, 0.7, 0.8  # the trainer's own filter would keep other sets
Case = tuple[str, dict[str, Any]]
ALONE: dict[str, Case] = {
    "rows": ("dtensor", {"micro_batch_size": 3}),
    "packed": ("dtensor", {"packing": True, "micro_batch_tokens": 20}),
    "megatron": ("megatron", {}),
    "megatron, packed": ("megatron", {"packing": True, "micro_batch_tokens": 20}),
}
ON_TWO: dict[str, Case] = {
    "context": ("dtensor", {"backend": {"context_parallel": 2}}),
    "tensor": ("dtensor", {"backend": {"tensor_parallel": 2}, "packing": True}),
    "megatron, context": ("megatron", {"cut": {"context_parallel": 2}, "packing": True}),
    "megatron, tensor": ("megatron", {"cut": {"tensor_parallel": 2}}),
    "megatron, pipeline": ("megatron", {"cut": {"pipeline_parallel": 2}, "micro_batch_size": 4}),
}


def with_support() -> Advised:
    """Random sets, a third of the vocabulary each, with the token that was drawn among them."""
    batch = some_batch()
    draw = torch.Generator().manual_seed(5)
    kept = torch.rand(*batch.token_ids.shape, VOCAB, generator=draw) < 0.3
    kept = kept.scatter(-1, batch.token_ids[..., None], True) & batch.token_mask[..., None]
    return replace(batch, support=pack_bits(kept))


def make(backend: str, settings: dict[str, Any]) -> Any:
    kinds = {"dtensor": (policies, "llama"), "megatron": (megatron_policies, "llama")}
    module, kind = kinds[backend]
    return module.make_backend(kind, temperature=TEMPERATURE, top_p=TOP_P, **settings)


def plainly(backend: str, batch: Sequences) -> Tensor:
    """Log-probs [B, S], a row at a time, from the network's own logits."""
    network = policies.tiny("llama") if backend == "dtensor" else megatron_policies.network("llama")
    out = torch.zeros(batch.token_ids.shape)
    assert batch.support is not None
    for row, ids in enumerate(batch.token_ids):
        with torch.no_grad():
            logits = network(ids[None]).logits[0].float() / TEMPERATURE
        for place in batch.token_mask[row].nonzero()[:, 0].tolist():
            kept = unpack_bits(batch.support[row, place], VOCAB)
            among = logits[place - 1][kept].log_softmax(dim=-1)
            out[row, place] = among[int(kept[: ids[place]].sum())]
    return out


def judged(backend: str, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Log-probs, and the norm of a loss's gradient."""
    made, batch = make(backend, settings), with_support()
    logprobs = made.compute_logprobs(batch)
    made.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    return logprobs, made.optimizer_step(0.0)


@pytest.mark.parametrize("case", ALONE)
def test_the_kept_sets_are_the_samplers(case: str, group: None) -> None:
    backend, settings = ALONE[case]
    logprobs, norm = judged(backend, settings)
    torch.testing.assert_close(logprobs, plainly(backend, with_support()), atol=2e-5, rtol=1e-5)
    assert norm == pytest.approx(judged(backend, {})[1], rel=1e-4)
    own = make(backend, settings).compute_logprobs(replace(with_support(), support=None))
    assert float((own - logprobs).abs().max()) > 0.1  # the trainer's own sets should be others


def on_a_rank(rank: int, world_size: int) -> dict[str, tuple[Tensor, float]]:
    return {case: judged(*ON_TWO[case]) for case in ON_TWO}


@pytest.mark.megatron
def test_on_two_ranks(group: None) -> None:
    expected = {backend: judged(backend, {}) for backend in ("dtensor", "megatron")}
    for found in run_ranks(on_a_rank, 2):
        for case, (logprobs, norm) in found.items():
            right, right_norm = expected[ON_TWO[case][0]]
            torch.testing.assert_close(
                logprobs, right, atol=2e-5, rtol=1e-5, msg=lambda m, c=case: f"{c}: {m}"
            )
            assert norm == pytest.approx(right_norm, rel=1e-4), case


def test_bits_come_back() -> None:
    for size in (1, 7, 8, 9, 99, 1000):
        kept = torch.rand(3, 4, size, generator=torch.Generator().manual_seed(size)) < 0.5
        bits = pack_bits(kept)
        assert bits.shape == (3, 4, -(-size // 8)) and bits.dtype == torch.uint8
        assert torch.equal(unpack_bits(bits, size), kept)
