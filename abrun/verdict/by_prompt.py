"""Validation, paired by prompt: both arms answer the same held-out prompts at the same steps.

No verdict hangs on it: the unit of a claim is the training run, and more prompts make no more runs (what else
they were taken for errs more often than it says: docs/verdict.md). It says how much of the spread over seeds
is that of too few prompts, which is cheaper to buy than a seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from abrun.errors import StoreError
from abrun.reasons import Code, Reason
from abrun.recorded.experiment import Pair, RecordedRun
from abrun.redaction import shown
from abrun.runs.metrics import ValidationRow
from abrun.stats.equivalence import pairs_needed, t_interval
from abrun.stats.series import Array
from abrun.stats.variance_components import Crossed, crossed
from abrun.verdict.results import Claim, PrimaryResult

ACCURACY = "validation/accuracy"
REWARD = "reward of held-out examples"  # as where a loss is in its place
Rows = Mapping[int, ValidationRow]  # of one run, by step


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedStep:
    """Both arms' answers at one step, over all pairs."""

    step: int
    baseline: float  # mean reward
    treatment: float
    num_won: int  # answers of the treatment that are better than the baseline's to the same prompt
    num_lost: int
    num_answers: int  # of an arm


@dataclass(frozen=True, slots=True, kw_only=True)
class PairByPrompt:
    """Two trained models on the same prompts: nothing about the change that made them."""

    seed: int
    difference: float
    interval: tuple[float, float]  # 90 %, Student's t over prompts: these two models on prompts like these


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPrompt:
    """One treatment's validation beside the baseline's. Differences are treatment - baseline."""

    arm: str
    metric: str
    window: tuple[int, int]  # the claim's, or the last validated step: what each prompt is averaged over
    num_prompts: int
    by_step: list[ValidatedStep]
    pairs: list[PairByPrompt]
    interval: tuple[float, float] | None  # 90 %, over seeds: on these prompts, which the claim speaks of
    parts: Crossed | None  # None: one pair, or pairs that do not vary
    effective_pairs: float | None  # that unshared prompts would take for the same error
    sd_with_twice_the_prompts: float | None
    worth_pairs: tuple[float, float, float] | None  # of twice the prompts: estimate, 90 % interval
    pairs_needed: int | None  # for 80 % power at an absolute margin; None: no such claim, or above 1000
    pairs_needed_with_twice: int | None
    problem: Reason | None = None  # why there is nothing here but the steps


def by_prompt(arm: str, pairs: Sequence[Pair], results: Sequence[PrimaryResult]) -> ByPrompt | None:
    """Over the pairs of which both runs finished; None where none was validated prompt by prompt."""
    try:
        rows = [
            (pair, left, right)
            for pair in pairs
            if pair.finished and (left := _rows(pair.baseline)) and (right := _rows(pair.treatment))
        ]
    except StoreError as error:
        return _nothing(arm, Code.VALIDATION_UNREADABLE(problem=shown(str(error))))
    if not rows:
        return None
    of_arms = [[left for _, left, _ in rows], [right for _, _, right in rows]]
    steps = sorted(set.intersection(*(set(one) for arm_rows in of_arms for one in arm_rows)))
    every = [one[step] for arm_rows in of_arms for one in arm_rows for step in steps]
    if not steps or len({(row.prompts_sha256, len(row.rewards)) for row in every}) > 1:
        return _nothing(arm, Code.PROMPTS_OF_RUNS_DIFFER())
    left, right = (np.array([[one[step].rewards for step in steps] for one in rows]) for rows in of_arms)
    metric = ACCURACY if _is_accuracy([pair.baseline for pair, *_ in rows], steps, left) else REWARD
    tested = (result.claim for result in results)
    claim = next((claim for claim in tested if claim.metric == metric and claim.steps), None)
    first, last = claim.steps if claim and claim.steps else (steps[-1], steps[-1])
    inside = np.array([first <= step <= last for step in steps])
    answered = {step for arm_rows in of_arms for one in arm_rows for step in one if first <= step <= last}
    if not answered <= {*steps}:
        return _nothing(arm, Code.PROMPTS_OF_RUNS_DIFFER())
    if not inside.any() or not np.isfinite(left + right).all():
        return _nothing(arm, Code.VALIDATION_NOT_FINITE())
    tables = [one[:, inside].mean(axis=1) for one in (left, right)]  # [S, P]
    table = tables[1] - tables[0]
    parts = crossed(table)
    return ByPrompt(
        arm=arm,
        metric=metric,
        window=(first, last),
        num_prompts=table.shape[1],
        by_step=[_step(step, left[:, at], right[:, at]) for at, step in enumerate(steps)],
        pairs=[_of_pair(pair.seed, row) for (pair, *_), row in zip(rows, table, strict=True)],
        interval=t_interval(table.mean(axis=1), 0.9) if len(table) > 1 else None,
        parts=parts,
        effective_pairs=_effective_pairs(parts, tables) if parts else None,
        sd_with_twice_the_prompts=parts.sd_with(2) if parts else None,
        worth_pairs=worth_of_twice(parts) if parts else None,
        pairs_needed=_needed(claim, parts, 1),
        pairs_needed_with_twice=_needed(claim, parts, 2),
    )


def worth_of_twice(parts: Crossed) -> tuple[float, float, float]:
    """How many more pairs would narrow the interval over seeds as twice the prompts do, with interval."""
    low, high = parts.noise_share_interval
    more = [parts.num_pairs * share / (2 - share) for share in (parts.noise_share, low, high)]
    return more[0], more[1], more[2]


def _rows(run: RecordedRun) -> Rows:
    return run.validations()


def _nothing(arm: str, problem: Reason) -> ByPrompt:
    return ByPrompt(
        arm=arm,
        metric=ACCURACY,
        window=(0, 0),
        num_prompts=0,
        by_step=[],
        pairs=[],
        interval=None,
        parts=None,
        effective_pairs=None,
        sd_with_twice_the_prompts=None,
        worth_pairs=None,
        pairs_needed=None,
        pairs_needed_with_twice=None,
        problem=problem,
    )


def _is_accuracy(runs: Sequence[RecordedRun], steps: Sequence[int], rewards: Array) -> bool:
    """Whether the mean reward [R, T, P] is what these runs recorded as their accuracy."""
    for run, of_run in zip(runs, rewards.mean(axis=2), strict=True):
        series = run.series(ACCURACY)
        known = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        if not all(
            math.isclose(known.get(step, math.nan), mean, rel_tol=1e-9, abs_tol=1e-9)
            for step, mean in zip(steps, of_run.tolist(), strict=True)
        ):
            return False
    return True


def _step(step: int, left: Array, right: Array) -> ValidatedStep:
    return ValidatedStep(
        step=step,
        baseline=float(left.mean()),
        treatment=float(right.mean()),
        num_won=int((right > left).sum()),
        num_lost=int((right < left).sum()),
        num_answers=left.size,
    )


def _of_pair(seed: int, differences: Array) -> PairByPrompt:
    mean = float(differences.mean())
    interval = t_interval(differences, 0.9) if len(differences) > 1 else (-math.inf, math.inf)
    return PairByPrompt(seed=seed, difference=mean, interval=interval)


def _effective_pairs(parts: Crossed, tables: Sequence[Array]) -> float:
    """Pairs that would be needed if every run answered prompts of its own, alike but not the same."""
    own = sum(float(table.var(axis=1, ddof=1).mean()) for table in tables) / parts.num_prompts
    unshared = parts.seed_variance + own
    return parts.num_pairs * unshared / (parts.seed_variance + parts.rest_variance / parts.num_prompts)


def _needed(claim: Claim | None, parts: Crossed | None, factor: float) -> int | None:
    if claim is None or parts is None or claim.margin is None or claim.margin_unit == "sigma":
        return None
    return pairs_needed(claim.margin, parts.sd_with(factor), alpha=claim.alpha)
