"""Gradient norms on the CPU, where torch's own norm adds float32 squares one by one.

That loses 0.2% for an embedding of 28 million elements, and more on one rank than on several.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18  # converted at a time, so that the copies stay in the cache


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, on the CPU: [] float64."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS):
            values = chunk.double()
            total += torch.dot(values, values)
    return total
