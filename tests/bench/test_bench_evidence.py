"""Experiments that share GPUs: who gets which place, and what of one is packed."""

import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import write_json
from abrun.verdict.verdict_file import as_json
from tests.bench import bench_evidence
from tests.bench.bench_evidence import SAMPLE, Asked, SharedPlaces, done_mark, num_free, run_all
from tests.verdict.verdicts import VERDICT

GPUS = ("2", "5")  # as CUDA_VISIBLE_DEVICES may name them
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def config(num_gpus: int) -> OwnRunConfig:
    found = load_recipe(RECIPE, [f"cluster.gpus_per_node={num_gpus}"]).run_config("baseline")
    assert isinstance(found, OwnRunConfig)
    return found


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Two GPUs with room for two runs each."""
    for gpu in range(2):
        for slot in range(2):
            (tmp_path / f"gpu-{gpu}-{slot:02d}").touch()
    return tmp_path


def test_runs_get_the_emptiest_gpu_and_all_that_they_need_of_it(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_evidence, "YIELD_S", 0.0)
    large, small = (SharedPlaces(places, gpus=GPUS, rank=rank, needed=2 - rank) for rank in range(2))
    assert small.find(config(1)) == GPUS[:1]
    small.take(GPUS[:1])
    assert large.find(config(2)) is None  # one GPU has no room for it
    taken = GPUS[1:]
    assert large.find(config(1)) == taken
    large.take(taken)
    assert [num_free(places, gpu) for gpu in range(2)] == [1, 0]
    assert small.find(config(2)) is None and small.find(config(1)) == GPUS[:1]
    large.give_back(taken)
    assert small.find(config(2)) == GPUS
    assert small.find(config(1)) == GPUS[1:]  # what was offered and not taken is free again


def test_a_later_launch_waits_while_an_earlier_one_looks_for_a_place(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, later = (SharedPlaces(places, gpus=GPUS, rank=rank, needed=1) for rank in range(2))
    assert earlier.find(config(1)) and later.find(config(1)) is None
    monkeypatch.setattr(bench_evidence, "YIELD_S", 0.0)
    assert later.find(config(1))


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
    command: str, verdict: str | None, done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(name="demo", rank=0, gpus=0, work=tmp_path, overrides=[])
    run = asked.directory / "baseline" / "seed-0"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("metrics.jsonl", "initial-sketch.safetensors", "checkpoints/step-1/weights"):
        (run / name).write_text("...")
    (run / "model.safetensors").write_bytes(bytes(SAMPLE + 1))
    if verdict is not None:
        judged = replace(VERDICT, verdict=verdict)
        write_json(asked.directory / "report" / "verdict.json", as_json(judged))
    monkeypatch.setattr(Asked, "command", ["sh", "-c", f"echo said; {command}"])
    run_all([asked], tmp_path / "archives", deadline=time.time() + 2)
    with tarfile.open(tmp_path / "archives" / "smollm2-demo.tar.xz") as packed:
        names = {member.name for member in packed if member.isfile()}
        log = packed.extractfile("demo.log")
        assert log is not None and log.read() == b"said\n"
    report = {"smollm2-demo/report/verdict.json"} if verdict else set[str]()
    of_run = {
        f"smollm2-demo/baseline/seed-0/{one}" for one in ("metrics.jsonl", "initial-sketch.safetensors")
    }
    assert names == {"demo.log"} | of_run | report
    assert done_mark(asked).exists() == done
