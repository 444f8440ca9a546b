"""Paired differences of seeds that answer the same prompts: what of their spread is seeds, and what prompts.

A two-way table without repetitions: the difference of seed s on prompt p is d + u_s + q_p + e_sp, all random.
u is what training runs differ in, q what the treatment does to one prompt in every seed, e the rest: seed by
prompt, and sampling. The mean over m prompts has variance var(u) + var(e) / m over seeds, and q is in none of
it: a test over seeds speaks of these prompts. Analysis of variance (Scheffe 1959, chapter 7); pulls in scipy.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from abrun.stats.equivalence import mean_and_sd


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """The parts of a table of differences, treatment - baseline. Variances are estimates, 0 at least."""

    num_pairs: int
    num_prompts: int
    mean: float
    sd_pairs: float  # over seeds of the means over prompts: what the verdict's test sees
    seed_variance: float  # var(u)
    prompt_variance: float  # var(q)
    rest_variance: float  # var(e)
    noise_share: float  # of sd_pairs squared that more prompts would average out: var(e) / m
    noise_share_interval: tuple[float, float]  # 90 %, exact where u and e are normal
    interval_of_prompts: tuple[float, float]  # 90 %, of d: over seeds and prompts like these

    def sd_with(self, factor: float) -> float:
        """What `sd_pairs` would be with `factor` times as many prompts."""
        return self.sd_pairs * math.sqrt(1 - self.noise_share + self.noise_share / factor)


def crossed(differences: ArrayLike) -> Crossed | None:
    """The parts of differences [S, P]; None below two seeds or prompts, or where no pair's mean varies."""
    table = np.asarray(differences, float)
    num_pairs, num_prompts = table.shape
    if min(table.shape) < 2 or not np.isfinite(table).all():
        return None
    of_pairs, of_prompts, mean = table.mean(axis=1), table.mean(axis=0), float(table.mean())
    sd_pairs = mean_and_sd(of_pairs)[1]
    if sd_pairs <= 1e-12 * max(1.0, float(np.abs(table).max())):
        return None
    seeds_free, prompts_free = num_pairs - 1, num_prompts - 1
    rest_free = seeds_free * prompts_free
    between = num_prompts * sd_pairs**2
    of_prompt = num_pairs * float(of_prompts.var(ddof=1))
    residual = table - of_pairs[:, None] - of_prompts + mean
    rest = float((residual**2).sum()) / rest_free
    ratio = rest / between
    low, high = (ratio * _quantile(seeds_free, rest_free, tail) for tail in (0.05, 0.95))
    return Crossed(
        num_pairs=num_pairs,
        num_prompts=num_prompts,
        mean=mean,
        sd_pairs=sd_pairs,
        seed_variance=max(0.0, (between - rest) / num_prompts),
        prompt_variance=max(0.0, (of_prompt - rest) / num_pairs),
        rest_variance=rest,
        noise_share=min(1.0, ratio),
        noise_share_interval=(min(1.0, low), min(1.0, high)),
        interval_of_prompts=_over_both(mean, between, of_prompt, rest, num_pairs, num_prompts),
    )


def _quantile(numerator: int, denominator: int, probability: float) -> float:
    """Of F."""
    return float(special.fdtri(numerator, denominator, probability))


def _over_both(
    mean: float, between: float, of_prompt: float, rest: float, num_pairs: int, num_prompts: int
) -> tuple[float, float]:
    """The 90 % interval of the mean over seeds and prompts, with Satterthwaite's degrees of freedom.

    The part of the prompts is 0 at least. Holds in 88 to 91 % at 3 to 10 pairs (bench_validation.py).
    """
    cells = num_pairs * num_prompts
    parts = between / cells, max(0.0, of_prompt - rest) / cells
    variance = sum(parts)
    freedom = variance**2 / (parts[0] ** 2 / (num_pairs - 1) + parts[1] ** 2 / (num_prompts - 1))
    reach = float(special.stdtrit(freedom, 0.95)) * math.sqrt(variance)
    return mean - reach, mean + reach
