"""From what every rank has seen of a step to one capture with logical shapes.

Each rank writes its part into a scratch folder, and rank 0 puts them together.

Letters: n tokens, F features.
"""

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from abrun.backends.ranks import Ranks
from abrun.backends.shards import Piece, ShardSpec, specs_to_metadata
from abrun.diagnose.trace.observe import DATA_FIELDS, GRAD_NORM, LEARNING_RATE, LOSS, StepRecord
from abrun.recipe.run import OwnRunConfig
from abrun.runs.captures import EXACT, Capture, Kind, write_capture
from abrun.train.branch import SavedTensors

SCRATCH, TOKENS = ".parts", "tokens"
CapturedRow = tuple[Kind, str, str, np.ndarray]


def gather_capture(
    folder: Path,
    record: StepRecord,
    config: OwnRunConfig,
    ranks: Ranks,
    weight_shapes: Mapping[str, tuple[int, ...]],
    *,
    step: int,
    model: str,
    perturbation: int | None,
) -> Capture | None:
    """Write the capture of a step into `folder`; return it on rank 0. Collective.

    `weight_shapes` has every trained parameter, also one without a gradient, which counts as 0.
    """
    parts = folder / SCRATCH
    if ranks.is_first:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
    ranks.barrier()
    _write_part(parts, record, ranks)
    ranks.barrier()
    capture = None
    (seconds,) = ranks.all_reduce_max_world([record.step_time_s])
    if ranks.is_first:
        states = _merge_states(parts)
        parameters = _merge_parameters(parts, weight_shapes)
        capture = write_capture(
            folder,
            list(_in_order(states, parameters, record, config.policy.dtype)),
            step=step,
            model=model,
            layout={"ranks": ranks.size, **_layout(config)},
            dtype=config.policy.dtype,
            perturbation=perturbation,
            step_time_s=seconds,
        )
        shutil.rmtree(parts)
    ranks.barrier()
    return capture


def _layout(config: OwnRunConfig) -> dict[str, Any]:
    policy = config.policy
    return policy.backend.model_dump(mode="json") | {
        "packing": policy.packing,
        "logprobs": policy.logprobs.model_dump(mode="json"),
    }


def _write_part(parts: Path, record: StepRecord, ranks: Ranks) -> None:
    save_file(
        record.shards,
        parts / f"shards-{ranks.rank:06d}.safetensors",
        specs_to_metadata(record.specs, record.shards),
    )
    replicas = (group for group in (ranks.tensor, ranks.context) if group is not None)
    if any(group.rank() for group in replicas) or not record.tokens:
        return  # another rank has the same tokens
    tensors = {f"{update}/{TOKENS}": torch.cat(tokens) for update, tokens in record.tokens.items()}
    for kind, noted in (("activation", record.activations), ("gradient", record.loss_gradients)):
        for index, ((update, name), rows) in enumerate(noted.items()):
            tensors[f"{update}/{kind}/{index:06d}/{name}"] = torch.cat(rows)
    save_file(tensors, parts / f"states-{ranks.rank:06d}.safetensors")


def _merge_states(parts: Path) -> dict[str, Tensor]:
    """Return the values [n, F] in the order of the batch, by kind and name in the order of execution."""
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for path in sorted(parts.glob("states-*")):
        tensors = load_file(path)
        for key in sorted(tensors, key=lambda key: (int(key.partition("/")[0]), key)):
            update, _, rest = key.partition("/")
            if rest != TOKENS:
                kind, _, name = rest.split("/", 2)
                suffix = f"@{int(update) + 1}" if int(update) else ""
                tokens = tensors[f"{update}/{TOKENS}"]
                pieces.setdefault(f"{kind}/{name}{suffix}", []).append((tokens, tensors[key]))
    merged = {}
    for name, seen in pieces.items():
        tokens = torch.cat([tokens for tokens, _ in seen])
        order = np.lexsort((tokens[:, 1].numpy(), tokens[:, 0].numpy()))
        merged[name] = torch.cat([values for _, values in seen])[torch.from_numpy(order)]
    return merged


def _merge_parameters(parts: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the full gradients and updates as `gradient/NAME` and `update/NAME`."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, "pt")) for path in sorted(parts.glob("shards-*"))]
        saved = SavedTensors(files)
        return {
            f"{kind}/{name}": saved.read_held(ShardSpec.from_piece(f"{kind}/{name}", Piece.full(shape)), None)
            if f"{kind}/{name}" in saved
            else torch.zeros(shape)
            for name, shape in shapes.items()
            for kind in ("gradient", "update")
        }


def _in_order(
    states: Mapping[str, Tensor], parameters: Mapping[str, Tensor], record: StepRecord, dtype: str
) -> Iterable[CapturedRow]:
    """Yield activations, gradients from the loss back, updates, and what later optimizer steps saw."""
    first = [name for name in states if "@" not in name]
    activations = [name.removeprefix("activation/") for name in first if name.startswith("activation/")]
    modules = [name for name in activations if not name.startswith(_AROUND)]
    data = [name for name in activations if name in _DATA]
    rest = [name for name in activations if name not in {*data, *modules}]
    for name in [*data, *modules, *rest]:
        yield _state(f"activation/{name}", states, dtype if name in modules else "float32")
    for name in first:
        if name.startswith("gradient/"):
            yield _state(name, states, "float32")
    by_depth = sorted({name.partition("/")[2] for name in parameters}, key=lambda name: _depth(name, modules))
    for name in reversed(by_depth):
        yield "gradient", name, dtype, parameters[f"gradient/{name}"].numpy()
    yield "gradient", GRAD_NORM, "float32", np.array(record.grad_norm, np.float32)
    yield "update", LEARNING_RATE, "float32", np.array(record.learning_rate, np.float32)
    for name in by_depth:
        yield "update", name, "float32", parameters[f"update/{name}"].numpy()
    later = (name for name in states if "@" in name)
    for name in sorted(later, key=lambda name: int(name.rpartition("@")[2])):
        yield _state(name, states, "float32")


_DATA = tuple(f"batch.{name}" for name in DATA_FIELDS)
_EXACT = ("batch.token_ids", "batch.token_mask")
_AROUND = ("batch.", "lm_head.", LOSS)


def _state(key: str, states: Mapping[str, Tensor], dtype: str) -> CapturedRow:
    kind, _, name = key.partition("/")
    is_exact = name.partition("@")[0] in _EXACT
    values = states[key]
    flat = values[:, 0] if values.shape[1] == 1 else values
    return (
        ("gradient" if kind == "gradient" else "activation"),
        name,
        EXACT if is_exact else dtype,
        flat.numpy(),
    )


def _depth(parameter: str, modules: list[str]) -> tuple[int, str]:
    """Return the place in the order of execution of the innermost module that has the parameter."""
    places = [place for place, name in enumerate(modules) if parameter.startswith(f"{name}.")]
    innermost = max(places, key=lambda place: len(modules[place]), default=len(modules))
    return innermost, parameter
