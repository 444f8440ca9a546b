"""One-ULP perturbations of a step: of weights, and of the outputs of modules."""

from typing import Any

import torch
from torch import Tensor

from abrun.runs.captures import MANTISSA_BITS
from abrun.seeds import derive_seed


def one_ulp_away(values: Tensor, dtype: str, seed: int, *names: str) -> Tensor:
    """Return each value moved by one ULP of `dtype`, up or down at random; zeros stay.

    The signs depend on seed, names and shape alone.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "trace", *names))
    signs = torch.randint(2, values.shape, generator=generator, dtype=torch.int8).to(values.device) * 2 - 1
    exponent = torch.frexp(values.float()).exponent - 1 - MANTISSA_BITS[dtype]
    ulp = torch.ldexp(torch.ones_like(values, dtype=torch.float32), exponent)
    return torch.where(values == 0, values, (values.float() + signs * ulp).to(values.dtype))


def perturb_weights(policy: Any, dtype: str, seed: int, replica: int) -> None:
    """Move each weight of a policy by one ULP of its compute dtype.

    Ranks with the same shard move it alike.
    """
    specs, state = policy.shard_specs(), policy.local_state()
    moved = {
        name: one_ulp_away(weight, dtype, seed, "weights", str(replica), name, repr(specs[name].pieces))
        for name, weight in state.items()
        if name.startswith("weights/")
    }
    policy.load_local_state(state | moved)
