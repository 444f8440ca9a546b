"""The benchmark of published memory, on sizes that take a second."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.bench.bench_published_memory import GB, GIB, MODELS, Case, HeadAlone, cases
from tests.bench.bench_published_memory import row as published_row


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-1.7B", 1.72),
        ("Qwen3-4B", 4.02),
        ("Qwen3-8B", 8.19),
        ("Llama-3.1-8B", 8.03),
    ],
)
def test_models_have_the_published_numbers_of_parameters(model: str, billions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(weight.numel() for weight in network.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    used = {getattr(step, "model", model) for case in cases() for step in case.predictions.values()}
    assert used == set(MODELS)


def test_a_published_saving_stands_beside_the_predicted_one(tmp_path: Path) -> None:
    tokens, vocab = 512, 8192
    head = HeadAlone(tokens=tokens, hidden=64, vocab=vocab)
    case = Case(
        source="somebody",
        setting="a head",
        published="0.05 GB",
        bytes=0.05 * GB,
        predictions={"dense": head, "chunked": head},
        figure=lambda peaks: 2**25,
        unmatched="none",
    )
    peaks = head.peaks(tmp_path)
    assert sum(peaks["backward"].values()) >= 3 * tokens * vocab * 4
    ratio = f"{2**25 / (0.05 * GB):.2f}"
    assert published_row(case, [peaks, peaks]) == (
        f"| somebody | a head | 0.05 GB = {0.05 * GB / GIB:.1f} | dense less chunked: 0.0 | {ratio} | none |"
    )
