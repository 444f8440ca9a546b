"""Cumulative drift of a ledger's entries, and the conditions for a new entry.

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

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Reference, union_steps
from abrun.logs.recorded.ledger import Entry, Ledger
from abrun.logs.recorded.reference import public_config, public_diff
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, Compare
from abrun.runs.metric_names import default_transform
from abrun.runs.redaction import shortened
from abrun.stats.equivalence import ALPHA, t_interval, welch_interval
from abrun.stats.sequential import interim_levels
from abrun.stats.series import window_bounds
from abrun.verdict.decide import PASSING, ArmVerdict, judge
from abrun.verdict.machines import MACHINE_KEYS
from abrun.verdict.margins import summarize_window
from abrun.verdict.results import ClaimResult

EXCEEDED = 3  # exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A bound on the distance between the last entry and the anchor, with confidence 1 - alpha."""

    bound: float
    chain: tuple[float, float]  # sum of the entries' intervals
    direct: tuple[float, float] | None  # last entry's runs minus the anchor's; None if not computed
    direct_by: str  # how the direct bound was computed; "chain" if it does not count

    @property
    def by(self) -> str:
        """Return the name of the bound that counts."""
        return "the direct comparison" if self.bound < _largest_distance(self.chain) else "the chain"

    @property
    def disagree(self) -> bool:
        """Return True if the two intervals exclude each other: a change outside the entries had an effect."""
        return self.direct is not None and (self.direct[0] > self.chain[1] or self.direct[1] < self.chain[0])


def new_ledger(
    experiment: RecordedExperiment,
    arm: str,
    claims: Compare,
    budget: str,
    *,
    chain_alone: bool,
    commit: str | None,
) -> Ledger:
    """Return the first ledger of a frozen reference. `budget`: NUMBER, or METRIC=NUMBER for several claims.

    Raises ComparisonError for a budget that is not a positive number or does not select one claim.
    """
    metric, _, number = budget.rpartition("=")
    fitting = [
        claim for claim in claims.claims if claim.difference_kind is not None and metric in ("", claim.metric)
    ]
    try:
        amount = float(number)
    except ValueError:
        amount = float("nan")
    if not 0 < amount < float("inf") or len(fitting) != 1:
        metrics = [claim.metric for claim in claims.claims if claim.difference_kind is not None]
        raise ComparisonError(_budget_refused(budget=shortened(budget), metrics=metrics))
    (claim,) = fitting
    runs = [run for name, run in experiment.runs.items() if name.arm == arm]
    return Ledger(
        metric=claim.metric,
        window=claim.window,
        steps=window_bounds(
            claim.window, union_steps(run.series(claim.metric).steps for run in runs), claim.metric
        ),
        transform=claim.transform or default_transform(claim.metric),
        budget=amount,
        alpha=ALPHA,
        rule="chain" if chain_alone else "smaller",
        commit=commit,
    )


def drift_of(ledger: Ledger, anchor: Mapping[int, float]) -> Drift:
    """Return the bound on the drift, given the anchor's window mean by seed. Needs at least one entry."""
    share = ledger.alpha / 2 if ledger.rule == "smaller" else ledger.alpha
    intervals = [
        t_interval(entry.differences, 1 - 2 * _level(entry, share / ledger.num_tried))
        for entry in ledger.entries
    ]
    chain = sum(low for low, _ in intervals), sum(high for _, high in intervals)
    if ledger.rule == "chain":
        return Drift(bound=_largest_distance(chain), chain=chain, direct=None, direct_by="chain")
    last_entry = ledger.entries[-1]
    confidence = 1 - 2 * _level(last_entry, share / ledger.num_chains)
    if anchor.keys() >= {*last_entry.seeds}:
        direct_by = f"{len(last_entry.seeds)} pairs"
        anchor_levels_of_seeds = [anchor[seed] for seed in last_entry.seeds]
        direct = t_interval(np.array(last_entry.levels) - np.array(anchor_levels_of_seeds), confidence)
    else:
        direct_by = "unpaired seeds"
        direct = welch_interval(list(anchor.values()), last_entry.levels, confidence)
    bound = min(_largest_distance(chain), _largest_distance(direct))
    return Drift(bound=bound, chain=chain, direct=direct, direct_by=direct_by)


def anchor_levels(reference: Reference) -> dict[int, float]:
    """Return the anchor's window mean by seed. The reference must have a ledger."""
    ledger = reference.ledger
    assert ledger is not None
    runs = [run for run in reference.runs if not run.name.rerun]
    return _levels(runs, ledger)


def next_entry(
    reference: Reference,
    experiment: RecordedExperiment,
    arm: str | None,
    *,
    tried: int,
    commits: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the entry of a change, without its hashes. `commits`: the commit of each arm's checkout.

    Raises ComparisonError if the change did not match or was not compared with the last entry.
    """
    ledger, arm = _ledger_and_arm(reference, experiment, arm)
    _refuse_other_baseline(reference, ledger, experiment)
    judged = {verdict.arm: verdict for verdict in judge(experiment, experiment.compare.claims)}[arm]
    result = _result(judged, ledger, experiment)
    seeds = list(result.claim.seeds)
    treated = experiment.arm(arm)
    levels = _levels([treated[seed] for seed in seeds], ledger)
    treatment = public_diff((experiment.treatment_diff or {}).get(arm, {}))
    runs = {"experiment": experiment.name, "arm": arm, "seeds": seeds, "treatment": treatment}
    runs_sha256 = _sha256({**runs, "levels": levels, "differences": result.estimate.differences})
    for number, entry in enumerate(ledger.entries, 1):
        if entry.runs_sha256 == runs_sha256:
            raise ComparisonError(f"{experiment.name}: {arm} is already entry {number}, so nothing was added")
    content: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "experiment": experiment.name,
        "runs_sha256": runs_sha256,
        "arm": arm,
        "treatment": treatment,
        "commit": commits.get(arm),
        "environment_sha256": environment_sha256(list(treated.values())),
        "moved": _changes_besides_config(reference, ledger, experiment, commits.get(experiment.baseline)),
        "margin": result.claim.margin_text,
        "interim": list(experiment.compare.interim),
        "alpha_spending": experiment.compare.alpha_spending,
        "seeds": seeds,
        "differences": list(result.estimate.differences),
        "levels": [levels[seed] for seed in seeds],
        "difference": result.estimate.mean_difference,
        "interval": result.estimate.ci90,
        "certified_bound": max(map(abs, result.estimate.ci90 or ())),
        "drift": 0.0,
        "tried": tried,
    }
    draft = Entry.model_validate({**content, "previous": "", "sha256": ""})
    extended = ledger.model_copy(update={"entries": (*ledger.entries, draft)})
    content["drift"] = drift_of(extended, anchor_levels(reference)).bound
    return content


def ledger_state(reference: Reference) -> Reason:
    """Return the state of a reference's ledger: its entries, and the drift against the budget."""
    ledger = reference.ledger
    assert ledger is not None
    first_step, last_step = ledger.steps
    if not ledger.entries:
        return Code.LEDGER_EMPTY(metric=ledger.metric, first=first_step, last=last_step, budget=ledger.budget)
    drift = drift_of(ledger, anchor_levels(reference))
    # After very many rejected changes the direct bound is infinite.
    direct = drift.direct if drift.direct and np.isfinite(drift.direct).all() else None
    return Code.LEDGER(
        metric=ledger.metric,
        first=first_step,
        last=last_step,
        num_entries=len(ledger.entries),
        num_tried=ledger.num_tried,
        budget=ledger.budget,
        bound=drift.bound,
        confidence=1 - ledger.alpha,
        bound_by=drift.by,
        chain=drift.chain,
        direct=direct,
        direct_by=drift.direct_by,
        num_chains=ledger.num_chains,
        disagree=drift.disagree,
    )


def is_over_budget(reference: Reference) -> bool:
    ledger = reference.ledger
    if ledger is None or not ledger.entries:
        return False
    return drift_of(ledger, anchor_levels(reference)).bound > ledger.budget


def _ledger_and_arm(
    reference: Reference, experiment: RecordedExperiment, arm: str | None
) -> tuple[Ledger, str]:
    """Return the ledger and the arm to add. Raises ComparisonError if there is no such ledger or arm."""
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
    return ledger, experiment.choose_arm(arm, experiment.treatments)


def _result(judged: ArmVerdict, ledger: Ledger, experiment: RecordedExperiment) -> ClaimResult:
    """Return the result of the ledger's claim. Raises ComparisonError if the experiment did not match."""
    if judged.verdict not in PASSING:
        raise ComparisonError(
            f"{experiment.name}: {judged.arm}: the verdict is {judged.verdict}, but a ledger takes only "
            f"matches: {judged.reasons[0]}"
        )
    for result in judged.claims:
        claim = result.claim
        is_ledger_claim = (claim.metric, claim.transform, claim.steps) == (
            ledger.metric,
            ledger.transform,
            ledger.steps,
        )
        is_tested = result.estimate.mean_difference is not None
        if is_ledger_claim and is_tested and claim.paired and claim.kind not in ("limit", "exact"):
            return result
    claims = [result.claim for result in judged.claims]
    claimed = ", ".join(f"{claim.metric} over {claim.window} ({claim.steps})" for claim in claims)
    raise ComparisonError(
        f"{experiment.name}: {judged.arm}: claims {claimed}, but the ledger tracks {ledger.metric} over "
        f"steps {ledger.steps[0]}-{ledger.steps[1]}, with a margin"
    )


def _refuse_other_baseline(reference: Reference, ledger: Ledger, experiment: RecordedExperiment) -> None:
    """Raise ComparisonError unless the baseline is configured as the last entry is."""
    link = dict(reference.config)
    for entry in ledger.entries:
        link |= {key: after for key, (_, after) in entry.treatment.items()}
    config = public_config(list(experiment.arm(experiment.baseline).values()))
    link_text = f"entry {len(ledger.entries)}'s treatment" if ledger.entries else "the anchor"
    if not config:
        raise ComparisonError(
            f"{experiment.name}: its baseline records no configuration, so it cannot be checked against "
            f"{link_text}"
        )
    for key in sorted(link):
        if config.get(key) != link[key]:
            entry_numbers = [
                number
                for number, entry in enumerate(ledger.entries, 1)
                if entry.experiment == experiment.name
            ]
            entry_text = entry_numbers[0] if entry_numbers else None
            entry_clause_text = (
                f" (entry {entry_numbers[0] if entry_numbers else None} is an experiment of this name)"
                if entry_text
                else ""
            )
            raise ComparisonError(
                f"{experiment.name}: {experiment.baseline}: {key} is {shortened(config.get(key))}, but "
                f"{shortened(link[key])} in {link_text}{entry_clause_text}; compare the change with "
                f"{link_text}"
            )


def _changes_besides_config(
    reference: Reference, ledger: Ledger, experiment: RecordedExperiment, commit: str | None
) -> str | None:
    """Return how the baseline's code and machine differ from the last link's; None if they do not.

    The last link is the newest entry, or the anchor if there is none.
    """
    last_entry = ledger.entries[-1] if ledger.entries else None
    linked_commit = last_entry.commit if last_entry else ledger.commit
    changes = []
    if commit != linked_commit:
        changes.append(f"commit {(linked_commit or 'unknown')[:9]} -> {(commit or 'unknown')[:9]}")
    baselines = list(experiment.arm(experiment.baseline).values())
    expected_sha256 = (
        last_entry.environment_sha256 if last_entry else _sha256(_machine(reference.environment))
    )
    if environment_sha256(baselines) != expected_sha256:
        changes.append("package versions or devices")
    return ", ".join(changes) or None


def environment_sha256(runs: Sequence[RecordedRun]) -> str:
    hashes = {_sha256(_machine(run.environment or {})) for run in runs}
    return hashes.pop() if len(hashes) == 1 else _sha256({"several": sorted(hashes)})


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {key: environment.get(key) for key in MACHINE_KEYS}


def _levels(runs: Sequence[RecordedRun], ledger: Ledger) -> dict[int, float]:
    claim = Claim(
        metric=ledger.metric,
        window=f"steps {ledger.steps[0]}-{ledger.steps[1]}",
        transform=ledger.transform,
        margin=1.0,
    )
    values = summarize_window(list(runs), claim)
    return {run.name.seed: float(value) for run, value in zip(runs, values, strict=True)}


def _level(entry: Entry, level: float) -> float:
    """Return the level of the entry's interim analysis; `level` if it declared none."""
    if not entry.interim:
        return level
    at = entry.interim.index(len(entry.seeds)) if len(entry.seeds) in entry.interim else 0
    return interim_levels(entry.interim, level, entry.alpha_spending)[at]


def _largest_distance(interval: tuple[float, float]) -> float:
    return max(abs(interval[0]), abs(interval[1]))


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _budget_refused(budget: str, metrics: list[str]) -> str:
    examples = ", ".join(f"{metric}=0.05" for metric in metrics)
    return (
        f"--budget: got {budget}; allowed: a number above 0 in units of the claim, for a claim with a "
        f"margin: {examples or 'none is declared (--claim)'}"
    )
