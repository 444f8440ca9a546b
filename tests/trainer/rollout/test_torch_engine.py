"""The embedded engine against a plain loop without cache, padding or batches, and against the trainer."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from abrun.recipe.policy import Logprobs, Model, Policy, Rollout
from abrun.tools.trace.observe import one_ulp_away
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models import checks
from abrun.trainer.models.sources import character_tokenizer
from abrun.trainer.models.text import Text
from abrun.trainer.models.weights import open_network
from abrun.trainer.rl.batch import scatter_support
from abrun.trainer.rollout import Completion, torch_engine
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.seeds import Draws
from tests.trainer.rollout.vllm_sampling import batch_of

PROMPTS = ["1+1=", "a rather long prompt, to pad the others for: 12345+67890=", "x", "30+12=", "Q: why?"] * 2
MAX_NEW_TOKENS = 9
DISTRIBUTIONS = [(1.0, 1.0), (0.7, 1.0), (1.6, 1.0), (1.0, 0.8), (0.7, 0.8)]


TEXT = Text(tokenizer=character_tokenizer(), end_ids=frozenset(range(70, 90)), max_positions=None)
ENCODED = TEXT.encode_prompts(PROMPTS)


def make_model() -> Any:
    """Random weights, scaled up against flat distributions; a fifth of the tokens end a completion."""
    network: Any = open_network(Model(preset="qwen2-tiny"), weights=None, seed=2, decodes=True)
    assert network.decodes_in_place
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return network


def make_backend(network: Any, rollout: Rollout, policy: Policy | None = None) -> DtensorBackend:
    ranks = make_ranks(torch.device("cpu"), {})
    return DtensorBackend(
        lambda: network, policy or Policy(), ranks, temperature=rollout.temperature, filters=rollout.filters
    )


def generate(
    model: Any,
    rollout: Rollout,
    policy: Policy | None = None,
    prompts: list[str] = PROMPTS,
    temperature: float | None = None,
) -> tuple[DtensorBackend, list[Completion]]:
    backend = make_backend(model, rollout, policy)
    encoded = TEXT.encode_prompts(prompts)
    engine = TorchEngine(rollout, backend, TEXT)
    return backend, engine.generate(encoded, draws(len(prompts)), temperature=temperature)


def draws(count: int) -> Draws:
    return Draws(seed=6, stream="sampling", step=1, rows=range(count))


def test_at_temperature_zero_every_token_is_the_most_likely_one(group: None) -> None:
    model = make_model()
    expected = []
    for prompt in TEXT.encode_prompts(PROMPTS):
        tokens: list[int] = []
        while len(tokens) < MAX_NEW_TOKENS and not TEXT.end_ids & {*tokens}:
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
        expected.append(tokens)
    for trained in (1.0, 0.7):
        rollout = Rollout(temperature=trained, top_p=0.8, max_new_tokens=MAX_NEW_TOKENS)
        _, completions = generate(make_model(), rollout, temperature=0.0)
        assert [completion.token_ids for completion in completions] == expected
        assert not any(logprob for completion in completions for logprob in completion.logprobs)
    assert len({len(tokens) for tokens in expected}) > 1  # the example should have several lengths


@pytest.mark.parametrize("first_room", [1, 2, 3])
def test_a_cache_gets_more_places_as_completions_need_them(
    first_room: int, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = Rollout(max_new_tokens=MAX_NEW_TOKENS)
    _, expected = generate(make_model(), rollout)
    monkeypatch.setattr(torch_engine, "INITIAL_SLOTS", first_room)
    monkeypatch.setattr(checks, "MULTIPLE", 1)
    _, found = generate(make_model(), rollout)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.truncated) == (other.token_ids, other.truncated)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("impl", "temperature", "top_p"),
    # A fused path has no logits to filter: the recipe refuses top_p with it.
    [("logits", *one) for one in DISTRIBUTIONS] + [("chunked", *one) for one in DISTRIBUTIONS if one[1] == 1],
)
def test_the_trainer_computes_the_same_logprobs(
    impl: str, temperature: float, top_p: float, group: None
) -> None:
    model = make_model()
    rollout = Rollout(temperature=temperature, top_p=top_p, max_new_tokens=MAX_NEW_TOKENS)
    policy = Policy(logprobs=Logprobs.model_validate({"impl": impl}))
    backend, completions = generate(model, rollout, policy)
    batch = batch_of(completions, ENCODED)
    torch.testing.assert_close(backend.compute_logprobs(batch), batch.inference_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("impl", ["logits", "chunked"])
def test_with_a_float32_head_engine_and_trainer_agree_better_in_bfloat16(impl: str, group: None) -> None:
    """The dense path rounds its logits as the engine does, but of other hidden states: without a cache.

    On some processors both passes round alike, so the trainer's states move by one ULP here.
    """
    excess = {}
    for head_dtype in (None, "float32"):
        model = make_model()
        with torch.no_grad():  # all logits far from 0, as trained models have them, and so coarsely rounded
            model.get_output_embeddings().weight[:, 0] += 3.0  # pyright: ignore
        logprobs = Logprobs.model_validate({"impl": impl, "head_dtype": head_dtype})
        policy = Policy(dtype="bfloat16", logprobs=logprobs)
        backend, completions = generate(model, Rollout(max_new_tokens=MAX_NEW_TOKENS), policy)
        backend.module.network.model.norm.register_forward_hook(
            lambda module, states, output: one_ulp_away(output, "bfloat16", 0, "norm")
        )
        batch = batch_of(completions, ENCODED)
        error = (backend.compute_logprobs(batch) - batch.inference_logprobs).abs().exp()
        excess[head_dtype] = float(error[batch.token_mask].mean()) - 1
    print(impl, "token_mult_prob_error - 1 by dtype of the head:", excess)
    assert 0 < excess["float32"] < excess[None] / 4


FILTERS: list[dict[str, float]] = [{"top_p": 0.3}, {"top_k": 7}, {"min_p": 0.05, "top_k": 30, "top_p": 0.9}]


def test_sets_are_kept_where_they_are_trained_on(group: None) -> None:
    for settings in ({"top_p": 1.0}, {"top_p": 0.8, "exact_support": False}):
        _, completions = generate(make_model(), Rollout.model_validate(settings | {"max_new_tokens": 2}))
        assert not any(completion.support is not None for completion in completions)
    _, validated = generate(make_model(), Rollout(top_p=0.8, max_new_tokens=2), temperature=0.7)
    assert not any(completion.support is not None for completion in validated)


@pytest.mark.parametrize("filters", FILTERS)
def test_in_another_precision_the_samplers_own_sets_agree_better(
    filters: dict[str, float], group: None
) -> None:
    """At the border of a set, rounding makes the trainer keep another one.

    The sampler computes in bfloat16 and the trainer in float32, as bfloat16 alone does not differ everywhere:
    on some processors a pass over the sequence and one a token round alike.
    """
    rollout = Rollout.model_validate(filters | {"max_new_tokens": MAX_NEW_TOKENS})
    _, completions = generate(make_model(), rollout, Policy(dtype="bfloat16"))
    backend = make_backend(make_model(), rollout)
    own, exact = batch_of(completions, ENCODED), batch_of(completions, ENCODED)
    kept = [completion.support for completion in completions if completion.support is not None]
    exact = replace(exact, support=scatter_support(kept, exact.token_mask))
    excess = []
    for batch in (own, exact):
        error = (backend.compute_logprobs(batch) - batch.inference_logprobs).abs().exp()
        excess.append(float(error[batch.token_mask].mean()) - 1)
    print(filters, "token_mult_prob_error - 1, own, exact sets:", excess)
    assert 0 < excess[1] < excess[0] / 1.1


def test_it_samples_from_the_weights_of_the_moment(group: None) -> None:
    """Weights are shared: after an optimizer step the engine's log-probs are the stepped policy's."""
    model, rollout = make_model(), Rollout(max_new_tokens=MAX_NEW_TOKENS)
    backend = make_backend(model, rollout)
    engine = TorchEngine(rollout, backend, TEXT)
    prompts = TEXT.encode_prompts(PROMPTS)
    before = engine.generate(prompts, draws(len(PROMPTS)))
    for parameter in backend.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    backend.optimizer_step(0.05)
    after = engine.generate(prompts, draws(len(PROMPTS)))
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    batch = batch_of(after, ENCODED)
    torch.testing.assert_close(backend.compute_logprobs(batch), batch.inference_logprobs, atol=1e-4, rtol=0)


def test_generation_copies_no_weights_once_they_are_gathered(group: None) -> None:
    """While decoding every forward pass uses the same storages."""
    model = make_model()
    backend = make_backend(model, Rollout())
    token_ids = torch.tensor(TEXT.encode_prompts(["1+1="]))
    with torch.no_grad(), backend.decoding() as decoder:
        seen = []
        for _ in range(2):
            decoder(token_ids, torch.ones_like(token_ids), torch.arange(4)[None], None)
            seen.append([parameter.data_ptr() for parameter in backend.module.parameters()])
        assert not backend.module.training
    assert seen[0] == seen[1] and all(seen[0])
    assert backend.module.training
