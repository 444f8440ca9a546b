"""From the store to arrays: the runs of an experiment, paired by seed, and the steps a window selects."""

import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from abrun.compare.metrics import Array
from abrun.errors import ComparisonError, StoreError
from abrun.plan import RunName
from abrun.recipe import BASELINE, Primary, Recipe, dotted
from abrun.store import Status, open_experiment, read_json, read_lines, read_metrics, run_dir, run_state

if TYPE_CHECKING:
    import pandas as pd

Steps = NDArray[np.int64]
NOT_METRICS = ("attempt", "time_s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One run as the store holds it."""

    name: RunName
    directory: Path
    status: Status
    failure: str  # how it ended, where it failed
    identity: dict[str, Any]  # arm, seed and rerun as its own config.json states them
    config: dict[str, Any]  # resolved, dotted
    environment: dict[str, Any] | None  # None: the trainer never came to write it
    frame: "pd.DataFrame"  # index step, a column a key
    nans: frozenset[tuple[int, str]]  # (step, key) written as NaN; any other NaN of `frame` was never written

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def metrics(self) -> list[str]:
        return [key for key in self.frame.columns if key not in NOT_METRICS]

    @property
    def steps(self) -> Steps:
        return self.frame.index.to_numpy(dtype=np.int64)

    def series(self, metric: str) -> dict[int, float]:
        """The values of a metric by step, where it was recorded; empty where it never was."""
        if metric not in self.frame:
            return {}
        values = {}
        for step, value in zip(self.steps.tolist(), self.frame[metric].tolist(), strict=True):
            if value is None or (value != value and (step, metric) not in self.nans):
                continue  # the frame's filling, or a JSON null: nothing was recorded
            if not isinstance(value, numbers.Real):
                raise StoreError(
                    f"{self.directory / 'metrics.jsonl'}: {metric} at step {step}: got {value!r}; "
                    "a number is expected: mend the trainer that wrote it and run again"
                )
            values[step] = float(value)
        return values

    def first_non_finite(self, metric: str, first: int = 0, last: int | None = None) -> int | None:
        """The first step, from `first` to `last`, at which a recorded metric is NaN or infinite."""
        return next(
            (
                step
                for step, value in self.series(metric).items()
                if step >= first and (last is None or step <= last) and not math.isfinite(value)
            ),
            None,
        )

    def __str__(self) -> str:
        return str(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """The two runs of one seed, and that seed's same-seed repetitions of the baseline."""

    seed: int
    baseline: Run
    treatment: Run
    reruns: tuple[Run, ...]

    @property
    def finished(self) -> bool:
        return self.baseline.finished and self.treatment.finished


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experiment:
    """An experiment as launched, and its runs as they are now."""

    name: str
    recipe: Recipe
    treatment_diff: dict[str, dict[str, list[Any]]]  # arm -> dotted key -> [baseline's value, the arm's]
    launched_compare_sha256: str
    runs: dict[RunName, Run]

    @property
    def treatments(self) -> list[str]:
        return [arm for arm in self.recipe.arms if arm != BASELINE]

    def arm(self, arm: str) -> dict[int, Run]:
        """The runs of an arm by seed, without A/A reruns."""
        return {name.seed: run for name, run in self.runs.items() if name.arm == arm and not name.rerun}

    def pairs(self, arm: str) -> list[Pair]:
        """The seeds that both arms planned, in launch order."""
        baselines, treatments = self.arm(BASELINE), self.arm(arm)
        reruns = [run for run in self.runs.values() if run.name.rerun]
        return [
            Pair(
                seed=seed,
                baseline=baseline,
                treatment=treatments[seed],
                reruns=tuple(run for run in reruns if run.name.seed == seed),
            )
            for seed, baseline in baselines.items()
            if seed in treatments
        ]

    def all_steps(self) -> Steps:
        """Every step that any finished run reached: the grid that windows are read on."""
        return union_of_steps(run for run in self.runs.values() if run.finished)


def load_experiment(experiment_dir: Path) -> Experiment:
    """Raises StoreError where a file is missing, corrupt or not abrun's."""
    path = experiment_dir / "experiment.json"
    content = open_experiment(experiment_dir)
    missing = [
        key
        for key in ("experiment", "recipe", "runs", "treatment_diff", "compare_sha256")
        if key not in content
    ]
    if missing:
        raise StoreError(f"{path}: {missing[0]}: missing; launch the recipe again under another --name")
    try:
        recipe = Recipe.model_validate(content["recipe"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StoreError(
            f"{path}: recipe.{where}: {first['msg']}; compare with the abrun that launched it"
        ) from None
    names = [RunName(**run) for run in content["runs"]]
    return Experiment(
        name=content["experiment"],
        recipe=recipe,
        treatment_diff=content["treatment_diff"],
        launched_compare_sha256=content["compare_sha256"],
        runs={name: _load_run(experiment_dir, name) for name in names},
    )


def _load_run(experiment_dir: Path, name: RunName) -> Run:
    directory = run_dir(experiment_dir, name)
    state = run_state(experiment_dir, name)
    config = _json_or_none(directory / "config.json") or {}
    frame = read_metrics(directory)
    rows = read_lines(directory / "metrics.jsonl")
    return Run(
        name=name,
        directory=directory,
        status=state.status,
        failure=_failure(directory, state.message) if state.status == "failed" else "",
        identity={key: config.get(key) for key in ("arm", "seed", "rerun")},
        config=dotted({**config.get("config", {}), "initial_weights": config.get("initial_weights")}),
        environment=_json_or_none(directory / "environment.json"),
        frame=frame,
        nans=frozenset(
            (row["step"], key)
            for row in rows
            for key, value in row.items()
            if isinstance(value, float)
            and math.isnan(value)
            and row.get("attempt", 1) == (frame.loc[row["step"], "attempt"] if "attempt" in frame else 1)
        ),
    )


def _json_or_none(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _failure(directory: Path, message: str | None) -> str:
    """How the last attempt ended, in a few words: `exit code 1: CUDA out of memory`."""
    attempts = (_json_or_none(directory / "meta.json") or {}).get("attempts") or [{}]
    last = attempts[-1]
    signal, code = last.get("signal"), last.get("exit_code")
    how = f"signal {signal}" if signal else f"exit code {code}" if code is not None else "no exit code"
    return f"{how}: {message}" if message else how


def union_of_steps(runs: Iterable[Run]) -> Steps:
    return np.array(sorted({int(step) for run in runs for step in run.steps}), dtype=np.int64)


def stack(runs: Sequence[Run], metric: str) -> tuple[Steps, Array]:
    """The shared steps [S] of a metric and its values [R, S]: inner join, never interpolated."""
    series = [run.series(metric) for run in runs]
    shared = set(series[0]).intersection(*series[1:]) if series else set()
    steps = np.array(sorted(shared), dtype=np.int64)
    values = [[one[step] for step in steps.tolist()] for one in series]
    return steps, np.array(values, dtype=np.float64).reshape(len(runs), len(steps))


def stack_pairs(pairs: Sequence[Pair], metric: str) -> tuple[Steps, Array, Array]:
    """Shared steps [S], baseline [P, S] and treatment [P, S] of a metric."""
    steps, values = stack([pair.baseline for pair in pairs] + [pair.treatment for pair in pairs], metric)
    return steps, values[: len(pairs)], values[len(pairs) :]


def window_bounds(window: str, steps: Steps, metric: str) -> tuple[int, int]:
    """First and last step of a window on a grid. Raises ComparisonError where the grid does not hold it."""
    first, last = int(steps[0]), int(steps[-1])
    if window == "all":
        return first, last
    if window.startswith("last"):
        percent = int(window.removeprefix("last ").removesuffix("%"))
        num_steps = -(-percent * len(steps) // 100)  # rounded up, in whole numbers: at least one step
        return int(steps[-num_steps]), last
    start, end = (int(part) for part in window.removeprefix("steps ").split("-"))
    if start < first or end > last:
        raise ComparisonError(
            f"{metric}: window: got {window!r}, the runs hold steps {first}-{last}; "
            f"use a window inside them, such as 'last 20%'"
        )
    return start, end


def refuse_unknown_metrics(experiment: Experiment, primaries: Sequence[Primary]) -> None:
    """Raises ComparisonError for a metric that no run recorded: given by hand, that is a typing error."""
    known = sorted({metric for run in experiment.runs.values() for metric in run.metrics})
    for primary in primaries:
        if known and primary.metric not in known:
            close = difflib.get_close_matches(primary.metric, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"recorded are: {', '.join(known)}"
            raise ComparisonError(f"--primary: got metric {primary.metric!r}, which no run recorded; {hint}")
