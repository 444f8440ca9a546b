"""A budget's figures, and its report's, against plain loops over made-up scorings."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abrun.diagnose.logprob_diff.budget import Array
from abrun.diagnose.logprob_diff.findings import PARITY, Budget, Facts, Scored, budget_of
from abrun.diagnose.logprob_diff.report import markdown, write_report
from abrun.diagnose.logprob_diff.variations import Change, Scoring, changes_of, path_of
from abrun.runs.layout import RunName
from tests.train.runs import run_config

CONFIG = run_config("policy.dtype=bfloat16", "policy.logprobs.impl=chunked", "policy.packing=true")
LENGTHS = (7, 1, 12, 3, 9, 5, 2, 6, 11, 1, 4, 8)  # of sequences, two a prompt
SEQUENCES = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
POSITIONS = np.concatenate([np.arange(length) for length in LENGTHS])
N = len(SEQUENCES)
NOT_MEASURED = {"tensor_parallel_2": "one core here"}
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each test, whichever others have run in its process."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(5))


def off(logprobs: Array, by: float) -> Array:
    return logprobs + RNG.normal(0, by, N) if by else logprobs


def facts(**known: Any) -> Facts:
    settled: dict[str, Any] = {
        "run": "runs/x",
        "experiment": "x",
        "name": RunName(arm="baseline", seed=0),
        "step": 3,
        "grad_norm": 1.0,
        "engine": "torch",
        "dtype": "bfloat16",
        "spread": 1,
        "num_sequences_sampled": len(LENGTHS),
        "seen": [],
        "worst": [],
    }
    return Facts(**settled | known)


def made_up(
    inference: Array, own: Array, found: dict[str, Array], along: dict[str, Array], **known: Any
) -> Budget:
    """`found` by a change's key and `along` by a step's; the others make of tokens what the trainer does."""
    changes = []
    for change in changes_of(CONFIG, []):
        scored = Scored(logprobs=found.get(change.key, own))
        changes.append((change, NOT_MEASURED.get(change.key, scored) if change.scoring else None))
    path = [
        (step, None if step.scoring is None else Scored(logprobs=along.get(step.key, own)))
        for step in path_of(CONFIG)
    ]
    return budget_of(
        facts(**known),
        inference=inference,
        own=Scored(logprobs=own),
        sequences=SEQUENCES,
        prompts=SEQUENCES // 2,
        positions=POSITIONS,
        changes=changes,
        path=path,
    )


def of_loops(a: Array, b: Array) -> list[float]:
    return [math.exp(abs(x - y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def test_figures_and_tables_are_those_of_plain_loops() -> None:
    own = RNG.uniform(-9, -1e-3, N)
    shape, dense, head, exact = (off(own, by) for by in (0.0, 2e-3, 3e-2, 4e-2))
    in_float32, engine = off(exact, 1e-4), off(exact, 3e-2)
    inference = off(engine, 1e-2)
    found = {"padded": off(own, 1e-3), "head_float32": head, "float32": exact, "engine_torch": engine}
    found["weights_before"] = off(own, 0.5)
    along = {"shape": shape, "logprobs": dense, "head": head, "dtype": exact}
    along |= {"engine_float32": in_float32, "engine": engine}
    budget = made_up(inference, own, found, along)

    factors = of_loops(inference, own)
    assert budget.error.value == pytest.approx(mean(factors), rel=1e-14)
    assert (budget.num_tokens, budget.num_sequences, budget.num_prompts) == (N, 12, 6)
    for row in budget.rows:
        if row.error is None or row.lowers is None or row.moves is None:
            assert row.key in NOT_MEASURED or "vllm" in row.key
            continue
        then = found.get(row.key, own)
        moved = of_loops(own, then)
        assert row.error == pytest.approx(mean(of_loops(inference, then)), rel=1e-14), row.key
        assert row.lowers.value == pytest.approx(mean(factors) - row.error, abs=1e-14), row.key
        assert row.moves.value == pytest.approx(mean(moved), rel=1e-14), row.key
        assert row.largest_factor == pytest.approx(max(moved), rel=1e-14), row.key

    # Aumann-Shapley: a straight line from no difference to all of it, each step's part of the way.
    places = [own, shape, dense, head, exact, in_float32, engine, inference]
    assert len(budget.bars) == len(places) - 1
    whole = inference - own
    line = (np.arange(2_000) + 0.5) / 2_000
    slopes = np.sign(whole) * np.exp(np.abs(np.outer(line, whole))).mean(axis=0)
    for bar, (before, after) in zip(budget.bars, itertools.pairwise(places), strict=True):
        assert bar.adds.value == pytest.approx(float((slopes * (after - before)).mean()), abs=1e-8), bar.key
    assert math.fsum(bar.adds.value for bar in budget.bars) == pytest.approx(
        budget.error.value - 1, abs=1e-14
    )

    for number, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:number])
        (one,) = (each for each in budget.sequences if each.sequence == number)
        inside = factors[start : start + length]
        assert (one.prompt, one.num_tokens, one.largest) == (
            number // 2,
            length,
            pytest.approx(max(inside)),
        )
        assert one.mean == pytest.approx(mean(inside), rel=1e-14)
    assert [each.mean for each in budget.sequences] == sorted(
        (e.mean for e in budget.sequences), reverse=True
    )
    for bins, by in (
        (budget.positions, POSITIONS.tolist()),
        (budget.probabilities, np.exp((inference + own) / 2).tolist()),
    ):
        assert sum(each.num_tokens for each in bins) == N
        for each in bins:
            inside = [f for f, value in zip(factors, by, strict=True) if each.first <= value < each.last]
            assert (each.num_tokens, each.mean, each.largest) == (
                len(inside),
                pytest.approx(mean(inside)),
                max(inside),
            )
    assert [each.first for each in budget.positions] == [0, 1, 2, 4, 8]

    cells = [
        [cell.strip().replace("\\", "") for cell in line.strip("|").split("|")]
        for line in markdown(budget).splitlines()
        if line.startswith("|")
    ]
    shown = {line[0]: line[1:] for line in cells}
    for row in budget.rows:
        if row.error is None or row.lowers is None or row.moves is None:
            assert row.label not in shown
            continue
        line = shown.get(row.label) or shown[f"{row.label} *"]
        assert as_number(line[0]) == pytest.approx(row.error, abs=6e-5)
        assert as_number(line[1].split()[0]) == pytest.approx(row.lowers.value, rel=0.06)
        assert as_number(line[2]) == pytest.approx(row.moves.value, abs=6e-5)
    at = 1.0
    for bar in budget.bars:
        at += bar.adds.value
        assert as_number(shown[bar.label][1]) == pytest.approx(at, abs=6e-5), bar.label


def as_number(text: str) -> float:
    """1+2.0e-07 or 1.0203 or -0.1, as a report has it."""
    return 1 + float(text[2:]) if text.startswith("1+") else float(text)


@pytest.mark.parametrize("again", [0.0, 2e-7])
def test_at_parity_the_engine_is_not_said_to_differ_from_what_it_recorded(again: float) -> None:
    """Trainer and engine agree to the last bit; scored again beside other rows, the engine nearly does."""
    own = RNG.uniform(-9, -1e-3, N)
    engine = off(own, again)
    budget = made_up(own, own, {"engine_torch": engine}, {"engine": engine})
    assert budget.error.value == 1 and budget.cause is None and not budget.merged
    assert {bar.key for bar in budget.bars} >= {"engine_float32", "engine", "rest"}
    assert [bar.adds.value for bar in budget.bars] == [0.0] * len(budget.bars)


def test_an_engine_that_is_farther_from_what_it_recorded_is_one_bar() -> None:
    own = RNG.uniform(-9, -1e-3, N)
    inference, engine = off(own, 10 * PARITY), off(own, 1e-2)
    budget = made_up(inference, own, {}, {"engine": engine, "engine_float32": engine})
    assert budget.merged and not {bar.key for bar in budget.bars} & {"engine", "engine_float32"}
    assert budget.bars[-1].adds.value == pytest.approx(budget.error.value - 1, rel=1e-12)


def test_two_roundings_that_cancel_are_shown_to() -> None:
    """Either alone would make an error; together they leave a tenth. No one change is the cause of that."""
    own = RNG.uniform(-9, -1e-3, N)
    up = np.abs(RNG.normal(0, 1e-2, N))
    inference = own + 0.1 * up
    along = {"dtype": own + up, "engine_float32": own + up, "engine": inference}
    budget = made_up(inference, own, {"float32": own + up}, along)
    adds = {bar.key: bar.adds.value for bar in budget.bars}
    total = budget.error.value - 1
    assert budget.cause is None
    assert adds["dtype"] == pytest.approx(10 * total, rel=1e-9)
    assert adds["engine"] == pytest.approx(-9 * total, rel=1e-9)
    assert math.fsum(adds.values()) == pytest.approx(total, abs=1e-15)
    (exact,) = (row for row in budget.rows if row.key == "float32")
    assert exact.lowers is not None and exact.lowers.value == pytest.approx(-8 * total, rel=0.02)


@pytest.mark.slow
def test_one_token_of_one_sequence_has_a_budget(tmp_path: Path) -> None:
    one = np.array([-1.0])
    changes = [(change, None) for change in changes_of(CONFIG, [])]
    budget = budget_of(
        facts(num_sequences_sampled=1),
        inference=one,
        own=Scored(logprobs=one - 0.25),
        sequences=np.array([3]),
        prompts=np.array([1]),
        positions=np.array([0]),
        changes=changes,
        path=[(step, None) for step in path_of(CONFIG)],
    )
    assert budget.error.value == pytest.approx(math.exp(0.25)) and budget.error.low is None
    (bar,) = budget.bars
    assert bar.adds.value == pytest.approx(math.expm1(0.25), rel=1e-12)
    write_report(budget, tmp_path)
    assert (tmp_path / "waterfall.png").stat().st_size > 0


def test_a_cause_that_leaves_a_prompt_alone_is_named() -> None:
    """Resamples without that prompt have no spread but rounding, by which nothing may be divided."""
    own = RNG.uniform(-9, -1e-3, N)
    inference = own - np.where(SEQUENCES // 2 == 3, 0.0, 1e-3)
    budget = made_up(inference, own, {"head_float32": inference.copy()}, {})
    (row,) = [row for row in budget.rows if row.key == "head_float32"]
    assert row.lowers is not None and row.lowers.low is not None and row.lowers.high is not None
    assert 0 < row.lowers.low < row.lowers.value <= row.lowers.high < 1.001e-3
    assert budget.cause == "head_float32"
    ends = [end for bar in budget.bars for end in (bar.adds.low, bar.adds.high) if end is not None]
    assert max(map(abs, ends)) < 1.001e-3


@pytest.mark.parametrize(("invariant_takes_off", "cause"), [(0.0, None), (0.5, "engine_vllm_invariant")])
def test_an_engine_that_reproduces_itself_is_no_cause_of_itself(
    invariant_takes_off: float, cause: str | None
) -> None:
    """Scoring again it comes close to what it recorded; only what a change takes off beyond that counts."""
    inference = RNG.normal(-2, 1, N)
    noise = RNG.normal(0, 0.1, N)
    scoring = Scoring(method="vllm", config=CONFIG)
    own = Change(key="engine_vllm", label="vLLM", kind="control", scoring=scoring)
    other = Change(key="engine_vllm_invariant", label="invariant", kind="engine", scoring=scoring)
    changes = [
        (change, Scored(logprobs=inference + noise * (0.5 - at * invariant_takes_off)))
        for at, change in enumerate((own, other))
    ]
    budget = budget_of(
        facts(engine="vllm"),
        inference=inference,
        own=Scored(logprobs=inference + noise),
        sequences=SEQUENCES,
        prompts=SEQUENCES // 2,
        positions=POSITIONS,
        changes=changes,
        path=[(path_of(CONFIG)[-1], None)],
    )
    assert budget.cause == cause
