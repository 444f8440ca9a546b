"""Faults in the setup of models, and a control: initial weights perturbed by one ULP."""

from typing import Any

import torch
from torch import Tensor, nn

from abrun.errors import RecipeError
from abrun.trainer.faults.site import FaultSite, wrap_method
from abrun.trainer.rl.batch import Sequences
from abrun.trainer.seeds import derive_seed

MANTISSA_BITS = {"float32": 23, "bfloat16": 7}


def value_unshifted(site: FaultSite) -> None:
    value_model: Any = site.setup.value_model
    value_model.right_shift = False


def critic_mask_of_other_rows(site: FaultSite) -> None:
    def values(inner, batch: Sequences) -> Tensor:  # [B, S]
        return inner(batch) * batch.token_mask.roll(int(site.size), 0)

    wrap_method(site.setup.value_model, "compute_values", values)


def dropout_on(site: FaultSite) -> None:
    policy: Any = site.setup.policy
    num_changed = 0
    for module in policy.module.modules():
        if isinstance(module, nn.Dropout):
            module.p, num_changed = site.size, num_changed + 1
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout, num_changed = site.size, num_changed + 1
    if not num_changed:
        name = type(policy.module.network).__name__
        raise RecipeError(
            f"injected_fault: got 'dropout_on' with {name}, which has no dropout; use another fault"
        )
    torch.manual_seed(derive_seed(site.setup.seed, "dropout", site.draw))


def one_ulp(site: FaultSite) -> None:
    """Move each weight by one ULP of the training dtype, up or down at random; weights of 0 stay.

    Each shard of a weight has its own signs, the same on every rank that holds the shard.
    """
    setup = site.setup
    shard_specs, state = setup.policy.shard_specs(), setup.policy.local_state()
    bits = MANTISSA_BITS[setup.config.policy.dtype]
    for name, weight in list(state.items()):
        if name.startswith("weights/"):
            generator = torch.Generator().manual_seed(
                derive_seed(setup.seed, "ulp", site.draw, name, repr(shard_specs[name].pieces))
            )
            signs = torch.randint(2, weight.shape, generator=generator).to(weight.device) * 2 - 1
            ulp = torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - 1 - bits)
            state[name] = torch.where(weight == 0, weight, weight + site.size * signs * ulp)
    setup.policy.load_local_state({name: state[name] for name in state if name.startswith("weights/")})
