"""`auto` of a policy on a GPU: what was decided and measured, and what the runs then took."""

from pathlib import Path
from typing import Any

import pytest

import abrun
from abrun.launch.memory.profile import GIB
from abrun.recipe.experiment import CHECKPOINTING, MICRO_BATCH_TOKENS, load_recipe
from abrun.runs.experiment import open_experiment
from abrun.runs.metric_names import peak_memory_phase
from abrun.runs.rundir import RunDir
from abrun.tools.predict import probes
from abrun.tools.predict.auto import decide_values

pytestmark = pytest.mark.gpu
SMALL = Path(__file__).parents[2] / "launch" / "small.yaml"
COUNTER = "peak_allocated_bytes"
LARGE = {  # four microbatches a step, each of nearly its 16,384 tokens: 480 sequences of about 134
    "model": {"preset": "qwen2.5-1.5b"},
    "algorithm": {"type": "grpo", "prompts_per_step": 30, "group_size": 16},
    "rollout": {"max_new_tokens": 128},
    "policy": {
        "dtype": "bfloat16",
        "packing": True,
        "micro_batch_tokens": 16384,
        "activation_checkpointing": "auto",
    },
    "cluster": {"gpus_per_node": 1},
    "steps": 2,
    "compare": {"claims": []},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("memory", "value"), [("90GiB", "full"), ("h200", "none")])
def test_runs_take_what_was_predicted(memory: str, value: str, tmp_path: Path) -> None:
    done = abrun.launch(SMALL, overrides=LARGE, seeds=[0], device_memory=memory, runs_dir=tmp_path)
    assert done.exit_code == 0
    kept = open_experiment(tmp_path / "small")
    decided = kept["decided"][CHECKPOINTING]
    print(decided["why"])
    assert decided["value"] == value == kept["recipe"]["policy"]["activation_checkpointing"]
    chosen = decided["candidates"][-1]
    measured = chosen["measured"]
    assert measured["peak_bytes"] == pytest.approx(chosen["peaks"][measured["arm"]]["peak_bytes"], rel=0.1)
    for arm, predicted in chosen["peaks"].items():
        metrics = RunDir(tmp_path / "small" / arm / "seed-0").metrics()
        peaks = {peak_memory_phase(name, COUNTER): max(one.values) for name, one in metrics.items()}
        peaks = {phase: peak for phase, peak in peaks.items() if phase not in (None, "", "generation")}
        print(arm, {phase: round(peak / 2**30, 1) for phase, peak in peaks.items()}, predicted)
        assert max(peaks.values()) == pytest.approx(predicted["peak_bytes"], rel=0.1)


def test_what_runs_out_of_memory_is_measured_and_not_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Predictions that are far too low, and the allocator's limit: a step of 8,192 tokens takes 3.2 GiB on an
    H100, most of it three float32 copies of the logits."""

    def too_low(
        processes: Any, directory: Path, config: Any, job: dict[str, Any], *rest: Any
    ) -> list[dict[str, Any]]:
        if "lengths" not in job:
            return do_job(processes, directory, config, job, *rest)
        (length,), num_sequences = job["lengths"], job["num_sequences"]
        sizes = {"length": length, "num_sequences": num_sequences}
        return [{**sizes, "by_phase": {"x": {"x": 1}}, "vllm": None, "experts": False}]

    do_job: Any = probes.TracingProcesses.do_job
    monkeypatch.setattr(probes.TracingProcesses, "do_job", too_low)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = load_recipe(
        SMALL,
        [
            "model.shape={vocab_size: 32768, max_position_embeddings: 1024}",
            "rollout.max_new_tokens=128",
            "policy={packing: true, micro_batch_tokens: auto, dtype: bfloat16}",
            "cluster.gpus_per_node=1",
        ],
    )
    one = decide_values(recipe, "7GiB", is_local=True)[MICRO_BATCH_TOKENS]
    print(one["why"])
    *larger, small = (trial["measured"] for trial in one["candidates"])
    for large in larger:
        assert large["out_of_memory"] in ("forward", "backward") and large["peak_bytes"] <= 7 * GIB
    assert small["out_of_memory"] is None and one["value"] == 8192
    assert small["peak_bytes"] == pytest.approx(3.22 * GIB, rel=0.1)
