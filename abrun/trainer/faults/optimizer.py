"""Faults in the state, the precision and the schedule of the optimizer."""

import math
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from abrun.trainer.faults.site import FaultSite, wrap_method


def adam_step_ahead(site: FaultSite) -> None:
    policy = site.setup.policy
    state = policy.local_state()
    for name in policy.shard_specs():
        kind, _, tensor = name.removeprefix("optimizer/").partition("/")
        if name.startswith("optimizer/") and name not in state:
            like = state[f"weights/{tensor}"]
            state[name] = torch.tensor(site.size) if kind == "step" else torch.zeros_like(like)
    policy.load_local_state(state)


def bf16_moments(site: FaultSite) -> None:
    policy = site.setup.policy
    kinds = ("optimizer/exp_avg", "weights/") if site.size >= 2 else ("optimizer/exp_avg",)

    def optimizer_step(inner, learning_rate: float) -> float:
        norm = inner(learning_rate)
        for name, tensor in policy.local_state().items():
            if name.startswith(kinds):
                tensor.copy_(tensor.bfloat16())
        return norm

    wrap_method(policy, "optimizer_step", optimizer_step)


def schedule_by_ranks(site: FaultSite) -> None:
    num_steps = site.setup.config.steps

    def update_on_each(inner, updates: Any, step: int, **settings: Any) -> dict[str, float]:
        return inner(updates, min(int(step * site.size), num_steps), **settings)

    wrap_method(site.setup.learner, "update_on_each", update_on_each)


def local_grad_norm(site: FaultSite) -> None:
    policy: Any = site.setup.policy
    sharded = policy._parameters
    max_norm = sharded._settings.max_grad_norm
    sharded._settings = sharded._settings.model_copy(update={"max_grad_norm": math.inf})

    @torch.no_grad()
    def step(inner, learning_rate: float) -> float:
        gradients = [
            parameter.grad.to_local()
            for parameter in sharded._parameters.values()
            if parameter.grad is not None
        ]
        norm = get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        inner(learning_rate)
        return float(norm)

    wrap_method(sharded, "optimizer_step", step)
