"""The changes accepted since a reference was frozen, and their drift: `abrun reference add`, `show`, `save`.

The drift since the anchor is the sum of the true differences of all entries. Each entry has a t-interval at
the one-sided level alpha / n (Bonferroni over all n judged changes, accepted or not), so the sum of the
intervals covers the drift, whatever runs the entries share. The last entry's runs against the anchor's give
a second, direct bound. If the smaller of the two counts (declared at the freeze), each has half of alpha.
Rejected changes count as well: among many changes that drift, those that pass are the ones whose interval
errs (Benjamini and Yekutieli 2005).

A change may move each seed by an amount that persists in every later entry. The direct bound therefore also
accumulates selection: the accepted chain is one of the product of the entries' `tried` possible chains, and
its level is divided by that product (Bonferroni). After a few rejected changes it is wider than the chain's
bound.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Reference, union_steps
from abrun.logs.recorded.ledger import Entry, Ledger, sha256_of
from abrun.logs.recorded.reference import add_entry, public_config, public_diff
from abrun.logs.recorded.stored import load_experiment
from abrun.messages.numbers import bound_text, counted, difference_text, interval_text
from abrun.recipe.claims import Claim, Compare, describe_claim
from abrun.report.comparing import find_post_hoc_reason
from abrun.report.evidence import describe_changes
from abrun.report.present.tables import Table, columns
from abrun.runs.experiment import run_dir
from abrun.runs.metric_names import default_transform
from abrun.runs.redaction import printable, shortened
from abrun.runs.rundir import RunDir
from abrun.stats.equivalence import ALPHA, t_interval, welch_interval
from abrun.stats.sequential import interim_levels
from abrun.stats.series import window_bounds
from abrun.tools.drift.store import environment_sha256
from abrun.verdict.decide import PASSING, judge
from abrun.verdict.margins import summarize_window
from abrun.verdict.results import ClaimResult

EXCEEDED = 3  # exit code
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Bounds on the distance between the last entry and the anchor, each with confidence 1 - alpha."""

    chain: Interval  # sum of the entries' intervals
    direct: Interval | None = None  # last entry's runs minus the anchor's; None if it does not count
    direct_by: str = ""  # how the direct bound was computed

    @property
    def bound(self) -> float:
        """Return the bound that counts: the smaller one."""
        return min(max(map(abs, interval)) for interval in (self.chain, self.direct) if interval)


def drift_of(ledger: Ledger, anchor: Mapping[int, float]) -> Drift:
    """Return the bound on the drift, given the anchor's window mean by seed. Needs at least one entry."""
    share = ledger.alpha / 2 if ledger.rule == "smaller" else ledger.alpha
    intervals = [
        t_interval(entry.differences, _confidence(entry, share / ledger.num_tried))
        for entry in ledger.entries
    ]
    chain = sum(low for low, _ in intervals), sum(high for _, high in intervals)
    if ledger.rule == "chain":
        return Drift(chain=chain)
    last_entry = ledger.entries[-1]
    confidence = _confidence(last_entry, share / ledger.num_chains)
    if anchor.keys() >= {*last_entry.seeds}:
        differences = np.array(last_entry.levels) - np.array([anchor[seed] for seed in last_entry.seeds])
        direct_by, direct = f"{len(differences)} pairs", t_interval(differences, confidence)
    else:
        direct_by = "unpaired seeds"
        direct = welch_interval(list(anchor.values()), last_entry.levels, confidence)
    return Drift(chain=chain, direct=direct, direct_by=direct_by)


def is_over_budget(reference: Reference) -> bool:
    ledger = reference.ledger
    if ledger is None or not ledger.entries:
        return False
    return drift_of(ledger, anchor_levels(reference, ledger)).bound > ledger.budget


def anchor_levels(reference: Reference, ledger: Ledger) -> dict[int, float]:
    """Return the anchor's window mean by seed."""
    return _levels([run for run in reference.runs if not run.name.rerun], ledger)


def _levels(runs: list[RecordedRun], ledger: Ledger) -> dict[int, float]:
    first_step, last_step = ledger.steps
    window = f"steps {first_step}-{last_step}"
    claim = Claim(metric=ledger.metric, window=window, transform=ledger.transform, margin=1.0)
    values = summarize_window(runs, claim)
    return {run.name.seed: float(value) for run, value in zip(runs, values, strict=True)}


def _confidence(entry: Entry, level: float) -> float:
    """Return the confidence of an interval at a one-sided level, or at its share at the entry's interim."""
    if entry.interim:
        at = entry.interim.index(len(entry.seeds)) if len(entry.seeds) in entry.interim else 0
        level = interim_levels(entry.interim, level, entry.alpha_spending)[at]
    return 1 - 2 * level


# --- a new ledger, and a new entry ---


def ledger_maker(
    experiment: RecordedExperiment,
    arm: str,
    budget: str,
    *,
    chain_alone: bool,
    experiment_dir: Path | None,
) -> Callable[[Compare], Ledger]:
    """Return a function that makes the first ledger of a frozen reference from its claims.

    `budget`: NUMBER, or METRIC=NUMBER for several claims. The function raises ComparisonError for a budget
    that is not a positive number or does not select one claim.
    """
    metric, _, number = budget.rpartition("=")
    try:
        amount = float(number)
    except ValueError:
        amount = float("nan")
    runs = [run for name, run in experiment.runs.items() if name.arm == arm]

    def begin(claims: Compare) -> Ledger:
        differences = [claim for claim in claims.claims if claim.difference_kind is not None]
        fitting = [claim for claim in differences if metric in ("", claim.metric)]
        if not 0 < amount < float("inf") or len(fitting) != 1:
            examples = ", ".join(f"{claim.metric}=0.05" for claim in differences)
            raise ComparisonError(
                f"--budget: got {shortened(budget)}; allowed: a number above 0 in units of the claim, for a "
                f"claim with a margin: {examples or 'none is declared (--claim)'}"
            )
        (claim,) = fitting
        grid = union_steps(run.series(claim.metric).steps for run in runs)
        return Ledger(
            metric=claim.metric,
            window=claim.window,
            steps=window_bounds(claim.window, grid, claim.metric),
            transform=claim.transform or default_transform(claim.metric),
            budget=amount,
            alpha=ALPHA,
            rule="chain" if chain_alone else "smaller",
            commit=_commit_of(experiment_dir, experiment, arm) if experiment_dir else None,
        )

    return begin


def _commit_of(experiment_dir: Path, experiment: RecordedExperiment, arm: str) -> str | None:
    """Return the commit that an arm's runs were launched from; None if unknown or several."""
    git = [RunDir(run_dir(experiment_dir, run.name)).git() or {} for run in experiment.arm(arm).values()]
    shas = {state.get("sha") for state in git}
    sha = shas.pop() if len(shas) == 1 else None
    return sha if isinstance(sha, str) else None


@np.errstate(all="ignore")
def add_to_ledger(path: Path, experiment_dir: Path, arm: str | None, tried: int) -> Reference:
    """Add an experiment's treatment to a reference's ledger, and return the new reference.

    Raises ComparisonError if it did not match or was not compared with the last entry.
    """
    experiment = load_experiment(experiment_dir)
    late = find_post_hoc_reason(experiment, experiment.compare)
    if late:
        raise ComparisonError(
            f"{experiment.name}: post hoc: {late}; a ledger takes only comparisons declared before the runs"
        )
    return add_entry(path, lambda reference: _next_entry(reference, experiment, experiment_dir, arm, tried))


def _next_entry(
    reference: Reference, experiment: RecordedExperiment, experiment_dir: Path, arm: str | None, tried: int
) -> dict[str, Any]:
    """Return the entry of a change, without its hashes. Raises ComparisonError."""
    ledger = reference.ledger
    if ledger is None:
        raise ComparisonError(
            f"{reference.name}: has no ledger; save a reference with one: abrun reference save SOURCE -o "
            "FILE --budget 0.05"
        )
    if experiment.treatment_diff is None or experiment.launched_compare_sha256 is None:
        raise ComparisonError(
            f"{experiment.name}: declares no treatment; a ledger takes only experiments that abrun launched"
        )
    arm = experiment.choose_arm(arm, experiment.treatments)
    _refuse_other_baseline(reference, ledger, experiment)
    result = _find_result(experiment, arm, ledger)
    seeds, estimate = list(result.claim.seeds), result.estimate
    treated = experiment.arm(arm)
    levels = _levels([treated[seed] for seed in seeds], ledger)
    treatment = public_diff(experiment.treatment_diff.get(arm, {}))
    runs = {"experiment": experiment.name, "arm": arm, "seeds": seeds, "treatment": treatment}
    runs_sha256 = sha256_of({**runs, "levels": levels, "differences": estimate.differences})
    for number, entry in enumerate(ledger.entries, 1):
        if entry.runs_sha256 == runs_sha256:
            raise ComparisonError(f"{experiment.name}: {arm} is already entry {number}, so nothing was added")
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "experiment": experiment.name,
        "runs_sha256": runs_sha256,
        "arm": arm,
        "treatment": treatment,
        "commit": _commit_of(experiment_dir, experiment, arm),
        "environment_sha256": environment_sha256(list(treated.values())),
        "moved": _changes_besides_config(reference, ledger, experiment, experiment_dir),
        "margin": result.claim.margin_text,
        "interim": list(experiment.compare.interim),
        "alpha_spending": experiment.compare.spending,
        "seeds": seeds,
        "differences": list(estimate.differences),
        "levels": [levels[seed] for seed in seeds],
        "difference": estimate.mean_difference,
        "interval": estimate.ci90,
        "certified_bound": max(map(abs, estimate.ci90 or ())),
        "drift": 0.0,
        "tried": tried,
    }
    draft = Entry.model_validate({**content, "previous": "", "sha256": ""})
    extended = ledger.model_copy(update={"entries": (*ledger.entries, draft)})
    return {**content, "drift": drift_of(extended, anchor_levels(reference, ledger)).bound}


def _find_result(experiment: RecordedExperiment, arm: str, ledger: Ledger) -> ClaimResult:
    """Return the result of the ledger's claim. Raises ComparisonError if the experiment did not match."""
    judged = {verdict.arm: verdict for verdict in judge(experiment, experiment.compare.claims)}[arm]
    if judged.verdict not in PASSING:
        raise ComparisonError(
            f"{experiment.name}: {arm}: the verdict is {judged.verdict}, but a ledger takes only matches: "
            f"{judged.reasons[0]}"
        )
    for result in judged.claims:
        claim = result.claim
        key = claim.metric, claim.transform, claim.steps
        is_tested = result.estimate.mean_difference is not None and claim.kind not in ("limit", "exact")
        if key == (ledger.metric, ledger.transform, ledger.steps) and is_tested and claim.paired:
            return result
    claims = [result.claim for result in judged.claims]
    claimed = ", ".join(f"{claim.metric} over {claim.window} ({claim.steps})" for claim in claims)
    raise ComparisonError(
        f"{experiment.name}: {arm}: claims {claimed}, but the ledger tracks {ledger.metric} over "
        f"steps {ledger.steps[0]}-{ledger.steps[1]}, with a margin"
    )


def _refuse_other_baseline(reference: Reference, ledger: Ledger, experiment: RecordedExperiment) -> None:
    """Raise ComparisonError unless the baseline is configured as the last entry is."""
    expected = dict(reference.config)
    for entry in ledger.entries:
        expected |= {key: after for key, (_, after) in entry.treatment.items()}
    config = public_config(list(experiment.arm(experiment.baseline).values()))
    link = f"entry {len(ledger.entries)}'s treatment" if ledger.entries else "the anchor"
    if not config:
        raise ComparisonError(
            f"{experiment.name}: its baseline records no configuration, so it cannot be checked against "
            f"{link}"
        )
    own_entries = [
        number for number, entry in enumerate(ledger.entries, 1) if entry.experiment == experiment.name
    ]
    namesake = f" (entry {own_entries[0]} is an experiment of this name)" if own_entries else ""
    for key in sorted(expected):
        if config.get(key) != expected[key]:
            raise ComparisonError(
                f"{experiment.name}: {experiment.baseline}: {key} is {shortened(config.get(key))}, but "
                f"{shortened(expected[key])} in {link}{namesake}; compare the change with {link}"
            )


def _changes_besides_config(
    reference: Reference, ledger: Ledger, experiment: RecordedExperiment, experiment_dir: Path
) -> str | None:
    """Return how the baseline's code and machine differ from the last link's; None if they do not.

    The last link is the newest entry, or the anchor if there is none.
    """
    link, changes = ledger.entries[-1] if ledger.entries else None, []
    commit = _commit_of(experiment_dir, experiment, experiment.baseline)
    linked_commit = (link or ledger).commit
    if commit != linked_commit:
        changes.append(f"commit {(linked_commit or 'unknown')[:9]} -> {(commit or 'unknown')[:9]}")
    baselines = list(experiment.arm(experiment.baseline).values())
    expected = link.environment_sha256 if link else environment_sha256([reference])
    if environment_sha256(baselines) != expected:
        changes.append("package versions or devices")
    return ", ".join(changes) or None


# --- a reference in words ---


def render_reference(reference: Reference) -> RenderableType:
    """Return what a reference holds: seeds, claims, and the entries and drift of its ledger if it has one."""
    ledger = reference.ledger
    seeds = sorted({run.name.seed for run in reference.runs if not run.name.rerun})
    claims = [
        f"{claim.metric} over {claim.window}, {describe_claim(claim)}" for claim in reference.compare.claims
    ]
    text = f"{len(seeds)} seeds ({', '.join(map(str, seeds))}); claims: {'; '.join(claims) or 'none'}"
    head = Text(printable(f"{reference.name}: {text}"))
    if ledger is None:
        return Group(head, Text("no ledger of accepted changes: abrun reference save --budget starts one"))
    rows = [
        (
            str(number),
            entry.date[:10],
            f"{entry.experiment}, {entry.arm}",
            "; ".join(
                [*describe_changes(entry.treatment), *([f"not judged: {entry.moved}"] if entry.moved else [])]
            ),
            (entry.commit or "-")[:9],
            difference_text(entry.difference, entry.interval),
            bound_text(entry.drift),
        )
        for number, entry in enumerate(ledger.entries, 1)
    ]
    titles = ("", "date", "experiment", "what changed", "commit", "difference [90 % CI]", "drift then")
    table = [Table(columns(*titles, fold=True), rows)] if rows else []
    return Group(head, *table, Text(printable(drift_text(reference, ledger)), style="bold"))


def drift_text(reference: Reference, ledger: Ledger) -> str:
    """Return the drift of a reference's ledger against its budget, as a sentence."""
    subject = f"ledger of {ledger.metric} over steps {ledger.steps[0]}-{ledger.steps[1]}"
    if not ledger.entries:
        return f"{subject}: no change since the anchor, drift spent 0 of {ledger.budget:g}"
    drift, direct = drift_of(ledger, anchor_levels(reference, ledger)), ""
    by = "the direct comparison" if drift.bound < max(map(abs, drift.chain)) else "the chain"
    if drift.direct and np.isfinite(drift.direct).all():  # after very many rejected changes it is infinite
        chains = f" for {ledger.num_chains:.3g} possible chains" if ledger.num_chains > 1 else ""
        direct = f", direct comparison {interval_text(drift.direct)} over {drift.direct_by}{chains}"
    tried, num_rejected = (
        counted(ledger.num_tried, "evaluated change"),
        ledger.num_tried - len(ledger.entries),
    )
    rejected = f", {num_rejected} of them rejected" if num_rejected else ""
    text = (
        f"{subject}: {counted(ledger.entries, 'change')}, drift spent {bound_text(drift.bound)} of "
        f"{ledger.budget:g} ({100 * (1 - ledger.alpha):g} % bound by {by}; chain "
        f"{interval_text(drift.chain)}{direct}; jointly over {tried}{rejected})"
    )
    if drift.direct and (drift.direct[0] > drift.chain[1] or drift.direct[1] < drift.chain[0]):
        text += "; chain and direct comparison contradict each other: something changed that no entry records"
    if drift.bound > ledger.budget:
        text += (
            "; the budget is exceeded; re-anchor: compare the anchor's arm with today's, then save today's "
            "as a new reference"
        )
    return text
