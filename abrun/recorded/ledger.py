"""The ledger of a reference: accepted changes since it was frozen, each hashed with the one before it.

What is stored are the differences themselves, so that every later bound is computed anew from them, at the
level that the number of entries leaves. The hashes show an edit by hand; they keep nobody from forging all.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from abrun.errors import ComparisonError
from abrun.metric_names import Transform
from abrun.reasons import Code
from abrun.recipe.claims import Spending

Finite = Annotated[float, Field(allow_inf_nan=False)]
Rule = Literal["smaller", "chain"]  # what counts: the smaller of chain and direct bound, or the chain's alone


class _LedgerModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Entry(_LedgerModel):
    """One accepted change: a treatment that matched the link before it."""

    date: str  # UTC, ISO 8601
    experiment: str
    runs_sha256: str  # of the experiment's runs and what the claim reads of them
    arm: str
    treatment: dict[str, tuple[Any, Any]]  # dotted key -> value before, value after
    commit: str | None  # of the checkout that the treated runs were launched from
    environment_sha256: str  # of their versions and devices
    moved: str | None  # what else is not what it was after the entry before
    margin: str
    interim: list[int]  # numbers of pairs at which the verdict could be taken
    alpha_spending: Spending = "equal"
    seeds: list[int]
    differences: list[Finite]  # treatment - baseline, by seed
    levels: list[Finite]  # the treatment's window, by seed
    difference: Finite
    interval: tuple[Finite, Finite]  # 90 %, of this change alone
    certified_bound: Finite  # 95 %, of this change alone
    drift: Finite  # bound of the drift since the anchor, when this was added
    tried: Annotated[
        int, Field(ge=1, le=1_000_000)
    ]  # changes judged since the entry before, this one among them
    previous: str
    sha256: str

    @model_validator(mode="after")
    def _seeds_fit(self) -> "Entry":
        if not 2 <= len(self.seeds) == len(self.differences) == len(self.levels) == len({*self.seeds}):
            raise ValueError(f"got {len(self.seeds)} seeds; as many differences and levels are expected")
        return self


class Ledger(_LedgerModel):
    """What a reference's file holds under `ledger`."""

    metric: str
    window: str
    steps: tuple[int, int]  # first and last of the window
    transform: Transform
    budget: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    alpha: Annotated[float, Field(gt=0, lt=0.5)]  # the drift is beyond its bound at most so often
    rule: Rule
    commit: str | None  # of the anchor
    entries: tuple[Entry, ...] = ()

    @property
    def num_tried(self) -> int:
        return sum(entry.tried for entry in self.entries)

    @property
    def num_chains(self) -> float:
        """Chains of changes that could have been accepted, one of the tried changes at each entry."""
        return math.prod(float(entry.tried) for entry in self.entries)


def read_ledger(content: Mapping[str, Any], path: str) -> Ledger | None:
    """The ledger of a reference's file; None: it has none. Raises ComparisonError where it was edited."""
    if "ledger" not in content:
        return None
    try:
        ledger = Ledger.model_validate(content["ledger"])
    except ValidationError as error:
        first_error = error.errors()[0]
        field = ".".join(map(str, first_error["loc"]))
        raise ComparisonError(
            Code.LEDGER_NOT_READ(path=path, where=field, problem=first_error["msg"])
        ) from None
    previous = hash_anchor(content)
    for number, (entry, raw) in enumerate(
        zip(ledger.entries, content["ledger"].get("entries", ()), strict=True), 1
    ):
        if entry.previous != previous:
            raise ComparisonError(Code.LEDGER_LINK_EDITED(path=path, entry=number))
        if entry.sha256 != hash_entry(raw):
            raise ComparisonError(Code.LEDGER_ENTRY_EDITED(path=path, entry=number))
        previous = entry.sha256
    return ledger


def hash_anchor(content: Mapping[str, Any]) -> str:
    """Of everything in a reference's file but the entries."""
    ledger = {key: value for key, value in content["ledger"].items() if key != "entries"}
    return _sha256({**content, "ledger": ledger})


def hash_entry(entry: Mapping[str, Any]) -> str:
    """Of an entry with what it was added to."""
    return _sha256({key: value for key, value in entry.items() if key != "sha256"})


def append_entry(content: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A reference's file with one more entry, hashed with the last."""
    entries: Sequence[Mapping[str, Any]] = content["ledger"].get("entries", ())
    previous = entries[-1]["sha256"] if entries else hash_anchor(content)
    linked = json.loads(json.dumps({**entry, "previous": previous}))
    linked["sha256"] = hash_entry(linked)
    return {**content, "ledger": {**content["ledger"], "entries": [*entries, linked]}}


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
