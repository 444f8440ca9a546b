"""Captures on disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from abrun.errors import StoreError
from abrun.runs.captures import INDEX, VALUES, Capture, read_capture, write_capture


def some_capture(folder: Path) -> Capture:
    draw = np.random.default_rng(0)
    return write_capture(
        folder,
        [
            ("activation", "model.embed_tokens", "bfloat16", draw.normal(size=(5, 4)).astype(np.float32)),
            (
                "gradient",
                "model.embed_tokens.weight",
                "bfloat16",
                draw.normal(size=(7, 4)).astype(np.float32),
            ),
            ("update", "optimizer.learning_rate", "float32", np.array(0.5, np.float32)),
        ],
        step=3,
        model="LlamaForCausalLM",
        layout={"type": "dtensor"},
        dtype="bfloat16",
        perturbation=None,
        step_time_s=0.5,
    )


def test_a_capture_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = some_capture(tmp_path)
    capture = read_capture(tmp_path)
    assert capture == written
    assert [tensor.name for tensor in capture.tensors][1:] == [
        "gradient:model.embed_tokens.weight",
        "update:optimizer.learning_rate",
    ]
    assert capture.read(capture.tensors[0]).shape == (5, 4)
    assert capture.read(capture.tensors[2]) == np.float32(0.5)


def test_ulps_are_distances_to_the_next_number(tmp_path: Path) -> None:
    bfloat16, _, float32 = some_capture(tmp_path).tensors
    values = np.array([1.0, -1.5, 3.0, 1e-3], np.float32)
    assert float32.ulps(values) == pytest.approx(np.spacing(np.abs(values)), rel=0)
    assert bfloat16.ulps(values)[:3].tolist() == [2**-7, 2**-7, 2**-6]


@pytest.mark.parametrize("damage", ["no values", "another format", "no step", "cut"])
def test_a_damaged_capture_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    some_capture(tmp_path)
    index = tmp_path / INDEX
    content = json.loads(index.read_text())
    if damage == "no values":
        (tmp_path / VALUES).unlink()
    elif damage == "another format":
        index.write_text(json.dumps(content | {"format": 99}))
    elif damage == "no step":
        del content["step"]
        index.write_text(json.dumps(content))
    else:
        values = (tmp_path / VALUES).read_bytes()
        (tmp_path / VALUES).write_bytes(values[:-5])
    with pytest.raises(StoreError) as raised:
        capture = read_capture(tmp_path)
        capture.read(capture.tensors[0])
    assert "\n" not in str(raised.value)
