"""The estimate before a launch, against earlier runs and a clock that ticks by the second."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from abrun.experiment.plan import make_plan
from abrun.experiment.preflight.machine import Machine, cpu_name
from abrun.launch.budget import Budget, PlannedJob, estimate_budget, simulate_launch
from abrun.launch.local import Slots
from abrun.messages import sentence
from abrun.reasons import Code
from abrun.recipe.experiment import Recipe
from abrun.recipe.run import ClusterConfig, RunConfig
from tests.verdict.simulate import RECIPE, edit, write, write_experiment


def machine(*, gpus: int = 0, cores: int = 4) -> Machine:
    names = tuple(map(str, range(gpus)))
    return Machine(gpus=names, cores=cores, packages={}, ask_hub=lambda name: None)


def earlier(folder: Path, *, step_s: float = 2.0, **recipe: Any) -> Path:
    """An experiment of runs that began at 100, took steps of `step_s` from 110 on, and ended 5 s later."""
    directory = write_experiment(folder / "pilot", seeds=[0, 1], **recipe)
    for path in directory.glob("*/*/metrics.jsonl"):
        arm_step_s = step_s * (2 if "treatment" in str(path) else 1)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row |= {"time_s": 110 + arm_step_s * row["step"], "timing/train/total_step_time_s": arm_step_s}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        times = {"started_s": 100, "ended_s": 115 + arm_step_s * len(rows), "status": "finished"}
        write(path.parent / "attempts/0001.json", times)
        edit(path.parent / "environment.json", lambda content: content.update(devices=[cpu_name()]))
    return directory


def test_the_estimate_is_that_of_earlier_runs_of_the_same_configuration(tmp_path: Path) -> None:
    earlier(tmp_path, controls={})
    plan = make_plan(
        Recipe.model_validate({**RECIPE, "name": "new", "steps": 100, "controls": {}, "seeds": [3, 4, 5]})
    )
    budget = estimate_budget(plan, tmp_path, machine(cores=2))
    assert isinstance(budget, Budget)
    assert budget.paces["baseline"].step_s == pytest.approx(2) and budget.paces[
        "treatment"
    ].step_s == pytest.approx(4)
    # Two cores: 215 and 415 s begin together, then 215 at 215, 415 at 415, 215 at 430, 415 at 645.
    assert budget.wall_s == pytest.approx(1060) and budget.device_s == pytest.approx(2120)
    assert sentence(budget.reason) == (
        "about 18 min on this machine, 35 core-minutes for 6 runs, at 2 s a step and 10 s of start-up "
        f"(baseline); 4 s a step and 10 s of start-up (treatment), as measured in pilot on {cpu_name()}"
    )
    on_cluster = estimate_budget(plan, tmp_path, None)
    assert isinstance(on_cluster, Budget) and on_cluster.wall_s is None
    assert on_cluster.device_s == pytest.approx(3 * (215 + 415))


def test_other_configurations_and_devices_give_no_estimate(tmp_path: Path) -> None:
    directory = earlier(tmp_path, controls={})
    plan = make_plan(
        Recipe.model_validate({**RECIPE, "algorithm": {"type": "grpo", "group_size": 2}, "controls": {}})
    )
    assert estimate_budget(plan, tmp_path, machine()) == Code.NO_BUDGET()
    plan = make_plan(Recipe.model_validate({**RECIPE, "controls": {}}))
    assert estimate_budget(plan, tmp_path / "nowhere", machine()) == Code.NO_BUDGET()
    for path in directory.glob("*/*/environment.json"):
        edit(path, lambda content: content.update(devices=["another CPU"]))
    assert estimate_budget(plan, tmp_path, machine()) == Code.NO_BUDGET()


def test_a_new_treatment_is_taken_to_be_as_fast_as_the_baseline(tmp_path: Path) -> None:
    earlier(tmp_path, controls={})
    arms = {"baseline": {}, "treatment": {"policy.optimizer.learning_rate": 1e-3}}
    budget = estimate_budget(make_plan(Recipe.model_validate({**RECIPE, "arms": arms})), tmp_path, machine())
    assert isinstance(budget, Budget) and budget.without_runs == ("treatment",)
    assert "; no earlier run of treatment, taken to be as fast" in sentence(budget.reason)


class _Config(RunConfig):
    """A run's configuration with nothing but its devices."""


@pytest.mark.parametrize("seed", range(20))
def test_the_wall_time_is_that_of_a_clock(seed: int) -> None:
    """Start what fits at every second, in order and without overtaking, as the queue does."""
    random = Random(seed)
    on_gpus = seed % 2 == 0
    jobs = []
    for number in range(random.randint(1, 12)):
        count = random.randint(1, 3)
        cluster = ClusterConfig(gpus_per_node=count) if on_gpus else ClusterConfig(cpu_ranks=count)
        warm_start = f"warm{number}" if random.random() < 0.2 else None
        earlier_keys = [job.warm_start for job in jobs if job.warm_start]
        after = random.choice([None, *earlier_keys]) if warm_start is None else None
        jobs.append(PlannedJob(warm_start, after, _Config(steps=1, cluster=cluster), random.randint(1, 9)))
    computer = machine(gpus=3 if on_gpus else 0, cores=4)
    wall_s, num_devices = simulate_launch(jobs, Slots(computer))
    free, now, most = 3 if on_gpus else 4, 0, 0
    capacity = free
    ends: dict[int, float] = {}
    while len(ends) < len(jobs) or any(end > now for end in ends.values()):
        free = capacity - sum(jobs[i].config.devices_per_node for i, end in ends.items() if end > now)
        for index, job in enumerate(jobs):
            warm = next(
                (i for i, other in enumerate(jobs) if other.warm_start == job.after and job.after), None
            )
            if index in ends or (warm is not None and not (warm in ends and ends[warm] <= now)):
                continue
            if job.config.devices_per_node > free:
                break
            free -= job.config.devices_per_node
            ends[index] = now + job.seconds
        most = max(most, capacity - free)
        now += 1
    assert wall_s == max(ends.values())
    assert num_devices == most or (on_gpus and num_devices >= most)
