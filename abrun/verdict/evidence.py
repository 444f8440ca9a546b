"""The record of every kind of evidence: what was measured of an arm, and what follows from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from abrun.messages.codes import Reason

Kind = Literal[
    "description",  # levels and difference of a metric, for arms with one run each or without claims
    "new run",  # a metric of a single run, beside several runs of the other arm
    "seed noise",  # a metric of one arm alone
    "step one",  # a metric at the first step, before any treated update can have an effect
    "guard",  # a one-sided limit that a treatment must keep
    "divergence",  # distance of the arms in a metric over all steps
    "trace",  # the first tensor in which one step of the arms differs, as `abrun trace` found it
    "final weights",  # distance of the trained weights
    "cost",  # step time and peak memory relative to the baseline
    "injected fault",  # a fault injected in the baseline, judged like a treatment
]
MEASURED = "measured"  # the result of evidence that decides nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measurement of one arm. The module that measures a kind says what its values are."""

    kind: Kind
    arm: str
    result: str = MEASURED  # such as pass or fail
    reason: Reason | None = None
    values: Mapping[str, Any]  # numbers, texts and reasons, also in lists and mappings

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def select_evidence(evidence: Iterable[Evidence], kind: Kind, arm: str | None = None) -> list[Evidence]:
    """Return the evidence of one kind, on one arm or on all."""
    return [item for item in evidence if item.kind == kind and arm in (None, item.arm)]
