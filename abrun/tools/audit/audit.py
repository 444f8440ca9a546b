"""The audit of a dump: each quantity against its formula, then the variant that explains a difference."""

from dataclasses import dataclass
from itertools import combinations, islice, permutations

import numpy as np

from abrun.errors import StoreError
from abrun.tools.audit.bounds import SINGLE, Bounded
from abrun.tools.audit.formulas import METRICS, QUANTITIES, Formulas, Lacking, metric
from abrun.tools.audit.reading import SHAPES, Dump
from abrun.tools.audit.variants import Variant, variants

# Quantities that matter at masked tokens, too
EVERYWHERE = ("token_mask", "token_weights", "logprob_gradients")
NAMES = {"token_weights": "normaliser", "clipped": "clip", "token_mask": "mask"}  # in sentences
MAX_PAIRS = 3_000  # pairs of variants that are tried if no single one fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A quantity of the dump against its formula."""

    name: str
    agrees: bool
    num_different: int
    # Of the element that is furthest outside of its bounds, or nearest to them
    place: tuple[int, ...]
    recorded: float
    recomputed: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit."""

    first: str | None  # the first quantity that differs; None: all agree
    seen_in: str | None  # the dump's own quantity that shows it
    fits: tuple[str, ...]  # what explains it
    checks: tuple[Check, ...]
    not_checked: dict[str, str]  # what the dump has -> why
    absent: tuple[str, ...]  # quantities that the dump lacks


def audit(dump: Dump) -> Audit:
    """Check every quantity that the dump has. Raises StoreError if it has none to check."""
    step = Formulas(dump)
    checks, not_checked = [], dict.fromkeys(dump.unknown, "no tensor of this format")
    recorded = [name for name in QUANTITIES if name in dump.tensors]
    for name in (*recorded, *(f"metrics/{name}" for name in METRICS if name in dump.metrics)):
        try:
            checks.append(compare(dump, name, recompute(step, name)))
        except Lacking as error:
            not_checked[name] = str(error)
    not_checked |= {f"metrics/{name}": "unknown name" for name in dump.metrics if name not in METRICS}
    if not checks:
        reasons = "; ".join(f"{name}: {why}" for name, why in not_checked.items())
        raise StoreError(f"the dump has nothing to check ({reasons:.200}); dump loss and advantages, too")

    witness = next((check.name for check in checks if not check.agrees), None)
    explained = explain(dump, witness, [check.name for check in checks]) if witness else []
    quantity = explained[0].quantity if explained else witness
    return Audit(
        first=NAMES.get(quantity, quantity) if quantity else None,
        seen_in=witness,
        fits=tuple(variant.says for variant in explained[:4]),
        checks=tuple(checks),
        not_checked=not_checked,
        absent=tuple(name for name in QUANTITIES if name not in dump.tensors),
    )


def recompute(step: Formulas, name: str) -> Bounded:
    """Return a quantity or metric by its formula. Raises Lacking if it cannot be recomputed."""
    key = name.removeprefix("metrics/")
    return metric(step, key) if key != name else step.expected(name)


def compare(dump: Dump, name: str, expected: Bounded) -> Check:
    """Compare a quantity of the dump with its recomputed bounds."""
    stored = dump.stored.get(name, SINGLE)
    recorded = dump.tensors.get(name, np.asarray(dump.metrics.get(name.removeprefix("metrics/"))))
    rounded = expected.rounded(stored)
    values, low, high = (np.atleast_1d(of) for of in np.broadcast_arrays(recorded, rounded.low, rounded.high))
    counts = np.ones_like(values, bool)
    if SHAPES.get(name) == "BT" and name not in EVERYWHERE:
        counts = np.broadcast_to(Formulas(dump).mask, values.shape) if values.shape[1] > 1 else counts
    with np.errstate(invalid="ignore"):
        # negative inside of the bounds; a NaN is outside of any
        outside = np.nan_to_num(np.maximum(low - values, values - high), nan=np.inf, neginf=-1e300)
    differs = (outside > 0) & counts
    worst = np.unravel_index(np.argmax(np.where(counts, outside, -np.inf)), values.shape)
    return Check(
        name=name,
        agrees=not differs.any(),
        num_different=int(differs.sum()),
        place=tuple(int(index) for index in worst) if recorded.ndim else (),
        recorded=float(values[worst]),
        recomputed=float(low[worst] / 2 + high[worst] / 2),
        bound=float(high[worst] / 2 - low[worst] / 2),
    )


def explain(dump: Dump, witness: str, names: list[str]) -> list[Variant]:
    """Return the variants under which a quantity fits and, of these, as many of all others as possible."""
    usual, tried = recompute(Formulas(dump), witness).low, []
    for variant in sorted(variants(dump.settings), key=lambda variant: QUANTITIES.index(variant.quantity)):
        outcome = _outcome(dump, variant, witness)
        if outcome is not None and not np.array_equal(outcome.low, usual, equal_nan=True):
            tried.append((variant, outcome))
    fitting = [variant for variant, outcome in tried if compare(dump, witness, outcome).agrees]
    if not fitting:
        pairs = (a | b for (a, _), (b, _) in combinations(tried, 2) if a.quantity != b.quantity)
        fitting = [pair for pair in islice(pairs, MAX_PAIRS) if _fits(dump, pair, witness)]
    scores = [sum(_fits(dump, variant, name) for name in names) for variant in fitting]
    best = [variant for variant, score in zip(fitting, scores, strict=True) if score == max(scores)]
    longer = [b for a, b in permutations(best, 2) if b.says.startswith(f"{a.says};")]
    return [variant for variant in best if variant not in longer]


def _outcome(dump: Dump, variant: Variant, name: str) -> Bounded | None:
    settings = dump.settings.model_copy(update=dict(variant.settings))
    try:
        return recompute(Formulas(dump, settings, variant.quirks), name)
    except Lacking:
        return None


def _fits(dump: Dump, variant: Variant, name: str) -> bool:
    outcome = _outcome(dump, variant, name)
    return outcome is not None and compare(dump, name, outcome).agrees
