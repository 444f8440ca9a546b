"""The ledger of a reference: the changes accepted since it was frozen, as a hash chain.

The differences themselves are stored, so that every later bound is recomputed from them at the level that the
number of entries requires. The hashes reveal edits by hand; they do not prevent forging the whole ledger.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from abrun.errors import ComparisonError
from abrun.recipe.claims import Spending
from abrun.runs.metric_names import Transform
from abrun.runs.migrations import migrate_ledger

Finite = Annotated[float, Field(allow_inf_nan=False)]
Rule = Literal["smaller", "chain"]  # the bound that counts: smaller of chain and direct, or chain


class _LedgerModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Entry(_LedgerModel):
    """One accepted change: a treatment that matched the link before it."""

    date: str  # UTC, ISO 8601
    experiment: str
    runs_sha256: str  # hash of the experiment's run names and of the values that the claim reads
    arm: str
    treatment: dict[str, tuple[Any, Any]]  # dotted key -> value before, value after
    commit: str | None  # commit from which the treated runs were launched
    environment_sha256: str  # hash of the runs' package versions and devices
    moved: str | None  # other differences from the previous entry's state
    margin: str
    interim: list[int]  # numbers of pairs at the interim analyses
    alpha_spending: Spending = "equal"
    seeds: list[int]
    differences: list[Finite]  # treatment - baseline, by seed
    levels: list[Finite]  # the treatment's window, by seed
    difference: Finite
    interval: tuple[Finite, Finite]  # 90 % confidence interval of this change
    certified_bound: Finite  # 95 % bound of this change
    drift: Finite  # bound of the drift since the anchor when this entry was added
    # Number of changes judged since the previous entry, including this one
    tried: Annotated[int, Field(ge=1, le=1_000_000)]
    previous: str
    sha256: str

    @model_validator(mode="after")
    def _seeds_fit(self) -> "Entry":
        if not 2 <= len(self.seeds) == len(self.differences) == len(self.levels) == len({*self.seeds}):
            raise ValueError(f"got {len(self.seeds)} seeds; expected as many differences and levels")
        return self


class Ledger(_LedgerModel):
    """The `ledger` in a reference file."""

    metric: str
    window: str
    steps: tuple[int, int]  # first and last of the window
    transform: Transform
    budget: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    alpha: Annotated[float, Field(gt=0, lt=0.5)]  # probability that the drift exceeds its bound
    rule: Rule
    commit: str | None  # commit of the anchor's runs
    entries: tuple[Entry, ...] = ()

    @property
    def num_tried(self) -> int:
        return sum(entry.tried for entry in self.entries)

    @property
    def num_chains(self) -> float:
        """Number of possible chains: at each entry, any of the tried changes could have been accepted."""
        return math.prod(float(entry.tried) for entry in self.entries)


def read_ledger(content: Mapping[str, Any], path: str) -> Ledger | None:
    """Return the ledger in a reference file, or None. Raises ComparisonError if it was edited."""
    if "ledger" not in content:
        return None
    try:
        ledger = Ledger.model_validate(migrate_ledger(content["ledger"]))
    except ValidationError as error:
        first_error = error.errors()[0]
        field = ".".join(map(str, first_error["loc"]))
        raise ComparisonError(f"{path}: ledger.{field}: {first_error['msg']}; restore the file") from None
    previous = hash_anchor(content)
    for number, (entry, raw) in enumerate(
        zip(ledger.entries, content["ledger"].get("entries", ()), strict=True), 1
    ):
        if entry.previous != previous:
            anchor = "the frozen runs, or the ledger's budget or rule"
            edited = f"entry {number - 1}" if number > 1 else anchor
            raise ComparisonError(
                f"{path}: ledger: {edited} changed after entry {number} was added; restore the file (git log "
                "shows it)"
            )
        if entry.sha256 != hash_entry(raw):
            raise ComparisonError(
                f"{path}: ledger: entry {number} was edited after it was written; restore the file (git log "
                "shows it)"
            )
        previous = entry.sha256
    return ledger


def hash_anchor(content: Mapping[str, Any]) -> str:
    """Return a hash of a reference file without the ledger's entries."""
    ledger = {key: value for key, value in content["ledger"].items() if key != "entries"}
    return sha256_of({**content, "ledger": ledger})


def hash_entry(entry: Mapping[str, Any]) -> str:
    """Return a hash of an entry, which includes the hash of the previous one."""
    return sha256_of({key: value for key, value in entry.items() if key != "sha256"})


def append_entry(content: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a reference file with one more entry, linked to the last one by its hash."""
    entries: Sequence[Mapping[str, Any]] = content["ledger"].get("entries", ())
    previous = entries[-1]["sha256"] if entries else hash_anchor(content)
    linked = json.loads(json.dumps({**entry, "previous": previous}))
    linked["sha256"] = hash_entry(linked)
    return {**content, "ledger": {**content["ledger"], "entries": [*entries, linked]}}


def sha256_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
