"""Tables of seed noise: one arm alone, and one run beside several."""

from collections.abc import Sequence

from abrun.messages.numbers import interval_text, percent_text
from abrun.present.tables import Table, columns
from abrun.verdict.new_run import NewRun
from abrun.verdict.seed_noise import PAIR_COUNTS, SeedNoise

MAX_METRICS = 6  # without a claim; verdict.json has all
ALONE_NOTE = (
    "Gap: the largest between two runs that seed noise alone explains (95 %; 90 % if the levels are skewed). "
    "Shown by N pairs: the smallest difference that N runs of each of two arms detect with 80 % power "
    "(planned with the upper 80 % bound of the sd)."
)


def noise_tables(seed_noise: Sequence[SeedNoise]) -> list[Table]:
    """Return the table of metrics, and one of the power of claims with a margin, if there are any."""
    claimed = [noise for noise in seed_noise if noise.claim is not None]
    unclaimed = [noise for noise in seed_noise if noise.claim is None and noise.gap is not None]
    listed = [*claimed, *unclaimed[:MAX_METRICS]]
    counts = [f"{count} pairs" for count in PAIR_COUNTS]
    tables = []
    if listed:
        heading = ["metric", "steps", "runs", "level", "sd over runs [90 % CI]", "gap"]
        shows = [f"shown by {PAIR_COUNTS[0]}", *(str(count) for count in PAIR_COUNTS[1:])]
        tables.append(Table(columns(*heading, *shows), [_noise_cells(noise) for noise in listed]))
    rows = [
        [f"{noise.metric}: {noise.claim}", *_power_cells(noise)]
        for noise in claimed
        if any(prospect.match_power is not None for prospect in noise.prospects)
    ]
    if rows:
        tables.append(Table(columns("P(match or pass) if equal", *counts, "80 % power at"), rows))
    return tables


def _noise_cells(noise: SeedNoise) -> list[str]:
    scale = "" if noise.transform == "identity" else f" ({noise.transform.replace('_', ' ')})"
    level = "-" if noise.mean is None else f"{noise.mean:.4g}"
    spread = "-" if noise.sd is None else f"{noise.sd:.3g}"
    if noise.sd is not None and noise.sd_interval:
        spread += f" {interval_text(noise.sd_interval)}"
    gap = "-" if noise.gap is None else f"{noise.gap:.3g}"
    shows = [f"{prospect.difference:.3g}" for prospect in noise.prospects] or ["-"] * len(PAIR_COUNTS)
    metric, steps = f"{noise.metric}{scale}", _steps_text(noise.steps)
    return [metric, steps, str(len(noise.levels)), level, spread, gap, *shows]


def _steps_text(steps: tuple[int, int] | None) -> str:
    return f"{steps[0]}-{steps[1]}" if steps else "-"


def _power_cells(noise: SeedNoise) -> list[str]:
    powers = [prospect.match_power for prospect in noise.prospects]
    needed = "more than 1000" if noise.pairs_needed is None else f"{noise.pairs_needed} pairs"
    return [*("-" if power is None else percent_text(power) for power in powers), needed]


def new_run_tables(new_runs: Sequence[NewRun]) -> list[Table]:
    """Return a table for each arm that is compared by a single run."""
    arms = dict.fromkeys(record.arm for record in new_runs)
    return [_new_run_table([record for record in new_runs if record.arm == arm]) for arm in arms]


def _new_run_table(new_runs: Sequence[NewRun]) -> Table:
    several, run = new_runs[0].several, new_runs[0].run
    heading = ["metric", "steps", f"{several} (runs)", run, "difference", "in sds"]
    rows = [
        [
            record.metric,
            _steps_text(record.steps),
            f"{record.mean:.4g} ({record.num_runs})",
            f"{record.level:.4g}",
            f"{record.difference:+.3g}",
            "-" if record.num_sds is None else f"{record.num_sds:.2g}",
            interval_text(record.interval),
            f"{record.p_holm:.2g}",
        ]
        for record in new_runs[:MAX_METRICS]
    ]
    return Table(columns(*heading, "95 of 100 further runs", "p (Holm)"), rows)
