"""Commands whose answers are those of a machine that has the trainer."""

import json
import shutil
from pathlib import Path

import pytest

from abrun.experiment.preflight.machine import find_gpus
from abrun.recipe.extras import installed_version
from abrun.recipe.implementations import BACKENDS, ENGINES, LOCAL_LAUNCHERS, scheduler_names
from abrun.report.doctor import KERNELS
from abrun.runs.rundir import RunDir
from tests.launch.test_local import SMALL
from tests.test_cli import Run, run
from tests.test_formats import Abrun, stored

__all__ = ["run", "stored"]


@pytest.mark.megatron
def test_a_dry_run_of_more_than_there_is_names_all_of_it_and_shows_the_plan(run: Run) -> None:
    changes = [
        "--set",
        "cluster.nodes=2",
        "--set",
        "arms.treatment.policy.backend={type: megatron, context_parallel: 2}",
        "--set",
        "arms.treatment.model={preset: null, path: /no/such/folder}",
    ]
    code, output, _ = run("launch", SMALL, "--dry-run", *changes)
    lines = output.splitlines()
    assert code == 2 and [line.split(": got ")[0] for line in lines[-3:-1]] == [  # of the model's folder
        "- arm treatment: model.path",
        "- arms baseline, treatment: cluster.nodes",
    ]
    assert ": 2 reasons" in lines[-1]
    assert lines[-4].startswith("Problems on this machine (") and lines[-4].endswith(")")
    assert any(line.split() == ["treatment", "policy.backend.type", "dtensor", "megatron"] for line in lines)


@pytest.mark.parametrize("stored", ["2026-11-24"], indirect=True)
def test_the_trainer_takes_a_record_of_an_earlier_version(stored: Path, abrun: Abrun) -> None:
    run = stored / "runs" / "own" / "treatment" / "seed-1"
    for path in run.iterdir():
        if path.name != "config.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, output, errors = abrun("launch", "own.yaml", "--resume", "--no-compare")
    assert code == 0, output + errors
    content = json.loads((run / "config.json").read_text())["config"]
    assert content["planted_fault"]["name"] == "stale_rollout_weights"  # by which its checkpoints know it
    assert RunDir(run).finished


def test_of_this_machine_as_a_table_and_for_machines(run: Run) -> None:
    code, output, _ = run("doctor", "--json")
    found = json.loads(output)
    assert code == 0 and found["versions"]["torch"] == installed_version("torch")
    parts = {(part["kind"], part["name"]): part["refusal"] for part in found["parts"]}
    kinds = {"policy.backend": BACKENDS, "rollout.engine": ENGINES, "policy.logprobs.impl": KERNELS}
    expected = {
        (kind, name)
        for kind, names in (kinds | {"launcher": (*LOCAL_LAUNCHERS, *scheduler_names())}).items()
        for name in names
    }
    assert expected | {("device", "cpu"), ("device", "cuda")} == parts.keys()
    can_train = installed_version("torch") is not None and installed_version("transformers") is not None
    assert (
        (parts["policy.backend", "dtensor"] is None)
        == (parts["rollout.engine", "torch"] is None)
        == can_train
    )
    assert (parts["device", "cuda"] is None) == (can_train and bool(find_gpus()))
