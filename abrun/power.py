"""What a claim can expect before its runs: the chance of a match, and the pairs that it takes.

Pulls in scipy: import it where it is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from abrun.equivalence import (
    ALPHA,
    pairs_needed,
    power_at,
    sd_interval,
    sd_of_difference,
    sigma_pairs_needed,
    sigma_power,
)
from abrun.recipe import Compare, Primary


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How much a claim's metric varies over seeds: assumed in the recipe, or measured earlier."""

    sigma: float | None  # of one arm; None: in units of itself, for a margin in sigmas
    correlation: float  # of the paired arms
    sd_difference: float  # of the paired difference
    num_pairs: int | None = None  # that it was measured over; None: assumed
    source: str = "assumed"


def assumed_spread(claim: Primary, has_reference: bool) -> Spread | None:
    """From the recipe; None where the margin is absolute and sigma unknown."""
    if claim.sigmas is not None and has_reference:  # everything in units of the reference's sigma
        return Spread(
            sigma=None, correlation=claim.correlation, sd_difference=sd_of_difference(1, claim.correlation)
        )
    if claim.sigma is None:
        return None
    difference = sd_of_difference(claim.sigma, claim.correlation)
    return Spread(sigma=claim.sigma, correlation=claim.correlation, sd_difference=difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPower:
    """P(match) of one claim if the arms are truly equal, and the pairs for 80 %."""

    power: Callable[[int], float]
    pairs_needed: int | None  # None: more than 1000
    pairs_needed_range: tuple[int | None, int | None] | None  # over the 90 % interval of a measured sd


def claim_power(
    claim: Primary, compare: Compare, spread: Spread | None, alpha: float = ALPHA
) -> ClaimPower | None:
    """Of the test that the verdict will use (see abrun.compare.judge.claims); None where sigma is unknown."""
    if claim.sigmas is not None and not compare.reference:
        sigmas = claim.sigmas
        return ClaimPower(
            power=lambda pairs: sigma_power(sigmas, pairs, alpha),
            pairs_needed=sigma_pairs_needed(sigmas, alpha=alpha),
            pairs_needed_range=None,
        )
    if spread is None:
        return None
    margin = claim.sigmas * (spread.sigma or 1.0) if claim.sigmas is not None else float(claim.margin)
    low_high = None
    if spread.num_pairs:
        low, high = sd_interval(spread.sd_difference, spread.num_pairs)
        low_high = pairs_needed(margin, low, alpha=alpha), pairs_needed(margin, high, alpha=alpha)
    return ClaimPower(
        power=lambda pairs: power_at(margin, spread.sd_difference, pairs, alpha),
        pairs_needed=pairs_needed(margin, spread.sd_difference, alpha=alpha),
        pairs_needed_range=low_high,
    )
