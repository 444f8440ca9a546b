"""The value model against plain autograd and AdamW: own and shared backbones, packed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from abrun.recipe.algorithms import Ppo
from abrun.trainer.backends.dtensor import DtensorBackend, DtensorValueModel
from abrun.trainer.rl.losses import TokenLosses
from abrun.trainer.rl.metrics import MetricParts
from tests.trainer.backends.policies import (
    Advised,
    WeightedLoss,
    make_backend,
    some_batch,
    tiny,
)
from tests.trainer.backends.test_dtensor import assert_same

OPTIMIZER = {"learning_rate": 0.01, "weight_decay": 0.2, "max_grad_norm": 100.0}


def make_critic(
    kind: str = "llama", *, policy: dict[str, Any] | None = None, **ppo: Any
) -> tuple[DtensorBackend, DtensorValueModel]:
    settings = Ppo.model_validate({"type": "ppo", "value_optimizer": OPTIMIZER} | ppo)
    backend = make_backend(kind, **(policy or {}))
    return backend, backend.make_value_model(settings, seed=3)


@dataclass(frozen=True)
class SquaredError:
    """Mean over `num_tokens` of (v - target)^2, a target of its own at every token."""

    num_tokens: float

    def losses(self, batch: Advised, values: Tensor) -> TokenLosses:
        errors = torch.where(batch.token_mask, (values - batch.advantages).square(), 0.0)
        return TokenLosses(shares=errors / self.num_tokens)

    def metrics(self, batch: Advised, values: Tensor, losses: TokenLosses) -> MetricParts:
        assert not values.requires_grad
        loss = losses.shares.sum().double()
        return MetricParts(sums={"loss": loss}, maxima={}, minima={})


def objective(batch: Advised) -> SquaredError:
    return SquaredError(float(batch.token_mask.sum()))


class Plain(nn.Module):
    """A transformers backbone and a linear head, sequence by sequence."""

    def __init__(self, backbone: Any, head: Iterable[Tensor], coefficient: float = 1.0) -> None:
        super().__init__()
        self.backbone, self.coefficient = backbone, coefficient
        self.head = nn.Linear(32, 1)
        self.head.weight.data, self.head.bias.data = (tensor.clone() for tensor in head)

    def forward(self, batch: Advised, *, right_shift: bool = True) -> Tensor:
        values = torch.zeros(batch.token_ids.shape)
        for row, (token_ids, mask) in enumerate(zip(batch.token_ids, batch.token_mask, strict=True)):
            length = int(mask.nonzero().max()) + 1
            hidden = self.backbone.base_model(token_ids[None, :length]).last_hidden_state[0]
            hidden = self.coefficient * hidden + (1 - self.coefficient) * hidden.detach()
            after = self.head(hidden)[:, 0]
            values[row, :length] = torch.cat([torch.zeros(1), after[:-1]]) if right_shift else after
        return values


def plain(critic: DtensorValueModel, kind: str = "llama", coefficient: float = 1.0) -> Plain:
    """With the weights that a value model began with."""
    head: Any = critic.head.parameters()
    return Plain(tiny(kind), (parameter.full_tensor().detach() for parameter in head), coefficient)


def head_gradients(critic: DtensorValueModel) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in critic.head.named_parameters()}  # pyright: ignore


@pytest.mark.parametrize("right_shift", [True, False])
@pytest.mark.parametrize(
    "packing", [{}, {"packing": True}, {"packing": True, "micro_batch_tokens": 20}], ids=str
)
def test_values_are_those_of_each_sequence_alone(
    right_shift: bool, packing: dict[str, Any], group: None
) -> None:
    """Before each token, or after it; a packed sequence begins with the 0 that no other sequence reaches."""
    _, critic = make_critic(right_shift=right_shift, policy=packing)
    batch = some_batch()
    expected = plain(critic)(batch, right_shift=right_shift).detach()
    found = critic.compute_values(batch)
    real = torch.arange(batch.token_ids.shape[1]) < batch.token_mask.sum(1, keepdim=True) + (
        batch.token_mask.int().argmax(1, keepdim=True)
    )
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    assert not found.requires_grad and (not right_shift or (found[:, 0] == 0).all())


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize(
    "packing",
    [{"backend": {"keep_gathered": True}}, {"packing": True, "activation_checkpointing": True}],
    ids=str,
)
@pytest.mark.parametrize(
    "ppo", [{}, {"value_backbone": "shared", "value_coefficient": 0.3}, {"right_shift": False}], ids=str
)
def test_gradients_are_those_of_plain_autograd(
    kind: str, packing: dict[str, Any], ppo: dict[str, Any], group: None
) -> None:
    backend, critic = make_critic(kind, policy={"micro_batch_size": 3} | packing, **ppo)
    batch = some_batch()
    parts = critic.forward_backward(batch, objective(batch))
    whole = plain(critic, kind, ppo.get("value_coefficient", 1.0))
    loss = objective(batch).losses(batch, whole(batch, right_shift=critic.right_shift)).shares.sum()
    loss.backward()
    assert float(parts.sums["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    heads = {name: p.grad for name, p in whole.head.named_parameters() if p.grad is not None}
    assert_same(head_gradients(critic), heads, rtol=1e-4, atol=1e-6)
    if ppo.get("value_backbone") != "shared":
        sharded: Any = critic._hidden_states
        prefix = "base_model."
        assert all(parameter.grad is None for parameter in backend.module.parameters())
    else:
        sharded, prefix = backend.module, "network.model."
    found = {
        name.removeprefix(prefix): p.grad.full_tensor()
        for name, p in sharded.named_parameters()
        if p.grad is not None
    }
    expected = {
        name: p.grad for name, p in whole.backbone.base_model.named_parameters() if p.grad is not None
    }
    assert_same(found, expected, rtol=1e-4, atol=1e-6)


def test_a_coefficient_of_zero_leaves_the_backbone_alone(group: None) -> None:
    batch = some_batch()
    backend, critic = make_critic(value_backbone="shared", value_coefficient=0.0)
    critic.forward_backward(batch, objective(batch))
    assert all(parameter.grad is None for parameter in backend.module.parameters())
    assert all(gradient.abs().sum() > 0 for gradient in head_gradients(critic).values())
    backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))  # and is not in its way


@pytest.mark.parametrize("backbone_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dtype", ["float32", "bfloat16"])
def test_the_head_has_a_dtype_of_its_own(backbone_dtype: str, head_dtype: str, group: None) -> None:
    _, critic = make_critic(policy={"dtype": backbone_dtype}, value_head_dtype=head_dtype, right_shift=False)
    seen: list[Any] = []
    critic.head.register_forward_hook(
        lambda module, args, output: seen.append((module.weight.dtype, args[0].dtype, output.dtype))
    )
    batch = some_batch()
    values = critic.compute_values(batch)
    dtype = getattr(torch, head_dtype)
    assert set(seen) == {(dtype, dtype, dtype)} and values.dtype == torch.float32
    rounded = bool((values == values.bfloat16().float()).all())
    assert rounded == (head_dtype == "bfloat16")


def test_a_head_in_bfloat16_has_masters_and_moments_in_it(group: None) -> None:
    """They truncate: an update of a 1,000th of a weight is lost, where float32 keeps it."""
    moved = {}
    for dtype in ("float32", "bfloat16"):
        _, critic = make_critic(value_head_dtype=dtype)
        batch, before = some_batch(), {}
        for name, parameter in critic.head.named_parameters():
            parameter.data.fill_(1.0)
            before[name] = parameter.full_tensor().clone()  # pyright: ignore
        critic.forward_backward(batch, objective(batch))
        critic.optimizer_step(1e-3)
        state = critic.local_state()
        for part in ("weights", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            assert state[f"{part}/head.weight"].dtype == getattr(torch, dtype), part
        after = state["weights/head.weight"]
        moved[dtype] = bool((after != before["weight"]).any())
    assert moved == {"float32": True, "bfloat16": False}
