"""Power analysis before the runs: P(match) of a claim, the pairs needed, and what interim analyses save.

Imports scipy, so import this module only where it is needed.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from abrun.messages.numbers import counted
from abrun.recipe.claims import Claim, Compare, NoisePrior, find_prior
from abrun.runs.files import MAX_FILE_BYTES, read_regular
from abrun.stats.equivalence import ALPHA, MIN_FOR_MISMATCH
from abrun.stats.many_tests import MAX_PRIOR_DOF, VariancePrior
from abrun.stats.one_sided import (
    one_sided_pairs_needed,
    one_sided_power,
    planned_excess,
    simulate_one_sided_decisions,
)
from abrun.stats.power import (
    Decisions,
    find_min_pairs,
    pairs_needed,
    pairs_needed_range,
    power_at,
    sd_interval,
    sd_of_difference,
    sd_upper_bound,
    simulate_tost_decisions,
    welch_dof_per_run,
)
from abrun.stats.sequential import interim_levels
from abrun.stats.sigma_margin import (
    VarianceModel,
    sigma_lower_bound,
    sigma_pairs_needed,
    sigma_power,
    simulate_sigma_decisions,
    simulate_sigma_improvements,
)

ASSURANCE = 0.8  # probability of reaching the planned power if a pilot measured the sd
POWER_ERROR = 0.005  # of a simulated power
MAX_EXTRA_PAIRS = 3  # of proposed interim analyses, to make up for their lower levels
MIN_FIRST_PAIRS = 3  # of an interim analysis: fewer decide almost nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Variation of a claim's metric over seeds: assumed in the recipe, or measured earlier."""

    sigma: float | None  # sd of one arm; None: the unit itself, for a margin in sigmas
    correlation: float  # between paired arms
    sd_difference: float  # sd of the paired difference
    num_pairs: int | None = None  # measured over so many pairs (or runs per arm); None: assumed
    source: str = "assumed"
    level: float | None = None  # of the baseline in the window, where measured
    climb: float | None = None  # of the baseline up to the window's end, where measured
    prior: VariancePrior | None = None  # the noise of earlier experiments, which the verdict's test uses

    @property
    def law(self) -> VarianceModel:
        """Return the law for a margin in sigmas.

        Of the two ratios of the arms' sigmas that explain the sd of the difference, it has the larger one.
        """
        spread, rho = self.sd_difference / (self.sigma or 1.0), self.correlation
        ratio = rho + math.sqrt(max(0.0, rho**2 - 1 + spread**2))
        widened = self.planned_sd / self.sd_difference if self.sd_difference else 1.0
        return VarianceModel(correlation=rho, sd_ratio=ratio, sd_factor=widened)

    @property
    def planned_sd(self) -> float:
        """Return the sd for planning: the upper 80 % bound of a measured sd, which is often too small."""
        # Few experiments, or unlike ones, leave the next sd as uncertain as their degrees of freedom say
        if self.prior and self.sigma is None and self.prior.dof < MAX_PRIOR_DOF:
            return sd_upper_bound(self.sd_difference, self.prior.dof + 1, ASSURANCE)
        if not self.num_pairs or self.num_pairs < 2:
            return self.sd_difference
        return sd_upper_bound(self.sd_difference, self.num_pairs, ASSURANCE)


def assumed_spread(
    claim: Claim, has_reference: bool, *, paired: bool = True, priors: Sequence[NoisePrior] = ()
) -> Spread | None:
    """Return the spread assumed in the recipe, or else that of earlier experiments.

    None if the margin is absolute and neither is known.
    """
    noise = find_prior(priors, claim) if paired else None
    prior = noise and VariancePrior(noise.sd**2, noise.dof)
    if noise and claim.sigma is None:
        source = f"noise of {counted(noise.experiments, 'earlier experiment')}"
        return Spread(sigma=None, correlation=0.0, sd_difference=noise.sd, source=source, prior=prior)
    if not paired:
        claim = claim.model_copy(update={"correlation": 0.0})
    if claim.sigma_margin is not None and has_reference:  # everything in units of the reference's sigma
        return Spread(
            sigma=None, correlation=claim.correlation, sd_difference=sd_of_difference(1, claim.correlation)
        )
    if claim.sigma is None:
        return None
    difference = sd_of_difference(claim.sigma, claim.correlation)
    return Spread(sigma=claim.sigma, correlation=claim.correlation, sd_difference=difference, prior=prior)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPower:
    """P(match) of one claim if the arms are truly equal, and the pairs needed for 80 % power."""

    power: Callable[[int], float]
    pairs_needed: int | None  # None: more than 1000
    pairs_needed_range: tuple[int | None, int | None] | None  # over the 90 % interval of a measured sd
    # What simulated experiments decide at interim analyses; by count, alpha of a match and of a mismatch, if
    # the true difference is this share of the margin; independent for each number of a stream
    decisions: Callable[[Sequence[int], Sequence[float], Sequence[float], float, int], Decisions]


def plan_claim_power(
    claim: Claim, compare: Compare, spread: Spread | None, alpha: float = ALPHA
) -> ClaimPower | None:
    """Return the power of the test that the verdict will use (see abrun.verdict.claims).

    Non-inferiority is planned for equal arms, superiority for the claim's `improvement`. None if sigma is
    unknown or the claim is not about a difference.
    """
    if claim.difference_kind is None:
        return None
    if claim.is_one_sided:
        return _plan_one_sided_power(claim, compare, spread, alpha)
    if claim.sigma_margin is not None and not compare.reference:
        correlation = claim.correlation if compare.paired else 0.0
        sigmas, law = claim.sigma_margin, spread.law if spread else VarianceModel(correlation=correlation)
        ends = None
        if spread and spread.num_pairs:
            low, high = (replace(law, sd_factor=end) for end in sd_interval(1.0, spread.num_pairs))
            ends = sigma_pairs_needed(sigmas, low, alpha=alpha), sigma_pairs_needed(sigmas, high, alpha=alpha)
        return ClaimPower(
            power=lambda pairs: sigma_power(sigmas, pairs, law, alpha),
            pairs_needed=sigma_pairs_needed(sigmas, law, alpha=alpha),
            pairs_needed_range=ends,
            decisions=lambda counts, levels, beyond_levels, share, stream: simulate_sigma_decisions(
                sigmas, counts, law, levels, beyond_levels, difference=share * sigmas, stream=stream
            ),
        )
    margin = _absolute_margin(claim, compare, spread)
    if spread is None or margin is None:
        return None
    # Independent arms are assumed to have equal variance; `sd` is that of the difference of one run each
    sd, freedom = spread.planned_sd, welch_dof_per_run((1.0, 1.0)) if not compare.paired else 1.0
    prior_dof = spread.prior.dof if spread.prior else 0.0
    return ClaimPower(
        power=lambda pairs: power_at(margin, sd, pairs, alpha, dof_per_pair=freedom, prior_dof=prior_dof),
        pairs_needed=pairs_needed(margin, sd, alpha=alpha, dof_per_pair=freedom, prior_dof=prior_dof),
        pairs_needed_range=pairs_needed_range(margin, spread.sd_difference, spread.num_pairs, alpha, freedom)
        if spread.num_pairs
        else None,
        decisions=lambda counts, levels, beyond_levels, share, stream: simulate_tost_decisions(
            *(margin, sd, counts, levels, beyond_levels),
            difference=share * margin,
            stream=stream,
            prior=spread.prior,
        ),
    )


def _plan_one_sided_power(
    claim: Claim, compare: Compare, spread: Spread | None, alpha: float
) -> ClaimPower | None:
    """Return the power of a one-sided claim; with a margin in sigmas, everything is in sigmas."""
    in_sigmas = claim.sigma_margin is not None and not compare.reference
    if in_sigmas:
        correlation = claim.correlation if compare.paired else 0.0
        law = spread.law if spread else VarianceModel(correlation=correlation)
        margin, sd = claim.margin_in[0], law.sd_difference
        improvement = claim.improvement and claim.improvement / ((spread and spread.sigma) or 1.0)
    else:
        law, margin, improvement = None, _absolute_margin(claim, compare, spread), claim.improvement
        if spread is None or margin is None:
            return None
        sd = spread.planned_sd
    excess = planned_excess(claim.kind, margin, improvement)
    if excess <= 0:  # `better: 0` without an improvement to plan for
        return None
    freedom = 1.0 if compare.paired else welch_dof_per_run((1.0, 1.0))

    min_pairs = 2 if claim.kind == "not_worse" else MIN_FOR_MISMATCH

    def decide(
        counts: Sequence[int],
        levels: Sequence[float],
        broken_levels: Sequence[float],
        share: float,
        stream: int,
    ) -> Decisions:
        gained = (1 - share) * excess
        if law is None:
            decided = simulate_one_sided_decisions(gained, sd, counts, levels, broken_levels, stream=stream)
        else:
            threshold = -margin if claim.kind == "not_worse" else margin
            decided = simulate_sigma_improvements(
                threshold, counts, law, levels, broken_levels, improvement=threshold + gained, stream=stream
            )
        return replace(decided, matches=decided.matches & (np.array(counts) >= min_pairs)[:, None])

    def power(pairs: int) -> float:
        if pairs < min_pairs:
            return 0.0
        if law is not None:
            return float(decide([pairs], [alpha], [alpha], 0.0, 0).matches.mean())
        return one_sided_power(excess, sd / math.sqrt(pairs), freedom * (pairs - 1), alpha)

    def needed(scale: float) -> int | None:
        if law is not None:
            return find_min_pairs(power) if scale == 1.0 and excess > 0 else None
        count = one_sided_pairs_needed(excess, scale * sd, alpha=alpha, dof_per_pair=freedom)
        return None if count is None else max(count, min_pairs)

    ends = None
    if spread and spread.num_pairs and law is None:
        low, high = sd_interval(spread.sd_difference / sd if sd else 1.0, spread.num_pairs)
        ends = needed(low), needed(high)
    return ClaimPower(power=power, pairs_needed=needed(1.0), pairs_needed_range=ends, decisions=decide)


def _absolute_margin(claim: Claim, compare: Compare, spread: Spread | None) -> float | None:
    """Return a claim's margin in units of its metric; None if it is relative to an unknown value."""
    number, unit = claim.margin_in
    if unit == "sigma":  # the verdict uses the lower bound of the reference's sigma
        ratio = _sigma_lower_bound_ratio(compare.reference)
        return ratio and number * ratio * ((spread.sigma if spread else None) or 1.0)
    if unit in ("level", "climb"):
        size = (spread.level if unit == "level" else spread.climb) if spread else None
        return number * abs(size) if size else None
    return number


def _sigma_lower_bound_ratio(reference: str | None) -> float | None:
    """Return the ratio of a reference's lower sigma bound to its sigma; None if the file is unusable."""
    try:
        runs = json.loads(read_regular(Path(reference or "").expanduser(), MAX_FILE_BYTES))["runs"]
        num_seeds = len({run["seed"] for run in runs})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # a launch refuses the file and says why
    return sigma_lower_bound(1.0, num_seeds) if num_seeds > 1 else None


# --- designs with interim analyses, and of a fixed number of pairs ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Designs:
    """Expected numbers of pairs of a design with interim analyses, and of a fixed one with the same power.

    A launch in stages stops once every treatment is a match or a mismatch.
    """

    interim: tuple[int, ...]  # pairs at each analysis
    power: float  # P(every treatment matches) if all arms are equal
    pairs_if_equal: float
    pairs_at_margin: float  # if every claim differs by its margin
    fixed_pairs: float  # with this power at a single analysis, interpolated between whole numbers

    @property
    def saved_pairs(self) -> float:
        """Expected pairs that interim analyses save if the arms are equal; negative if they cost more."""
        return self.fixed_pairs - self.pairs_if_equal


def interim_counts(first_pairs: int, max_pairs: int) -> list[int]:
    """Return the numbers of pairs of up to three evenly spaced analyses."""
    return sorted({first_pairs, round((first_pairs + max_pairs) / 2), max_pairs})


def min_first_pairs(compare: Compare) -> int:
    """Return the fewest pairs of a first analysis: with the noise of earlier experiments, two can match."""
    return MIN_FIRST_PAIRS - bool(compare.noise_priors)


def first_analysis(num_pairs: int, min_pairs: int = MIN_FIRST_PAIRS) -> int | None:
    """Return the pairs of the first analysis of several that end with `num_pairs`; None if too few."""
    first_pairs = max(min_pairs, math.ceil(num_pairs / 2))
    return first_pairs if first_pairs < num_pairs else None


def compare_designs(
    compare: Compare, interim: Sequence[int], powers: Sequence[ClaimPower | None], num_treatments: int
) -> Designs | None:
    """Return the expected pairs of both designs; None if interim analyses cannot judge these claims.

    `powers` are those of all claims at alpha. Claims and treatments are drawn independently of each other;
    in runs they share seeds, agree more often, and stop no later.
    """
    if not compare.paired or compare.reference or not num_treatments or not powers or None in powers:
        return None
    if len(interim) < 2:
        return None
    claims = [power for power in powers if power is not None]
    guard_alpha = compare.guards.alpha * compare.alpha / ALPHA
    spending = compare.model_copy(update={"interim": list(interim)}).spending
    levels = interim_levels(interim, compare.alpha, spending)
    beyond_alpha = (compare.alpha - guard_alpha) / (len(claims) * num_treatments)
    beyond_levels = interim_levels(interim, beyond_alpha, spending)

    def simulate(share: float) -> tuple[float, float]:
        """Return the expected pairs, and P(every treatment matches), at this share of the margins."""
        num_analyses, stop, all_match = len(interim), np.array(0), np.array(True)
        for treatment in range(num_treatments):
            decided = [
                claim.decisions(interim, levels, beyond_levels, share, treatment * len(claims) + index)
                for index, claim in enumerate(claims)
            ]
            matches = np.all([claim.matches for claim in decided], axis=0)
            mismatches = np.any([claim.mismatches for claim in decided], axis=0)
            is_decided = np.concatenate([matches | mismatches, np.ones((1, matches.shape[1]), bool)])
            decided_at = is_decided.argmax(axis=0)
            analysis = np.minimum(decided_at, num_analyses - 1)
            columns = np.arange(matches.shape[1])
            all_match = all_match & matches[analysis, columns] & ~mismatches[analysis, columns]
            stop = np.maximum(stop, analysis)
        return float(np.array(interim)[stop].mean()), float(all_match.mean())

    pairs_if_equal, power = simulate(0.0)
    return Designs(
        interim=tuple(interim),
        power=power,
        pairs_if_equal=pairs_if_equal,
        pairs_at_margin=simulate(1.0)[0],
        fixed_pairs=_interpolate_pairs(
            lambda pairs: fixed_power(claims, num_treatments, pairs), power, interim[-1]
        ),
    )


def fixed_power(claims: Sequence[ClaimPower], num_treatments: int, num_pairs: int) -> float:
    """Return P(every treatment matches) at a single analysis, if all arms are equal."""
    return math.prod(claim.power(num_pairs) for claim in claims) ** num_treatments


def _interpolate_pairs(power_of_pairs: Callable[[int], float], power: float, max_pairs: int) -> float:
    """Return the number of pairs with this power, interpolated; at most `max_pairs`."""
    # A power near 1 would ask for more pairs than its simulation can tell apart.
    count = find_min_pairs(power_of_pairs, power - POWER_ERROR, max_pairs) or max_pairs
    upper, lower = power_of_pairs(count), power_of_pairs(count - 1)
    if upper <= lower:
        return count
    return count - 1 + min(max((power - lower) / (upper - lower), 0.0), 1.0)


def propose_designs(
    compare: Compare, num_pairs: int, powers: Sequence[ClaimPower | None], num_treatments: int
) -> Designs | None:
    """Return `compare_designs` of the declared interim analyses, or of some with the power of `num_pairs`.

    These begin at half of the pairs and take up to MAX_EXTRA_PAIRS more; None if they do not reach the power.
    """
    if compare.interim:
        return compare_designs(compare, compare.interim, powers, num_treatments)
    first_pairs = first_analysis(num_pairs, min_first_pairs(compare))
    if first_pairs is None:
        return None
    for max_pairs in range(num_pairs, num_pairs + MAX_EXTRA_PAIRS + 1):
        interim = interim_counts(first_pairs, max_pairs)
        if (designs := compare_designs(compare, interim, powers, num_treatments)) is None:
            return None
        claims = [power for power in powers if power is not None]
        if designs.power >= fixed_power(claims, num_treatments, num_pairs) - POWER_ERROR:
            return designs
    return None


def staged_options(compare: Compare, seeds: Sequence[int], designs: Designs) -> str:
    """Return the options of a launch in stages with this design."""
    if compare.interim:
        return "--until-decided"
    first_seeds = ",".join(map(str, seeds[: designs.interim[0]]))
    return f"--seeds {first_seeds} --until-decided --max-seeds {designs.interim[-1]}"


def design_reason(compare: Compare, seeds: Sequence[int], designs: Designs) -> str:
    """Return which design is cheaper if the arms are equal."""
    pairs_if_equal, fixed_pairs = designs.pairs_if_equal, designs.fixed_pairs
    if designs.saved_pairs <= 0:
        return (
            f"One analysis is cheaper: {fixed_pairs:.3g} pairs; interim analyses with the same P(match) take "
            f"{pairs_if_equal:.3g} on average if the arms are equal"
        )
    return (
        f"Interim analyses are cheaper: {pairs_if_equal:.3g} pairs on average if the arms are equal, at most "
        f"{designs.interim[-1]}; one analysis with the same P(match) takes {fixed_pairs:.3g}; launch with "
        f"{staged_options(compare, seeds, designs)}"
    )
