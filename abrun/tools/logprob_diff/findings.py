"""The mismatch budget, computed from the scorings of recorded tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.runs.layout import RunName
from abrun.tools.logprob_diff.budget import Array, ClusteredMean, Clusters, error, probability_factors
from abrun.tools.logprob_diff.variations import Variation

SCHEMA_VERSION = 2
Routes = NDArray[Any]  # [N, L, K]
WORTH_NAMING = 0.1  # smallest share of the error that is named as its cause
PARITY = 1e-5  # an excess over 1 that float32 has as well, so that there is nothing to explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One scoring of the completion tokens."""

    logprobs: Array  # [N]
    routes: Routes | None = None  # each token's experts by layer; None if dense or unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The run, step and settings that the recorded tokens come from."""

    run: str
    experiment: str
    name: RunName
    step: int  # after which the run is continued; the tokens are those of step + 2
    grad_norm: float  # of the update at step + 1
    engine: str
    dtype: str
    spread: int  # number of ranks of the run
    num_sequences_sampled: int
    seen: list[dict[str, float]]  # the metric of repeated steps, here and in the run
    worst: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeResult:
    """The effect of one change."""

    key: str
    label: str
    kind: str
    reason: str | None  # why it was not measured; the fields below are then None
    error: float | None = None  # of the changed trainer against the engine
    lowers: ClusteredMean | None = None  # by how much that is below the run's error
    moves: ClusteredMean | None = None  # against the run's scoring
    largest_factor: float | None = None  # over tokens, against the run's scoring
    rerouted: list[float] | None = None  # share of tokens routed to other experts, by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The content of mismatch.json, without its schema version."""

    facts: MeasuredRun
    num_tokens: int
    num_sequences: int
    num_prompts: int
    error: ClusteredMean  # token_mult_prob_error
    floor: list[ChangeResult]  # the rows that show the noise floor of the arithmetic
    rows: list[ChangeResult]
    cause: str | None  # key of the change that explains most, if it explains enough to be named

    def content(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @property
    def cause_row(self) -> ChangeResult | None:
        return next((row for row in self.rows if row.key == self.cause), None)


def budget_of(
    facts: MeasuredRun,
    *,
    inference: Array,  # [N], the engine's log-probs
    trainer: Scored,  # scores of the unchanged trainer
    sequences: NDArray[np.int64],  # [N], the sequence of each token
    prompts: NDArray[np.int64],  # [N], the prompt of each token
    changes: Sequence[tuple[Variation, Scored | str | None]],
) -> Budget:
    """Return the budget of recorded tokens. A scoring that is a string is the reason why it failed."""
    measured = sum(isinstance(scored, Scored) for _, scored in changes)
    clusters = Clusters(prompts, num_intervals=measured + 3)
    factors = probability_factors(inference, trainer.logprobs)
    rows = [_row(change, scored, inference, trainer, clusters) for change, scored in changes]
    total = clusters.mean(factors, minimum=1.0)
    cause = _cause(rows, total.value - 1, f"engine_{facts.engine}")
    return Budget(
        facts=facts,
        num_tokens=len(inference),
        num_sequences=len(np.unique(sequences)),
        num_prompts=clusters.num_prompts,
        error=total,
        floor=_select_floor_rows(rows),
        rows=rows,
        cause=cause,
    )


def _row(
    change: Variation, scored: Scored | str | None, inference: Array, trainer: Scored, clusters: Clusters
) -> ChangeResult:
    if not isinstance(scored, Scored):
        return ChangeResult(
            key=change.key, label=change.label, kind=change.kind, reason=scored or change.reason
        )
    now, then = (probability_factors(inference, scoring.logprobs) for scoring in (trainer, scored))
    moved = probability_factors(trainer.logprobs, scored.logprobs)
    return ChangeResult(
        key=change.key,
        label=change.label,
        kind=change.kind,
        reason=None,
        error=error(inference, scored.logprobs),
        lowers=clusters.mean(now - then),
        moves=clusters.mean(moved, minimum=1.0),
        largest_factor=float(moved.max()),
        rerouted=rerouted(trainer.routes, scored.routes),
    )


def rerouted(routes: Routes | None, other_routes: Routes | None) -> list[float] | None:
    """Return the share of tokens routed to other experts, by layer; the experts' order does not count."""
    if routes is None or other_routes is None:
        return None
    differ = (np.sort(routes, axis=-1) != np.sort(other_routes, axis=-1)).any(axis=-1)  # [N, L]
    return differ.mean(axis=0).tolist()


def _cause(rows: Sequence[ChangeResult], excess: float, engine: str) -> str | None:
    """Return the change that lowers the error most, if that is beyond noise and large enough to name.

    The run's own engine reproduces its recorded log-probs closely, whatever else changes; its control shows
    how closely. A change of that engine (its key begins with `engine`) counts only beyond this.
    """
    measured = [(row, row.lowers) for row in rows if row.lowers is not None]
    engine_gains = [
        lowers.value for row, lowers in measured if row.kind == "control" and row.key.startswith(engine)
    ]
    close = max(engine_gains, default=0.0)
    gains = [
        (lowers.value - close * row.key.startswith(engine), row.key)
        for row, lowers in measured
        if lowers.is_above_zero and row.kind != "control"
    ]
    largest, key = max(gains, default=(0.0, ""), key=lambda gain: gain[0])  # the first of equal gains
    return key if excess > PARITY and largest > WORTH_NAMING * excess else None


def _select_floor_rows(rows: Sequence[ChangeResult]) -> list[ChangeResult]:
    """Return the rows of the noise floor: the batch shape that moves the log-probs most, and float32."""
    shapes = [row for row in rows if row.kind == "batch shape" and row.moves]
    exact = [row for row in rows if row.key == "float32" and row.moves]
    return [*sorted(shapes, key=lambda row: -(row.moves.value if row.moves else 0))[:1], *exact]
