"""Verdicts on tables of scores: final scores per run, and scores per prompt."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from abrun.errors import ComparisonError
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources
from abrun.messages import sentence, sentences
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.report.comparing import Comparison, compare_sources, freeze_arm
from abrun.report.context import verdict_qualifiers
from abrun.stats.equivalence import equivalence_test
from tests.replications import replicated
from tests.snapshot import Snapshot

Rows = Iterable[Sequence[object]]


def write(path: Path, header: str, rows: Rows) -> str:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows), ""]))
    return str(path)


def compare(*sources: str, claims: Sequence[Claim] | None = None, **options: Any) -> Comparison:
    reading = {name: options.pop(name) for name in ("unpaired", "baseline") if name in options}
    return compare_sources(sources, ReadingOptions(**reading), claims=claims, **options)


def claim(metric: str, margin: float, window: str = "last 20%") -> Claim:
    return Claim(metric=metric, window=window, margin=margin)


def prompt_rows(*, seeds: int, prompts: int, shift: float, samples: int = 1, random: int = 0) -> list[tuple]:
    """Return rows `arm, seed, prompt, correct` of graded answers; prompts differ in difficulty."""
    generator = np.random.default_rng(random)
    difficulty = 2 * generator.normal(size=prompts)
    return [
        (arm, seed, prompt, int(generator.random() < 1 / (1 + math.exp(-difficulty[prompt] - effect))))
        for arm, effect in (("old", 0.0), ("new", shift))
        for seed in range(seeds)
        for prompt in range(prompts)
        for _ in range(samples)
    ]


def test_five_megatron_runs_below_the_reference_in_one_command(tmp_path: Path, snapshot: Snapshot) -> None:
    """The situation of NeMo-RL #1293: a table of final scores, in which one backend is always worse.

    The thread shows its scores as a picture; these are made up in its shape.
    """
    scores = {"dtensor": (0.634, 0.629, 0.631), "megatron": (0.612, 0.608, 0.611, 0.609, 0.611)}
    rows = [(arm, seed, score) for arm, runs in scores.items() for seed, score in enumerate(runs)]
    table = write(tmp_path / "scores.csv", "config,seed,ifeval", rows)
    comparison = compare(table, claims=[claim("ifeval", 0.01)], unpaired=True)
    assert (comparison.verdict, comparison.exit_code) == ("MISMATCH", 3)
    (result,) = comparison.content.claims
    baseline, treatment = (np.array(runs) for runs in scores.values())
    oracle: Any = stats.ttest_ind(treatment, baseline, equal_var=False)
    assert result.estimate.mean_difference == pytest.approx(treatment.mean() - baseline.mean())
    assert result.estimate.p_difference == pytest.approx(oracle.pvalue, rel=0.6)  # fewer degrees of freedom
    assert (result.claim.axis, result.claim.steps, result.claim.num_runs) == ("final", None, (3, 5))
    snapshot(sentences(comparison.content.reasons))
    snapshot(sentences(comparison.content.guessed))


def test_one_run_is_set_against_the_spread_of_the_others(tmp_path: Path, snapshot: Snapshot) -> None:
    """The same thread, with made-up scores: one run of the reference, and five that are all worse."""
    scores = [("dtensor", 0, 0.634), *(("megatron", seed, 0.608 + 0.001 * (seed % 3)) for seed in range(5))]
    table = write(tmp_path / "scores.csv", "config,seed,ifeval", scores)
    comparison = compare(table, claims=[claim("ifeval", 0.01)])
    assert comparison.verdict == "INCONCLUSIVE"
    snapshot(sentences(comparison.content.reasons)[:2])


def test_scores_are_compared_with_a_frozen_reference(tmp_path: Path) -> None:
    tables = {
        arm: write(tmp_path / f"{arm}.csv", "seed,acc", [(seed, base + 0.01 * seed**2) for seed in range(4)])
        for arm, base in (("old", 0.5), ("new", 0.501))
    }
    reference = tmp_path / "reference.json"
    declared = [claim("acc", 0.05)]
    freeze_arm(open_sources([tables["old"]], ReadingOptions(allows_one_arm=True), declared), "old", reference)
    comparison = compare(tables["new"], reference=reference)
    assert comparison.verdict == "MATCH" and comparison.content.axis == "final"
    curves = write(tmp_path / "curves.csv", "seed,step,acc", [(0, step, 0.5) for step in (1, 2)])
    with pytest.raises(ComparisonError) as error:
        compare(curves, reference=reference)
    assert str(error.value).startswith("sources: got final scores (")


def test_final_scores_are_paired_by_seed_and_each_benchmark_is_a_metric(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    rows = []
    for seed in range(6):
        level = generator.normal(0.5, 0.05, 2)
        for arm in ("base", "fused"):
            noise = generator.normal(0, 0.002, 2)
            rows.append((arm, seed, *(f"{score:.4f}" for score in level + noise)))
    generator.shuffle(rows)
    table = write(tmp_path / "scores.csv", "arm,seed,ifeval,gsm8k", rows)
    comparison = compare(table, claims=[claim("ifeval", 0.01), claim("gsm8k", 0.01, "steps 10-50")])
    assert comparison.verdict == "MATCH"
    for result, column in zip(comparison.content.claims, (2, 3), strict=True):
        by_run = {(row[0], row[1]): float(row[column]) for row in rows}
        differences = [by_run["fused", seed] - by_run["base", seed] for seed in range(6)]
        assert sorted(result.estimate.differences) == pytest.approx(sorted(differences))
        oracle: Any = stats.ttest_1samp(differences, 0)
        assert result.estimate.p_difference == pytest.approx(oracle.pvalue)
    assert Code.FIRST_STEP_OF_SCORES in {
        reason.code for r in comparison.content.not_tested for reason in r.walk()
    }


def test_a_reward_or_loss_among_final_scores_needs_no_curve(tmp_path: Path) -> None:
    rows = [(arm, seed, 0.5 + 0.01 * seed, 1.5) for arm in "ab" for seed in range(4)]
    rows = [(*row[:2], row[2] + 0.0001 * index, row[3] - 0.01 * index) for index, row in enumerate(rows)]
    table = write(tmp_path / "scores.csv", "arm,seed,reward,loss", rows)
    comparison = compare(table, claims=[claim("reward", 0.05)])
    assert comparison.verdict == "MATCH"
    assert Code.LEARNING_NOT_RECORDED in {reason.code for reason in comparison.content.not_tested}


def test_equal_scores_of_two_seeds_are_no_copy_and_equal_tables_are(tmp_path: Path) -> None:
    rows = [("a", 0, 0.5), ("a", 1, 0.5), ("a", 2, 0.54), ("b", 0, 0.52), ("b", 1, 0.5), ("b", 2, 0.5)]
    comparison = compare(write(tmp_path / "few.csv", "arm,seed,acc", rows), claims=[claim("acc", 0.3)])
    assert comparison.verdict == "MATCH"
    copied: list[tuple[object, ...]] = [
        (arm, seed, *(0.1 * k + 0.01 * (seed % 2) for k in range(5))) for arm in "ab" for seed in range(3)
    ]
    table = write(tmp_path / "copied.csv", "arm,seed,v,w,x,y,z", copied)
    (result,) = compare(table, claims=[claim("v", 0.3)]).content.claims
    assert result.problem is not None and result.problem.code == Code.ONE_RUN_AS_TWO_SEEDS
    copied[-1] = (*copied[-1][:2], 0.3, *copied[-1][3:])
    table = write(tmp_path / "copied.csv", "arm,seed,v,w,x,y,z", copied)
    (result,) = compare(table, claims=[claim("v", 0.3)]).content.claims
    assert result.problem is not None and result.problem.code == Code.ONE_RUN_AS_TWO_SEEDS


def test_one_run_of_each_arm_is_paired_by_prompt(tmp_path: Path, snapshot: Snapshot) -> None:
    rows = prompt_rows(seeds=1, prompts=400, shift=-0.9)
    table = write(tmp_path / "graded.csv", "arm,seed,prompt,correct", rows)
    comparison = compare(table, claims=[claim("correct", 0.03)], baseline="old")
    (result,) = comparison.content.claims
    by_prompt = {(row[0], row[2]): row[3] for row in rows}
    differences = np.array([by_prompt["new", prompt] - by_prompt["old", prompt] for prompt in range(400)])
    error = differences.std(ddof=1) / math.sqrt(400)
    assert comparison.verdict == "MISMATCH"
    assert result.estimate.mean_difference == pytest.approx(differences.mean())
    assert result.estimate.standard_error == pytest.approx(error)
    assert (result.claim.unit, result.claim.num_pairs, result.claim.seeds) == ("prompt", 400, ())
    assert verdict_qualifiers(comparison.content) == ["post hoc", "these two checkpoints"]
    snapshot(sentences(comparison.content.reasons))
    assert comparison.next_steps[0].text.startswith("Train at least two more runs of each arm")
    described = compare(table, baseline="old")
    assert described.content.select("description")[0]["interval"] == pytest.approx(result.estimate.interval)
    assert described.exit_code == 0 and Code.PROMPTS_AS_UNITS in {r.code for r in described.content.reasons}


def test_several_samples_of_a_prompt_are_one_cluster(tmp_path: Path) -> None:
    rows = prompt_rows(seeds=1, prompts=60, shift=-0.2, samples=8)
    rows = [row for index, row in enumerate(rows) if index % 7]  # unequal numbers of samples
    table = write(tmp_path / "graded.csv", "arm,seed,prompt,correct", rows)
    (result,) = compare(table, claims=[claim("correct", 0.2)], baseline="old").content.claims
    scores: dict[tuple[str, int], list[int]] = defaultdict(list)
    for arm, _, prompt, correct in rows:
        scores[arm, prompt].append(correct)
    differences = [
        sum(scores["new", prompt]) / len(scores["new", prompt])
        - sum(scores["old", prompt]) / len(scores["old", prompt])
        for prompt in range(60)
    ]
    # The clustered standard error of Miller 2024, with a cluster of one mean for each prompt.
    mean = sum(differences) / 60
    error = math.sqrt(sum((difference - mean) ** 2 for difference in differences)) / 60 * math.sqrt(60 / 59)
    assert result.estimate.standard_error == pytest.approx(error)
    assert result.claim.num_pairs == 60


def test_with_several_seeds_the_seed_is_the_unit(tmp_path: Path) -> None:
    rows = prompt_rows(seeds=4, prompts=100, shift=-0.3)
    table = write(tmp_path / "graded.csv", "arm,seed,prompt,correct", rows)
    comparison = compare(table, claims=[claim("correct", 0.3)], baseline="old")
    (result,) = comparison.content.claims
    means = {
        (arm, seed): sum(row[3] for row in rows if row[:2] == (arm, seed)) / 100
        for arm in ("old", "new")
        for seed in range(4)
    }
    differences = [means["new", seed] - means["old", seed] for seed in range(4)]
    assert sorted(result.estimate.differences) == pytest.approx(sorted(differences))
    assert (result.claim.unit, result.claim.num_pairs, result.claim.seeds) == ("seed", 4, (0, 1, 2, 3))
    assert Code.PROMPTS_AS_UNITS not in {reason.code for reason in comparison.content.reasons}


def test_only_prompts_that_all_runs_share_count(tmp_path: Path) -> None:
    rows = prompt_rows(seeds=1, prompts=50, shift=0)
    for arm in ("old", "new"):
        write(
            tmp_path / f"{arm}.csv",
            "prompt,seed,correct",
            [(f"p{row[2]}", 0, row[3]) for row in rows if row[0] == arm and (arm == "old" or row[2] % 5)],
        )
    sources = [f"{arm}={tmp_path / arm}.csv" for arm in ("old", "new")]
    comparison = compare(*sources, claims=[claim("correct", 0.4)])
    (result,) = comparison.content.claims
    assert result.claim.num_pairs == 40
    assert Code.PROMPTS_NOT_SHARED(metric="correct", shared=40, total=50) in comparison.content.reasons


def test_scores_keep_their_names_and_runs_without_seeds_are_unpaired(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    rows = [("hf", 0.62), ("hf", 0.63), ("hf", 0.625), ("mc", 0.60), ("mc", 0.61), ("mc", 0.605)]
    table = write(tmp_path / "scores.csv", "arm,score", rows)
    comparison = compare(table, claims=[claim("score", 0.05)], unpaired=True)
    assert (comparison.verdict, comparison.content.claims[0].claim.num_runs) == ("MATCH", (3, 3))
    with snapshot.refused(ComparisonError):
        compare(table, claims=[claim("score", 0.05)])


def test_scores_and_curves_are_not_compared(tmp_path: Path, snapshot: Snapshot) -> None:
    scores = write(tmp_path / "a.csv", "seed,reward", [(0, 0.5), (1, 0.6)])
    curves = write(
        tmp_path / "b.csv", "seed,step,reward", [(s, step, 0.5) for s in (0, 1) for step in (1, 2)]
    )
    with snapshot.refused(ComparisonError):
        compare(f"a={scores}", f"b={curves}")


def test_a_report_on_scores_has_no_curves(tmp_path: Path) -> None:
    rows = prompt_rows(seeds=1, prompts=40, shift=0)
    table = write(tmp_path / "graded.csv", "arm,seed,prompt,correct", rows)
    comparison = compare(table, claims=[claim("correct", 0.4)], output=tmp_path / "report")
    assert sorted(path.name for path in comparison.files) == ["report.html", "report.md", "verdict.json"]
    assert "40" in (tmp_path / "report" / "report.md").read_text()
    assert sentence(Code.PROMPTS_AS_UNITS()) in (tmp_path / "report" / "report.md").read_text()


@replicated(300)
@pytest.mark.parametrize("samples", [1, 4])
def test_the_level_of_the_test_over_prompts(samples: int, num: int) -> None:
    """A difference of exactly the margin is called equivalent in 5 % of experiments, clustered or not.

    Prompts that are right or wrong have an exact test, which takes longer and errs less often.
    """
    generator, num_passed, num_experiments = np.random.default_rng(0), 0, 5 * num if samples > 1 else num
    for _ in range(num_experiments):
        easy = generator.random(150)
        arms = [generator.binomial(samples, np.clip(easy + shift, 0, 1)) / samples for shift in (0.0, 0.1)]
        true_difference = (np.clip(easy + 0.1, 0, 1) - easy).mean()
        result = equivalence_test(arms[0], arms[1], true_difference, resolution=1 / samples)
        num_passed += result.equivalent
    low, high = (0.02, 0.075) if samples > 1 else (0.0, 0.05 + 3 * np.sqrt(0.05 * 0.95 / num_experiments))
    assert low <= num_passed / num_experiments < high


def test_a_gain_over_prompts_is_planned_for_itself_and_no_climb_is_read_into_the_prompts(
    tmp_path: Path,
) -> None:
    """Scores per prompt do not climb; the pairs needed for `better` assume the gain, not equal arms."""
    table = write(tmp_path / "t.csv", "arm,seed,prompt,correct", prompt_rows(seeds=4, prompts=50, shift=0.1))
    open_claim = Claim(metric="correct", window="all", better=0.01, higher_is_better=True)
    comparison = compare(table, claims=[open_claim])
    assert comparison.verdict == "INCONCLUSIVE" and comparison.content.claims[0].estimate.climb is None
    steps = [step.text for step in comparison.next_steps]
    assert "if the true gain is 0.02" in steps[0] and "truly equal" not in steps[0]
    (described, *_) = compare(table).content.select("description")
    level = described["baseline"]
    assert described["margin"] == pytest.approx(0.05 * level, abs=0.01)
