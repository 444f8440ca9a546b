"""One arm alone, and one run beside several: what `abrun compare` says of seed noise."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from abrun.errors import ComparisonError
from abrun.logs.recorded.sources import ReadingOptions, read_sources
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import parse_claim
from abrun.report.comparing import Comparison, compare, compare_sources
from tests.reasons import reason_of

LEVELS = (0.86, 0.84, 0.87, 0.83, 0.85)
STEPS = 50


def write_run(path: Path, level: float, *, seed: int = 0, steps: int = STEPS, nan_at: int = 0) -> None:
    """Write a run that learns up to `level` in 25 steps; then pairs of steps cancel to that level."""
    rng = np.random.default_rng([seed, len(path.parts)])
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, wobble = ["step,reward,loss"], 0.0
    for step in range(1, steps + 1):
        wobble = 0.01 * rng.standard_normal() if step % 2 else -wobble
        reward = 0.2 + (level - 0.2) * min(1.0, step / 25) + wobble
        lines.append(
            f"{step},{'nan' if step == nan_at else reward},{1 - reward / 2 + 1e-3 * rng.standard_normal()}"
        )
    path.write_text("\n".join(lines) + "\n")


def write_arm(folder: Path, levels=LEVELS, first_seed: int = 0, **options) -> str:
    for seed, level in enumerate(levels, first_seed):
        write_run(folder / f"seed{seed}.csv", level, seed=seed, **options)
    return str(folder)


def compared(*sources: str, claims=(), **reading) -> Comparison:
    parsed = [parse_claim(text) for text in claims] or None
    return compare_sources(sources, ReadingOptions(**reading), claims=parsed)


def test_one_arm_reports_level_spread_and_what_pairs_show(tmp_path: Path) -> None:
    found = compared(write_arm(tmp_path / "runs"))
    noise = {record["metric"]: record for record in found.content.select("seed noise")}["train/reward"]
    sd = np.std(LEVELS, ddof=1)
    assert (found.verdict, found.exit_code, found.content.is_description) == ("DESCRIPTION", 0, True)
    assert noise["mean"] == pytest.approx(0.85, abs=1e-3) and noise["sd"] == pytest.approx(sd, rel=0.02)
    assert noise["gap"] == pytest.approx(stats.t.ppf(0.975, 4) * sd * math.sqrt(2), rel=0.02)
    assert noise["steps"] == (41, 50) and len(noise["levels"]) == 5 and noise.reason is None
    assert [prospect["num_pairs"] for prospect in noise["prospects"]] == [3, 5, 8, 10]
    assert noise["prospects"][0]["difference"] > 2 * noise["prospects"][3]["difference"]
    text = " ".join(map(sentence, found.content.reasons))
    assert "by their seeds alone" in text and "% of the level" in text
    assert "train/reward" in found.as_json()["evidence"][0]["values"]["metric"]


def test_a_claim_on_one_arm_stays_open_and_gets_its_power(tmp_path: Path) -> None:
    found = compared(write_arm(tmp_path / "runs"), claims=["reward:steps 31-50:0.1", "loss:last 20%:<0.9"])
    reward, loss = found.content.select("seed noise")[:2]
    assert (found.verdict, found.exit_code) == ("INCONCLUSIVE", 4)  # a gate must not pass on one arm
    assert reward["steps"] == (31, 50) and reward["claim"] == "±0.1" and loss["claim"] == "level below 0.9"
    powers = [prospect["match_power"] or 0.0 for prospect in reward["prospects"]]
    assert powers == sorted(powers) and powers[-1] > 0.99 and reward["pairs_needed"] in range(3, 9)
    assert [prospect["match_power"] for prospect in loss["prospects"]] == [None] * 4


def test_one_run_alone_says_what_cannot_be_known(tmp_path: Path) -> None:
    found = compared(write_arm(tmp_path / "new", [0.55], first_seed=7))
    assert reason_of(found, Code.ONE_RUN_ALONE)["run"] == "new/seed-7"
    assert found.exit_code == 0 and found.content.select("seed noise")[0]["gap"] is None
    assert found.next_steps[0].text.startswith("Train at least two more runs of this arm")


@pytest.mark.parametrize("seed", [7, 1])  # a seed of its own, and one that an earlier run has
@pytest.mark.parametrize("order", [1, -1])
def test_one_run_beside_several(tmp_path: Path, seed: int, order: int) -> None:
    sources = [write_arm(tmp_path / "earlier"), write_arm(tmp_path / "new", [0.55], first_seed=seed)]
    found = compared(*sources[::order])
    record = found.content.select("new run")[0]
    mean, sd = np.mean(LEVELS), np.std(LEVELS, ddof=1)
    half_width = stats.t.ppf(0.975, 4) * sd * math.sqrt(1 + 1 / 5)
    assert (record["run"], record["several"], record["num_runs"]) == (f"new/seed-{seed}", "earlier", 5)
    assert record["difference"] == pytest.approx(0.55 - mean, abs=2e-3)
    assert record["num_sds"] == pytest.approx((mean - 0.55) / sd, rel=0.03)
    assert record["interval"] == pytest.approx((mean - half_width, mean + half_width), abs=4e-3)
    assert record["p"] <= record["p_holm"] <= 2 * record["p"] and record["num_metrics"] == 2
    reason = reason_of(found, Code.NEW_RUN)
    assert reason is found.content.reasons[0] and reason["is_outside"] and found.exit_code == 0
    assert "below earlier, 19 times the usual seed sd" in sentence(reason)


def test_a_new_run_within_the_spread_is_seed_noise(tmp_path: Path) -> None:
    found = compared(write_arm(tmp_path / "earlier"), write_arm(tmp_path / "new", [0.88], first_seed=9))
    assert not reason_of(found, Code.NEW_RUN)["is_outside"]
    assert "seed noise can explain it" in sentence(found.content.reasons[0])


# --- the questions of verl #626 and open-instruct #648: is this gap normal? ---


def write_scores(path: Path, **scores: list[float]) -> str:
    rows = [f"{arm},{seed},{score}" for arm, found in scores.items() for seed, score in enumerate(found)]
    path.write_text("\n".join(["arm,seed,gsm8k", *rows]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("mine", "is_outside"),
    [([0.741, 0.768, 0.752, 0.730], False), ([0.751, 0.753, 0.752, 0.754], True)],
)
def test_a_published_score_four_points_above_mine(
    tmp_path: Path, mine: list[float], is_outside: bool
) -> None:
    """The same gap of about 4 points is normal if seeds vary, and not if they hardly do.

    The scores are made up in the shape of verl #626.
    """
    found = compared(write_scores(tmp_path / "scores.csv", mine=mine, published=[0.79]))
    reason = found.content.reasons[0]
    assert reason.code is Code.NEW_RUN and reason["is_outside"] == is_outside
    answer = "seed noise does not explain it" if is_outside else "seed noise can explain it"
    assert answer in sentence(reason) and "above mine" in sentence(reason)


def test_reruns_of_one_configuration_say_which_gap_is_normal(tmp_path: Path) -> None:
    """The scores are made up in the shape of open-instruct #648: reruns of one configuration."""
    found = compared(write_scores(tmp_path / "reruns.csv", grpo=[0.612, 0.602, 0.607, 0.615]))
    reason, noise = found.content.reasons[0], found.content.select("seed noise")[0]
    assert reason.code is Code.NORMAL_GAP and 0.01 < reason["gap"] < 0.04  # a gap of one point is normal
    assert noise["steps"] is None and "two runs of grpo differ by up to" in sentence(reason)


# --- attacks ---


def test_short_long_and_broken_runs_do_not_move_the_window(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_arm(folder)
    write_run(folder / "seed5.csv", 0.85, seed=5, steps=4)  # died early
    write_run(folder / "seed6.csv", 0.85, seed=6, steps=500)  # trained longer
    write_run(folder / "seed7.csv", 0.85, seed=7, nan_at=45)
    found = compared(str(folder))
    noise = found.content.select("seed noise")[0]
    assert noise["metric"] == "train/reward" and noise["steps"] == (41, 50)
    assert [*noise["levels"]] == [f"runs/seed-{seed}" for seed in (0, 1, 2, 3, 4, 6)]
    assert {Code.LEFT_OUT_SHORT, Code.LEFT_OUT_NOT_FINITE} <= {reason.code for reason in noise["warnings"]}
    assert reason_of(found, Code.LEFT_OUT_SHORT)["run"] == "runs/seed-5"


def test_one_seed_twice_is_no_spread(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_arm(folder, LEVELS[:3])
    (folder / "seed3.csv").write_text((folder / "seed0.csv").read_text())
    found = compared(str(folder))
    assert found.content.select("seed noise")[0].reason is not None
    assert reason_of(found, Code.ONE_RUN_AS_TWO_SEEDS)["run"] == "runs/seed-3"
    assert all(noise["gap"] is None for noise in found.content.select("seed noise"))


def test_a_constant_metric_has_no_gap(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for seed in range(4):
        lines = [f"{step},0.5,{0.1 * seed + 0.01 * step}" for step in range(1, 21)]
        folder.mkdir(exist_ok=True)
        (folder / f"seed{seed}.csv").write_text("step,reward,loss\n" + "\n".join(lines) + "\n")
    found = compared(str(folder))
    constant = next(
        noise for noise in found.content.select("seed noise") if noise["metric"] == "train/reward"
    )
    assert constant.reason is not None and constant.reason.code is Code.RUNS_ALIKE
    assert constant["gap"] is None and reason_of(found, Code.SEED_NOISE)["metric"] == "train/loss"


def test_a_mixture_of_arms_is_said_or_refused(tmp_path: Path) -> None:
    folder = write_arm(tmp_path / "mixed", (0.30, 0.31, 0.29, 0.70, 0.71, 0.69))
    groups = reason_of(compared(folder), Code.TWO_GROUPS)
    assert groups["runs"] == [[f"mixed/seed-{seed}" for seed in seeds] for seeds in ((0, 1, 2), (3, 4, 5))]
    folder = write_arm(tmp_path / "runs")
    write_run(tmp_path / "runs" / "fused-seed9.csv", 0.5, seed=9)
    found = compared(folder)  # told apart by their names
    assert {found.content.baseline, *found.content.arms} == {"run", "fused"}
    assert found.content.select("new run")[0]["run"].startswith("fused/")
    assert compared(f"old={folder}").content.baseline == "old"


def test_a_copy_among_the_earlier_runs_adds_no_spread(tmp_path: Path) -> None:
    earlier, new = tmp_path / "earlier", write_arm(tmp_path / "new", [0.55], first_seed=9)
    write_arm(earlier, LEVELS[:4])
    (earlier / "seed4.csv").write_text((earlier / "seed0.csv").read_text())
    record = compared(str(earlier), new).content.select("new run")[0]
    assert record["num_runs"] == 4
    assert [reason.code for reason in record["left_out"]] == [Code.ONE_RUN_AS_TWO_SEEDS]


def test_a_distance_that_two_runs_cannot_judge_is_explained(tmp_path: Path) -> None:
    found = compared(
        write_arm(tmp_path / "two", LEVELS[:2]), write_arm(tmp_path / "new", [0.55], first_seed=9)
    )
    assert "because the sd of 2 runs is uncertain" in sentence(found.content.reasons[0])
    alone = compared(str(tmp_path / "two"))
    assert alone.next_steps[0].text.startswith("Train at least two more runs of this arm")


def test_what_is_not_measured_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_arm(folder, nan_at=45)
    found = compared(str(folder))
    assert reason_of(found, Code.METRICS_WITHOUT_LEVEL)["metrics"] == ["train/reward"]
    assert reason_of(found, Code.SEED_NOISE)["metric"] == "train/loss"
    with pytest.raises(ComparisonError, match="exceeds the recorded steps"):
        compared(str(folder), claims=["reward:steps 60-70:0.1"])
    with pytest.raises(ComparisonError, match=r"there are only . pairs"):
        compared(str(folder), interim=(2, 3))


def test_runs_that_log_at_other_steps_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_arm(folder, LEVELS[:3])
    lines = (folder / "seed2.csv").read_text().splitlines()
    (folder / "seed2.csv").write_text("\n".join([lines[0], *lines[5::5]]) + "\n")
    reason = reason_of(compared(str(folder)), Code.FEW_STEPS_IN_COMMON)
    assert (reason["num_shared"], reason["num_recorded"]) == (2, 10)


def test_the_page_and_the_figure_show_one_arm(tmp_path: Path) -> None:
    output = tmp_path / "report"
    compare_sources([write_arm(tmp_path / "runs")], ReadingOptions(), output=output)
    page = (output / "report.html").read_text()
    assert '"kind":"seed noise"' in page and '"gap"' in page
    assert "| train/reward | 41-50 | 5 |" in (output / "report.md").read_text()
    assert (output / "train-reward.svg").exists()


def test_configurations_that_differ_by_more_than_the_seed_are_invalid(tmp_path: Path) -> None:
    contents = read_sources([write_arm(tmp_path / "runs")], ReadingOptions())
    experiment = contents.experiment(may_be_one_arm=True)
    rates = dict(zip(experiment.runs, (0.1, 0.1, 0.1, 0.2, 0.2), strict=True))
    runs = {
        name: replace(run, config={"seed": name.seed, "lr": rates[name], "output": f"runs/{name.seed}"})
        for name, run in experiment.runs.items()
    }
    found = compare(replace(experiment, runs=runs))
    assert (found.verdict, found.exit_code) == ("INVALID", 5)
    assert reason_of(found, Code.CONFIG_MIXED)["key"] == "lr"
    assert found.next_steps[0].text.startswith("Repair the runs")
