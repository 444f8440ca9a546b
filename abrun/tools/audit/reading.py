"""Dumps: reading and checking. Dimensions: B sequences, T positions, N of the whole batch, V vocabulary."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from abrun.errors import StoreError
from abrun.tools.audit.bounds import PRECISIONS, SINGLE, Array, Bounded, Precision
from abrun.tools.audit.dump import FORMAT, KEY
from abrun.tools.audit.settings import ALGORITHMS, Settings

# Letters of each tensor's shape. Entry t of a token tensor belongs to token t
SHAPES = {
    **dict.fromkeys(("token_ids", "token_mask", "prompt_mask", "attention_mask", "excluded_mask"), "BT"),
    **dict.fromkeys(("trainer_logprobs", "old_logprobs", "inference_logprobs", "reference_logprobs"), "BT"),
    **dict.fromkeys(("ratio", "clipped", "kl", "importance_weights", "entropy", "token_losses"), "BT"),
    **dict.fromkeys(("token_weights", "logprob_gradients", "values", "token_rewards", "advantages"), "BT"),
    **dict.fromkeys(("rewards", "group_ids", "baseline"), "B"),
    "reward_parts": "BK",
    **dict.fromkeys(("batch_rewards", "batch_group_ids"), "N"),
    **dict.fromkeys(("logits", "old_logits"), "LV"),
    "logit_tokens": "L2",  # row and position of each row of logits
    **dict.fromkeys(("loss", "auxiliary_loss"), ""),
}
BOOLEAN = ("token_mask", "prompt_mask", "attention_mask", "excluded_mask", "clipped")
INTEGER = ("token_ids", "group_ids", "batch_group_ids", "logit_tokens")
BROADCAST = ("advantages", "ratio", "importance_weights", "clipped")  # also [B] or [B, 1]
RESULTS = ("loss", "logprob_gradients", "token_losses")  # NaN there is a difference, not bad input
DTYPES = {
    "F64": ("float64", np.float64),
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", np.uint16),
    "BOOL": ("int", np.bool_),
    **{
        f"{kind}{size}": ("int", np.dtype(f"{kind.lower()}{size // 8}"))
        for kind in "IU"
        for size in (8, 16, 32, 64)
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The tensors of one micro-batch as float64, with the types that they are stored in."""

    algorithm: str
    settings: Settings
    metrics: dict[str, float]
    tensors: dict[str, Array]
    stored: dict[str, Precision]
    unknown: tuple[str, ...]  # tensors that the format does not know

    def bounded(self, name: str) -> Bounded:
        chosen = self.settings.compute_dtype
        return Bounded.exact(self.tensors[name], PRECISIONS[chosen] if chosen else self.stored[name])


def read_dump(path: Path, algorithm: str | None = None) -> Dump:
    """Read and check a dump; `algorithm` replaces the header's and outranks its settings.

    Raises StoreError for anything that is not a sound dump.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise StoreError(f"--as: got {algorithm!r}; allowed: {', '.join(ALGORITHMS)}")
    header, arrays = _read_file(path)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        got = header.get("format") if isinstance(header, dict) else header
        raise StoreError(f"{path}: format {got!r:.40}; this abrun reads format {FORMAT}")
    named = header.get("algorithm")
    if named not in ALGORITHMS:
        raise StoreError(f"{path}: algorithm: got {named!r:.40}; allowed: {', '.join(ALGORITHMS)}")
    metrics, settings = header.get("metrics", {}), header.get("settings", {})
    if not (isinstance(metrics, dict) and isinstance(settings, dict)):
        raise StoreError(f"{path}: settings and metrics must be mappings; write the dump with write_dump")
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise StoreError(f"{path}: metrics.{name:.40}: got {value!r:.40}; give a number")
    try:
        preset = ALGORITHMS[named] | settings | (ALGORITHMS[algorithm] if algorithm else {})
        validated = Settings.model_validate(preset)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise StoreError(
            f"{path}: settings.{where:.60}: {problem['msg']}, got {problem['input']!r:.40}"
        ) from None

    known = {name: array for name, (array, _) in arrays.items() if name in SHAPES}
    _check_shapes(path, known)
    tensors = {name: _as_float64(path, name, array) for name, array in known.items()}
    _check_values(path, tensors)
    return Dump(
        algorithm=algorithm or named,
        settings=validated,
        metrics={name: float(value) for name, value in metrics.items()},
        tensors=tensors,
        stored={name: PRECISIONS.get(arrays[name][1], SINGLE) for name in known},
        unknown=tuple(sorted(arrays.keys() - known.keys())),
    )


def _read_file(path: Path) -> tuple[Any, dict[str, tuple[NDArray[Any], str]]]:
    """Return a file's header and its tensors with the names of their types."""
    from safetensors import SafetensorError, deserialize, safe_open

    if not path.is_file():
        raise StoreError(f"{path}: no such file; give a dump that write_dump has written")
    try:
        with safe_open(path, framework="numpy") as opened:
            metadata: Mapping[str, str] = opened.metadata() or {}
        if KEY not in metadata:
            raise StoreError(f"{path}: no {KEY} in its metadata, so it is no dump; write it with write_dump")
        header = json.loads(metadata[KEY])
        entries = deserialize(path.read_bytes())
    except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{path}: not a readable safetensors file ({reason:.120}); dump again") from None
    arrays = {}
    for name, entry in entries:
        if entry["dtype"] not in DTYPES:
            if name in SHAPES:
                raise StoreError(f"{path}: {name}: type {entry['dtype']}; use {', '.join(DTYPES)}")
            continue
        dtype, storage = DTYPES[entry["dtype"]]
        array = np.frombuffer(entry["data"], storage).reshape(entry["shape"])
        if dtype == "bfloat16":  # the upper half of a float32
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = (array, dtype)
    return header, arrays


def _check_shapes(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise StoreError if the tensors do not agree on the length of a dimension."""
    if "trainer_logprobs" not in arrays:
        raise StoreError(f"{path}: no tensor trainer_logprobs; dump the log-probs that the loss reads")
    lengths: dict[str, tuple[int, str]] = {"2": (2, "row and position")}
    for name in sorted(arrays, key=lambda name: name != "trainer_logprobs"):
        shape, letters = arrays[name].shape, SHAPES[name]
        if name in BROADCAST and (len(shape) == 1 or shape[1:] == (1,)):
            shape, letters = shape[:1], "B"
        if not letters and shape == (1,):
            shape = ()
        if len(shape) != len(letters):
            raise StoreError(f"{path}: {name}: shape {[*shape]}; give [{', '.join(letters)}]")
        for letter, length in zip(letters, shape, strict=True):
            expected, source = lengths.setdefault(letter, (length, name))
            if length != expected or length == 0:
                raise StoreError(
                    f"{path}: {name}: shape {[*shape]}, but {letter} is {expected} in {source}; "
                    f"give [{', '.join(letters)}] of one micro-batch"
                )


def _as_float64(path: Path, name: str, array: NDArray[Any]) -> Array:
    if name in BOOLEAN or name in INTEGER:
        if array.size and not np.isfinite(array).all():
            raise StoreError(f"{path}: {name}: NaN or infinity; give whole numbers")
        if name in BOOLEAN and not np.isin(array, (0, 1)).all():
            raise StoreError(f"{path}: {name}: got other values than 0 and 1; give a mask")
    values = array.astype(np.float64)
    if name in BROADCAST and values.ndim == 1:
        values = values[:, None]
    return values.reshape(()) if not SHAPES[name] else values


def _check_values(path: Path, tensors: Mapping[str, Array]) -> None:
    """Raise StoreError if a value that counts is not finite, or an index is out of range."""
    mask = tensors.get("token_mask")
    counted = np.ones_like(tensors["trainer_logprobs"], bool) if mask is None else mask > 0
    for name, values in tensors.items():
        if name in RESULTS or name in BOOLEAN:
            continue
        of_tokens = SHAPES[name] == "BT" and values.shape == counted.shape
        broken = ~np.isfinite(values) & (counted if of_tokens else True)
        if broken.any():
            place = [int(index) for index in np.argwhere(broken)[0]]
            raise StoreError(
                f"{path}: {name}: {values[tuple(place)]} at {place}, which the loss counts; nothing can be "
                "recomputed from it: look for its origin, or dump an earlier step"
            )
    if "logits" in tensors or "old_logits" in tensors:
        if "logit_tokens" not in tensors or "token_ids" not in tensors:
            raise StoreError(f"{path}: logits need the tensors logit_tokens and token_ids; dump them too")
        limits = np.array(counted.shape)
        places = tensors["logit_tokens"]
        vocabulary = next(tensors[name] for name in ("logits", "old_logits") if name in tensors).shape[1]
        if (places < 0).any() or (places >= limits).any():
            raise StoreError(f"{path}: logit_tokens: a row or position outside of {[*limits]}; dump again")
        if ((tensors["token_ids"] < 0) | (tensors["token_ids"] >= vocabulary)).any():
            raise StoreError(f"{path}: token_ids: an id outside of the {vocabulary} logits; dump all of them")
