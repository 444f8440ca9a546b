"""What prompts shared by both arms may add to a verdict, and what not: prints the tables of docs/verdict.md.

python tests/bench/bench_validation.py

Each experiment is a table of differences, seeds by prompts, whose true mean is exactly the margin, so that
every match is an error. `seeds` is the sd over seeds of a run's true difference, `rest` a single answer's.
Answers are 0 or 1 in the binary rows: of 64 prompts that every experiment shares.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.variance_components import crossed

EXPERIMENTS = 20_000
PAIRS = (3, 5, 10)
NUM_PROMPTS = 64
ALPHA = 0.05
Table = NDArray[np.floating]  # [N, S, P]


def normal_table(
    seeds: float, prompts: float, rest: float, num_pairs: int, num: int = EXPERIMENTS, *, fixed: bool = False
) -> Table:
    """Differences about 0; `prompts` is the sd of what the treatment does to a prompt in every seed.

    `fixed`: 0 is their mean on these prompts, which is what a claim speaks of; else on any.
    """
    rng = np.random.default_rng([num_pairs, round(100 * seeds)])
    table = rest * rng.standard_normal((num, num_pairs, NUM_PROMPTS))
    table += seeds * rng.standard_normal((num, num_pairs, 1))
    of_prompts = prompts * rng.standard_normal((num, 1, NUM_PROMPTS))
    if fixed:
        of_prompts -= of_prompts.mean(axis=2, keepdims=True)
    return table + of_prompts


def answers(
    num_pairs: int, spread: float, num: int = EXPERIMENTS, seed: int = 1
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Right answers of both arms to 64 prompts: `spread` is the sd over runs of the log odds."""
    of_prompts = np.random.default_rng(0)
    base = 0.5 + 1.5 * of_prompts.standard_normal(NUM_PROMPTS)
    treated = base + 0.4 + 0.3 * of_prompts.standard_normal(NUM_PROMPTS)
    rng = np.random.default_rng([seed, num_pairs])
    shared = 0.5 * rng.standard_normal((num, num_pairs, 1)) + 0.7 * rng.standard_normal(
        (num, num_pairs, NUM_PROMPTS)
    )
    arms = [odds + shared + spread * rng.standard_normal((num, num_pairs, 1)) for odds in (base, treated)]
    left, right = (rng.random(odds.shape) < special.expit(odds) for odds in arms)
    return left, right


def binary_table(num_pairs: int, spread: float) -> Table:
    """Differences of right answers, about their true mean."""
    truth = [np.mean(one) for one in answers(num_pairs, spread, 40_000, seed=2)]
    left, right = answers(num_pairs, spread)
    return right.astype(float) - left - (truth[1] - truth[0])


def errs(means: NDArray[np.floating], errors: NDArray[np.floating], freedom) -> float:
    """How often the upper bound of differences about 0 lies below it: a match at the edge of its margin."""
    return float(np.mean(special.stdtr(freedom, means / np.maximum(errors, 1e-300)) < ALPHA))


def by_unit(table: Table) -> dict[str, float]:
    """Shares of false matches by what counts as the independent unit."""
    num, num_pairs, num_prompts = table.shape
    of_seeds, of_prompts, mean = table.mean(axis=2), table.mean(axis=1), table.mean(axis=(1, 2))
    by_seed = of_seeds.std(axis=1, ddof=1) / np.sqrt(num_pairs)
    by_prompt = of_prompts.std(axis=1, ddof=1) / np.sqrt(num_prompts)
    cells = table.reshape(num, -1)
    by_cell = cells.std(axis=1, ddof=1) / np.sqrt(cells.shape[1])
    # Test, then pool: prompts take part where an F test sees no spread of seeds beyond theirs
    residual = table - of_seeds[:, :, None] - of_prompts[:, None] + mean[:, None, None]
    rest_free = (num_pairs - 1) * (num_prompts - 1)
    rest = (residual**2).sum(axis=(1, 2)) / rest_free
    between = num_prompts * num_pairs * by_seed**2
    no_spread = special.fdtrc(num_pairs - 1, rest_free, between / rest) > ALPHA
    pooled = (between * (num_pairs - 1) + rest * rest_free) / (num_pairs - 1 + rest_free)
    error = np.where(no_spread, np.sqrt(pooled / cells.shape[1]), by_seed)
    freedom = np.where(no_spread, num_pairs - 1 + rest_free, num_pairs - 1)
    return {
        "seeds": errs(mean, by_seed, num_pairs - 1),
        "prompts": errs(mean, by_prompt, num_prompts - 1),
        "answers": errs(mean, by_cell, cells.shape[1] - 1),
        "pooled if F > .05": errs(mean, error, freedom),
    }


def by_covariate(num_pairs: int, correlation: float) -> tuple[float, float, float, float]:
    """False matches of differences adjusted for a covariate: without paying for it (CUPED), and with a degree
    of freedom (least squares); then P(match) of equal arms at a margin of 1.5 sd, without it and with it.
    """
    rng = np.random.default_rng([num_pairs, round(10 * correlation)])
    covariate = rng.standard_normal((EXPERIMENTS, num_pairs))
    noise = rng.standard_normal(covariate.shape)
    differences = correlation * covariate + np.sqrt(1 - correlation**2) * noise
    x = covariate - covariate.mean(axis=1, keepdims=True)
    squares = (x**2).sum(axis=1)
    slope = (x * differences).sum(axis=1) / squares
    plain, at_x = differences.mean(axis=1), covariate.mean(axis=1)  # the covariate's true mean is 0
    adjusted = plain - slope * at_x
    residual = differences - plain[:, None] - slope[:, None] * x
    cuped = np.sqrt((residual**2).sum(axis=1) / (num_pairs - 1) / num_pairs)
    spread = np.sqrt((residual**2).sum(axis=1) / max(1, num_pairs - 2))
    paid = spread * np.sqrt(1 / num_pairs + at_x**2 / squares)
    error = differences.std(axis=1, ddof=1) / np.sqrt(num_pairs)

    def power(mean, error, freedom: int) -> float:
        reach = special.stdtrit(freedom, 1 - ALPHA) * error
        return float(np.mean(np.abs(mean) + reach < 1.5))

    return (
        errs(adjusted, cuped, num_pairs - 1),
        errs(adjusted, paid, num_pairs - 2),
        power(plain, error, num_pairs - 1),
        power(adjusted, paid, num_pairs - 2),
    )


def coverage(seeds: float, prompts: float, num_pairs: int, num: int = 2000) -> tuple[float, float, float]:
    """How often the 90 % intervals hold: of the share of noise, of the mean over seeds and prompts; and how
    often the interval over seeds alone holds the mean over all prompts, which it does not speak of.
    """
    share = (1 / NUM_PROMPTS) / (seeds**2 + 1 / NUM_PROMPTS)
    held = []
    for table in normal_table(seeds, prompts, 1.0, num_pairs, num):
        found = crossed(table)
        assert found
        reach = float(special.stdtrit(num_pairs - 1, 0.95)) * found.sd_pairs / np.sqrt(num_pairs)
        low, high = found.noise_share_interval
        held.append(
            (
                low <= share <= high or (high == 1.0 and low <= share),
                found.interval_of_prompts[0] <= 0 <= found.interval_of_prompts[1],
                abs(found.mean) <= reach,
            )
        )
    of_share, of_both, of_seeds = np.mean(held, axis=0)
    return float(of_share), float(of_both), float(of_seeds)


TABLES = {
    "normal, no spread of seeds": lambda pairs: normal_table(0.0, 0.1, 1.0, pairs, fixed=True),
    "normal, seeds .5 of a prompt mean's noise": lambda pairs: normal_table(
        0.0625, 0.1, 1.0, pairs, fixed=True
    ),
    "normal, as much": lambda pairs: normal_table(0.125, 0.1, 1.0, pairs, fixed=True),
    "normal, twice": lambda pairs: normal_table(0.25, 0.1, 1.0, pairs, fixed=True),
    "binary, runs spread by .2": lambda pairs: binary_table(pairs, 0.2),
    "binary, by .5": lambda pairs: binary_table(pairs, 0.5),
}


def main() -> None:
    print(
        f"{EXPERIMENTS:,} experiments a cell, {NUM_PROMPTS} prompts; 3, 5, 10 pairs\n\nfalse matches by unit"
    )
    for name, draw in TABLES.items():
        rows = [by_unit(draw(pairs)) for pairs in PAIRS]
        cells = (" ".join(f"{row[unit]:.3f}" for row in rows) for unit in rows[0])
        print(f"| {name} | {' | '.join(cells)} |")
    print("\ncovariate: false matches of CUPED and of least squares; P(match) without it and with it")
    for correlation in (0.0, 0.5, 0.8):
        for pairs in (3, 4, 5, 10):
            found = " ".join(f"{one:.3f}" for one in by_covariate(pairs, correlation))
            print(f"| {correlation} | {pairs} | {found} |")
    print("\ncoverage of 90 % intervals: share of noise, any prompts, seeds alone for any prompts")
    for seeds, prompts in ((0.0, 0.5), (0.125, 0.0), (0.125, 0.5), (0.25, 0.5), (0.125, 1.0)):
        for pairs in PAIRS:
            found = " ".join(f"{one:.3f}" for one in coverage(seeds, prompts, pairs))
            print(f"| {seeds} | {prompts} | {pairs} | {found} |")


if __name__ == "__main__":
    main()
