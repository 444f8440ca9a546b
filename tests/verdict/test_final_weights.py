"""How far apart the arms' final weights are, and what is said where that is not known."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from abrun.report.evidence import evidence_lines
from tests.verdict.simulate import edit

WEIGHTS = {"a": np.array([0.5, -2.0, 0.0]), "b": np.array([1e-3, 0.0])}


def ended_with(directory, weights, digest=None):
    digest = digest or repr(sorted((name, one.tolist()) for name, one in weights.items()))
    edit(directory / "result.json", lambda content: content.update(final_weights_hash=digest))
    save_file(weights, directory / "final-sketch.safetensors")


def everywhere(experiment_dir, weights):
    for result in experiment_dir.glob("*/*/result.json"):
        ended_with(result.parent, weights)


def found(comparison):
    (one,) = comparison.content.select("final weights")
    return one


def changed(name, place, value):
    weights = {key: one.copy() for key, one in WEIGHTS.items()}
    weights[name][place] = value
    return weights


def test_the_pair_that_ends_farthest_apart(simulated, judged, snapshot):
    experiment_dir = simulated()
    everywhere(experiment_dir, WEIGHTS)
    ended_with(experiment_dir / "treatment/seed-1", changed("a", 1, -2.25))
    ended_with(experiment_dir / "treatment/seed-2", changed("b", 1, 5e-4))
    ended_with(experiment_dir / "baseline/seed-0-aa1", changed("a", 0, 0.75))
    comparison = judged(experiment_dir)
    one = found(comparison)
    norm = math.sqrt(0.5**2 + 2.0**2 + 1e-3**2)
    assert (one["num_pairs"], one["num_equal"], one["seed"], one["num_reruns"]) == (5, 3, 1, 2)
    assert one["relative_difference"] == pytest.approx(0.25 / norm)
    assert one["aa_relative_difference"] == pytest.approx(0.25 / norm)
    snapshot(dict(evidence_lines(comparison.content))["final weights"])


def test_equal_weights_and_nothing_else_to_say(simulated, judged, snapshot):
    experiment_dir = simulated(controls={"aa_reruns": 0})
    everywhere(experiment_dir, WEIGHTS)
    comparison = judged(experiment_dir)
    one = found(comparison)
    apart = (one["seed"], one["relative_difference"], one["aa_relative_difference"])
    assert one["num_equal"] == 5 and apart == (None, None, None)
    snapshot(dict(evidence_lines(comparison.content))["final weights"])


def test_hashes_alone_a_damaged_sample_and_other_models(simulated, judged):
    experiment_dir = simulated()
    everywhere(experiment_dir, WEIGHTS)
    for seed, weights in enumerate((WEIGHTS, {"a": WEIGHTS["a"]}, {**WEIGHTS, "b": WEIGHTS["b"][:1]})):
        ended_with(experiment_dir / f"treatment/seed-{seed}", weights, digest="another")
    (experiment_dir / "treatment/seed-0/final-sketch.safetensors").write_bytes(b"{not" * 9)
    one = found(judged(experiment_dir))
    assert (one["num_equal"], one["num_pairs"], one["seed"]) == (2, 5, None)


def test_a_weight_that_is_no_number_is_the_farthest(simulated, judged):
    experiment_dir = simulated()
    everywhere(experiment_dir, WEIGHTS)
    ended_with(experiment_dir / "treatment/seed-3", changed("a", 0, np.nan))
    ended_with(experiment_dir / "treatment/seed-4", changed("a", 0, 100.0))
    one = found(judged(experiment_dir))
    assert one["seed"] == 3 and math.isnan(one["relative_difference"])
    written = json.loads((experiment_dir / "report/verdict.json").read_text())
    (weights,) = (item for item in written["evidence"] if item["kind"] == "final weights")
    assert weights["values"]["relative_difference"] == "NaN"
