"""The judgement of captures: its level, what it names, and what it refuses."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from abrun.errors import ComparisonError, StoreError
from abrun.runs.captures import Capture, Kind, write_capture
from abrun.runs.traces import TraceResult
from abrun.tools.trace.cli import summary
from abrun.tools.trace.command import REPLICAS, read_replicas
from abrun.tools.trace.judge import judge_trace, measure_errors, standardise

NAMES: tuple[tuple[Kind, str], ...] = (
    ("activation", "model.embed_tokens"),
    ("activation", "model.layers.0"),
    ("gradient", "model.layers.0.weight"),
    ("update", "model.layers.0.weight"),
)
SIZES = (1e-7, 5e-7, 2e-6, 1e-4)  # of a replica's errors in each tensor


def written(folder: Path, values: Sequence[np.ndarray], **facts: object) -> Capture:
    tensors = [(kind, name, "float32", value) for (kind, name), value in zip(NAMES, values, strict=True)]
    settings = {"step": 1, "model": "M", "layout": {}, "dtype": "float32", "perturbation": None}
    return write_capture(folder, tensors, step_time_s=1.0, **(settings | facts))  # pyright: ignore


def clean_values() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=(20, 4)).astype(np.float32) for _ in NAMES]


def noisy(values: Sequence[np.ndarray], draw: np.random.Generator, scale: float = 1.0) -> list[np.ndarray]:
    """Values with errors of a size of their own for each replica."""
    own = scale * np.exp(0.3 * draw.normal())
    return [v + own * size * draw.standard_t(4, v.shape) for v, size in zip(values, SIZES, strict=True)]


def judged(folder: Path, treatment: Sequence[np.ndarray], seed: int = 1, replicas: int = 19) -> TraceResult:
    draw, values = np.random.default_rng(seed), clean_values()
    baseline = written(folder / "baseline", values)
    errors = [
        measure_errors(baseline, written(folder / "replica", noisy(values, draw))) for _ in range(replicas)
    ]
    return judge_trace(baseline, written(folder / "treatment", treatment), errors)


def test_tensors_of_zeros_are_named_because_an_error_of_their_scale_cannot_show(tmp_path: Path) -> None:
    """As of a step whose completions have equal rewards: its gradients and update are zero in each arm."""
    values = clean_values()
    values[2:] = [np.zeros_like(value) for value in values[2:]]
    baseline = written(tmp_path / "baseline", values)
    draw = np.random.default_rng(1)
    replicas = [
        measure_errors(baseline, written(tmp_path / "replica", [*noisy(values, draw)[:2], *values[2:]]))
        for _ in range(19)
    ]
    result = judge_trace(baseline, written(tmp_path / "treatment", values), replicas)
    assert result.first is None and [tensor.name for tensor in result.zero] == [
        "gradient:model.layers.0.weight",
        "update:model.layers.0.weight",
    ]
    assert result.detectable_error and result.detectable_error < 1
    console = Console(record=True, width=400, file=io.StringIO())
    console.print(summary(result))
    text = console.export_text()
    assert "zero in the baseline: 2 tensors, the first is gradient:model.layers.0.weight; " in text


def test_clean_arms_pass_the_limit_in_one_of_twenty_traces() -> None:
    """Errors with heavy tails, which depend on each other, of 100 tensors, of which 10 have no spread."""
    draw, num_traces, flagged = np.random.default_rng(5), 3000, 0
    for _ in range(num_traces):
        own = np.exp(0.5 * draw.normal(size=(20, 1, 1)))  # a replica has more or less of everything
        by_tensor = np.exp(0.3 * draw.standard_t(4, size=(20, 100, 1)))
        errors = own * by_tensor * np.exp(0.2 * draw.normal(size=(20, 100, 2)))
        errors[:, :10] = 0
        ratios, limit = standardise(errors[0], errors[1:])
        flagged += ratios.max() > limit
    assert 0.02 < flagged / num_traces < 0.05 + 3 * (0.05 * 0.95 / num_traces) ** 0.5


@pytest.mark.parametrize("place", range(len(NAMES)))
def test_the_first_tensor_beyond_the_limit_is_named(tmp_path: Path, place: int) -> None:
    treatment = noisy(clean_values(), np.random.default_rng(7), scale=0.5)
    for later in range(place, len(NAMES)):
        treatment[later] = treatment[later] + np.float32(100 * SIZES[later])
    result = judged(tmp_path, treatment)
    assert result.first is not None and result.first.name == ":".join(NAMES[place])
    assert [tensor.name for tensor in result.beyond] == [":".join(name) for name in NAMES[place:]]
    before = result.last_agreeing and result.last_agreeing.name
    assert before == (":".join(NAMES[place - 1]) if place else None)


def test_errors_are_in_ulps_and_relative(tmp_path: Path) -> None:
    treatment = clean_values()
    treatment[1] = treatment[1].copy()
    treatment[1][3, 2] = np.nextafter(np.nextafter(treatment[1][3, 2], np.float32(9)), np.float32(9))
    result = judged(tmp_path, treatment)
    assert result.missing == ()
    found = result.tensors[1]
    values = clean_values()[1].astype(np.float64)
    assert found.ulps == 2
    moved = abs(float(treatment[1][3, 2]) - values[3, 2])
    assert found.relative_error == pytest.approx(moved / np.linalg.norm(values))


@pytest.mark.parametrize("what", ["nan", "shape", "one value of an exact tensor"])
def test_what_no_rounding_gives_is_a_difference(tmp_path: Path, what: str) -> None:
    treatment = clean_values()
    if what == "nan":
        treatment[2][0, 0] = np.nan
    elif what == "shape":
        treatment[2] = treatment[2][:-1]
    else:
        treatment[2][0, 0] += 1
    result = judged(tmp_path, treatment)
    assert result.first is not None and result.first.name == ":".join(NAMES[2])


@pytest.mark.parametrize(("facts", "problem"), [({"step": 2}, "of step 2"), ({"model": "N"}, "of model N")])
def test_what_cannot_be_compared_is_refused_in_one_line(
    tmp_path: Path, facts: dict[str, object], problem: str
) -> None:
    values = clean_values()
    baseline, treatment = written(tmp_path / "a", values), written(tmp_path / "b", values, **facts)
    with pytest.raises(ComparisonError, match=problem) as raised:
        judge_trace(baseline, treatment, [measure_errors(baseline, baseline)] * 3)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ['{"rep', "[]", "{}", '{"replicas": {"a": 1}}', '{"replicas": [{"a": {"largest": "x"}}]}']
)
def test_a_torn_file_of_replicas_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / REPLICAS).write_text(text)
    with pytest.raises(StoreError, match=REPLICAS) as raised:
        read_replicas(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("place", range(len(NAMES)))
def test_an_error_of_the_detectable_size_is_flagged_and_a_smaller_one_is_not(
    tmp_path: Path, place: int
) -> None:
    """An error of one size in every value, so that its root mean square decides, not its maximum."""
    equal = judged(tmp_path / "equal", clean_values())
    detectable = equal.tensors[place].detectable_error
    assert detectable is not None and 0 < detectable <= equal.detectable_error  # pyright: ignore
    assert {tensor.kind for tensor in equal.least_sensitive} == {"activation", "gradient", "update"}
    values = clean_values()[place].astype(np.float64)
    size = detectable * np.sqrt(np.mean(values**2))
    for factor, is_flagged in ((0.9, False), (1.1, True)):
        treatment: list[np.ndarray] = [*clean_values()]
        treatment[place] = values + factor * size
        result = judged(tmp_path / str(factor), treatment)
        assert (result.first is not None) == is_flagged, result
