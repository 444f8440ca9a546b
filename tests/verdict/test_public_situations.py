"""Questions that people asked in public, rebuilt as logs and answered by one command."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from abrun.cli.app import app

STEPS = 100


def write_log(path, curves):
    """Write curves {name: values} in verl's layout: `{"step": 1, "data": {...}}` in each line."""
    path.parent.mkdir(parents=True)
    rows = ({name: float(values[step]) for name, values in curves.items()} for step in range(STEPS))
    lines = (json.dumps({"step": step + 1, "data": row}) for step, row in enumerate(rows))
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def gradient_norms(tmp_path):
    """Return a function that writes one run of two backends, whose gradient norms have a ratio."""

    def write(ratio, noise=0.01):
        rng = np.random.default_rng(4710)
        norms = 0.08 * np.exp(0.2 * rng.standard_normal(STEPS))
        for backend, factor in (("megatron", 1.0), ("fsdp", ratio)):
            curves = {
                "actor/grad_norm": factor * norms * np.exp(noise * rng.standard_normal(STEPS)),
                "critic/score/mean": np.linspace(0.3, 0.6, STEPS) + 0.03 * rng.standard_normal(STEPS),
                "actor/entropy": 0.5 + 0.02 * rng.standard_normal(STEPS),
            }
            write_log(tmp_path / backend / "metrics.jsonl", curves)
        return [f"megatron={tmp_path / 'megatron'}", f"fsdp={tmp_path / 'fsdp'}"]

    return write


def compare(sources, *options):
    result = CliRunner().invoke(app, ["compare", *sources, *options, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_gradient_norm_three_times_as_high_at_each_step(gradient_norms):
    """verl #4710: FSDP and Megatron gradient norms 3x apart, one run each; how does one compare them?"""
    _, content = compare(gradient_norms(3.05))
    assert content["reasons"][0].startswith(
        "train/grad_norm is 3.05x as high in fsdp as in megatron at each of 100 steps"
    )
    assert "nearly constant factor" in content["reasons"][0]
    crossing = {row["metric"] for row in content["descriptions"] if row["ratio_at_each_step"] is None}
    assert crossing == {"train/reward", "train/entropy"}


def test_the_lower_arm_is_named_last_and_curves_that_cross_have_no_ratio(gradient_norms):
    sources = gradient_norms(3.05)
    _, content = compare(sources, "--baseline", "fsdp", "--claim", "grad_norm:all:within 0.1")
    assert content["reasons"][0].startswith("train/grad_norm is 3.05x as high in fsdp as in megatron")
    assert content["verdict"] == "INCONCLUSIVE"


def test_equal_arms_have_no_ratio_at_each_step(gradient_norms):
    _, content = compare(gradient_norms(1.0))
    assert content["reason_codes"][0]["code"] == "described"
