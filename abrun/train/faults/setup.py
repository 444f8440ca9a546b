"""Faults of how models are set up; and what is none: initial weights moved by one ULP."""

from typing import Any

import torch
from torch import Tensor, nn

from abrun.errors import RecipeError
from abrun.rl.batch import Sequences
from abrun.seeds import derive_seed
from abrun.train.faults.site import Site, around

MANTISSA_BITS = {"float32": 23, "bfloat16": 7}


def value_unshifted(site: Site) -> None:
    value_model: Any = site.setup.value_model
    value_model.right_shift = False


def critic_mask_of_other_rows(site: Site) -> None:
    def values(inner, batch: Sequences) -> Tensor:  # [B, S]
        return inner(batch) * batch.token_mask.roll(int(site.size), 0)

    around(site.setup.value_model, "values", values)


def dropout_on(site: Site) -> None:
    policy: Any = site.setup.policy
    found = 0
    for module in policy.module.modules():
        if isinstance(module, nn.Dropout):
            module.p, found = site.size, found + 1
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout, found = site.size, found + 1
    if not found:
        name = type(policy.module.network).__name__
        raise RecipeError(f"injected_fault: got 'dropout_on' with {name}, which has no dropout; drop it")
    torch.manual_seed(derive_seed(site.setup.seed, "dropout", site.draw))


def one_ulp(site: Site) -> None:
    """A number of the training dtype further, up or down; what is 0 stays.

    A piece of a weight has its own signs, the same on every rank that has the piece.
    """
    setup = site.setup
    pieces, state = setup.policy.pieces(), setup.policy.local_state()
    bits = MANTISSA_BITS[setup.config.policy.dtype]
    for name, weight in list(state.items()):
        if name.startswith("weights/"):
            generator = torch.Generator().manual_seed(
                derive_seed(setup.seed, "ulp", site.draw, name, repr(pieces[name].pieces))
            )
            signs = torch.randint(2, weight.shape, generator=generator).to(weight.device) * 2 - 1
            ulp = torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - 1 - bits)
            state[name] = torch.where(weight == 0, weight, weight + site.size * signs * ulp)
    setup.policy.load_local_state({name: state[name] for name in state if name.startswith("weights/")})


OF_SETUPS = {
    function.__name__: function
    for function in (value_unshifted, critic_mask_of_other_rows, dropout_on, one_ulp)
}
