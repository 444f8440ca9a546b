"""Expected cost of a comparison with interim analyses, next to one of a fixed number of pairs.

Imports scipy, so import this module only where it is needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from abrun.experiment.power import ClaimPower
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Compare
from abrun.stats.equivalence import ALPHA
from abrun.stats.power import find_min_pairs
from abrun.stats.sequential import interim_levels

POWER_ERROR = 0.005  # of a simulated power
MAX_EXTRA_PAIRS = 3  # of proposed interim analyses, to make up for their lower levels
MIN_FIRST_PAIRS = 3  # of an interim analysis: fewer decide almost nothing


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


def first_analysis(num_pairs: int) -> int | None:
    """Return the pairs of the first analysis of several that end with `num_pairs`; None if too few."""
    first_pairs = max(MIN_FIRST_PAIRS, math.ceil(num_pairs / 2))
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
    levels = interim_levels(interim, compare.alpha, compare.alpha_spending)
    beyond_alpha = (compare.alpha - guard_alpha) / (len(claims) * num_treatments)
    beyond_levels = interim_levels(interim, beyond_alpha, compare.alpha_spending)

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
            last = np.minimum(decided_at, num_analyses - 1)
            columns = np.arange(matches.shape[1])
            all_match = all_match & matches[last, columns] & ~mismatches[last, columns]
            stop = np.maximum(stop, last)
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
    first_pairs = first_analysis(num_pairs)
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


def design_reason(compare: Compare, seeds: Sequence[int], designs: Designs) -> Reason:
    """Return which design is cheaper if the arms are equal."""
    pairs_if_equal, fixed_pairs = designs.pairs_if_equal, designs.fixed_pairs
    if designs.saved_pairs <= 0:
        return Code.INTERIM_COSTS_MORE(pairs_if_equal=pairs_if_equal, fixed_pairs=fixed_pairs)
    return Code.INTERIM_SAVES(
        pairs_if_equal=pairs_if_equal,
        fixed_pairs=fixed_pairs,
        max_pairs=designs.interim[-1],
        options=staged_options(compare, seeds, designs),
    )
