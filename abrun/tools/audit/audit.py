"""The audit of a dump: each quantity against its formula, then the variant that explains the first difference."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.errors import StoreError
from abrun.tools.audit.bounds import PRECISIONS, Bounded
from abrun.tools.audit.formulas import METRICS, QUANTITIES, Formulas, Lacking
from abrun.tools.audit.reading import Dump
from abrun.tools.audit.variants import Variant, variants

# Quantities whose value matters at counted tokens alone
PER_TOKEN = frozenset(
    ("trainer_logprobs", "old_logprobs", "advantages", "ratio", "clipped", "kl")
    + ("importance_weights", "token_losses")
)
NAMES = {"token_weights": "normaliser", "clipped": "clip", "token_mask": "mask"}  # in sentences
MAX_PAIRS = 4_000  # pairs of variants that are tried if no single one fits
FIRST, SECOND = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A quantity of the dump against its formula."""

    name: str
    agrees: bool
    # At the element that is furthest outside of its bounds, or else of its middle
    recorded: float
    recomputed: float
    bound: float
    place: tuple[int, ...]
    num_different: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What an audit found."""

    checks: tuple[Check, ...]
    not_checked: dict[str, str]  # name -> why
    first: str | None  # the first quantity that differs; None: all agree
    seen_in: str | None  # the dump's own quantity that shows it
    fits: tuple[str, ...]  # what explains it, the best first

    def as_json(self) -> dict[str, Any]:
        return {
            "agrees": self.first is None,
            "first": self.first,
            "seen_in": self.seen_in,
            "fits": list(self.fits),
            "checks": [
                {field: getattr(check, field) for field in Check.__dataclass_fields__}
                for check in self.checks
            ],
            "not_checked": self.not_checked,
        }


def audit(dump: Dump) -> Audit:
    """Check every quantity that the dump has. Raises StoreError if it has none to check."""
    formulas = Formulas(dump)
    checks, not_checked = [], dict.fromkeys(dump.unknown, "no tensor of the format")
    for name in _recorded(dump):
        try:
            checks.append(check_quantity(formulas, name))
        except Lacking as error:
            not_checked[name] = str(error)
    for name in QUANTITIES:
        if name not in dump.tensors:
            not_checked[name] = "not in the dump"
    not_checked |= {f"metrics/{name}": "unknown" for name in dump.metrics if name not in METRICS}
    if not checks:
        reasons = "; ".join(f"{name}: {why}" for name, why in not_checked.items())
        raise StoreError(f"the dump has nothing to check ({reasons:.200}); dump loss and advantages too")
    seen = next((check.name for check in checks if not check.agrees), None)
    if seen is None:
        return Audit(checks=tuple(checks), not_checked=not_checked, first=None, seen_in=None, fits=())
    explained = explain(dump, seen, [check.name for check in checks])
    first = explained[0].quantity if explained else seen
    return Audit(
        checks=tuple(checks),
        not_checked=not_checked,
        first=NAMES.get(first, first),
        seen_in=seen,
        fits=tuple(variant.says for variant in explained),
    )


def _recorded(dump: Dump) -> Iterator[str]:
    yield from (name for name in QUANTITIES if name in dump.tensors)
    yield from (f"metrics/{name}" for name in METRICS if name in dump.metrics)


def check_quantity(formulas: Formulas, name: str) -> Check:
    """Compare a quantity of the dump with its formula. Raises Lacking if it cannot be recomputed."""
    dump = formulas.dump
    if name.startswith("metrics/"):
        key = name.removeprefix("metrics/")
        expected, recorded, stored = METRICS[key](formulas), dump.metrics[key], PRECISIONS["float32"]
    else:
        expected, recorded, stored = formulas.expected(name), dump.tensors[name], dump.stored[name]
    values, low, high = np.broadcast_arrays(recorded, expected.low, expected.high)
    agrees = np.atleast_1d(Bounded(low, high, expected.precision).contains(values, stored))
    counted = np.ones_like(agrees)
    if name in PER_TOKEN and values.shape == counted_tokens(dump).shape:
        counted = counted_tokens(dump)
    differs = ~agrees & counted
    with np.errstate(invalid="ignore"):
        distance = np.abs(values - (low + high) / 2) - (high - low) / 2
    distance = np.atleast_1d(np.where(np.isnan(distance), np.inf, distance))
    place = np.unravel_index(
        np.argmax(np.where(differs if differs.any() else counted, distance, -np.inf)), agrees.shape
    )
    at = place if np.ndim(values) else ()
    return Check(
        name=name,
        agrees=not differs.any(),
        recorded=float(values[at]),
        recomputed=float((low[at] + high[at]) / 2),
        bound=float((high[at] - low[at]) / 2),
        place=tuple(int(index) for index in at),
        num_different=int(differs.sum()),
    )


def counted_tokens(dump: Dump) -> NDArray[np.bool_]:
    return Formulas(dump).mask


def explain(dump: Dump, seen: str, names: list[str]) -> list[Variant]:
    """Return the variants under which a quantity fits, those that most later quantities fit too first."""
    known = [variant for variant in variants(dump.settings) if _can_matter(variant, dump)]
    fitting = [variant for variant in known if _fits(dump, variant, seen)]
    if not fitting:
        fitting = [pair for pair in _pairs(known) if _fits(dump, pair, seen)][:3]
    after = names[min(names.index(name) for name in (seen, "loss") if name in names) :]
    return sorted(fitting, key=lambda variant: -sum(_fits(dump, variant, name) for name in after))


def _can_matter(variant: Variant, dump: Dump) -> bool:
    return not variant.settings.keys() or any(
        getattr(dump.settings, key) != value for key, value in variant.settings.items()
    )


def _pairs(known: list[Variant]) -> Iterator[Variant]:
    count = 0
    for index, first in enumerate(known):
        for second in known[index + 1 :]:
            if first.quantity != second.quantity and count < MAX_PAIRS:
                count += 1
                yield first | second


def _fits(dump: Dump, variant: Variant, name: str) -> bool:
    formulas = Formulas(dump, dump.settings.changed(**variant.settings), variant.quirks)
    try:
        return check_quantity(formulas, name).agrees
    except (Lacking, ZeroDivisionError):
        return False
