"""Sketches of a run's weights: random projections of its tensors, in a file of safetensors."""

from pathlib import Path
from typing import TYPE_CHECKING

from abrun.regular_files import read_regular

if TYPE_CHECKING:
    from abrun.stats.series import Array

MAX_BYTES = 1 << 28


def read_sketch(path: Path) -> "dict[str, Array]":
    """Return the sketches in a file, float64, by tensor; none where it is missing or does not read."""
    from safetensors import SafetensorError, numpy  # and numpy itself, which status does without

    try:
        sketch = numpy.load(read_regular(path, MAX_BYTES))
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}
    return {name: values for name, values in sketch.items() if values.dtype == "float64"}
