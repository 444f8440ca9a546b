"""What a live view says of the claims while runs are to come: the numbers of a verdict over those pairs."""

import json
import shutil
from pathlib import Path

import pytest

from abrun.recorded.stored import load_experiment
from abrun.report.comparing import compare
from abrun.report.so_far import so_far
from tests.verdict.simulate import write_experiment


def leave(experiment_dir: Path, *seeds: int) -> None:
    """As it was when only the runs of these seeds had been started and had finished."""
    for directory in experiment_dir.glob("*/seed-*"):
        if int(directory.name.split("-")[1]) not in seeds:
            for path in directory.iterdir():
                if path.name != "config.json":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(("shift", "place"), [(0.0, "inside"), (0.2, "outside"), (0.02, "not decided")])
def test_it_says_what_a_verdict_over_those_pairs_alone_would_have_found(
    tmp_path: Path, shift: float, place: str
) -> None:
    partial = write_experiment(tmp_path / "partial", shift=shift, noise=0.006)
    alone = write_experiment(tmp_path / "alone", shift=shift, noise=0.006, seeds=[0, 1, 2], controls={})
    leave(partial, 0, 1, 2)
    (claim,) = compare(load_experiment(alone), output=tmp_path / "out", formats=[]).content.primaries
    assert (
        claim.estimate.interval and claim.estimate.mean_difference is not None and claim.claim.num_pairs == 3
    )
    (low, high), difference = claim.estimate.interval, claim.estimate.mean_difference
    assert so_far(partial) == [
        f"train/reward: 3 of 5 pairs so far, difference {difference:+.3g} [{low:.3g}, {high:.3g}] "
        f"(90 %), margin ±0.02: {place}"
    ]


def test_each_treatment_and_claim_has_a_line_and_one_pair_has_none(tmp_path: Path) -> None:
    arms = {
        "baseline": {},
        "a": {"policy.logprobs.impl": "chunked"},
        "b": {"policy.logprobs.head_dtype": "float32"},
    }
    claims = [{"metric": "train/reward", "margin": 0.02}, {"metric": "train/reward", "above": 0.1}]
    experiment_dir = write_experiment(
        tmp_path / "several", arms=arms, compare={"primary": claims}, shift={"a": 0.0, "b": 0.3}
    )
    leave(experiment_dir, 0, 1)
    lines = so_far(experiment_dir)
    assert [line.split(":")[0] for line in lines] == ["a, train/reward"] * 2 + ["b, train/reward"] * 2
    assert all("2 of 5 pairs so far" in line for line in lines)
    assert lines[2].endswith("margin ±0.02: outside") and "limit" in lines[1]
    leave(experiment_dir, 0)
    assert so_far(experiment_dir) == []


def test_what_cannot_be_read_yet_is_left_to_the_comparison_at_the_end(tmp_path: Path) -> None:
    assert so_far(tmp_path / "gone") == []
    experiment_dir = write_experiment(tmp_path / "torn", seeds=[0, 1], controls={})
    content = json.loads((experiment_dir / "experiment.json").read_text())
    (experiment_dir / "experiment.json").write_text(json.dumps({**content, "recipe": {}}))
    assert so_far(experiment_dir) == []
