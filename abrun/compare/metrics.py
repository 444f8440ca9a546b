"""What the comparison knows of a metric by its name: transform, how a window is summarised, unit."""

from typing import Literal

import numpy as np

from abrun.errors import ComparisonError
from abrun.series import Array

Transform = Literal["identity", "log", "log_excess"]

TOKEN_MULT_PROB_ERROR = "train/token_mult_prob_error"
STEP_TIME = "timing/train/total_step_time_s"
# On CUDA the allocator's peak; on CPU, which has no such counter, the peak of live tensors. Never mixed.
PEAK_MEMORY = ("peak_allocated_bytes", "peak_live_tensor_bytes")

EXCESS_OFFSET = 1e-6  # keeps log(x - 1) finite where trainer and engine agree exactly


def default_transform(metric: str) -> Transform:
    """Rewards and shares are compared as they are, scales (norms, seconds, bytes) as ratios."""
    if metric.endswith("mult_prob_error"):
        return "log_excess"
    if metric.endswith("grad_norm") or metric.startswith(("timing/", "memory/", "performance/")):
        return "log"
    return "identity"


def default_reduction(metric: str) -> Literal["mean", "median"]:
    """The median for metrics whose single spikes would carry a mean."""
    spiky = metric.endswith(("mult_prob_error", "grad_norm")) or metric.startswith(
        ("timing/", "performance/")
    )
    return "median" if spiky else "mean"


def transformed(values: Array, transform: Transform, metric: str) -> Array:
    """`values` on the scale they are compared on. Raises ComparisonError outside the transform's domain."""
    if transform == "identity":
        return values
    inside = values - 1 + EXCESS_OFFSET if transform == "log_excess" else values
    if (inside <= 0).any():
        allowed = "at least 1" if transform == "log_excess" else "above 0"
        raise ComparisonError(
            f"{metric}: transform {transform!r} got the value {values[inside <= 0].flat[0]:.6g}; "
            f"it takes values {allowed}: declare `transform: identity` for this metric"
        )
    return np.log(inside)


def reduced(values: Array, metric: str) -> Array:
    """One number a row: the summary of a window's steps (last axis)."""
    return np.median(values, axis=-1) if default_reduction(metric) == "median" else np.mean(values, axis=-1)


def difference_unit(transform: Transform) -> str:
    """How a difference of transformed values is read."""
    return {"identity": "", "log": " (log ratio)", "log_excess": " (log ratio of the excess over 1)"}[
        transform
    ]


def display_unit(metric: str, largest: float) -> tuple[str, float]:
    """Label and divisor for showing a metric to people; files keep seconds and bytes."""
    if metric.endswith("_bytes"):
        return ("GiB", 2.0**30) if largest >= 2**28 else ("MiB", 2.0**20)
    if metric.endswith("_s"):
        return "s", 1.0
    return ("nats", 1.0) if metric.endswith("entropy") else ("", 1.0)
