"""Runs that one vLLM engine serves, one after the other, record what runs with engines of their own record.

`pytest -m gpu -s tests/trainer/launched/test_hosts_vllm.py` prints seconds to the first step.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from abrun.experiment.plan import make_plan
from abrun.launch import hosts
from abrun.recipe.experiment import load_recipe
from abrun.runs.experiment import read_run_state
from tests.bench.launches import first_difference, run_seconds
from tests.launch.fakes import run_to_end
from tests.trainer.rollout.vllm_sampling import PRESET, needs_vllm, with_vllm

SMALL = Path(__file__).parents[2] / "launch" / "small.yaml"
SETTINGS = (
    "rollout={engine: vllm, max_new_tokens: 12}",
    "validation={every: 2, num_prompts: 4}",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "algorithm.entropy_coefficient=0.05",  # gradients that are not 0, whatever the rewards
    "arms={baseline: {}, treatment: {policy.optimizer.learning_rate: 1.0e-2}}",
    "compare.claims=[]",
    "seeds=[0, 1]",
)
ON_GPU = ("cluster.gpus_per_node=1", "policy.dtype=bfloat16", "rollout.max_new_tokens=128")
# Not compiled: torch tunes a compiled policy anew where vLLM is imported, which changes its rounding.
LARGE = ("model.preset=qwen2.5-1.5b",)


def train(runs_dir: Path, *overrides: str, num_runs: int, jobs: int | None = 1) -> Path:
    """Launch the first runs of the recipe, which must finish; return the experiment's directory."""
    plan = make_plan(load_recipe(SMALL, [*SETTINGS, *overrides]))
    plan = replace(plan, runs=plan.runs[:num_runs])
    outcome = run_to_end(plan, runs_dir, jobs=jobs)
    states = [read_run_state(runs_dir / "small", run.name) for run in plan.runs]
    assert outcome.exit_code == 0, states
    return runs_dir / "small"


def logs(experiment: Path) -> Iterator[str]:
    for path in experiment.glob("*/*/stdout.log"):
        yield path.read_text()


def check(tmp_path: Path, *overrides: str, num_runs: int = 3, jobs: int | None = 1) -> None:
    served = train(tmp_path / "served", *overrides, num_runs=num_runs, jobs=jobs)
    assert not any("engine in this process" in log for log in logs(served))
    assert len([*served.glob("*/*/engine-0.log")]) == num_runs
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hosts, "engine_settings", lambda config: None)
        alone = train(tmp_path / "alone", *overrides, num_runs=num_runs, jobs=jobs)
    assert not [*alone.glob("*/*/engine-0.log")]
    for experiment in (served, alone):
        first_steps = [run.first_step_s or 0.0 for run in run_seconds(experiment)]
        print(f"{experiment.parent.name}: seconds to the first step: {[f'{s:.1f}' for s in first_steps]}")
    for run in sorted(served.glob("*/seed-*")):
        assert first_difference(run, alone / run.relative_to(served)) is None, run


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.temperature=0.8", "rollout.top_p=0.9", "rollout.exact_support=false"),
        ("cluster.cpu_ranks=2",),
    ],
    ids=["filters", "two ranks"],
)
@pytest.mark.parametrize("mark", [pytest.param("", marks=needs_vllm)])
def test_on_cpu_cores_metrics_are_equal_bit_for_bit(
    mark: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    check(tmp_path, f"model.preset={PRESET}", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [LARGE, (*LARGE, "policy.logprobs.head_dtype=float32"), (f"model.preset={PRESET}",)],
    ids=["1.5b", "fp32 head", "tiny"],
)
@pytest.mark.parametrize("mark", [pytest.param("", marks=[pytest.mark.gpu, *with_vllm])])
def test_on_a_gpu_metrics_are_equal_bit_for_bit(
    mark: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    check(tmp_path, *ON_GPU, *overrides)


@pytest.mark.parametrize("mark", [pytest.param("", marks=[pytest.mark.gpu, *with_vllm])])
def test_runs_that_share_a_gpu_have_hosts_each(mark: str, tmp_path: Path) -> None:
    overrides = (f"model.preset={PRESET}", "cluster.runs_per_gpu=2")
    check(tmp_path, *ON_GPU, *overrides, num_runs=4, jobs=None)
