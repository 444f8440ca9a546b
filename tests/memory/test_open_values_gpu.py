"""`policy.activation_checkpointing: auto` on a GPU: what was decided, and what the runs then took."""

from pathlib import Path

import pytest

import abrun
from abrun import store
from abrun.metric_names import phase_of
from abrun.recipe import CHECKPOINTING

pytestmark = pytest.mark.gpu
SMALL = Path(__file__).parents[1] / "launch" / "small.yaml"
COUNTER = "peak_allocated_bytes"
LARGE = {  # microbatches of 16,384 tokens, several a step
    "model": {"preset": "qwen2.5-1.5b"},
    "algorithm": {"type": "grpo", "prompts_per_step": 32, "group_size": 16},
    "rollout": {"max_new_tokens": 128},
    "policy": {
        "dtype": "bfloat16",
        "packing": True,
        "micro_batch_tokens": 16384,
        "activation_checkpointing": "auto",
    },
    "cluster": {"gpus_per_node": 1},
    "steps": 2,
    "compare": {"primary": []},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("memory", "value"), [("90GiB", "full"), ("h200", "none")])
def test_runs_take_what_was_predicted(memory: str, value: str, tmp_path: Path) -> None:
    done = abrun.launch(SMALL, overrides=LARGE, seeds=[0], device_memory=memory, runs_dir=tmp_path)
    assert done.exit_code == 0
    kept = store.open_experiment(tmp_path / "small")
    decided = kept["decided"][CHECKPOINTING]
    print(decided["why"])
    assert decided["value"] == value == kept["recipe"]["policy"]["activation_checkpointing"]
    for arm, predicted in decided["candidates"][-1]["peaks"].items():
        metrics = store.RunDir(tmp_path / "small" / arm / "seed-0").metrics()
        peaks = {phase_of(name, COUNTER): max(one.values) for name, one in metrics.items()}
        peaks = {phase: peak for phase, peak in peaks.items() if phase not in (None, "", "generation")}
        print(arm, {phase: round(peak / 2**30, 1) for phase, peak in peaks.items()}, predicted)
        assert max(peaks.values()) == pytest.approx(predicted["peak_bytes"], rel=0.1)
