"""Simulated nightlies: the false discovery rate, and the share of right splits, over many fleets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy import stats

from abrun.tools.drift.evidence import ClaimEvidence, Judgement, RecipeEvidence
from abrun.tools.drift.fleet import Fleet, classify, red_recipes
from abrun.verdict.decide import Verdict

MARGIN = 3.0  # of the usual sd of a pair
SHIFT = 3 * MARGIN
ACCIDENT_RATE = 0.01  # of a run that fails for no reason of its recipe
SHARES = {  # of the recipes
    "regressed here": 0.12,
    "crashes": 0.02,  # every run fails, since this version
    "red before": 0.15,
    "shifted once": 0.03,  # a machine's trouble: gone on the rerun
    "at the margin": 0.1,  # the worst of what is still no regression
}


@dataclass
class Counts:
    """Rows over many nightlies."""

    false_shares: list[float]
    right: int = 0
    num_red: int = 0

    @property
    def false_discovery_rate(self) -> float:
        return float(np.mean(self.false_shares))


def judge(differences: np.ndarray, failed: Sequence[int] = ()) -> Judgement:
    """Return a judgement of one claim, as the verdict decides it: TOST, and the test beyond the margin."""
    kept = np.delete(differences, list(failed))
    claims: tuple[ClaimEvidence, ...] = ()
    verdict: Verdict = "INVALID"
    if len(kept) >= 3:
        mean, error, dof = float(kept.mean()), float(kept.std(ddof=1) / np.sqrt(len(kept))), len(kept) - 1
        p_beyond = sum(float(stats.t.sf((abs(mean) - end) / error, dof)) for end in (MARGIN, -MARGIN))
        is_equivalent = stats.t.sf((MARGIN - abs(mean)) / error, dof) < 0.05
        verdict = "MATCH" if is_equivalent else "MISMATCH" if p_beyond < 0.04 else "INCONCLUSIVE"
        claims = (
            ClaimEvidence(
                metric="train/reward",
                kind="within",
                better="higher",
                p_alone=p_beyond,
                share=0.8,
                design="paired",
                difference=mean / MARGIN,
                margin=MARGIN,
                variance=float(kept.var(ddof=1)) / MARGIN**2,
                variance_factor=1 / len(kept),
                dof=dof,
            ),
        )
    return Judgement(
        verdict="MISMATCH" if failed and verdict != "INVALID" else verdict,
        reason="nothing is claimed",
        claims=claims,
        p_guards=None,
        is_open_apart_from_claims=False,
        breaks_exact_rule=False,
        num_runs=len(differences),
        failed_seeds=tuple(failed),
        reference_problem=None,
        report=None,
    )


def simulate(rng: np.random.Generator, num_recipes: int, num_seeds: int, spread: float) -> tuple[Fleet, dict]:
    """Return a classified nightly and the truth; the earlier fleet shares the noise of the references."""
    truths = rng.choice([*SHARES, "calm"], num_recipes, p=[*SHARES.values(), 1 - sum(SHARES.values())])
    now, earlier, truth_by_name = [], [], {}
    for number, truth in enumerate(truths):
        name, sd = f"recipe-{number}", np.exp(spread * rng.standard_normal()) / np.sqrt(2)
        truth_by_name[name] = str(truth)
        reference = rng.standard_normal(num_seeds)

        def runs(shift: float, sd=sd, reference=reference) -> np.ndarray:
            return shift + sd * (rng.standard_normal(num_seeds) - reference)

        sign = rng.choice([-1.0, 1.0])
        still = {"at the margin": MARGIN * sign, "red before": SHIFT * sign}.get(str(truth), 0.0)
        first = SHIFT * sign if truth in ("regressed here", "shifted once") else still
        second = SHIFT * sign if truth == "regressed here" else still
        failed = np.flatnonzero(rng.random(num_seeds) < ACCIDENT_RATE).tolist()
        failed = list(range(num_seeds)) if truth == "crashes" else failed
        judgement = judge(runs(first), failed)
        recipe = RecipeEvidence(name=name, reference_sha256=name, judgement=judgement)
        if judgement.verdict != "MATCH":  # whatever is not green runs again
            again = judge(runs(second), failed if truth == "crashes" else ())
            recipe = replace(recipe, rerun=again, num_rerun=num_seeds)
        now.append(recipe)
        earlier.append(RecipeEvidence(name=name, reference_sha256=name, judgement=judge(runs(still))))
        if failed and truth in ("calm", "at the margin"):
            truth_by_name[name] = "accident"
    red_before = red_recipes(classify(earlier).recipes)
    return classify(now, red_before), truth_by_name


def test_chance_before_hides_no_regression() -> None:
    """Of many recipes at their margin, one was red by itself: no discovery among so many."""
    spread = np.array([-0.7, 0.0, 0.7])

    def fleet_of(shift: float) -> list[RecipeEvidence]:
        shifts = {"chance": shift} | {f"other-{number}": MARGIN for number in range(30)}
        judged = {name: judge(mean + spread) for name, mean in shifts.items()}
        return [
            RecipeEvidence(name=name, reference_sha256=name, judgement=judgement)
            for name, judgement in judged.items()
        ]

    before = classify(fleet_of(MARGIN + 1.4))
    row = {row.name: row for row in before.recipes}["chance"]
    assert row.is_red and row.status == "open"
    now = classify(fleet_of(SHIFT), red_recipes(before.recipes))
    assert {row.name: row.status for row in now.recipes}["chance"] == "regressed here"


EXPECTED = {
    "regressed here": "regressed here",
    "crashes": "regressed here",
    "red before": "red before",
    "shifted once": "flaked",
    "accident": "flaked",
}


def count(num_fleets: int, num_recipes: int, num_seeds: int, spread: float) -> Counts:
    counts = Counts([])
    for number in range(num_fleets):
        fleet, truth = simulate(np.random.default_rng([number, num_seeds]), num_recipes, num_seeds, spread)
        called = [truth[row.name] for row in fleet.recipes if row.status == "regressed here"]
        num_false = sum(EXPECTED.get(one) != "regressed here" for one in called)
        counts.false_shares.append(num_false / max(1, len(called)))
        for row in fleet.recipes:
            if truth[row.name] in EXPECTED:
                counts.num_red += 1
                counts.right += row.status == EXPECTED[truth[row.name]]
    return counts


def test_a_nightly_is_split_rightly() -> None:
    counts = count(num_fleets=4, num_recipes=150, num_seeds=3, spread=0.3)
    assert counts.false_discovery_rate <= 0.05
    assert counts.num_red > 150 and counts.right / counts.num_red >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("num_seeds", "spread"), [(3, 0.0), (3, 0.3), (4, 0.5), (5, 0.5)])
def test_nightlies_keep_the_rate_and_split_rightly(num_seeds: int, spread: float) -> None:
    counts = count(num_fleets=60, num_recipes=150, num_seeds=num_seeds, spread=spread)
    assert counts.false_discovery_rate <= 0.05
    assert counts.right / counts.num_red >= 0.95
