"""Runs that share GPUs, and what of an experiment is packed."""

import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.verdict.verdict_file import as_json
from tests.bench.bench_evidence import SAMPLE, Evidence, GpuSlots
from tests.verdict.verdicts import VERDICT

GPUS = ("2", "5")  # as CUDA_VISIBLE_DEVICES may name them
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def config(num_gpus: int) -> OwnRunConfig:
    found = load_recipe(RECIPE, [f"cluster.gpus_per_node={num_gpus}"]).run_config("baseline")
    assert isinstance(found, OwnRunConfig)
    return found


def test_runs_get_the_emptiest_gpu_and_all_that_they_need_of_it() -> None:
    slots = GpuSlots(GPUS, slots_per_gpu=3, needed=2)
    assert slots.find(config(2)) == GPUS and slots.find(config(1)) == GPUS[:1]
    slots.take(GPUS[:1])
    assert slots.find(config(2)) is None and slots.find(config(1)) == GPUS[1:]
    slots.take(GPUS[1:])
    assert slots.find(config(1)) is None
    slots.give_back(GPUS[:1])
    assert slots.find(config(1)) == GPUS[:1]


@pytest.mark.parametrize(
    ("command", "verdict", "done"),
    [
        ("exit 0", "MATCH", True),
        ("exit 0", "INVALID", False),  # a later call may end what was not finished
        ("exit 1", None, False),
        ("sleep 60", None, False),  # beyond the limit
    ],
)
def test_whatever_was_begun_is_packed_without_weights(
    command: str, verdict: str | None, done: bool, tmp_path: Path
) -> None:
    evidence = Evidence("demo", tmp_path, [])
    run = evidence.directory / "baseline" / "seed-0"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("metrics.jsonl", "initial-sketch.safetensors", "checkpoints/step-1/weights"):
        (run / name).write_text("...")
    (run / "model.safetensors").write_bytes(bytes(SAMPLE + 1))
    if verdict is not None:
        judged = replace(VERDICT, verdict=verdict)
        write_json(evidence.directory / "report" / "verdict.json", as_json(judged))
    evidence.run(["sh", "-c", f"echo said; {command}"], tmp_path / "archives", time.time() + 2)
    with tarfile.open(tmp_path / "archives" / "smollm2-demo.tar.xz") as packed:
        names = {member.name for member in packed if member.isfile()}
        log = packed.extractfile("demo.log")
        assert log is not None and log.read() == b"said\n"
    report = {"smollm2-demo/report/verdict.json"} if verdict else set[str]()
    of_run = {
        f"smollm2-demo/baseline/seed-0/{one}" for one in ("metrics.jsonl", "initial-sketch.safetensors")
    }
    assert names == {"demo.log"} | of_run | report
    assert evidence.done.exists() == done
