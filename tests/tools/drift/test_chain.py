"""The ledger of a reference: what is added, what is refused, what it adds up to, and that an edit is seen."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from abrun import cli
from abrun.errors import AbrunError, ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, Reference
from abrun.logs.recorded.ledger import Ledger
from abrun.logs.recorded.reference import load_reference
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.stored import load_experiment
from abrun.report.comparing import compare_sources, freeze_arm
from abrun.runs.files import read_json
from abrun.runs.lock import LockedError, file_lock
from abrun.stats.equivalence import welch_interval
from abrun.tools.drift.chain import (
    add_to_ledger,
    anchor_levels,
    drift_of,
    drift_text,
    ledger_maker,
    render_reference,
)
from tests.bench.bench_ledger import beyond
from tests.reasons import refused
from tests.tools.drift.test_store import ALL, mutations, with_value
from tests.verdict.simulate import edit, write_experiment

QUIET = {"noise": 0.001}
FIRST = {"baseline": {}, "treatment": {"policy.logprobs.impl": "chunked"}}
SECOND = {
    "baseline": {"policy.logprobs.impl": "chunked"},
    "other": {"policy.logprobs.impl": "chunked", "policy.optimizer.beta2": 0.9},
}


def freeze(experiment: RecordedExperiment, path: Path, budget: str, *, chain_alone: bool = False) -> None:
    begin = ledger_maker(experiment, "baseline", budget, chain_alone=chain_alone, experiment_dir=None)
    freeze_arm(experiment, "baseline", path, begin_ledger=begin)


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    experiment = load_experiment(write_experiment(tmp_path / "anchor", **QUIET))
    freeze(experiment, tmp_path / "ref.json", "0.05")
    return tmp_path / "ref.json"


def changed_experiment(tmp_path: Path, name: str = "first", arms: dict | None = None, **scenario) -> Path:
    return write_experiment(tmp_path / name, **{**QUIET, "arms": arms or FIRST, **scenario})


def add(reference: Path, experiment_dir: Path, tried: int = 1) -> Reference:
    return add_to_ledger(reference, experiment_dir, None, tried)


def ledger_of(reference: Reference) -> Ledger:
    assert reference.ledger is not None
    return reference.ledger


def anchor_of(reference: Reference) -> dict[int, float]:
    return anchor_levels(reference, ledger_of(reference))


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["reference", *arguments], catch_exceptions=False)


def test_two_changes_are_added(tmp_path, reference):
    found = add(reference, changed_experiment(tmp_path, shift=0.004))
    one = ledger_of(found).entries[0]
    assert one.treatment == {"policy.logprobs.impl": ("logits", "chunked")} and one.seeds == [0, 1, 2, 3, 4]
    assert one.difference == pytest.approx(0.004, abs=0.002) and one.interval[0] < one.difference
    found = add(reference, changed_experiment(tmp_path, "second", SECOND, shift=0.004), tried=3)
    ledger, drift = ledger_of(found), drift_of(ledger_of(found), anchor_of(found))
    assert (len(ledger.entries), ledger.num_tried, ledger.num_chains) == (2, 4, 3)
    assert drift.direct_by == "5 pairs" and 0 < drift.bound < 0.1
    assert not list(tmp_path.glob(".*lock"))


def test_the_sums_are_those_of_the_docs(tmp_path, reference):
    found = add(reference, changed_experiment(tmp_path, shift=0.004))
    found = add(reference, changed_experiment(tmp_path, "second", SECOND, shift=0.004))
    entries = ledger_of(found).entries
    anchor = anchor_of(found)
    drift = drift_of(ledger_of(found), anchor)
    from scipy import stats

    reaches = [
        stats.t.ppf(1 - 0.025 / 2, 4) * np.std(one.differences, ddof=1) / np.sqrt(5) for one in entries
    ]
    middle = sum(one.difference for one in entries)
    assert drift.chain == pytest.approx((middle - sum(reaches), middle + sum(reaches)))
    direct = np.array(entries[-1].levels) - np.array(list(anchor.values()))
    reach = stats.t.ppf(0.975, 4) * direct.std(ddof=1) / np.sqrt(5)
    assert drift.direct is not None
    assert drift.direct == pytest.approx((direct.mean() - reach, direct.mean() + reach))
    assert drift.bound == min(max(map(abs, drift.chain)), max(map(abs, drift.direct)))
    assert entries[-1].drift == pytest.approx(drift.bound)


def test_an_experiment_with_looks_has_the_intervals_of_a_look(tmp_path, reference):
    found = add(reference, changed_experiment(tmp_path))
    (entry,) = ledger_of(found).entries
    looked = ledger_of(found).model_copy(update={"entries": (entry.model_copy(update={"interim": [3, 5]}),)})
    plain, wider = (drift_of(each, anchor_of(found)) for each in (ledger_of(found), looked))
    assert np.ptp(wider.chain) > 1.1 * np.ptp(plain.chain)
    assert plain.direct and wider.direct and np.ptp(wider.direct) > 1.1 * np.ptp(plain.direct)


def test_other_seeds_are_compared_unpaired(tmp_path, reference):
    found = add(reference, changed_experiment(tmp_path, seeds=[7, 8, 9, 10]))
    drift = drift_of(ledger_of(found), anchor_of(found))
    assert drift.direct_by == "unpaired seeds"
    from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

    left, right = list(anchor_of(found).values()), ledger_of(found).entries[0].levels
    expected = CompareMeans(DescrStatsW(right), DescrStatsW(left)).tconfint_diff(0.05, usevar="unequal")
    assert drift.direct == pytest.approx(expected) and welch_interval([1, 1], [2, 2], 0.9) == (1, 1)


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ({"shift": 0.1}, "the verdict is MISMATCH, but a ledger takes only matches"),
        ({"noise": 0.03}, "the verdict is INCONCLUSIVE, but a ledger takes only matches"),
        ({"steps": 60}, "steps is 60, but 40 in"),
        ({"arms": SECOND}, "policy.logprobs.impl is 'chunked', but 'logits' in"),
        (
            {"compare": {"claims": [{"metric": "train/grad_norm", "margin": 0.5}]}},
            "but the ledger tracks train/reward over",
        ),
        (
            {"compare": {"claims": [{"metric": "train/reward", "window": "all", "margin": 0.02}]}},
            "over steps 33-40, with a margin",
        ),
    ],
)
def test_what_is_no_link_of_the_chain_is_refused_in_a_line(tmp_path, reference, scenario, said, snapshot):
    before = reference.read_bytes()
    with refused(said) as error:
        add(reference, changed_experiment(tmp_path, **scenario))
    snapshot(error.value)
    assert reference.read_bytes() == before


def test_a_broken_chain_the_same_change_twice_and_what_was_claimed_later_are_refused(tmp_path, reference):
    first = changed_experiment(tmp_path)
    add(reference, first)
    with refused("compare the change with entry 1's treatment"):
        add(reference, changed_experiment(tmp_path, "again", FIRST, shift=0.001))
    second = changed_experiment(tmp_path, "second", SECOND)
    add(reference, second)
    edit(second / "experiment.json", lambda content: content.update(compare_sha256="0" * 64))
    with refused("post hoc: the comparison is not the one declared at launch"):
        add(reference, second)
    back = {"baseline": SECOND["other"], "back": SECOND["baseline"]}
    found = add(reference, changed_experiment(tmp_path, "back", back))  # a change may be taken back
    assert len(ledger_of(found).entries) == 3
    same = {"baseline": {"trainer.env": {"A": "/a"}}, "treatment": {"trainer.env": {"A": "/b"}}}
    # an absolute path is no part of what a reference keeps: the link stays as it is
    experiment, twice = changed_experiment(tmp_path, "same", same), tmp_path / "ref2.json"
    freeze(load_experiment(experiment), twice, "0.05")
    add(twice, experiment)
    with refused("is already entry 1, so nothing was added"):
        add(twice, experiment)


def test_what_moved_besides_is_said(tmp_path, reference, monkeypatch, snapshot):
    monkeypatch.setenv("COLUMNS", "200")
    first = changed_experiment(tmp_path)
    for run in first.glob("*/seed-*"):
        (run / "launch.json").write_text(json.dumps({"git": {"sha": "a" * 40}, "launches": []}))
    assert ledger_of(add(reference, first)).entries[0].moved == "commit unknown -> aaaaaaaaa"
    second = changed_experiment(tmp_path, "second", SECOND)
    for run in second.glob("*/seed-*"):
        (run / "launch.json").write_text(json.dumps({"git": {"sha": "a" * 40}, "launches": []}))
        edit(run / "environment.json", lambda content: content["versions"].update(torch="2.12.0"))
    moved = ledger_of(add(reference, second)).entries[1].moved
    assert f"not judged: {moved}" in " ".join(typed("show", str(reference)).output.split())
    snapshot(moved)


def test_chain_and_direct_comparison_that_exclude_each_other_are_said(tmp_path, reference, snapshot):
    add(reference, changed_experiment(tmp_path))
    moved = changed_experiment(tmp_path, "second", SECOND)
    for run in moved.glob("*/seed-*"):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["train/reward"] -= 0.1 * (row["step"] > 1)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = add(reference, moved)
    snapshot(drift_text(found, ledger_of(found)))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["ledger"]["entries"][0].update(difference=0.0),
        lambda content: content["ledger"]["entries"][1].update(tried=1, seeds=[5, 6, 7, 8, 9]),
        lambda content: content["ledger"]["entries"].pop(0),
        lambda content: content["ledger"].update(budget=0.5),
        lambda content: content["runs"][0].update(seed=17),
        lambda content: content["ledger"]["entries"][0].update(levels=[1.0]),
    ],
)
def test_an_edit_is_seen(tmp_path, reference, change, snapshot):
    add(reference, changed_experiment(tmp_path))
    add(reference, changed_experiment(tmp_path, "second", SECOND), tried=2)
    edit(reference, change)
    for read in (load_reference, lambda path: add(path, tmp_path / "first")):
        with pytest.raises(ComparisonError) as error:
            read(reference)
        snapshot(error.value)


@pytest.mark.parametrize("num", [30, ALL])
def test_each_field_with_another_value_is_read_or_refused(tmp_path: Path, reference: Path, num: int) -> None:
    add(reference, changed_experiment(tmp_path))
    second, plain = changed_experiment(tmp_path, "second", SECOND), tmp_path / "plain.json"
    freeze_arm(load_experiment(tmp_path / "anchor"), "baseline", plain)
    for path in (reference, plain):
        content = json.loads(path.read_text())
        for fields, value in mutations(content, num):
            path.write_text(json.dumps(with_value(content, fields, value)))
            with suppress(AbrunError):
                add(path, second)
            with suppress(AbrunError):
                render_reference(load_reference(path))
                compare_sources([str(second)], ReadingOptions(), reference=path)


def test_a_reference_without_a_ledger_reads_as_ever_and_gets_no_entry(tmp_path, reference):
    plain = tmp_path / "plain.json"
    freeze_arm(load_experiment(tmp_path / "anchor"), "baseline", plain)
    assert load_reference(plain).ledger is None and "ledger" not in read_json(plain)
    with pytest.raises(AbrunError, match="has no ledger"):
        add(plain, changed_experiment(tmp_path))
    shown = typed("show", str(plain))
    assert shown.exit_code == 0 and "5 seeds (0, 1, 2, 3, 4)" in shown.output
    assert "train/reward over last 20%, ±0.02" in shown.output and "no ledger" in shown.output


def test_a_freeze_does_not_overwrite_entries_and_budgets_are_checked(tmp_path, reference):
    anchor = load_experiment(tmp_path / "anchor")
    freeze(anchor, reference, "0.04")  # no entry yet
    add(reference, changed_experiment(tmp_path))
    with pytest.raises(ComparisonError, match=r"has a ledger \(entries: 1\)"):
        freeze(anchor, reference, "0.05")
    for budget in ("0", "-1", "nan", "much", "train/loss=0.1", ""):
        with refused("allowed: a number above 0 in units of the claim"):
            freeze(anchor, tmp_path / "other.json", budget)


def test_adds_at_once_are_one_after_the_other(tmp_path, reference):
    """Both read the file and judge before either writes, were it not for the lock: one finds the other's."""
    experiments = [changed_experiment(tmp_path), changed_experiment(tmp_path, "other", shift=0.001)]
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(add, reference, each) for each in experiments]
    errors = [str(end.exception()) for end in ends if end.exception()]
    assert len(errors) == 1 and "in entry 1's treatment" in errors[0]  # both changed the same link
    assert len(ledger_of(load_reference(reference)).entries) == 1


def test_a_file_that_another_holds_is_waited_for_and_then_refused(reference, tmp_path):
    with file_lock(reference), pytest.raises(LockedError, match="another process is changing it"):
        file_lock(reference, wait_s=0.2).__enter__()
    with file_lock(reference):
        pass
    assert not list(tmp_path.glob(".*lock"))


@pytest.mark.parametrize("chains", [24, pytest.param(120, marks=pytest.mark.slow)])
def test_the_drift_is_within_the_bound_as_often_as_stated(chains: int) -> None:
    rates = beyond(chains=chains, seed=1, length=10, step=0.004, noise=0.004)
    for label in ("the smaller", "chain alone"):
        share, bound = rates[label]
        assert share <= 0.05 and bound < 0.15


@pytest.mark.parametrize(
    ("pairs", "chains"),
    [(3, 12), (5, 12), *(pytest.param(pairs, 60, marks=pytest.mark.slow) for pairs in (3, 5, 8))],
)
def test_what_selection_adds_up_to_in_the_seeds_is_within_the_bound(pairs: int, chains: int) -> None:
    noise = 0.0054 * pairs**0.5
    rates = beyond(chains=chains, seed=1, length=10, step=0.012, noise=noise, runs="walk", pairs=pairs)
    assert rates["the smaller"][0] <= 0.07 and rates["last entry's tries"][0] > 0.15


@pytest.mark.slow
def test_without_the_correction_the_simulation_sees_it() -> None:
    rates = beyond(chains=30, seed=1, length=2, step=0.022, noise=0.012, runs="fresh")
    assert rates["chain alone, tries uncounted"][0] > 0.5 and rates["chain alone"][0] <= 0.05


def test_the_direct_bound_counts_the_tries_of_every_entry(tmp_path, reference):
    found = add(reference, changed_experiment(tmp_path, shift=0.004))
    (entry,) = ledger_of(found).entries
    first, last = (entry.model_copy(update={"tried": tried}) for tried in (6, 1))
    anchor = anchor_of(found)
    plain, tried = (
        drift_of(ledger_of(found).model_copy(update={"entries": entries}), anchor)
        for entries in ((last, last), (first, last))
    )
    assert plain.direct and tried.direct and np.ptp(tried.direct) > 1.5 * np.ptp(plain.direct)
    often = entry.model_copy(update={"tried": 1_000_000})
    hopeless = ledger_of(found).model_copy(update={"entries": (often,) * 60})
    drift = drift_of(hopeless, anchor)
    text = drift_text(found, hopeless)  # a level of no float at all
    assert (
        "bound by the chain" in text
        and "direct" not in text
        and np.isfinite([drift.bound, *drift.chain]).all()
    )
