"""What a decoder's layers do besides what transformers gives them: compiled, and computed again backwards."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from abrun.recipe import Policy


def prepare_layers(layers: Iterable[nn.Module], policy: Policy) -> None:
    """Compile each layer's forward pass, and compute it again in the backward pass, where the policy says so.

    Both replace the layer's method `forward`, so that FSDP's hooks stay outside and run once. Lengths are
    dynamic, and the layers share their code: one compilation serves all of them and any microbatch.
    """
    for layer in layers:
        forward: Callable[..., Any] = layer.forward
        if policy.compile:
            forward = torch.compile(forward, dynamic=True)
        if policy.activation_checkpointing == "selective":
            forward = functools.partial(_graphs_again, forward)
        elif policy.activation_checkpointing == "full":
            forward = functools.partial(_computed_again, forward)
        layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def _computed_again(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Only a layer's inputs are kept until then. It draws no random numbers: models that do are refused."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **more)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **more)


def _graphs_again(forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """The compiled parts of a layer keep their inputs alone, and attention between them keeps what it needs.

    (Selective checkpointing of operators one by one was no faster than a whole layer again, for 20 GiB more.)
    """
    with functorch_config.patch(activation_memory_budget=0.0):  # read when a part is compiled
        return forward(*inputs, **more)
