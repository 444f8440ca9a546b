"""A self-check on load: every module must compute the same for a sequence in a stream as for a padded row.

Windowed and linear attention, state-space layers, convolutions and modules that count positions themselves
can mix up the sequences of a stream. A few tokens reveal all of them, because the check shortens attention
windows and chunks below the length of its sequences. It compares modules one by one: the effect on log-probs
depends on the weights and can be small.

Letters: B sequences of S tokens, T = B * S tokens in their stream.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from abrun.backends.packing import Packing, make_packing
from abrun.models import Facts
from abrun.models.checks import agree, draw_plain_tokens, logits_of, nested_configs, restored_afterwards

# Fields of modules and configurations that limit how far a token attends; `sliding_window_pattern` does not.
WINDOWS = re.compile(r"window(_size)?$|attention_chunk_size$")
WINDOW = 3
# Two seeds: rounding can route a token to another expert, but it is unlikely to do so for both sets of
# tokens.
SEEDS = (0, 1)

HiddenStates = Callable[[Any, Tensor, Packing | None], Tensor]


class Deviation(NamedTuple):
    """The first module whose outputs differ between stream and rows, and the effect on log-probs."""

    module: str
    nats: float  # largest difference of log-probs


def measure_stream_deviation(
    network: Any,
    facts: Facts,
    hidden_states: HiddenStates,
    enable: Callable[[], None],
    *,
    share_prompts: bool,
) -> Deviation | None:
    """Return how a network's stream differs from its rows; None if they agree to rounding.

    Runs the network on rows, then calls `enable`, which replaces its attention, and runs it on the stream.
    Leaves weights, buffers, modes and the random-number generator as they were.
    """
    batches = [draw_plain_tokens(network, facts, seed=seed) for seed in SEEDS]  # [B, S] each
    rows, length = batches[0].shape
    shared = [0, length // 2] if share_prompts else None  # plain_tokens gives both rows the same prompt
    packing = make_packing([length] * rows, length, batches[0].device, shared=shared)
    deviation = None
    with restored_afterwards(network), torch.no_grad():
        network.eval()
        with short_windows(network):
            expected = [_record_outputs(network, facts, hidden_states, tokens, None) for tokens in batches]
        enable()
        with short_windows(network):
            for tokens, row_outputs in zip(batches, expected, strict=True):
                stream_outputs = _record_outputs(network, facts, hidden_states, packing.pack(tokens), packing)
                deviation = _compare_outputs(row_outputs, stream_outputs)
                if deviation is None:
                    return None
    return deviation


def _record_outputs(
    network: Any, facts: Facts, hidden_states: HiddenStates, tokens: Tensor, packing: Packing | None
) -> dict[str, Tensor]:
    """Return the outputs [B, S, ...] of modules with submodules, in execution order, then the logits."""
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            if isinstance(states, Tensor) and states.shape[:2] == tokens.shape:
                outputs[name] = states if packing is None else packing.unpack_with_prompts(states)

        return hook

    containers = [(name, module) for name, module in network.named_modules() if next(module.children(), None)]
    hooks = [module.register_forward_hook(record(name)) for name, module in containers]
    try:
        hidden = hidden_states(facts.base, tokens, packing)
    finally:
        for hook in hooks:
            hook.remove()
    logits = logits_of(facts, hidden)
    return outputs | {"": logits if packing is None else packing.unpack_with_prompts(logits)}


def _compare_outputs(rows: dict[str, Tensor], stream: dict[str, Tensor]) -> Deviation | None:
    differing = (
        name for name in stream if name in rows and not agree(stream[name].float(), rows[name].float())
    )
    module = next(differing, None)
    if module is None:
        return None
    difference = stream[""].log_softmax(dim=-1) - rows[""].log_softmax(dim=-1)
    return Deviation(module, float(difference.abs().max()))


@contextlib.contextmanager
def short_windows(network: Any) -> Iterator[None]:
    """Shorten all windows and chunks of attention to `WINDOW` tokens while the context is open."""
    owners = {id(module): module for module in network.modules()}
    for module in list(owners.values()):
        owners |= {id(config): config for config in nested_configs(getattr(module, "config", None))}
    windows = [
        (owner, name, value)
        for owner in owners.values()
        for name, value in vars(owner).items()
        if WINDOWS.search(name) and type(value) is int and value > WINDOW
    ]
    try:
        for owner, name, _ in windows:
            setattr(owner, name, WINDOW)
        yield
    finally:
        for owner, name, value in windows:
            setattr(owner, name, value)
