"""Megatron's value model against plain autograd and AdamW: own and shared backbones, on one and two ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from abrun.recipe.algorithms import Ppo
from abrun.trainer.backends.microbatches import Packing
from abrun.trainer.rl.advantages import shift_right
from tests.spawn import run_ranks
from tests.trainer.backends.megatron_policies import make_backend, network
from tests.trainer.backends.policies import WeightedLoss, plain_adamw, plain_loss, some_batch
from tests.trainer.backends.test_value_model import Plain, objective

OPTIMIZER = {"weight_decay": 0.2, "max_grad_norm": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
COEFFICIENT = 0.3
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
PIPELINE, CONTEXT = {"pipeline_parallel": 2}, {"context_parallel": 2}
PACKED = {"packing": True, "micro_batch_tokens": 20}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # backbone, how ranks are cut, the policy's settings
TWO: dict[str, Case] = {
    f"{backbone}-{name}": (backbone, cut, policy)
    for backbone in ("own", "shared")
    for name, cut, policy in (
        ("tp2", {"tensor_parallel": 2}, {"micro_batch_size": 3}),
        ("tp2-sequence", SEQUENCE, {"micro_batch_size": 3}),
        ("tp2-sequence-packed", SEQUENCE, PACKED),
        ("dp2", {}, {"micro_batch_size": 3}),
        ("pp2", PIPELINE, {"micro_batch_size": 3}),
    )
}
CONTEXTS: dict[str, Case] = {
    "own": ("own", CONTEXT, {"micro_batch_size": 3}),
    "shared": ("shared", CONTEXT, PACKED),
}
FOUR: dict[str, Case] = {
    "own-cp2-tp2": ("own", CONTEXT | SEQUENCE, PACKED),
    "shared-cp2-tp2": ("shared", CONTEXT | SEQUENCE, {"micro_batch_size": 3}),
    "own-cp2-pp2": ("own", CONTEXT | PIPELINE, {"micro_batch_size": 3}),
    "shared-cp2-pp2": ("shared", CONTEXT | PIPELINE, {"micro_batch_size": 3}),
}


def train(backbone: str, cut: dict[str, Any], policy: dict[str, Any], **ppo: Any) -> dict[str, Any]:
    """Values before, and losses and norms of three steps of value model and policy, and their weights."""
    backend = make_backend(cut=cut, optimizer=OPTIMIZER, **policy)
    coefficient = {"value_coefficient": COEFFICIENT} if backbone == "shared" else {}
    chosen = {"value_backbone": backbone, "value_optimizer": OPTIMIZER} | coefficient | ppo
    critic = backend.make_value_model(Ppo.model_validate({"type": "ppo"} | chosen), seed=3)
    rows = backend.ranks.data_slice(8)
    found: dict[str, Any] = {"rows": rows, "losses": [], "norms": []}
    found["head"] = [parameter.detach().clone() for parameter in critic.head.parameters()]
    found["values"] = critic.compute_values(some_batch()[rows])
    for step in range(3):
        batch = some_batch(step)
        share = batch[rows]
        parts = critic.forward_backward(share, objective(batch))
        found["norms"].append(critic.optimizer_step(0.01))
        backend.forward_backward(share, WeightedLoss(float(batch.token_mask.sum())))
        found["norms"].append(backend.optimizer_step(0.01))
        found["losses"].append(backend.ranks.all_reduce_sum_data(float(parts.sums["loss"]))[0])
    found["weights"] = {name: weight.clone() for name, weight in backend.gather_weights()}
    return found | {"values_after": critic.compute_values(some_batch()[rows])}


def one_process(backbone: str, head: list[Tensor]) -> dict[str, Any]:
    own, policy = backbone == "own", network()
    critic = Plain(network(), head, 1.0) if own else Plain(policy, head, COEFFICIENT)
    trained = [p for n, p in critic.named_parameters() if own or n.startswith("head.")]
    optimizers = plain_adamw(nn.ParameterList(trained), OPTIMIZER), plain_adamw(policy, OPTIMIZER)
    found: dict[str, Any] = {"losses": [], "norms": []}
    with torch.no_grad():
        found["values"] = critic(some_batch())
    for step in range(3):
        batch = some_batch(step)
        loss = objective(batch).losses(batch, critic(batch)).shares.sum()
        loss.backward()
        found["losses"].append(float(loss.detach()))
        for optimizer, parameters in ((optimizers[0], trained), (optimizers[1], list(policy.parameters()))):
            if optimizer is optimizers[1]:
                plain_loss(policy, batch).backward()
            norm = nn.utils.clip_grad_norm_(parameters, OPTIMIZER["max_grad_norm"])
            found["norms"].append(float(norm))
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return found | {"weights": dict(policy.named_parameters()), "values_after": critic(some_batch())}


def check(backbone: str, found: dict[str, Any]) -> None:
    expected, rows = one_process(backbone, found["head"]), found["rows"]
    mask = some_batch().token_mask[rows]
    for key in ("values", "values_after"):
        torch.testing.assert_close(found[key][mask], expected[key][rows][mask], rtol=1e-4, atol=2e-5)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=2e-4)


def head_of_two(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last stage's head, also for a stage that has none."""
    return [of_rank | {"head": found[-1]["head"]} for of_rank in found]


@pytest.mark.parametrize("backbone", ["own", "shared"])
@pytest.mark.parametrize(
    "policy", [{"micro_batch_size": 3}, PACKED, {"activation_checkpointing": True}], ids=str
)
def test_it_trains_as_plain_autograd_and_adamw(backbone: str, policy: dict[str, Any], group: None) -> None:
    check(backbone, train(backbone, {}, policy))


def on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two", "four"])
def test_more_ranks_train_as_one_process(
    cases: dict[str, Case],
) -> None:
    found = run_ranks(on_ranks, 2 if cases is TWO else 4, list(cases.values()), timeout_s=280)
    for index, (backbone, *_) in enumerate(cases.values()):
        for one in head_of_two([of_rank[index] for of_rank in found]):
            check(backbone, one)


def in_a_context(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Right, and with values that are shifted in each rank's slices."""
    gather = Packing.to_full
    found = on_ranks(rank, world_size, list(CONTEXTS.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("abrun.trainer.backends.policy.shift_right", lambda values: values)
        patch.setattr(Packing, "to_full", lambda packing, own: gather(packing, shift_right(own)))
        return [*found, train(*CONTEXTS["own"])]


def test_values_of_a_context_are_shifted_as_whole_rows() -> None:
    batch = some_batch()
    for *right, shifted in run_ranks(in_a_context, 2):
        for (backbone, *_), found in zip(CONTEXTS.values(), right, strict=True):
            check(backbone, found)
        with torch.no_grad():
            expected = Plain(network(), shifted["head"])(batch)
        differs = (shifted["values"] - expected)[batch.token_mask].abs() > 1e-3
        assert 0 < int(differs.sum()) < differs.numel() / 2  # tokens at borders alone


def test_a_coefficient_of_zero_leaves_the_policy_alone(group: None) -> None:
    backend = make_backend()
    settings = {"type": "ppo", "value_backbone": "shared", "value_coefficient": 0.0}
    critic = backend.make_value_model(Ppo.model_validate(settings), seed=3)
    critic.forward_backward(some_batch(), objective(some_batch()))
    assert all(not parameter.main_grad.any() for parameter in backend.model.parameters())
    assert critic.optimizer_step(0.01) > 0


def test_it_goes_on_from_its_state_to_the_bit(group: None) -> None:
    found = []
    state: dict[str, Tensor] = {}
    for resumed in (False, True):
        critic = make_backend().make_value_model(Ppo.model_validate({"type": "ppo"}), seed=3 + resumed)
        if resumed:
            critic.load_local_state(state)
        for step in range(2):
            if step == 1 and not resumed:
                state = {name: tensor.clone() for name, tensor in critic.local_state().items()}
            if step == 1 or not resumed:
                critic.forward_backward(some_batch(step), objective(some_batch(step)))
                critic.optimizer_step(0.01)
        found.append(critic.compute_values(some_batch()))
    assert torch.equal(*found)
