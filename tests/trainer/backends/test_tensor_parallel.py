"""A policy over ranks, by any layout, against the same backend in one process; and with faults in it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate
from transformers import (
    AutoModelForCausalLM,
)

from abrun.errors import RecipeError
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Filters, Model, Policy, Rollout
from abrun.trainer.backends import context
from abrun.trainer.backends.context import ContextSplit
from abrun.trainer.backends.dtensor import DtensorBackend, tensor_parallel
from abrun.trainer.backends.dtensor.tensor_parallel import TensorParallel, check_fits
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.recorder import hash_policy
from abrun.trainer.models.sources import character_tokenizer
from abrun.trainer.models.text import Text
from abrun.trainer.models.weights import Checkpoint, content_of, open_network, published, weights_hash
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.seeds import Draws
from tests.spawn import run_ranks
from tests.trainer.backends.megatron_policies import network
from tests.trainer.backends.policies import (
    CPU,
    WeightedLoss,
    gradients,
    some_batch,
    tiny,
    whole_gradients,
)
from tests.trainer.backends.test_value_model import SquaredError

OPTIMIZER = {
    "learning_rate": 0.01,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "beta2": 0.95,
    "max_grad_norm": 0.05,
}
SP = {"sequence_parallel": True}
STEPS = 2
LOSS, NORM, GRADIENT, WEIGHT = 5e-6, 1e-5, 5e-5, 3e-4  # that float32 may differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A policy over `data` x `tensor` ranks."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)  # to its configuration
    data: int = 1
    tensor: int = 2
    layout: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    top_p: float = 1.0
    value_backbone: str | None = None  # with a value model
    right_shift: bool = True  # of its values


ONE_KEY_HEAD, EVEN = {"num_key_value_heads": 1}, {"vocab_size": 100}
PACKED, ONE_PASS = {"packing": True}, {"logprobs": {"impl": "chunked", "one_pass": True}}
CHECKPOINTED = {"activation_checkpointing": True, "micro_batch_size": 3}
CONTEXT: dict[str, Any] = {"tensor": 1, "layout": {"context_parallel": 2}}
DATA: dict[str, Any] = {"tensor": 1, "data": 2}
CHUNKED = {"logprobs": {"impl": "chunked", "chunk_size": 40}, "micro_batch_size": 3}
TWO_RANKS = {  # vocabulary 99 is odd, and so are most rows' lengths
    "tied, biases": Case(kind="qwen2"),
    "untied, head norms, sequence parallel": Case(kind="qwen3", layout=SP, policy=CHECKPOINTED),
    "one key head, packed, one pass, sequence parallel": Case(
        kind="llama", changes=ONE_KEY_HEAD, layout=SP, policy=PACKED | ONE_PASS
    ),
    "own value model, sequence parallel": Case(kind="qwen3", layout=SP, value_backbone="own"),
    "experts, sequence parallel": Case(kind="qwen3_moe", layout=SP, policy=CHECKPOINTED),
    "context, tied, own value model": Case(kind="qwen2", **CONTEXT, value_backbone="own", right_shift=False),
    "context, packed, shared value model": Case(
        kind="llama",
        **CONTEXT,
        policy=PACKED | {"micro_batch_tokens": 25, "activation_checkpointing": True},
        value_backbone="shared",
    ),
    "context, chunked": Case(kind="qwen3", **CONTEXT, policy=CHUNKED),
    "context, one pass": Case(kind="llama", **CONTEXT, policy=ONE_PASS),
    "data": Case(kind="qwen2", **DATA, policy={"micro_batch_size": 3}),
    "data, checkpointed": Case(kind="llama", **DATA, policy=CHECKPOINTED),
    "data, one pass": Case(kind="qwen3", **DATA, policy=ONE_PASS | {"micro_batch_size": 3}),
}
CONTEXT_AND_TENSOR = {"context_parallel": 2}
FOUR_RANKS = {
    "context": Case(kind="qwen2", layout=CONTEXT_AND_TENSOR),
    "context of 4": Case(kind="llama", tensor=1, layout={"context_parallel": 4}, policy=PACKED),
    "context, data": Case(kind="qwen3", data=2, **CONTEXT, policy=CHUNKED),
    "context, SP": Case(
        kind="qwen3", layout=CONTEXT_AND_TENSOR | SP, policy=PACKED | ONE_PASS, value_backbone="shared"
    ),
    "qwen2": Case(kind="qwen2", data=2),
    "qwen2, SP": Case(kind="qwen2", data=2, layout=SP, policy=PACKED),
    "qwen3": Case(kind="qwen3", data=2, policy=ONE_PASS),
    "qwen3, SP": Case(kind="qwen3", data=2, layout=SP, policy=CHECKPOINTED),
    "llama": Case(kind="llama", data=2, changes=EVEN, policy=PACKED),
    "llama, SP": Case(kind="llama", data=2, changes=EVEN, layout=SP),
    "experts": Case(kind="qwen3_moe", data=2),
    "experts, packed": Case(kind="qwen3_moe", data=2, policy=PACKED),
    "experts, SP": Case(kind="qwen3_moe", data=2, layout=SP, policy=PACKED, value_backbone="own"),
    "experts on 4, SP": Case(kind="qwen3_moe", tensor=4, layout=SP, value_backbone="shared"),
    "experts, context, SP": Case(kind="qwen3_moe", layout=CONTEXT_AND_TENSOR | SP, policy=PACKED | ONE_PASS),
    "2 key heads on 4": Case(kind="qwen2", tensor=4),
    "2 key heads on 4, SP": Case(kind="qwen3", tensor=4, layout=SP, policy=PACKED),
    "1 key head": Case(kind="qwen3", data=2, changes=ONE_KEY_HEAD, layout=SP),
    "top-p": Case(kind="qwen3", data=2, top_p=0.8, policy={"logprobs": {"head_dtype": "float32"}}),
    "top-p, SP": Case(kind="qwen2", data=2, top_p=0.7, layout=SP),
    "own value model": Case(kind="qwen2", data=2, value_backbone="own", policy=PACKED),
    "own value model, SP": Case(kind="qwen3", data=2, layout=SP, value_backbone="own"),
    "shared value model": Case(kind="qwen3", data=2, value_backbone="shared"),
    "shared value model, SP": Case(
        kind="llama", data=2, layout=SP, value_backbone="shared", policy=CHECKPOINTED
    ),
}


def loud(kind: str, changes: dict[str, Any]) -> Any:
    """A network whose biases and norms are no 0 and 1, which would hide faults; the same at every call."""
    biases = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    return network(kind, num_hidden_layers=2, **biases, **changes)


def make_backend(case: Case, layout: dict[str, Any]) -> DtensorBackend:
    policy = Policy.model_validate({"optimizer": OPTIMIZER, "backend": layout} | case.policy)
    return DtensorBackend(
        partial(loud, case.kind, case.changes),
        policy,
        make_ranks(CPU, policy.backend.shape),
        temperature=0.8,
        filters=Filters(top_p=case.top_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    loss: float
    norms: list[float]  # before clipping
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(case: Case, layout: dict[str, Any], *, steps: int = STEPS, scale: float = 1.0) -> list[Step]:
    """Steps on this rank's rows, of whole tensors; the loss `scale` times what it should be."""
    backend, found = make_backend(case, layout), []
    critic: Any = None
    if case.value_backbone:
        settings = {"value_backbone": case.value_backbone, "right_shift": case.right_shift}
        settings |= {"value_optimizer": OPTIMIZER}
        critic = backend.make_value_model(Ppo.model_validate({"type": "ppo"} | settings), seed=3)
    for step in range(steps):
        batch = some_batch(step)
        share = batch[backend.ranks.data_slice(len(batch))]
        num_tokens = float(batch.token_mask.sum()) / scale
        parts = [backend.forward_backward(share, WeightedLoss(num_tokens))]
        if critic:
            parts.append(critic.forward_backward(share, SquaredError(num_tokens)))
        of_all = gradients(backend)
        norms = [backend.optimizer_step(0.01)]
        weights = {name: weight.clone() for name, weight in backend.gather_weights()}
        if critic:
            modules = {"head.": critic.head}
            modules |= {"own.": critic._hidden_states} if case.value_backbone == "own" else {}
            for name, module in modules.items():
                of_all |= {name + key: gradient for key, gradient in whole_gradients(module).items()}
            norms.append(critic.optimizer_step(0.01))
            for name, module in modules.items():
                weights |= {name + k: p.detach().full_tensor().clone() for k, p in module.named_parameters()}
        losses = [backend.ranks.all_reduce_sum_data(float(part.sums["loss"]))[0] for part in parts]
        found.append(Step(loss=sum(losses), norms=norms, gradients=of_all, weights=weights))
    return found


def differences(found: list[Step], expected: list[Step]) -> dict[str, float]:
    """The largest of all steps, in units of what float32 may differ by."""
    largest: dict[str, float] = dict.fromkeys(("loss", "norm", "gradient", "weight"), 0.0)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
        assert ours.weights.keys() == theirs.weights.keys()
        each = {
            "loss": abs(ours.loss - theirs.loss) / LOSS,
            "norm": max(abs(a / b - 1) for a, b in zip(ours.norms, theirs.norms, strict=True)) / NORM,
            "gradient": max(
                float((ours.gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-6))
                for name, gradient in theirs.gradients.items()
            )
            / GRADIENT,
            "weight": max(
                float((ours.weights[name] - weight).abs().max()) for name, weight in theirs.weights.items()
            )
            / WEIGHT,
        }
        largest = {name: max(largest[name], each[name]) for name in largest}
    return largest


def on_ranks(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, list[Step]]:
    return {name: train(case, {"tensor_parallel": case.tensor} | case.layout) for name, case in cases.items()}


def assert_ranks_do_what_one_does(cases: dict[str, Case], ranks: list[dict[str, list[Step]]]) -> None:
    for name, case in cases.items():
        expected = train(case, {})
        assert min(step.norms[0] for step in expected) > 2 * OPTIMIZER["max_grad_norm"], "clipping matters"
        for found in ranks:
            off = differences(found[name], expected)
            assert max(off.values()) < 1, f"{name}: {off}"
            for ours, first in zip(found[name], ranks[0][name], strict=True):
                assert ours.norms == first.norms
                assert all(torch.equal(weight, first.weights[key]) for key, weight in ours.weights.items())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found in every test of this file, which start once: by test, of each rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, case in LOADED.items():
        loud(case.kind, case.changes).to(torch.bfloat16).save_pretrained(folder / name)
    ranks = run_ranks(on_two_ranks, 2, str(folder), timeout_s=280)
    return {"folder": folder} | {test: [found[test] for found in ranks] for test in ranks[0]}


def on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "parity": on_ranks(rank, world_size, TWO_RANKS),
        "faults": on_ranks_with_faults(),
        "beside": {
            name: used(case, {"tensor_parallel": case.tensor} | case.layout) for name, case in DECODED.items()
        },
        "loaded": {
            name: loaded(f"{folder}/{name}", case, {"tensor_parallel": case.tensor} | case.layout)
            for name, case in LOADED.items()
        },
    }


def test_two_ranks_do_what_one_does(two_ranks: dict[str, Any], group: None) -> None:
    assert_ranks_do_what_one_does(TWO_RANKS, two_ranks["parity"])


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_four_ranks_do_what_one_does(part: int, group: None) -> None:
    cases = dict(list(FOUR_RANKS.items())[part::2])
    assert_ranks_do_what_one_does(cases, run_ranks(on_ranks, 4, cases, timeout_s=280))


# --- faults ---


def _patched(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(TensorParallel, name, value)


def _alike(self: TensorParallel, module: nn.Module, gradient: Any = None) -> None:
    _replicate(self, module, Replicate())


def _made(self: Any, mesh: Any, *, of_states: Any, **settings: Any) -> None:
    _make(self, mesh, **settings)
    self._state_gradient = of_states


def _base_that_does_not_enter(self: TensorParallel, base: Any) -> None:
    """Hidden states reach the head as if their gradient were alike on all ranks."""


def _whole_share(self: Any, token_ids: Tensor, packing: Any) -> Tensor:
    """Hidden states of a value model whose loss every rank counts whole."""
    return self._hidden_states(token_ids, packing)


def _summed_over_ranks(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    """As if each rank's experts had computed a part."""
    return tensor_parallel.reduce_scatter(gradient, 1, ctx.group), None


def _every_loss(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    """As if every rank's loss of all log-probs counted."""
    whole = grads[0].clone()
    dist.all_reduce(whole, group=ctx.split.group)
    return whole[..., ctx.split.local_positions], None


def _keys_of_own_loss(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    """Without the reduce-scatter of keys' gradients."""
    return grads[0][..., ctx.split.local_positions, :], None


def _in_the_order_of_ranks(own: Tensor, split: ContextSplit) -> Tensor:
    return _gather(own, replace(split, stream_order=torch.arange(len(split.rank_order))))


def _positions_from_0(split: ContextSplit, values: Tensor, fill: float = 0) -> Tensor:
    local = _to_local(split, values, fill)
    starts = values.ndim == 2 and values.dtype == torch.int64 and int(values[0, 0]) == 0 and fill == 0
    return torch.arange(local.shape[1])[None] if starts else local


def _patched_context(owner: Any, name: str, value: Any) -> tuple[Case, Callable[[pytest.MonkeyPatch], None]]:
    return Case(kind="qwen2", **CONTEXT), lambda patch: patch.setattr(owner, name, value)


_gather, _to_local = context._gather_in_order, ContextSplit.to_local
_make, _replicate = TensorParallel.__init__, TensorParallel.replicate
_VALUE_MODEL = "abrun.trainer.backends.dtensor.DtensorValueModel._backbone_states"
FAULTS: dict[str, tuple[Case, Callable[[pytest.MonkeyPatch], None]]] = {
    "hidden states alike": (Case(kind="qwen2"), _patched("_shard_base", _base_that_does_not_enter)),
    "head norms alike": (Case(kind="qwen3"), _patched("replicate", _alike)),
    "states' gradients alike with sequence parallel": (
        Case(kind="llama", layout=SP),
        _patched("__init__", partialmethod(_made, of_states=Replicate())),
    ),
    "states' gradients added without": (
        Case(kind="llama"),
        _patched("__init__", partialmethod(_made, of_states=Partial())),
    ),
    "a shared key head alike": (
        Case(kind="llama", changes=ONE_KEY_HEAD),
        lambda patch: patch.setattr(tensor_parallel, "Partial", Replicate),
    ),
    "experts' positions summed over ranks": (
        Case(kind="qwen3_moe", layout=SP),
        lambda patch: patch.setattr(tensor_parallel._GatherPositions, "backward", _summed_over_ranks),
    ),
    "values counted by every rank": (
        Case(kind="qwen2", value_backbone="own"),
        lambda patch: patch.setattr(_VALUE_MODEL, _whole_share),
    ),
    "every rank's loss": _patched_context(context._GatherTokens, "backward", staticmethod(_every_loss)),
    "keys of own loss": _patched_context(context._GatherKeys, "backward", staticmethod(_keys_of_own_loss)),
    "keys in the order of ranks": _patched_context(context, "_gather_in_order", _in_the_order_of_ranks),
    "positions from 0": _patched_context(ContextSplit, "to_local", _positions_from_0),
}


def on_ranks_with_faults() -> dict[str, list[Step]]:
    found = {}
    for name, (case, inject) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            inject(patch)
            found[name] = train(case, {"tensor_parallel": case.tensor} | case.layout, steps=1)
    case = Case(kind="qwen2")
    return found | {"loss times ranks": train(case, {"tensor_parallel": 2}, scale=2.0)}


def test_a_fault_shows(two_ranks: dict[str, Any], group: None) -> None:
    found = two_ranks["faults"][0]
    for name, (case, _) in FAULTS.items():
        off = differences(found[name], train(case, {}, steps=1))
        assert off["gradient"] > 100, f"{name}: {off}"
    off = differences(found["loss times ranks"], train(Case(kind="qwen2"), {}))
    assert off["norm"] > 100 and off["gradient"] > 100, off
    assert off["weight"] < 1  # clipping and Adam hide a factor: weights alone would show nothing


# --- what a run does beside ---

PROMPTS = ["1+1=", "a longer prompt: 12345+67890=", "x", "30+12=", "Q: why?"]
TEXT = Text(tokenizer=character_tokenizer(), end_ids=frozenset(range(70, 80)), max_positions=None)
DECODED = {
    "sequence parallel": Case(kind="qwen3", changes=ONE_KEY_HEAD, layout=SP),
    "packed": Case(kind="llama", layout=SP, policy=PACKED, top_p=0.8),
    "experts": Case(kind="qwen3_moe", layout=SP),
    "context": Case(kind="qwen2", **CONTEXT, policy=PACKED),
}


def completions(backend: DtensorBackend, top_p: float) -> list[tuple[list[int], list[float]]]:
    rollout = Rollout(temperature=0.8, top_p=top_p, max_new_tokens=12, batch_size=3)
    engine = TorchEngine(rollout, backend, TEXT)
    draws = Draws(seed=6, stream="sampling", step=1, rows=range(len(PROMPTS)))
    found = engine.generate(TEXT.encode_prompts(PROMPTS), draws)
    return [(completion.token_ids, completion.logprobs) for completion in found]


def used(case: Case, layout: dict[str, Any]) -> dict[str, Any]:
    """Completions, before and after a step; log-probs; and whether a restored backend goes on alike."""
    backend, batch = make_backend(case, layout), some_batch()
    share, loss = batch[backend.ranks.data_slice(len(batch))], WeightedLoss(float(batch.token_mask.sum()))
    found: dict[str, Any] = {"logprobs": backend.compute_logprobs(share), "hash": hash_policy(backend)}
    found["completions"] = [completions(backend, case.top_p)]
    backend.forward_backward(share, loss)
    backend.optimizer_step(0.01)
    found["completions"].append(completions(backend, case.top_p))
    state = {name: tensor.clone() for name, tensor in backend.local_state().items()}
    restored = make_backend(case, layout)
    restored.load_local_state(state)
    for each in (backend, restored):
        each.forward_backward(share, loss)
        each.optimizer_step(0.01)
    again = restored.local_state()
    found["restored"] = all(
        torch.equal(tensor, again[name]) for name, tensor in backend.local_state().items()
    )
    found["num_held"] = sum(tensor.numel() for tensor in again.values())
    return found


def test_completions_and_checkpoints_of_two_ranks(two_ranks: dict[str, Any], group: None) -> None:
    ranks = two_ranks["beside"]
    for name, case in DECODED.items():
        expected = used(case, {})
        parameters = loud(case.kind, case.changes).named_parameters()
        experts = sum(parameter.numel() for key, parameter in parameters if ".experts." in key)
        whole = 3 * experts  # on each rank, with their two moments
        for found in ranks:
            assert found[name]["restored"] and found[name]["hash"] == expected["hash"], name
            torch.testing.assert_close(found[name]["logprobs"], expected["logprobs"], atol=2e-5, rtol=1e-5)
            for ours, theirs in zip(found[name]["completions"], expected["completions"], strict=True):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], name
                for (_, logprobs), (_, others) in zip(ours, theirs, strict=True):
                    assert logprobs == pytest.approx(others, abs=1e-4), name
            held, of = found[name]["num_held"] - whole, expected["num_held"] - whole
            assert held < 0.55 * of, name  # a rank holds half of everything else
            assert found[name]["completions"] == ranks[0][name]["completions"]
        lengths = {len(tokens) for tokens, _ in expected["completions"][0]}
        assert len(lengths) > 1  # some completions should end before others


REFUSED = [
    ({"num_attention_heads": 6}, 4, False, r"6 attention heads and 2 key-value heads; use a divisor of 6"),
    ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, False, r"got 2 with 12 .* 3 key-value heads"),
    (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        2,
        True,
        r"layers without full attention",
    ),
]


@pytest.mark.parametrize(("changes", "size", "sequence_parallel", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], size: int, sequence_parallel: bool, message: str
) -> None:
    network = loud("qwen2", changes | {"hidden_size": 48})
    with pytest.raises(RecipeError, match=message) as caught:
        check_fits(network, size, sequence_parallel=sequence_parallel)
    assert str(caught.value).startswith("policy.backend.") and len(str(caught.value).splitlines()) == 1


def test_a_family_without_a_plan_is_refused() -> None:
    network: Any = tiny("gemma2")
    with pytest.raises(RecipeError, match=r"got 2 with Gemma2ForCausalLM, .* use 1"):
        check_fits(network, 2, sequence_parallel=False)


# --- loading ---

LOADED = {
    "qwen2": Case(kind="qwen2"),
    "qwen3": Case(kind="qwen3", changes=ONE_KEY_HEAD, layout=SP),
    "experts": Case(kind="qwen3_moe", data=2, tensor=1),
    "experts over ranks": Case(kind="qwen3_moe", data=2, tensor=1, layout={"expert_parallel": 2}),
    "context": Case(kind="llama", **CONTEXT),
    "data": Case(kind="llama", **DATA),
}


def loaded(folder: str, case: Case, layout: dict[str, Any]) -> dict[str, Any]:
    """A policy and a value model of a checkpoint, and the share of it that was read for the policy."""
    policy = Policy.model_validate({"backend": layout})
    network = AutoModelForCausalLM.from_pretrained(folder)
    size, read, total = sum(p.numel() for p in network.parameters()), Checkpoint.read, [0]

    def counted(self: Checkpoint, name: str, part: tuple[slice, ...]) -> Tensor:
        found = read(self, name, part)
        total[0] += found.numel()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read", counted)
        load = partial(open_network, Model(path=folder), weights=None, seed=0, decodes=True)
        experts = policy.backend.expert_parallel
        ranks = make_ranks(CPU, policy.backend.shape, expert_parallel=experts)
        backend = DtensorBackend(load, policy, ranks)
        read_by_policy = total[0]
        critic = backend.make_value_model(Ppo.model_validate({"type": "ppo"}), seed=3)
    backbone: Any = critic._hidden_states
    whole = {name.removeprefix("base_"): p.detach().full_tensor() for name, p in backbone.named_parameters()}
    batch = some_batch()
    share = backend.ranks.data_slice(len(batch))
    return {
        "hash": hash_policy(backend),
        "critic": weights_hash(content_of(name, weight) for name, weight in whole.items()),
        "logprobs": backend.compute_logprobs(batch[share]),
        "values": critic.compute_values(batch[share])[batch.token_mask[share]],
        "share": read_by_policy / size,
    }


def test_each_rank_reads_its_own_part_of_a_checkpoint(two_ranks: dict[str, Any], group: None) -> None:
    ranks, folder = two_ranks["loaded"], two_ranks["folder"]
    for name, case in LOADED.items():
        one = loaded(str(folder / name), case, {})
        assert one["share"] == 1
        network: Any = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        stored = dict(network.named_parameters())
        of_file = published(network, stored.items())
        assert one["hash"] == weights_hash(content_of(key, weight) for key, weight in of_file)
        body = [content_of(key, weight) for key, weight in stored.items() if key != "lm_head.weight"]
        assert one["critic"] == weights_hash(body)
        plain = DtensorBackend(lambda network=network: network, Policy(), make_ranks(CPU, {}))
        assert torch.equal(one["logprobs"], plain.compute_logprobs(some_batch()))
        for rank, found in enumerate(each[name] for each in ranks):
            rows = slice(4 * rank, 4 * rank + 4) if case.data == 2 else slice(None)
            mask = some_batch().token_mask
            values = torch.zeros(mask.shape).masked_scatter(mask, one["values"])[rows][mask[rows]]
            assert (found["hash"], found["critic"]) == (one["hash"], one["critic"])
            torch.testing.assert_close(found["logprobs"], one["logprobs"][rows], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(found["values"], values, atol=2e-5, rtol=1e-5)
            assert found["share"] < 0.55  # a rank reads half of it
