"""Experiments that share GPUs: who gets which place, and what of one is packed."""

import tarfile
from pathlib import Path

import pytest

from abrun.recipe import OwnRunConfig, load_recipe
from tests.bench import bench_evidence
from tests.bench.bench_evidence import Asked, SharedPlaces, num_free, pack

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
    large, small = (SharedPlaces(places, gpus=2, rank=rank, needed=2 - rank) for rank in range(2))
    assert small.find(config(1)) == ("0",)
    small.take(("0",))
    assert large.find(config(2)) is None, "one GPU has no room for it"
    taken = ("1",)
    assert large.find(config(1)) == taken
    large.take(taken)
    assert [num_free(places, gpu) for gpu in range(2)] == [1, 0]
    assert small.find(config(2)) is None and small.find(config(1)) == ("0",)
    large.give_back(taken)
    assert small.find(config(2)) == ("0", "1")
    assert small.find(config(1)) == ("1",), "what was offered and not taken is free again"


def test_a_later_launch_waits_while_an_earlier_one_looks_for_a_place(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, later = (SharedPlaces(places, gpus=2, rank=rank, needed=1) for rank in range(2))
    assert earlier.find(config(1)) and later.find(config(1)) is None
    monkeypatch.setattr(bench_evidence, "YIELD_S", 0.0)
    assert later.find(config(1))


def test_an_archive_has_all_but_weights(tmp_path: Path) -> None:
    asked = Asked(name="demo", rank=0, gpus=0, work=tmp_path, model="", overrides=[])
    run = asked.directory / "baseline" / "seed-0"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("metrics.jsonl", "initial-sample.safetensors", "checkpoints/step-1/weights"):
        (run / name).write_text("...")
    assert pack(asked, tmp_path / "archives").startswith("smollm2-demo.tar.xz ")
    with tarfile.open(tmp_path / "archives" / "smollm2-demo.tar.xz") as packed:
        names = {member.name for member in packed if member.isfile()}
    assert names == {"smollm2-demo/baseline/seed-0/metrics.jsonl"}
