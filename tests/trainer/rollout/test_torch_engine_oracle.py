"""The embedded engine against transformers' own pass in float64, and filters written anew in numpy.

Random prompts (ragged, one token, groups), filters to their ends, temperatures, batches, ends and lengths.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from abrun.recipe.policy import ARCHITECTURES, Model, Policy, Rollout
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.checks import check_decoding, check_network
from abrun.trainer.models.families import facts_of
from abrun.trainer.models.sources import character_tokenizer
from abrun.trainer.models.text import Text
from abrun.trainer.models.weights import open_network
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.seeds import Draws
from tests.trainer.models.architectures import tiny_network

Array = NDArray[Any]
NEAR = 1e-4  # of a filter's border: which side a token is on is rounding
SLIDING = {"sliding_window": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1} | SLIDING,
    "qwen3": {},
    "mistral": SLIDING,
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 7.0} | SLIDING,
    "gemma3_text": SLIDING,
    "gpt_oss": SLIDING,
    "cohere": {"logit_scale": 0.3},
    "cohere2": SLIDING,
    "granite": {"logits_scaling": 4.0},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": {},
    "opt": {},
    "phi3": {},
    "falcon": {},
    "bloom": {},
    "llama4_text": {"attention_chunk_size": 4},
    "exaone4": SLIDING,
    "gemma4": {},
}
QUICK = ("gpt2", "mistral")  # learned positions, which padding must not shift, and a cache that grows


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What was drawn of one row's logits, judged anew."""

    logprobs: Array  # [V] float64, -inf of what filters drop
    is_near: bool  # a token is so near to a border that rounding decides


def judged(logits: Array, rollout: Rollout) -> Drawn:
    """vLLM's order: temperature, min_p, top_k, top_p."""
    scaled = logits.astype(np.float64) / rollout.temperature
    shares = np.exp(scaled - scaled.max())
    shares /= shares.sum()
    kept, gaps = np.ones(len(shares), bool), [1.0]
    if rollout.min_p:
        relative = shares / shares.max()
        kept &= relative >= rollout.min_p
        gaps.append(np.abs(relative / rollout.min_p - 1).min())
    if rollout.top_k and rollout.top_k < kept.sum():
        order = sorted(kept.nonzero()[0], key=lambda token: -shares[token])
        last, following = (shares[order[place]] for place in (rollout.top_k - 1, rollout.top_k))
        kept &= shares >= last
        gaps.append(1 - following / last)
    if rollout.top_p < 1:
        order = sorted(kept.nonzero()[0], key=lambda token: -shares[token])
        reached = np.cumsum(shares[order]) / shares[kept].sum()
        count = 1 + int((reached < rollout.top_p).sum())
        if count < len(order):
            kept[order[count:]] = False
            gaps.append(1 - shares[order[count]] / shares[order[count - 1]])
        gaps.append(np.abs(reached - rollout.top_p).min())
    with np.errstate(divide="ignore"):
        logprobs = np.where(kept, np.log(shares / shares[kept].sum()), -np.inf)
    return Drawn(logprobs=logprobs, is_near=min(gaps) < NEAR)


def some_rollout(pick: random.Random, vocab_size: int) -> Rollout:
    settings: dict[str, Any] = {
        "temperature": pick.choice([1.0, 0.3, 0.05, 3.0, 0.7]),
        "max_new_tokens": pick.choice([1, 2, 5, 13, 22]),
        "batch_size": pick.choice([None, 1, 3]),
    }
    if pick.random() < 0.7:
        settings["top_p"] = pick.choice([1.0, 1e-9, 0.3, 0.9, 0.999])
        settings["top_k"] = pick.choice([None, 1, 3, vocab_size, 10**6])
        settings["min_p"] = pick.choice([0.0, 0.9999, 0.1, 1e-6, 1e-30])
    return Rollout(**settings)


def compared(network: Any, seed: int) -> Iterator[tuple[float, float]]:
    """Log-prob of each token that was drawn: the engine's and ours, in units that the temperature has not
    blown up. Asserts all else."""
    pick, size = random.Random(seed), network.get_output_embeddings().weight.shape[0]
    exact = copy.deepcopy(network).double().eval()
    if getattr(exact.config, "_experts_implementation", None):
        exact.set_experts_implementation("eager")
    ends = frozenset(pick.sample(range(2, size), k=pick.choice([1, size // 10])))
    text = Text(tokenizer=character_tokenizer(), end_ids=ends, max_positions=None)
    lengths = [pick.choice([1, 2, 3, 7, 20, 33]) for _ in range(pick.choice([1, 2, 5, 9]))]
    prompts = [[pick.randrange(3, size) for _ in range(length)] for length in lengths]
    prompts = [prompt for prompt in prompts for _ in range(pick.choice([1, 2]))]
    rollout = some_rollout(pick, size)
    backend = DtensorBackend(
        lambda: network,
        Policy(),
        make_ranks(torch.device("cpu"), {}),
        temperature=rollout.temperature,
        filters=rollout.filters,
    )
    engine, unit = TorchEngine(rollout, backend, text), min(1.0, rollout.temperature)
    draws = Draws(seed=seed, stream="sampling", step=1, rows=range(len(prompts)))
    completions = engine.generate(prompts, draws)
    assert completions == engine.generate(prompts, draws)
    support = [one.support for one in completions if one.support is not None] or None
    scored = engine.score(prompts, [one.token_ids for one in completions], support)
    for prompt, one, again in zip(prompts, completions, scored, strict=True):
        assert again == pytest.approx(one.logprobs, abs=1e-5 / unit)
        assert not set(one.token_ids[:-1]) & ends and one.truncated == (one.token_ids[-1] not in ends)
        assert len(one.token_ids) == len(one.logprobs) <= rollout.max_new_tokens
        assert not one.truncated or len(one.token_ids) == rollout.max_new_tokens
        with torch.no_grad():
            logits = exact(input_ids=torch.tensor([prompt + one.token_ids]), use_cache=False).logits[0]
        for place, (token, logprob) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            found = judged(logits[len(prompt) - 1 + place].numpy(), rollout)
            if found.is_near:
                continue
            if one.support is not None:
                bits = np.unpackbits(one.support[place].numpy(), bitorder="little")
                assert bits[:size].astype(bool).tolist() == (found.logprobs > -np.inf).tolist()
                assert not bits[size:].any()
            yield logprob * unit, float(found.logprobs[token]) * unit


def enlarged(network: Any) -> Any:
    """Against flat distributions."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return network


def assert_alike(network: Any, seed: int) -> int:
    found = list(compared(network, seed))
    assert all(abs(engine - exact) < 1e-5 for engine, exact in found), f"seed {seed}"
    return len(found)


def preset(name: Any, seed: int) -> Any:
    return enlarged(open_network(Model(preset=name), weights=None, seed=seed, decodes=True))


def test_what_is_drawn_and_kept_is_that_of_one_pass_in_float64(group: None) -> None:
    names = ("qwen2-tiny", "qwen3-moe-tiny")
    assert sum(assert_alike(preset(name, seed), seed) for name in names for seed in range(4)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "tiny" in name])
def test_of_every_small_preset(name: str, group: None) -> None:
    assert sum(assert_alike(preset(name, seed), seed) for seed in range(4, 12)) > 100


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES],
)
def test_of_every_family(kind: str, group: None) -> None:
    """Whose windows and chunks are shorter than its prompts."""
    count = 0
    for seed in range(8):
        network = tiny_network(kind, **FAMILIES[kind])
        facts = facts_of(network)
        check_network(network, facts)
        network.decodes_in_place = check_decoding(network, facts)
        count += assert_alike(enlarged(network), seed)
    assert count > 50
