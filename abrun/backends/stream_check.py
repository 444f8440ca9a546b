"""A check at load: a sequence in a stream has the logits that it has in a row of its own.

Attention that is neither full nor causal, state-space layers, linear attention and convolutions differ in a
stream, each in its own way. A few tokens show all of them: while the check runs, every window and chunk of
attention is shorter than its sequences.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from abrun.backends.packing import Packing, packing_of
from abrun.models import Facts
from abrun.models.checks import agree, logits_of, nested_configs, plain_tokens, undisturbed

# Fields of modules and configurations that bound how far a token attends; `sliding_window_pattern` does not.
WINDOWS = re.compile(r"window(_size)?$|attention_chunk_size$")
WINDOW = 3
# Rounding may send a token to another expert, which shows in its logits, but not with other tokens as well.
SEEDS = (0, 1)

HiddenStates = Callable[[Any, Tensor, Packing | None], Tensor]


def stream_deviation(
    network: Any,
    facts: Facts,
    hidden_states: HiddenStates,
    enable: Callable[[], None],
    *,
    share_prompts: bool,
) -> float | None:
    """Return the largest difference of log-probs, in nats, between a stream and rows; None within rounding.

    Runs the network on rows, then calls `enable`, which replaces its attention, and runs it on the stream.
    Leaves weights, buffers, modes and the random-number generator as they were.
    """
    batches = [plain_tokens(network, facts, seed=seed) for seed in SEEDS]  # [2, S] each
    num_rows, length = batches[0].shape
    shared = [0, length // 2] if share_prompts else None  # plain_tokens gives both rows the same prompt
    packing = packing_of([length] * num_rows, length, batches[0].device, shared=shared)
    with undisturbed(network), torch.no_grad():
        network.eval()
        with short_windows(network):
            rows = [logits_of(facts, hidden_states(facts.base, tokens, None)) for tokens in batches]
        enable()
        with short_windows(network):
            for tokens, expected in zip(batches, rows, strict=True):
                stream = hidden_states(facts.base, packing.pack(tokens), packing)
                found = logits_of(facts, packing.unpack_prompts(stream))
                if agree(found, expected):
                    return None
    difference = found.log_softmax(dim=-1) - expected.log_softmax(dim=-1)
    return float(difference.abs().max())


@contextlib.contextmanager
def short_windows(network: Any) -> Iterator[None]:
    """Shorten all windows and chunks of attention to `WINDOW` tokens while the context is open."""
    owners = {id(module): module for module in network.modules()}
    for module in list(owners.values()):
        for config in nested_configs(getattr(module, "config", None)):
            owners[id(config)] = config
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
