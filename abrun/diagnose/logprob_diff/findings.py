"""What the scorings of recorded tokens amount to: the budget."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.diagnose.logprob_diff.budget import Array, Clusters, Estimate, error, multiplicative
from abrun.diagnose.logprob_diff.variations import Change
from abrun.runs.layout import RunName

SCHEMA_VERSION = 2
Routes = NDArray[Any]  # [N, L, K]
WORTH_NAMING = 0.1  # of the whole error: below it nothing is called a cause
PARITY = 1e-5  # an error above 1 that float32 has, too: nothing is to be explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one scoring makes of the completion tokens."""

    logprobs: Array  # [N]
    routes: Routes | None = None  # the experts of each token, by layer; None: no mixture, or not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the recorded tokens besides their log-probs."""

    run: str
    experiment: str
    name: RunName
    step: int  # after which the run goes on; the tokens are those of step + 2
    grad_norm: float  # of the update in between
    engine: str
    dtype: str
    spread: int  # ranks of the run itself
    num_sequences_sampled: int
    seen: list[dict[str, float]]  # the metric of step + 1, here and in the run
    worst: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing changed."""

    key: str
    label: str
    kind: str
    reason: str | None  # why it was not measured; all else is then None
    error: float | None = None  # against the engine, had the trainer scored so
    lowers: Estimate | None = None  # by how much that is below the run's own
    moves: Estimate | None = None  # against the run's own scoring
    largest_factor: float | None = None  # of any token, against the run's own scoring
    rerouted: list[float] | None = None  # share of tokens that go to other experts, by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What `mismatch.json` holds, but for the version of its form."""

    facts: Facts
    num_tokens: int
    num_sequences: int
    num_prompts: int
    error: Estimate  # token_mult_prob_error
    floor: list[Row]  # of the rows, those that are the arithmetic's own
    rows: list[Row]
    cause: str | None  # the key of the one change that explains most, if any is worth naming

    def content(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @property
    def cause_row(self) -> Row | None:
        return next((row for row in self.rows if row.key == self.cause), None)


def budget_of(
    facts: Facts,
    *,
    inference: Array,  # [N], of the engine
    own: Scored,  # by the trainer as it is
    sequences: NDArray[np.int64],  # [N], each token's
    prompts: NDArray[np.int64],  # [N]
    changes: Sequence[tuple[Change, Scored | str | None]],
) -> Budget:
    """The budget of recorded tokens. A scoring that is text could not be had, and says why."""
    measured = sum(isinstance(found, Scored) for _, found in changes)
    clusters = Clusters(prompts, num_intervals=measured + 3)
    factors = multiplicative(inference, own.logprobs)
    rows = [_row(change, found, inference, own, clusters) for change, found in changes]
    total = clusters.mean(factors, least=1.0)
    cause = _cause(rows, total.value - 1, f"engine_{facts.engine}")
    return Budget(
        facts=facts,
        num_tokens=len(inference),
        num_sequences=len(np.unique(sequences)),
        num_prompts=clusters.num_prompts,
        error=total,
        floor=_floor(rows),
        rows=rows,
        cause=cause,
    )


def _row(
    change: Change, found: Scored | str | None, inference: Array, own: Scored, clusters: Clusters
) -> Row:
    if not isinstance(found, Scored):
        return Row(key=change.key, label=change.label, kind=change.kind, reason=found or change.reason)
    now, then = (multiplicative(inference, each.logprobs) for each in (own, found))
    moved = multiplicative(own.logprobs, found.logprobs)
    return Row(
        key=change.key,
        label=change.label,
        kind=change.kind,
        reason=None,
        error=error(inference, found.logprobs),
        lowers=clusters.mean(now - then),
        moves=clusters.mean(moved, least=1.0),
        largest_factor=float(moved.max()),
        rerouted=rerouted(own.routes, found.routes),
    )


def rerouted(one: Routes | None, other: Routes | None) -> list[float] | None:
    """The share of tokens that go to other experts, by layer; their order does not count."""
    if one is None or other is None:
        return None
    differ = (np.sort(one, axis=-1) != np.sort(other, axis=-1)).any(axis=-1)  # [N, L]
    return differ.mean(axis=0).tolist()


def _cause(rows: Sequence[Row], excess: float, engine: str) -> str | None:
    """The change that lowers the error most, where noise is no explanation and it is worth naming.

    The run's own engine comes close to what it recorded whatever else is changed (its control shows how
    close): a change of it, whose key begins with `engine`, counts by what it takes off beyond that.
    """
    measured = [(row, row.lowers) for row in rows if row.lowers is not None]
    of_engine = [
        lowers.value for row, lowers in measured if row.kind == "control" and row.key.startswith(engine)
    ]
    close = max(of_engine, default=0.0)
    found = [
        (lowers.value - close * row.key.startswith(engine), row.key)
        for row, lowers in measured
        if lowers.is_above_zero and row.kind != "control"
    ]
    largest, key = max(found, default=(0.0, ""), key=lambda each: each[0])  # of equal ones the first
    return key if excess > PARITY and largest > WORTH_NAMING * excess else None


def _floor(rows: Sequence[Row]) -> list[Row]:
    """The same trainer in another batch shape, the one that moves most; and against float32."""
    shapes = [row for row in rows if row.kind == "batch shape" and row.moves]
    exact = [row for row in rows if row.key == "float32" and row.moves]
    return [*sorted(shapes, key=lambda row: -(row.moves.value if row.moves else 0))[:1], *exact]
