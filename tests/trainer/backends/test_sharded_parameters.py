"""The optimizer of sharded modules, against torch's own AdamW on whole ones."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from abrun.recipe.policy import Optimizer
from abrun.trainer.backends.dtensor.fsdp import ShardedParameters, shard
from tests.spawn import run_ranks
from tests.trainer.models.architectures import tiny_network

SETTINGS = Optimizer(learning_rate=0.1, weight_decay=0.1, max_grad_norm=0.5)


def modules() -> nn.ModuleDict:
    """Of sizes that two ranks cannot share evenly, or at all."""
    torch.manual_seed(0)
    return nn.ModuleDict({"used": nn.Linear(3, 5), "seldom": nn.Linear(3, 1)})


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    groups = [
        {"params": [one for one in parameters if one.ndim == 2], "weight_decay": SETTINGS.weight_decay},
        {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps)


def trained(rank: int, world_size: int) -> None:
    ours, plain = modules(), modules()
    reference = adamw(list(plain.parameters()))
    for part in ours.values():
        shard(part, init_device_mesh("cpu", (world_size,)), "float32")
    parameters = ShardedParameters(dict(ours.named_parameters()), SETTINGS)
    inputs, met = torch.randn(4, 4, 3), set[str]()
    for step, names in enumerate((["used"], ["used", "seldom"], ["used"], ["seldom"])):
        if step == 1:
            ours._apply(lambda tensor: tensor.clone())  # into other memory, as `to` may
        for network, share in ((ours, 1 / world_size), (plain, 1.0)):
            losses = [network[name](inputs[step]).square().sum() for name in names]
            (share * torch.stack(losses).sum()).backward()
        before = parameters.local_state()
        norm = parameters.optimizer_step(0.1)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), SETTINGS.max_grad_norm)
        reference.step()
        reference.zero_grad()

        assert norm == pytest.approx(float(expected), rel=1e-5)
        for name, whole in parameters.full_weights():
            torch.testing.assert_close(whole, plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
        assert all(parameter.grad is None for parameter in ours.parameters())
        after = parameters.local_state()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), "not in place"
        met.update(names)
        optimizer_specs = {key.split("/")[2].split(".")[0] for key in after if key.startswith("optimizer/")}
        assert optimizer_specs == met


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_may_move_and_go_without_a_gradient(world_size: int) -> None:
    run_ranks(trained, world_size)


# Of each family: what stands in its networks with two dimensions and is no matrix.
NO_MATRICES = {
    "gpt_oss": ({}, {"gate_up_proj_bias", "down_proj_bias"}),
    "cohere": ({"use_qk_norm": True}, {"q_norm.weight", "k_norm.weight"}),
    "recurrent_gemma": ({}, {"input_gate_bias", "recurrent_gate_bias"}),
    "falcon_mamba": ({}, {"A_log"}),
    "ernie4_5_moe": ({}, {"e_score_correction_bias"}),
}


@pytest.mark.parametrize("kind", NO_MATRICES)
def test_biases_and_norms_of_several_dimensions_are_not_decayed(kind: str) -> None:
    settings, suffixes = NO_MATRICES[kind]
    network = tiny_network(kind, **settings)
    named = dict(network.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    spared = {name for name in named if name.endswith(tuple(suffixes))}
    assert {suffix for suffix in suffixes if any(name.endswith(suffix) for name in spared)} == suffixes
    assert all(named[name].ndim >= 2 for name in spared)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    ShardedParameters(named, SETTINGS).optimizer_step(0.1)
    for name, parameter in named.items():
        factor = 1.0 if parameter.ndim < 2 or name in spared else 1 - 0.1 * SETTINGS.weight_decay
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)
