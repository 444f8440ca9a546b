"""Campaigns of many candidates under `abrun gate`: the figures of docs/how-to/track-drift.md.

python -m tests.bench.bench_gate [NUM_CAMPAIGNS]

A campaign judges 100 candidates, one after the other. Most change nothing; the others improve the incumbent
by 0.5 to 3 standard deviations of a run. A candidate starts with `first` seeds and gets those that the gate
asks for. One that is better becomes the incumbent and is run again up to `incumbent_seeds`. Noise is normal,
or an exponential distribution whose long tail is to the better (right) or to the worse side (left).
"""

import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np

from abrun.stats.online import MAX_SEEDS, Noise, Sample, lord_level, read_candidate, seeds_to_add


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One kind of campaign, and the way in which an agent works with the gate."""

    shape: Literal["normal", "right", "left"] = "normal"
    null_share: float = 0.85
    harmful_share: float = 0.0  # of the null candidates, worse by up to 3 sd
    noisy_share: float = 0.0  # of the null candidates, with `noisy_sd`
    noisy_sd: float = 3.0
    first: int = 1  # seeds at which a candidate is judged first
    incumbent_seeds: int = 16
    after_keep: Literal["add", "reuse"] = "add"  # how a new incumbent's runs are made
    step: int | None = None  # add this many seeds instead of those that the gate asks for
    worth: float = 2.0
    num_candidates: int = 100


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over campaigns; costs are runs a candidate."""

    fdr: float
    fdr_error: float
    large_kept: float  # share of improvements of 2 sd or more that are kept
    candidate_runs: float
    incumbent_runs: float


def draw_noise(rng: np.random.Generator, shape: str, size: tuple[int, ...]) -> np.ndarray:
    """Return noise of mean 0 and sd 1."""
    if shape == "normal":
        return rng.standard_normal(size)
    sign = 1.0 if shape == "right" else -1.0
    return sign * (rng.exponential(size=size) - 1)


def simulate(setting: Setting, num_campaigns: int = 200, seed: int = 0) -> Outcome:
    """Run campaigns side by side."""
    rng = np.random.default_rng(seed)
    rows = np.arange(num_campaigns)
    true_level = np.zeros(num_campaigns)
    noise_squares, noise_dof = np.zeros(num_campaigns), np.zeros(num_campaigns)
    incumbent = Sample.of(draw_noise(rng, setting.shape, (num_campaigns, setting.incumbent_seeds)))
    incumbent_runs = np.full(num_campaigns, setting.incumbent_seeds)
    kept, false, discoveries = [], [], [[] for _ in rows]
    table = []
    for number in range(1, setting.num_candidates + 1):
        is_null = rng.random(num_campaigns) < setting.null_share
        harm = np.where(
            rng.random(num_campaigns) < setting.harmful_share, rng.uniform(-3, 0, num_campaigns), 0
        )
        effect = np.where(is_null, harm, rng.uniform(0.5, 3, num_campaigns))
        sd = np.where(is_null & (rng.random(num_campaigns) < setting.noisy_share), setting.noisy_sd, 1.0)
        draws = draw_noise(rng, setting.shape, (num_campaigns, MAX_SEEDS))
        values = (true_level + effect)[:, None] + sd[:, None] * draws
        level = np.array([lord_level(number, times) for times in discoveries])
        noise = Noise(squares=noise_squares, dof=noise_dof)
        num_seeds, better = judge_all(values, incumbent, noise, level, setting)
        sample = first_runs(values, num_seeds)
        table.append((effect, better, num_seeds))
        kept.append(better)
        false.append(better & (effect <= 0))
        loser = Sample(
            **{
                name: np.where(better, getattr(incumbent, name), getattr(sample, name))
                for name in ("count", "mean", "squares")
            }
        )
        noise_squares = noise_squares + loser.squares
        noise_dof = noise_dof + loser.count - 1
        true_level = np.where(better, true_level + effect, true_level)
        count, mean, squares = incumbent.count.copy(), incumbent.mean.copy(), incumbent.squares.copy()
        for row in np.flatnonzero(better):
            discoveries[row].append(number)
            own = values[row, : num_seeds[row]]
            num_fresh = max(setting.incumbent_seeds - len(own), 0) * (setting.after_keep == "add")
            fresh = true_level[row] + sd[row] * draw_noise(rng, setting.shape, (num_fresh,))
            incumbent_runs[row] += num_fresh
            new = Sample.of(np.concatenate([own, fresh]))
            count[row], mean[row], squares[row] = new.count, new.mean, new.squares
        incumbent = Sample(count=count, mean=mean, squares=squares)
    effect, better, num_seeds = (np.array(column) for column in zip(*table, strict=True))
    large = effect >= 2
    proportion = np.sum(false, axis=0) / np.maximum(np.sum(kept, axis=0), 1)
    return Outcome(
        fdr=proportion.mean(),
        fdr_error=proportion.std() / np.sqrt(num_campaigns),
        large_kept=better[large].mean() if large.any() else 1.0,
        candidate_runs=num_seeds.mean(),
        incumbent_runs=incumbent_runs.mean() / setting.num_candidates,
    )


def first_runs(values: np.ndarray, num_seeds: np.ndarray) -> Sample:
    """Return the sample of the first `num_seeds` values of each row."""
    is_used = np.arange(values.shape[1]) < num_seeds[:, None]
    mean = np.where(is_used, values, 0).sum(axis=1) / num_seeds
    squares = np.where(is_used, (values - mean[:, None]) ** 2, 0).sum(axis=1)
    return Sample(count=num_seeds.astype(float), mean=mean, squares=squares)


def judge_all(
    values: np.ndarray, incumbent: Sample, noise: Noise, level: np.ndarray, setting: Setting
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seeds spent on one candidate of each campaign, and where it was kept."""
    num_seeds = np.full(len(values), setting.first)
    better = np.zeros(len(values), bool)
    discarded = np.zeros(len(values), bool)
    for _ in range(MAX_SEEDS):
        sample = first_runs(values, num_seeds)
        reading = read_candidate(sample, incumbent, noise, level=level, worth=setting.worth, in_sds=True)
        is_open = ~better & ~discarded
        better |= is_open & reading.better
        discarded |= is_open & (reading.alike | reading.worse)
        is_open = ~better & ~discarded & (num_seeds < MAX_SEEDS)
        if not is_open.any():
            break
        added = setting.step or seeds_to_add(
            sample, incumbent, noise, level=level, worth=setting.worth, in_sds=True
        )
        num_seeds = np.where(is_open, np.minimum(num_seeds + added, MAX_SEEDS), num_seeds)
    return num_seeds, better


def main() -> None:
    num_campaigns = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for shape in ("normal", "right", "left"):
        for null_share in (0.8, 0.9):
            for first in (1, 3):
                name = f"{shape}, {null_share:.0%} null, from {first}"
                outcome = simulate(Setting(shape=shape, null_share=null_share, first=first), num_campaigns)
                runs = outcome.candidate_runs + outcome.incumbent_runs
                print(
                    f"{name:28} FDR {outcome.fdr:.3f} +- {outcome.fdr_error:.3f}  kept of 2 sd "
                    f"{outcome.large_kept:.2f}  runs {outcome.candidate_runs:.2f} + "
                    f"{outcome.incumbent_runs:.2f} = {runs:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
