"""Changes to a reference's ledger, for `abrun reference add` and `abrun reference save --budget`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, Reference
from abrun.logs.recorded.ledger import Ledger
from abrun.logs.recorded.reference import add_entry
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.numbers import bound_text, difference_text
from abrun.recipe.claims import Compare, describe_claim
from abrun.report.comparing import find_post_hoc_reason
from abrun.report.evidence import describe_changes
from abrun.report.present.tables import Table, columns
from abrun.runs.experiment import run_dir
from abrun.runs.redaction import printable
from abrun.runs.rundir import RunDir
from abrun.tools.drift.ledger.drift import ledger_state, new_ledger, next_entry


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
    commits = {arm_name: commit_of(experiment_dir, experiment, arm_name) for arm_name in experiment.arms}
    return add_entry(
        path, lambda reference: next_entry(reference, experiment, arm, tried=tried, commits=commits)
    )


def commit_of(experiment_dir: Path, experiment: RecordedExperiment, arm: str) -> str | None:
    """Return the commit that an arm's runs were launched from; None if unknown or several."""
    git = [RunDir(run_dir(experiment_dir, run.name)).git() or {} for run in experiment.arm(arm).values()]
    shas = {state.get("sha") for state in git}
    sha = shas.pop() if len(shas) == 1 else None
    return sha if isinstance(sha, str) else None


def ledger_maker(
    experiment: RecordedExperiment,
    arm: str,
    budget: str | None,
    *,
    chain_alone: bool,
    experiment_dir: Path | None,
) -> Callable[[Compare], Ledger] | None:
    """Return a function that makes the ledger from the reference's claims; None without a budget."""
    if budget is None:
        return None
    commit = commit_of(experiment_dir, experiment, arm) if experiment_dir else None
    return lambda claims: new_ledger(experiment, arm, claims, budget, chain_alone=chain_alone, commit=commit)


def render_reference(reference: Reference) -> RenderableType:
    """Return what a reference holds: seeds, claims, and its ledger if it has one."""
    seeds = sorted({run.name.seed for run in reference.runs if not run.name.rerun})
    claims = [
        f"{claim.metric} over {claim.window}, {describe_claim(claim)}" for claim in reference.compare.claims
    ]
    head = Text(
        printable(
            f"{reference.name}: {len(seeds)} seeds ({', '.join(map(str, seeds))}); "
            f"claims: {'; '.join(claims) or 'none'}"
        )
    )
    if reference.ledger is None:
        return Group(head, Text("no ledger of accepted changes: abrun reference save --budget starts one"))
    return Group(head, *_ledger_lines(reference, reference.ledger))


def _ledger_lines(reference: Reference, ledger: Ledger) -> Iterator[RenderableType]:
    """Yield the entries as a table, then the ledger's state."""
    rows = []
    for number, entry in enumerate(ledger.entries, 1):
        changed = [
            *describe_changes(entry.treatment),
            *([f"not judged: {entry.moved}"] if entry.moved else []),
        ]
        cells = (
            str(number),
            entry.date[:10],
            f"{entry.experiment}, {entry.arm}",
            "; ".join(changed),
            (entry.commit or "-")[:9],
            difference_text(entry.difference, entry.interval),
            bound_text(entry.drift),
        )
        rows.append(cells)
    titles = ("", "date", "experiment", "what changed", "commit", "difference [90 % CI]", "drift then")
    if rows:
        yield Table(columns(*titles, fold=True), rows)
    yield Text(printable(sentence(ledger_state(reference))), style="bold")
