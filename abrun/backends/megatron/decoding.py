"""The policy as a plain Hugging Face network, to write checkpoints and to decode with a cache."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from abrun.backends import Decoder
from abrun.backends.head import LmHead
from abrun.models import attention_in_place, facts_of


class WeightlessNetwork:
    """A transformers network without its weights, which megatron-core's model holds."""

    def __init__(self, network: Any) -> None:
        # Keep buffers that a checkpoint lacks, such as the frequencies of rotary embeddings.
        stored = network.state_dict().keys()
        self._buffers = {name: b.clone() for name, b in network.named_buffers() if name not in stored}
        vars(network).pop("checkpoint", None)  # closes its files
        self.network: Any = network.to("meta")
        self.network.tie_weights()

    def fill(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> Any:
        """Return a copy on `device` in evaluation mode, filled with the weights one tensor at a time."""
        network = copy.deepcopy(self.network)
        modules = dict(network.named_modules())
        for name, buffer in self._buffers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(modules[owner], attribute, buffer.to(device))
        missing = dict(network.named_parameters())
        for name, weight in weights:
            owner, _, attribute = name.rpartition(".")
            setattr(modules[owner], attribute, nn.Parameter(weight.to(dtype, copy=True), requires_grad=False))
            del missing[name]
        network.tie_weights()
        assert not missing, f"no weights for {sorted(missing)}"
        return network.eval()


@contextlib.contextmanager
def open_decoder(network: Any, head: LmHead) -> Iterator[Decoder]:
    facts, in_place = facts_of(network), getattr(network, "decodes_in_place", False)
    step = partial(head.decode, facts.base, facts.head.weight)
    with attention_in_place(network) if in_place else contextlib.nullcontext():
        yield Decoder(step=step, in_place=in_place, collective=False)
