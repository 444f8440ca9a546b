"""Tests of claims with the noise of the whole fleet: each recipe's variance, moderated by all others'."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from scipy import special

from abrun.recipe.claims import ClaimKind
from abrun.stats.shared_variance import VariancePrior, fit_prior

# single: one run, whose noise is that of the reference's runs
Design = Literal["paired", "unpaired", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimEvidence:
    """One claim of a recipe, in units of its margin: differences of recipes then have similar noise."""

    metric: str
    kind: ClaimKind
    better: str | None  # direction of an improvement
    p_alone: float | None  # with the recipe's own noise; None: not tested
    share: float  # of the recipe's level
    # The rest is None unless the claim is about a difference with a margin of its own
    design: Design | None = None
    difference: float | None = None  # treatment - reference
    margin: float | None = None
    variance: float | None = None  # of one pair, or of one run of the reference
    variance_factor: float = 1.0  # variance of the difference / variance
    dof: float = 0.0

    @property
    def is_improvement(self) -> bool:
        if self.difference is None or self.better is None:
            return False
        return (self.difference > 0) == (self.better == "higher")


@dataclass(frozen=True, slots=True)
class FleetNoise:
    """Distributions of the variances, by metric and design; none for few recipes."""

    priors: Mapping[tuple[str, Design | None], VariancePrior | None]

    def p_beyond(self, claim: ClaimEvidence) -> float | None:
        """Return the p-value of a difference (`not_worse`: a loss) beyond the margin; None: no test."""
        if claim.difference is None:
            return claim.p_alone
        error, dof = self._error(claim)
        if not error:
            return claim.p_alone
        if claim.kind == "within":
            distance = abs(claim.difference)
            return sum(float(special.stdtr(dof, (end - distance) / error)) for end in (1, -1))
        loss = -claim.difference if claim.better == "higher" else claim.difference
        return float(special.stdtr(dof, (1 - loss) / error))

    def p_within(self, claim: ClaimEvidence) -> float:
        """Return the p-value of the claim itself; 1 if the noise is unknown."""
        if claim.difference is None:
            return 1.0
        error, dof = self._error(claim)
        if not error:
            return 1.0
        loss = -claim.difference if claim.better == "higher" else claim.difference
        distance = abs(claim.difference) if claim.kind == "within" else loss
        return float(special.stdtr(dof, (distance - 1) / error))

    def _error(self, claim: ClaimEvidence) -> tuple[float, float]:
        """Return the standard error of the difference and its degrees of freedom; 0 if it is unknown."""
        assert claim.variance is not None
        prior = self.priors.get((claim.metric, claim.design))
        variance, dof = prior.moderate(claim.variance, claim.dof) if prior else (claim.variance, claim.dof)
        return (variance * claim.variance_factor) ** 0.5, dof


def fit_noise(claims: Iterable[ClaimEvidence]) -> FleetNoise:
    """Fit the distribution of the variances of each metric and design."""
    groups: dict[tuple[str, Design | None], list[ClaimEvidence]] = defaultdict(list)
    for claim in claims:
        if claim.variance is not None:
            groups[claim.metric, claim.design].append(claim)
    return FleetNoise(
        {
            key: fit_prior([claim.variance or 0.0 for claim in group], [claim.dof for claim in group])
            for key, group in groups.items()
        }
    )
