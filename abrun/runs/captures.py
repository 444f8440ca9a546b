"""Captures: the tensors of one training step, in order of execution, as a folder that needs no torch to read.

capture.json            the step, its layout, and the list of tensors; written last
values.safetensors      their values as float32, under the tensors' names

Every tensor has its logical shape, however it was sharded: parameters as Hugging Face has them, activations
[tokens, features], with the tokens of the first sequences of the global batch, sequence by sequence.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from abrun.errors import StoreError
from abrun.runs.files import PUBLIC_MODE, read_json, wrap_read_errors, wrap_write_errors, write_json

FORMAT = 1
INDEX, VALUES = "capture.json", "values.safetensors"
Kind = Literal["activation", "gradient", "update", "parameter"]
MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10, "float8_e4m3fn": 3, "float8_e5m2": 2}
MIN_EXPONENTS = {"float16": -14, "float8_e4m3fn": -6, "float8_e5m2": -14}  # of others -126
EXACT = "exact"  # dtype of values that nothing rounds: token ids, masks


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTensor:
    """One tensor of a capture.

    `module` is Hugging Face's name of the module whose output an activation is, or of the parameter. Values
    outside the network have names of their own: `batch.*` what the step trains on, `lm_head.*` log-probs and
    entropies, `loss` (on the baseline's log-probs), and `optimizer.*`; `NAME@2` is of the step's second
    optimizer step.
    """

    index: int  # position in the order of execution: activations, gradients from the loss back, updates
    kind: Kind
    module: str
    shape: tuple[int, ...]
    dtype: str  # in which it was computed: a key of MANTISSA_BITS, or EXACT

    @property
    def name(self) -> str:
        """Return the tensor's name, which no other tensor of the capture has."""
        return f"{self.kind}:{self.module}"

    def ulps(self, values: np.ndarray) -> np.ndarray:
        """Return the distance from each value to the next larger one in its dtype; 0 if EXACT."""
        if self.dtype == EXACT:
            return np.zeros(values.shape)
        exponents = np.frexp(np.abs(values.astype(np.float64)))[1] - 1
        smallest = MIN_EXPONENTS.get(self.dtype, -126)
        return np.ldexp(1.0, np.maximum(exponents, smallest) - MANTISSA_BITS[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The captured tensors of one step of one arm."""

    folder: Path
    step: int
    model: str  # Hugging Face's class of the network
    layout: Mapping[str, Any]  # the arm's backend section and its number of ranks, for people
    dtype: str  # compute dtype of the policy
    perturbation: int | None  # number of the one-ULP replica; None: unperturbed
    step_time_s: float  # seconds of the step, with the capture
    tensors: tuple[CapturedTensor, ...]  # in order of execution

    def read(self, tensor: CapturedTensor) -> np.ndarray:
        """Return a tensor's values as float32. Raises StoreError if the file is damaged."""
        path = self.folder / VALUES
        try:
            with wrap_read_errors(path), safe_open(path, framework="numpy") as file:
                values = file.get_tensor(tensor.name)
        except SafetensorError as error:
            raise StoreError(f"{path}: damaged ({error}); capture the step again") from error
        if values.shape != tensor.shape:
            problem = f"{tensor.name} has another shape than in {INDEX}"
            raise StoreError(f"{path}: {problem}; capture the step again")
        return values


def write_capture(
    folder: Path,
    tensors: Sequence[tuple[Kind, str, str, np.ndarray]],  # (kind, module, dtype, values), in order
    *,
    step: int,
    model: str,
    layout: Mapping[str, Any],
    dtype: str,
    perturbation: int | None,
    step_time_s: float,
) -> Capture:
    """Write a capture into `folder`, replacing an earlier one."""
    captured = tuple(
        CapturedTensor(index=index, kind=kind, module=module, shape=values.shape, dtype=of)
        for index, (kind, module, of, values) in enumerate(tensors)
    )
    assert len({tensor.name for tensor in captured}) == len(captured), "two captured tensors of one name"
    arrays = [np.ascontiguousarray(values, np.float32).reshape(values.shape) for *_, values in tensors]
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        names = (tensor.name for tensor in captured)
        save_file(dict(zip(names, arrays, strict=True)), folder / VALUES)
    facts = {
        "step": step,
        "model": model,
        "layout": dict(layout),
        "dtype": dtype,
        "perturbation": perturbation,
        "step_time_s": step_time_s,
    }
    content = {"format": FORMAT, **facts, "tensors": [asdict(tensor) for tensor in captured]}
    write_json(folder / INDEX, json.loads(json.dumps(content)), mode=PUBLIC_MODE)
    return Capture(folder=folder, tensors=captured, **facts)


def is_capture(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def read_capture(folder: Path) -> Capture:
    """Read a capture, without its values. Raises StoreError if it is missing, torn or of another version."""
    path = folder / INDEX
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise StoreError(f"{path}: unknown format {content.get('format')!r}; capture the step again")
    try:
        tensors = tuple(
            CapturedTensor(**{**row, "shape": tuple(row["shape"])}) for row in content.pop("tensors")
        )
        names = {field.name for field in fields(Capture)} - {"folder", "tensors"}
        capture = Capture(folder=folder, tensors=tensors, **{name: content[name] for name in names})
        kinds, dtypes = {tensor.kind for tensor in tensors}, {tensor.dtype for tensor in tensors}
        is_known = kinds <= {*get_args(Kind)} and dtypes <= {*MANTISSA_BITS, EXACT}
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path}: damaged; capture the step again") from error
    if not is_known or not (folder / VALUES).is_file():
        raise StoreError(f"{path}: damaged; capture the step again")
    return capture
