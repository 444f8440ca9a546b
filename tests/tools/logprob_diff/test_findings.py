"""A budget's figures, and its report's, against plain loops over made-up scorings."""

import math
from typing import Any

import numpy as np
import pytest

from abrun.report.present.terminal import terminal
from abrun.runs.layout import RunName
from abrun.tools.logprob_diff.budget import Array
from abrun.tools.logprob_diff.findings import Budget, MeasuredRun, Scored, budget_of
from abrun.tools.logprob_diff.report import changes_table, summary
from abrun.tools.logprob_diff.variations import Scoring, Variation, variations_of
from tests.written_runs import run_config

CONFIG = run_config("policy.dtype=bfloat16", "policy.logprobs.impl=chunked", "policy.packing=true")
LENGTHS = (7, 1, 12, 3, 9, 5, 2, 6, 11, 1, 4, 8)  # of sequences, two a prompt
SEQUENCES = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
N = len(SEQUENCES)
NOT_MEASURED = {"tensor_parallel_2": "one core here"}
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each test, whichever others have run in its process."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(5))


def off(logprobs: Array, by: float) -> Array:
    return logprobs + RNG.normal(0, by, N) if by else logprobs


def facts(**known: Any) -> MeasuredRun:
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
    return MeasuredRun(**settled | known)


def made_up(inference: Array, own: Array, found: dict[str, Array], **known: Any) -> Budget:
    """`found` by a change's key; the others make of tokens what the trainer does."""
    changes = []
    for change in variations_of(CONFIG, []):
        scored = Scored(logprobs=found.get(change.key, own))
        changes.append((change, NOT_MEASURED.get(change.key, scored) if change.scoring else None))
    return budget_of(
        facts(**known),
        inference=inference,
        trainer=Scored(logprobs=own),
        sequences=SEQUENCES,
        prompts=SEQUENCES // 2,
        changes=changes,
    )


def of_loops(a: Array, b: Array) -> list[float]:
    return [math.exp(abs(x - y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def test_figures_and_tables_are_those_of_plain_loops() -> None:
    own = RNG.uniform(-9, -1e-3, N)
    head, exact, engine = (off(own, by) for by in (3e-2, 4e-2, 3e-2))
    inference = off(engine, 1e-2)
    found = {"padded": off(own, 1e-3), "head_float32": head, "float32": exact, "engine_torch": engine}
    found["weights_before"] = off(own, 0.5)
    budget = made_up(inference, own, found)

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

    shown = {str(label): [*map(str, cells)] for label, *cells in changes_table(budget).rows}
    for row in budget.rows:
        if row.error is None or row.lowers is None or row.moves is None:
            assert row.label not in shown
            continue
        line = shown.get(row.label) or shown[f"{row.label} *"]
        assert as_number(line[0]) == pytest.approx(row.error, abs=6e-5)
        assert as_number(line[1].split()[0]) == pytest.approx(row.lowers.value, rel=0.06)
        assert as_number(line[2]) == pytest.approx(row.moves.value, abs=6e-5)


def as_number(text: str) -> float:
    """1+2.0e-07 or 1.0203 or -0.1, as a report has it."""
    return 1 + float(text[2:]) if text.startswith("1+") else float(text)


def test_two_roundings_that_cancel_have_no_cause() -> None:
    """Either alone would make an error; together they leave a tenth."""
    own = RNG.uniform(-9, -1e-3, N)
    up = np.abs(RNG.normal(0, 1e-2, N))
    budget = made_up(own + 0.1 * up, own, {"float32": own + up})
    assert budget.cause is None
    (exact,) = (row for row in budget.rows if row.key == "float32")
    assert exact.lowers is not None
    assert exact.lowers.value == pytest.approx(-8 * (budget.error.value - 1), rel=0.02)


def test_one_token_of_one_sequence_has_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    one = np.array([-1.0])
    changes = [(change, None) for change in variations_of(CONFIG, [])]
    budget = budget_of(
        facts(num_sequences_sampled=1),
        inference=one,
        trainer=Scored(logprobs=one - 0.25),
        sequences=np.array([3]),
        prompts=np.array([1]),
        changes=changes,
    )
    assert budget.error.value == pytest.approx(math.exp(0.25)) and budget.error.low is None
    terminal().print(summary(budget))
    assert "No intervals: 1 prompts" in capsys.readouterr().out


def test_a_cause_that_leaves_a_prompt_alone_is_named() -> None:
    own = RNG.uniform(-9, -1e-3, N)
    inference = own - np.where(SEQUENCES // 2 == 3, 0.0, 1e-3)
    budget = made_up(inference, own, {"head_float32": inference.copy()})
    (row,) = [row for row in budget.rows if row.key == "head_float32"]
    assert row.lowers is not None and row.lowers.low is not None and row.lowers.high is not None
    assert 0 < row.lowers.low < row.lowers.value <= row.lowers.high < 1.001e-3
    assert budget.cause == "head_float32"


@pytest.mark.parametrize(("invariant_takes_off", "cause"), [(0.0, None), (0.5, "engine_vllm_invariant")])
def test_an_engine_that_reproduces_itself_is_no_cause_of_itself(
    invariant_takes_off: float, cause: str | None
) -> None:
    """Scoring again it comes close to what it recorded; only what a change takes off beyond that counts."""
    inference = RNG.normal(-2, 1, N)
    noise = RNG.normal(0, 0.1, N)
    scoring = Scoring(method="vllm", config=CONFIG)
    own = Variation(key="engine_vllm", label="vLLM", kind="control", scoring=scoring)
    other = Variation(key="engine_vllm_invariant", label="invariant", kind="engine", scoring=scoring)
    changes = [
        (change, Scored(logprobs=inference + noise * (0.5 - at * invariant_takes_off)))
        for at, change in enumerate((own, other))
    ]
    budget = budget_of(
        facts(engine="vllm"),
        inference=inference,
        trainer=Scored(logprobs=inference + noise),
        sequences=SEQUENCES,
        prompts=SEQUENCES // 2,
        changes=changes,
    )
    assert budget.cause == cause
