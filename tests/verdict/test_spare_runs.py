"""Runs beside the pairs: seeds of a reference without a partner, and A/A reruns."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.messages.codes import Code
from abrun.report.comparing import Comparison, compare_sources, freeze_arm
from abrun.stats.equivalence import equivalence_test
from abrun.stats.one_sided import improvement_test
from tests.bench.bench_spare_runs import with_further
from tests.verdict.simulate import edit, edit_rows, write_experiment

LEVELS = np.random.default_rng(7)


def test_the_vectorised_rates_are_those_of_the_product() -> None:
    baseline, treatment = LEVELS.standard_normal((200, 8)), LEVELS.standard_normal((200, 3))
    _, expected = with_further(baseline, treatment, 1.5)
    found = [equivalence_test(b[:3], t, 1.5, further=b[3:]) for b, t in zip(baseline, treatment, strict=True)]
    assert [test.equivalent for test in found] == expected.tolist() and 5 < expected.sum() < 195
    both_sides = [
        max(improvement_test(b[:3], t, -1.5, sign=sign, further=b[3:]).p_above for sign in (1, -1))
        for b, t in zip(baseline, treatment, strict=True)
    ]
    assert both_sides == pytest.approx([test.p_tost for test in found])


def test_further_baselines_pull_towards_their_own_mean_and_rounding_does_without() -> None:
    baseline, treatment = np.array([1.0, 2.0, 4.0]), np.array([1.5, 2.0, 5.0])
    test = equivalence_test(baseline, treatment, 1.0, further=np.array([3.0]))
    weight = 0.5 + 0.5 * 3 / 4
    expected = (treatment - weight * baseline).mean() - (1 - weight) * 3.0
    assert test.mean_difference == pytest.approx(expected) and test.dof <= 2.5
    rounded = np.array([1.0 + 1e-6, 2.0 - 1e-6, 4.0 + 2e-6])
    alone = equivalence_test(baseline, rounded, 1.0)
    assert equivalence_test(baseline, rounded, 1.0, further=np.array([3.0])) == alone


def compared_with_five_seeds(tmp_path: Path, shift: float) -> Comparison:
    """Compare three runs of an arm with a reference of five."""
    anchor = tmp_path / "anchor"
    if not anchor.exists():
        write_experiment(anchor, controls={"aa_reruns": 0})
    later = write_experiment(tmp_path / "later", controls={"aa_reruns": 0}, seeds=[0, 1, 2], shift=shift)
    freeze_arm(open_sources([str(anchor)], ReadingOptions(allows_one_arm=True)), "baseline", tmp_path / "r")
    return compare_sources([str(later)], ReadingOptions(), reference=tmp_path / "r", arm="treatment")


def test_a_seed_that_ran_on_another_device_is_left_out(tmp_path: Path) -> None:
    anchor = write_experiment(tmp_path / "anchor", controls={"aa_reruns": 0})
    edit(
        anchor / "baseline/seed-4/environment.json", lambda content: content.update(devices=["another card"])
    )
    found = compared_with_five_seeds(tmp_path, 0.0)
    (claim,) = found.content.claims
    (used,) = [warning for warning in claim.warnings if warning.code is Code.SEEDS_WITHOUT_PAIR]
    assert used["seeds"] == [3]


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "MATCH"), (0.1, "MISMATCH")])
def test_seeds_of_a_reference_without_a_later_run_are_used_and_said(
    tmp_path: Path, shift: float, verdict: str
) -> None:
    found = compared_with_five_seeds(tmp_path, shift)
    (claim,) = found.content.claims
    (used,) = [warning for warning in claim.warnings if warning.code is Code.SEEDS_WITHOUT_PAIR]
    assert found.verdict == verdict and used["seeds"] == [3, 4]
    assert used["interval"] != claim.estimate.interval
    assert all(reason.code is not Code.REFERENCE_SEEDS_UNUSED for reason in found.content.not_tested)


def test_reruns_are_degrees_of_freedom_unless_they_repeat_or_the_treatment_adds_noise(
    simulated, judged
) -> None:
    experiment_dir = simulated(seeds=[0, 1, 2])
    noise = judged(experiment_dir).content.claims[0].estimate.noise
    assert (noise.reruns, noise.experiments, noise.dof) == (2, 0, 2.0)

    def with_spread(spread: float) -> None:
        for seed in (0, 1, 2):
            edit_rows(
                experiment_dir / f"treatment/seed-{seed}",
                lambda row, seed=seed: row.update(
                    {"train/reward": row["train/reward"] + spread * (seed - 1)}
                ),
            )

    with_spread(1.0)
    claim = judged(experiment_dir).content.claims[0]
    assert claim.estimate.noise is None and any(w.code is Code.NOISE_UNLIKE for w in claim.warnings)

    with_spread(-1.0)
    for seed in (0, 1):  # bit-identical reruns say nothing of how arms drift apart
        rerun = experiment_dir / f"baseline/seed-{seed}-aa1"
        shutil.copy(experiment_dir / f"baseline/seed-{seed}/metrics.jsonl", rerun / "metrics.jsonl")
        edit_rows(rerun, lambda row: row.update(time_s=row["time_s"] + 1))
        edit_rows(rerun, lambda row: row.update({"timing/train/total_step_time_s": row["time_s"]}))
    claim = judged(experiment_dir).content.claims[0]
    noise_codes = (Code.NOISE_UNLIKE, Code.NOISE_BORROWED)
    assert claim.estimate.noise is None and not any(w.code in noise_codes for w in claim.warnings)
    assert json.loads((experiment_dir / "report/verdict.json").read_text())["claims"][0].get("noise") is None
