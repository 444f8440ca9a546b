"""Dumps: reading and checking. Dimensions: B sequences, T positions, N rewards of a batch, V vocabulary."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from abrun.errors import StoreError
from abrun.tools.audit.bounds import PRECISIONS, SINGLE, Array, Bounded, Precision
from abrun.tools.audit.dump import FORMAT, KEY
from abrun.tools.audit.settings import ALGORITHMS, Settings

MASKS = ("token_mask", "prompt_mask", "attention_mask", "excluded_mask", "clipped")
# Letters of each tensor's shape. Entry t of a token tensor belongs to token t
SHAPES = {
    **dict.fromkeys((*MASKS, "token_ids", "token_rewards", "entropy", "advantages"), "BT"),
    **dict.fromkeys(("trainer_logprobs", "old_logprobs", "inference_logprobs", "reference_logprobs"), "BT"),
    **dict.fromkeys(("ratio", "kl", "importance_weights", "token_losses", "token_weights"), "BT"),
    "logprob_gradients": "BT",
    **dict.fromkeys(("rewards", "group_ids", "baseline"), "B"),
    "reward_parts": "BK",
    **dict.fromkeys(("batch_rewards", "batch_group_ids"), "N"),
    **dict.fromkeys(("logits", "old_logits"), "LV"),
    "logit_tokens": "L2",  # row and position of each row of logits
    **dict.fromkeys(("loss", "auxiliary_loss"), ""),
}
BY_ROW = ("advantages", "ratio", "importance_weights", "clipped")  # also [B] or [B, 1]
RESULTS = ("loss", "logprob_gradients", "token_losses")  # NaN there is a difference, not bad input
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"} | {
    f"{kind[0].upper()}{size}": f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)
}


class Header(BaseModel):
    """The JSON under `dump.KEY` in the metadata of a dump."""

    algorithm: str
    settings: dict[str, Any] = {}
    metrics: dict[str, float] = {}


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
        precision = PRECISIONS.get(self.settings.compute_dtype or "", self.stored[name])
        return Bounded.exact(self.tensors[name], precision)


def read_dump(path: Path, algorithm: str | None = None) -> Dump:
    """Read and check a dump; `algorithm` replaces the header's and outranks its settings.

    Raises StoreError for anything that is not a sound dump.
    """
    fields, arrays = _read_file(path)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise StoreError(f"{path}: got {fields!r:.60}; this abrun reads dumps of format {FORMAT}")
    try:
        header = Header.model_validate(fields)
        for source, name in (("--as", algorithm), (f"{path}: algorithm", header.algorithm)):
            if name is not None and name not in ALGORITHMS:
                raise StoreError(f"{source}: got {name!r:.40}; allowed: {', '.join(ALGORITHMS)}")
        chosen = ALGORITHMS[algorithm] if algorithm else {}
        settings = Settings.model_validate(ALGORITHMS[header.algorithm] | header.settings | chosen)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        is_unknown = problem["type"] == "extra_forbidden"
        why = f"known settings: {', '.join(Settings.model_fields)}" if is_unknown else problem["msg"]
        raise StoreError(f"{path}: {place:.60}: got {problem['input']!r:.40}; {why}") from None

    tensors = {name: array.astype(np.float64) for name, (array, _) in arrays.items() if name in SHAPES}
    for name, values in tensors.items():
        if name in BY_ROW and values.ndim == 1:
            tensors[name] = values[:, None]
        elif not SHAPES[name] and values.size == 1:
            tensors[name] = values.reshape(())
    _check_shapes(path, tensors)
    _check_values(path, tensors)
    return Dump(
        algorithm=algorithm or header.algorithm,
        settings=settings,
        metrics=header.metrics,
        tensors=tensors,
        stored={name: PRECISIONS.get(arrays[name][1], SINGLE) for name in tensors},
        unknown=tuple(sorted(arrays.keys() - tensors.keys())),
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
        fields, entries = json.loads(metadata[KEY]), deserialize(path.read_bytes())
    except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{path}: not a readable safetensors file ({reason:.120}); dump again") from None
    arrays = {}
    for name, entry in entries:
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            raise StoreError(f"{path}: {name}: type {entry['dtype']}; dump it as one of {', '.join(DTYPES)}")
        array = np.frombuffer(entry["data"], "uint16" if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16":  # the upper half of a float32
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = (array.reshape(entry["shape"]), dtype)
    return fields, arrays


def _check_shapes(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise StoreError if the tensors do not agree on the length of a dimension."""
    if "trainer_logprobs" not in arrays:
        raise StoreError(f"{path}: no tensor trainer_logprobs; dump the log-probs that the loss reads")
    lengths: dict[str, tuple[int, str]] = {"2": (2, "row and position")}
    for name in sorted(arrays, key=lambda name: name != "trainer_logprobs"):
        shape, letters = arrays[name].shape, SHAPES[name]
        if name in BY_ROW and shape[1:] == (1,):
            shape, letters = shape[:1], "B"
        agrees = len(shape) == len(letters)
        for letter, length in zip(letters, shape, strict=False):
            agrees &= length == lengths.setdefault(letter, (length, name))[0] > 0
        if not agrees:
            sizes = ", ".join(f"{letter} is {length} in {of}" for letter, (length, of) in lengths.items())
            raise StoreError(f"{path}: {name}: shape {[*shape]}; give [{', '.join(letters)}] ({sizes:.120})")


def _check_values(path: Path, tensors: Mapping[str, Array]) -> None:
    """Raise StoreError if a value that counts is not finite, or a mask is none."""
    counts = tensors.get("token_mask", np.ones_like(tensors["trainer_logprobs"])) != 0
    for name, values in tensors.items():
        is_masked = SHAPES[name] == "BT" and values.shape == counts.shape and name not in MASKS
        broken = ~np.isfinite(values) & (counts if is_masked else True)
        if broken.any() and name not in RESULTS:
            place = tuple(int(index) for index in np.argwhere(broken)[0])
            raise StoreError(
                f"{path}: {name}: {values[place]} at {[*place]}, which the loss counts; look for its origin "
                "before the loss, or dump an earlier step"
            )
        if name in MASKS and not np.isin(values, (0, 1)).all():
            raise StoreError(f"{path}: {name}: got other values than 0 and 1; give a mask")
