"""The budget of small runs: injected causes are found, and nothing else is blamed."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.recipe.implementations import ENGINES
from abrun.tools.logprob_diff.command import measure_run
from abrun.tools.logprob_diff.findings import Budget, ChangeResult
from tests.snapshot import Snapshot
from tests.tools.logprob_diff.conftest import LEARNING, Measure, scored_here
from tests.trainer.loop.runs import group, metrics_by_step, train_here
from tests.trainer.loop.test_implementations import verifier
from tests.written_runs import make_run, run_config

__all__ = ["group"]
PARITY = 1e-5


def inject(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "torch", f"tests.tools.logprob_diff.injected:{engine}")


def excess(budget: Budget) -> float:
    return budget.error.value - 1


def row(budget: Budget, key: str) -> ChangeResult:
    return next(each for each in budget.rows if each.key == key)


def assert_found(budget: Budget, key: str) -> None:
    """This change explains all of the error, with its interval above 0, and no other a tenth of it."""
    assert budget.cause == key
    found = row(budget, key)
    assert found.error is not None and found.error - 1 < max(PARITY, 1e-3 * excess(budget))
    assert found.lowers is not None and found.lowers.low is not None
    assert 0 < found.lowers.low < found.lowers.value <= excess(budget) * (1 + 1e-9)
    for other in budget.rows:
        if other.lowers is not None and other.key != key:
            assert other.lowers.value < 0.1 * excess(budget), other


def test_in_float32_there_is_nothing_to_explain(measure: Measure, snapshot: Snapshot) -> None:
    budget = measure("policy.logprobs.impl=chunked")
    assert budget.error.value <= 1 + PARITY and budget.cause is None
    same = ["again", "alone", "packed", "logprobs_logits", "engine_torch"]
    for key in same:
        found = row(budget, key)
        assert found.moves is not None and found.moves.value <= 1 + PARITY, key
    again, before = row(budget, "again"), row(budget, "weights_before")
    assert again.largest_factor == 1  # weights that were saved and read are the same to the last bit
    assert before.error is not None and before.error > 1.01  # while an update moves log-probs
    reasons = {each.key: each.reason for each in budget.rows if each.reason}
    snapshot(reasons["float32"])
    assert reasons["tensor_parallel_2"] == "one rank here"
    assert "vllm" in reasons["engine_vllm"].lower()


def test_stale_weights_are_found(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    inject("stale", monkeypatch)
    budget = measure()
    assert excess(budget) > 0.01
    assert_found(budget, "weights_before")


@pytest.mark.slow
def test_a_wrong_temperature_is_found(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    inject("untempered", monkeypatch)
    budget = measure("rollout.temperature=0.7")
    assert excess(budget) > 0.01
    assert_found(budget, "temperature_1")


@pytest.mark.slow
def test_a_temperature_that_the_user_thinks_of_is_found(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject("untempered", monkeypatch)
    budget = measure("rollout.temperature=0.7", sets=["rollout.temperature=0.9", "rollout.temperature=1.0"])
    assert budget.cause in ("temperature_1", "set_1")
    nearer = row(budget, "set_0")
    assert nearer.lowers is not None and 0.1 * excess(budget) < nearer.lowers.value < 0.95 * excess(budget)


@pytest.mark.slow
def test_a_head_in_float32_is_found(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    inject("Float32Head", monkeypatch)
    budget = measure("policy.dtype=bfloat16")
    assert excess(budget) > 1e-4
    found = row(budget, "head_float32")
    assert found.error is not None and found.error - 1 < 0.05 * excess(budget)
    assert found.lowers is not None and found.lowers.is_above_zero
    assert budget.cause == "head_float32"  # chunked log-probs have such a head, too


@pytest.mark.slow
def test_what_no_change_explains_has_no_cause(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    inject("Noisy", monkeypatch)
    budget = measure()
    assert excess(budget) == pytest.approx(0.01, rel=0.02)
    assert budget.cause is None


@pytest.mark.slow
def test_filters_that_are_not_scored_are_seen(measure: Measure) -> None:
    budget = measure("rollout.top_p=0.5")
    assert budget.error.value <= 1 + PARITY
    found = row(budget, "no_filters")
    assert found.moves is not None and found.moves.value > 1.05
    assert row(budget, "logprobs_chunked").reason == "min_p, top_k and top_p need whole logits"


@pytest.mark.slow
def test_the_sets_that_the_sampler_kept_are_no_part_of_the_engine_s_code(measure: Measure) -> None:
    """All score the recorded sets, the engine too, but where the user asks for other filters."""
    sets = ["rollout.exact_support=false", "rollout.top_p=0.3"]
    budget = measure("rollout.top_p=0.8", "policy.dtype=bfloat16", sets=sets)
    assert excess(budget) > 1e-4 and row(budget, "engine_torch").error == 1
    own, other = (row(budget, f"set_{index}").moves for index in range(2))
    assert own is not None and other is not None and 1 < own.value < 1.05 < other.value


@pytest.mark.slow
def test_experts_that_tokens_go_to(measure: Measure) -> None:
    budget = measure("model.preset=qwen3-moe-tiny", "policy.dtype=bfloat16")
    shares = {each.key: each.rerouted for each in budget.rows if each.rerouted}
    assert set(shares["again"]) == {0.0}
    assert 0 < sum(shares["float32"]) / len(shares["float32"]) < 0.5
    assert "engine_torch" not in shares


@pytest.mark.slow
def test_it_goes_on_as_the_run_did_with_a_floor(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "task=" + verifier(tmp_path)
    run = make_run(tmp_path / "run", run_config(*LEARNING, task, "steps=5", "policy.dtype=bfloat16"))
    recorded = {step: values["train/token_mult_prob_error"] for step, values in train_here(run).items()}
    torch.distributed.destroy_process_group()
    try:
        monkeypatch.setattr("abrun.tools.logprob_diff.command.run_probe", scored_here)
        budget, output = measure_run(str(run), tmp_path)
    finally:
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert budget.facts.step == 3
    assert [seen["step"] for seen in budget.facts.seen] == [4, 5]
    for seen in budget.facts.seen:
        assert seen["here"] == pytest.approx(recorded[int(seen["step"])], rel=0, abs=1e-15)
        assert seen["run"] == recorded[int(seen["step"])] > 1
    assert (budget.num_prompts, budget.num_sequences) == (12, 24)
    factors = [math.exp(abs(w["inference_logprob"] - w["trainer_logprob"])) for w in budget.facts.worst]
    assert factors == sorted(factors, reverse=True) and len(factors) == 10
    exact = row(budget, "float32")
    assert exact.moves is not None and 1.0001 < exact.moves.value < 1.05
    assert exact in budget.floor and len(budget.floor) == 2
    again = row(budget, "engine_torch")
    assert again.kind == "control" and again.error == 1  # it makes of them what it made as it drew them
    assert metrics_by_step(run).keys() == {1, 2, 3, 4, 5}  # nothing was added to the run
    assert sorted(path.name for path in output.iterdir()) == ["jobs", "mismatch.json"]
    content = json.loads((output / "mismatch.json").read_text())
    assert content["schema_version"] == 2 and content["error"]["value"] == budget.error.value


@pytest.mark.slow
def test_of_a_run_on_megatron(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    inject("stale", monkeypatch)
    budget = measure("policy.backend={type: megatron}")
    assert_found(budget, "weights_before")


@pytest.mark.slow
def test_processes_of_their_own(tmp_path: Path) -> None:
    """Two ranks, and probes as a user has them."""
    run = make_run(tmp_path / "run", run_config(*LEARNING, "policy.dtype=bfloat16"))
    budget, _ = measure_run(str(run), tmp_path, num_sequences=8)
    found = row(budget, "tensor_parallel_2")
    assert found.moves is not None and 1 < found.moves.value < 1.05
    assert budget.num_sequences == 8 < budget.facts.num_sequences_sampled
