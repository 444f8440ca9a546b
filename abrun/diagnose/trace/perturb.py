"""One-ULP perturbations of a step: of weights, and of the outputs of modules."""

import torch
from torch import Tensor

from abrun.backends import Trainable
from abrun.runs.captures import MANTISSA_BITS
from abrun.seeds import derive_seed


def one_ulp_away(values: Tensor, dtype: str, seed: int, *names: str) -> Tensor:
    """Return each value moved by one ULP of `dtype`, up or down at random; zeros stay.

    The signs depend on seed, names and shape alone.
    """
    device = values.device
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "trace", *names))
    signs = torch.randint(2, values.shape, generator=generator, dtype=torch.int8, device=device) * 2 - 1
    exponent = torch.frexp(values.float()).exponent - 1 - MANTISSA_BITS[dtype]
    ulp = torch.ldexp(torch.ones_like(values, dtype=torch.float32), exponent)
    return torch.where(values == 0, values, (values.float() + signs * ulp).to(values.dtype))


def perturb_weights(model: Trainable, dtype: str, seed: int, name: str) -> None:
    """Move each weight of a model by one ULP of its compute dtype.

    Ranks with the same shard move it alike. The signs depend on `name`.
    """
    specs, state = model.shard_specs(), model.local_state()
    moved = {
        key: one_ulp_away(weight, dtype, seed, "weights", name, key, repr(specs[key].pieces))
        for key, weight in state.items()
        if key.startswith("weights/")
    }
    model.load_local_state(state | moved)
