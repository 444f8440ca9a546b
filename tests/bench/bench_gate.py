"""Campaigns of many candidates under `abrun gate`: the figures of docs/how-to/track-drift.md.

python -m tests.bench.bench_gate [NUM_CAMPAIGNS]

A campaign judges 100 candidates, one after the other. Most change nothing; the others improve the incumbent
by 0.5 to 3 standard deviations (sd) of a run. A round runs a candidate and as many controls of the incumbent,
1, 2, 4, then 8 pairs in all, as far as the gate asks. Costs are runs a candidate, controls included. The
environment adds to all runs of a round, and old runs had another one. Noise is normal, or an exponential
distribution whose long tail is to the better (right) or to the worse side (left).
"""

import sys
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from abrun.stats.online import (
    NUM_OLD,
    Memory,
    Noise,
    environment_excess,
    estimate_environment,
    lord_level,
    plan_seeds,
    read_candidate,
    seeds_to_add,
    spent_level,
)

NUM_ROUNDS = 16  # of which the environment is estimated


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One kind of campaign, and the way in which an agent works with the gate."""

    # machines: a candidate's rounds run on one of two; node: another machine in each round
    environment: Literal["none", "machines", "node", "step", "ramp"] = "none"
    size_sd: float = 0.0  # between machines or of nodes; of the whole step or ramp
    shape: Literal["normal", "right", "left"] = "normal"
    null_share: float = 0.85
    harmful_share: float = 0.0  # of the null candidates, worse by up to 3 sd
    noisy_share: float = 0.0  # of the null candidates, with `noisy_sd`
    noisy_sd: float = 3.0
    has_controls: bool = True
    incumbent_seeds: int = 8  # at the start
    worth: float = 2.0
    num_candidates: int = 100


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over campaigns; `runs` a candidate, with controls and the first incumbent."""

    fdr: float
    fdr_error: float
    kept: float  # share of improvements of `worth` or more
    half_kept: float  # share of improvements of about half of it
    runs: float


@dataclass
class Campaigns:
    """State of campaigns side by side; all arrays [C, ...]."""

    setting: Setting
    rng: np.random.Generator
    num: int
    true_level: np.ndarray = field(init=False)
    old: np.ndarray = field(init=False)  # last runs of the incumbent [C, NUM_OLD], NaN where there are fewer
    runs: Noise = field(init=False)
    pairs: Noise = field(init=False)
    excesses: np.ndarray = field(init=False)
    discoveries: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.true_level = np.zeros(self.num)
        first = self.draw(self.setting.incumbent_seeds) + self.environment(0)[:, None]
        self.old = np.full((self.num, NUM_OLD), np.nan)
        self.append(first, np.ones(self.num, bool))
        self.runs = Noise.of(first)
        self.runs = Noise(squares=self.runs.squares, dof=np.full(self.num, self.runs.dof))
        # Two runs of one seed are at least as alike as two others
        self.pairs = Noise(squares=2 * self.runs.squares, dof=self.runs.dof)
        self.excesses = np.full((self.num, NUM_ROUNDS), np.nan)
        self.discoveries = [[] for _ in range(self.num)]

    def draw(self, num_seeds: int) -> np.ndarray:
        """Return noise of mean 0 and sd 1, [C, num_seeds]."""
        size = (self.num, num_seeds)
        if self.setting.shape == "normal":
            return self.rng.standard_normal(size)
        return (1.0 if self.setting.shape == "right" else -1.0) * (self.rng.exponential(size=size) - 1)

    def environment(self, number: int) -> np.ndarray:
        """Return what the environment adds to the runs of a round [C]."""
        size, kind = self.setting.size_sd, self.setting.environment
        if kind == "machines":
            return size * self.rng.integers(0, 2, self.num)
        if kind == "node":
            return size * self.rng.standard_normal(self.num)
        progress = number / self.setting.num_candidates
        return np.full(self.num, {"step": size * (progress > 0.5), "ramp": size * progress}.get(kind, 0.0))

    def append(self, values: np.ndarray, where: np.ndarray) -> None:
        """Append runs of the incumbent [C, n] to its last ones."""
        num = values.shape[1]
        longer = np.concatenate([self.old, values], axis=1)[:, num:][:, -NUM_OLD:]
        self.old = np.where(where[:, None], longer, self.old)

    def memory(self) -> Memory:
        return Memory(
            old_mean=np.nanmean(self.old, axis=1),
            num_old=np.isfinite(self.old).sum(axis=1),
            runs=self.runs,
            pairs=self.pairs,
            environment=estimate_environment(self.excesses),
        )

    def judge(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Judge one candidate of each campaign; return effects, where it was kept, and pairs [C]."""
        setting, rng, num = self.setting, self.rng, self.num
        is_null = rng.random(num) < setting.null_share
        harm = np.where(rng.random(num) < setting.harmful_share, rng.uniform(-3, 0, num), 0)
        effect = np.where(is_null, harm, rng.uniform(0.25, 1.5, num) * setting.worth)
        sd = np.where(is_null & (rng.random(num) < setting.noisy_share), setting.noisy_sd, 1.0)
        max_seeds = plan_seeds(setting.worth)
        level = np.array([lord_level(number, times) for times in self.discoveries])
        memory, environment = self.memory(), self.environment(number)
        values, controls = np.empty((num, 0)), np.empty((num, 0))
        is_open, better, num_seeds = np.ones(num, bool), np.zeros(num, bool), np.zeros(num, int)
        runs, pairs, excess = self.runs, self.pairs, self.excesses[:, -1]
        count, added, spent = 0, 1, np.zeros(num)
        while added and is_open.any():
            if setting.environment == "node" and count:  # another round
                environment = self.environment(number)
            base = self.true_level + environment
            fresh = base[:, None] + self.draw(added)
            controls = np.concatenate([controls, fresh], axis=1)
            drawn = (base + effect)[:, None] + sd[:, None] * self.draw(added)
            values = np.concatenate([values, drawn], axis=1)
            count += added
            total = spent_level(level, count, max_seeds)
            settings = {"level": total - spent, "worth": setting.worth, "in_sds": True}
            shown = controls if setting.has_controls else None
            reading = read_candidate(values, shown, memory, max_seeds=max_seeds, **settings)
            spent = total
            num_seeds[is_open] = count
            better |= is_open & reading.better
            ends = is_open & (reading.better | reading.alike | reading.worse)
            if not (added := seeds_to_add(count, max_seeds)):
                ends = is_open
            known = controls if setting.has_controls else values
            own, differences = Noise.of(known), Noise.of(values - controls)
            runs = _added(runs, own, ends)
            pairs = _added(pairs, differences, ends) if setting.has_controls else pairs
            if setting.has_controls:
                excess = np.where(ends, environment_excess(controls, memory), excess)
                self.append(controls, ends & ~better)
            kept = ends & better
            if kept.any():
                self.old[kept] = np.nan
                self.append(values, kept)
            is_open = is_open & ~ends
        self.runs, self.pairs = runs, pairs
        self.excesses = np.concatenate([self.excesses, excess[:, None]], axis=1)[:, 1:]
        self.true_level = np.where(better, self.true_level + effect, self.true_level)
        for row in np.flatnonzero(better):
            self.discoveries[row].append(number)
        return effect, better, num_seeds


def _added(noise: Noise, other: Noise, where: np.ndarray) -> Noise:
    return Noise(
        squares=noise.squares + np.where(where, other.squares, 0),
        dof=noise.dof + np.where(where, other.dof, 0),
    )


def simulate(setting: Setting, num_campaigns: int = 200, seed: int = 0) -> Outcome:
    """Run campaigns side by side."""
    campaigns = Campaigns(setting, np.random.default_rng(seed), num_campaigns)
    rounds = [campaigns.judge(number) for number in range(1, setting.num_candidates + 1)]
    effect, better, num_seeds = (np.array(column) for column in zip(*rounds, strict=True))
    false = (better & (effect <= 0)).sum(axis=0)
    proportion = false / np.maximum(better.sum(axis=0), 1)
    runs = (2 if setting.has_controls else 1) * num_seeds.mean()
    large = effect >= setting.worth
    half = np.abs(effect / setting.worth - 0.5) < 0.1
    return Outcome(
        fdr=proportion.mean(),
        fdr_error=proportion.std() / np.sqrt(num_campaigns),
        kept=better[large].mean() if large.any() else 1.0,
        half_kept=better[half].mean() if half.any() else 1.0,
        runs=runs + setting.incumbent_seeds / setting.num_candidates,
    )


ENVIRONMENTS = {
    "none": Setting(),
    "two machines, 0.5 sd apart": Setting(environment="machines", size_sd=0.5),
    "two machines, 1 sd apart": Setting(environment="machines", size_sd=1),
    "two machines, 2 sd apart": Setting(environment="machines", size_sd=2),
    "a node a round, 0.5 sd": Setting(environment="node", size_sd=0.5),
    "one step up of 2 sd": Setting(environment="step", size_sd=2),
    "one step down of 2 sd": Setting(environment="step", size_sd=-2),
    "slow rise of 2 sd": Setting(environment="ramp", size_sd=2),
    "slow fall of 2 sd": Setting(environment="ramp", size_sd=-2),
    "slow fall of 4 sd": Setting(environment="ramp", size_sd=-4),
}
OTHERS = {
    "long tail to the better side": Setting(shape="right"),
    "long tail to the worse side": Setting(shape="left"),
    "no candidate improves": Setting(null_share=1),
    "none improves, machines 2 sd apart": Setting(null_share=1, environment="machines", size_sd=2),
    "half of the nulls are worse": Setting(harmful_share=0.5),
    "15 % of the nulls 3 times as noisy": Setting(noisy_share=0.15),
    "30 % improve": Setting(null_share=0.7),
    "5 % improve": Setting(null_share=0.95),
    "incumbent of 3 runs": Setting(incumbent_seeds=3),
    "worth 1 sd": Setting(worth=1),
}
OLD_RUNS = {
    f"{name}, old runs alone": replace(ENVIRONMENTS[name], has_controls=False) for name in ENVIRONMENTS
}


def main() -> None:
    num_campaigns = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for name, setting in (ENVIRONMENTS | OTHERS | OLD_RUNS).items():
        outcome = simulate(setting, num_campaigns)
        print(
            f"{name:45} FDR {outcome.fdr:.3f} +- {outcome.fdr_error:.3f}  kept {outcome.kept:.2f}, of half "
            f"the size {outcome.half_kept:.2f}  runs {outcome.runs:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
