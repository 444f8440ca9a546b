"""Values at the ends of what float64 holds: a verdict that says so, no traceback, no warning of numpy."""

import itertools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from abrun.cli import main
from abrun.stats.series import Series

LARGE = ["1.7e308", "-1.7e308", "1e300", "3.5e38", "1" + "0" * 400, "1e999", str(2**64), str(-(2**70))]
SMALL = ["5e-324", "-5e-324", "1e-310", "-0.0", "0.0", "-1e-999"]
CLAIMS = [
    ["train/reward:last 20%:0.05", "train/loss:all:1e300"],
    ["train/reward:last 50%:5%", "train/loss:last 20%:1e-320"],
    ["train/reward:all:1 sigma", "train/reward:last 20%:10% of climb"],
    ["train/reward:all:exact"],
    [],
]


def write_runs(folder: Path, values: list[str], *, arms: str, seeds: int = 2) -> None:
    """Write runs of two arms; those in `arms` take every third value of each metric from `values`."""
    odd = itertools.cycle(values)
    for arm, seed in itertools.product("ab", range(seeds)):
        (folder / arm / f"seed-{seed}").mkdir(parents=True)
        lines = []
        for step in range(1, 21):
            row = {
                "train/reward": step / 20 + seed / 100,
                "train/loss": 1 / step,
                "timing/step_s": 1.0 + seed,
            }
            row |= {"memory/training/peak_allocated_bytes": 2.0**30, "train/token_mult_prob_error": 1.01}
            cells = {key: json.dumps(value) for key, value in row.items()}
            if arm in arms:
                cells |= {key: next(odd) for key in cells if (step + seed + len(key)) % 3 == 0}
            text = ", ".join(f'"{key}": {cell}' for key, cell in cells.items())
            lines.append(f'{{"step": {step}, {text}}}\n')
        (folder / arm / f"seed-{seed}" / "m.jsonl").write_text("".join(lines))


def compared(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["abrun", "compare", "x", *arguments])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        warnings.simplefilter("error", RuntimeWarning)
        main()
    output = capsys.readouterr()
    assert "Warning" not in output.err and not output.err.startswith("abrun:"), output.err
    return int(ended.value.code or 0), output.out


@pytest.mark.parametrize(
    ("values", "arms"),
    [(LARGE + SMALL, "b"), (LARGE, "ab"), (SMALL, "ab"), (["1.7e308"], "ab"), (["5e-324"], "b")],
)
def test_values_at_the_ends_of_float64_are_judged(tmp_path, monkeypatch, capsys, values, arms) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "x", values, arms=arms)
    for claims, more in itertools.product(CLAIMS, ([], ["--unpaired"])):
        options = [word for claim in claims for word in ("--claim", claim)] + more
        compared(monkeypatch, capsys, *options, "--json")
    compared(monkeypatch, capsys, *("--claim", CLAIMS[0][0]), "--output", "report")


def test_a_run_that_diverged_in_float64_is_a_mismatch_and_says_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "x", ["1.7e308", "-1.7e308"], arms="b")
    code, printed = compared(monkeypatch, capsys, "--claim", "train/reward:last 20%:0.05")
    assert code == 3 and "MISMATCH" in printed
    assert "guard finite fails: train/reward is" in printed and "inf in b/seed-0" in printed


def test_a_value_beyond_float32_counts_as_infinite_and_any_other_as_it_is() -> None:
    largest = float(np.finfo(np.float32).max)
    values = np.array([largest, -largest, 1e39, -1e300, np.nan, 5e-324, -0.0, np.inf])
    series = Series(np.arange(8), values)
    expected = np.array([largest, -largest, np.inf, -np.inf, np.nan, 5e-324, -0.0, np.inf])
    assert series.values.tobytes() == expected.tobytes()
    assert values[2] == 1e39  # the caller's array stays
    usual = np.array([1.0, np.nan])
    assert Series(np.arange(2), usual).values is usual
