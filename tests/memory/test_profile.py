"""memory-profile on a CPU: what the fused path saves, where the peak is, and the refusals."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from abrun import store
from abrun.errors import LaunchError
from abrun.launch.command import environment
from abrun.launch.probe import _run as run_probe
from abrun.memory.profile import MemoryProfile, Peaks, measure_recipe
from abrun.processes import Popen, processes_of
from abrun.recipe import OwnRunConfig, load_recipe
from tests.train.runs import single_rank

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = load_recipe(RECIPES / "fused-logprobs-memory.yaml")
WITH_OLD_PASS = load_recipe(RECIPES / "fused-logprobs-memory.yaml", ["algorithm.ratio=old"])
VOCABULARY = 32_768


def measured_here(
    module: str, directory: Path, config: OwnRunConfig, job: dict[str, Any]
) -> list[dict[str, Any]]:
    """`probe` without the seconds that a process of its own takes to import; the slow tests have those."""
    from abrun.launch.probe import ROWS
    from abrun.memory.measure import _without_groups, measure
    from abrun.train.setup import make_setup

    assert module == "abrun.memory.measure"
    directory.mkdir(parents=True)
    with single_rank():
        setup = make_setup(_without_groups(config), 0, None, torch.device("cpu"))
        measure(setup, directory, **job)
    return store.read_lines(directory / ROWS)


def test_the_fused_arm_does_not_hold_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("abrun.memory.profile.probe", measured_here)
    profile = measure_recipe(WITH_OLD_PASS, tmp_path, lengths=[32, 256])
    peaks = {(p.arm, p.length): p for p in profile.peaks}
    assert list(peaks) == [("baseline", 32), ("treatment", 32), ("baseline", 256), ("treatment", 256)]
    grown = {
        (arm, phase): peaks[arm, 256].by_phase[phase] - peaks[arm, 32].by_phase[phase]
        for arm in RECIPE.arms
        for phase in ("logprobs", "forward_backward")
    }
    logits = (256 - 32) * VOCABULARY * 4
    assert grown["baseline", "logprobs"] >= logits and grown["baseline", "forward_backward"] >= 2 * logits
    assert grown["treatment", "logprobs"] < logits / 2 > grown["treatment", "forward_backward"]
    assert peaks["baseline", 256].highest == (
        "forward_backward",
        peaks["baseline", 256].by_phase["forward_backward"],
    )
    ratio = profile.ratio(peaks["treatment", 256])
    assert ratio is not None and ratio < 0.6
    assert profile.kind == "peak_live_tensor_bytes"
    written = json.loads((tmp_path / "peaks.json").read_text())
    assert [(p["arm"], p["length"]) for p in written["peaks"]] == list(peaks)
    assert written["peaks"][0]["by_phase"] == peaks["baseline", 32].by_phase
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert (tmp_path / "memory.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_dpo_is_measured_in_pairs(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "dpo-fused-logprobs.yaml")
    profile = measure_recipe(recipe, tmp_path, lengths=[16])
    assert profile.num_sequences == 2
    assert profile.peaks[0].by_phase.keys() == {"reference_logprobs", "forward_backward", "optimizer"}
    with pytest.raises(LaunchError, match=r"^--sequences: got 3 with .*'dpo', .* an even number"):
        measure_recipe(recipe, tmp_path, lengths=[16], num_sequences=3)


def test_a_length_that_ran_out_of_memory_has_no_ratio() -> None:
    fits = Peaks(arm="treatment", length=64, by_phase={"logprobs": 5, "optimizer": 7})
    out_of_memory = Peaks(
        arm="baseline", length=64, by_phase={"logprobs": 7}, out_of_memory="forward_backward"
    )
    longer = Peaks(arm="treatment", length=128, by_phase={"optimizer": 9})  # the baseline did not get there
    profile = MemoryProfile(name="x", num_sequences=1, kind="", peaks=[out_of_memory, fits, longer])
    assert out_of_memory.highest is None and profile.ratio(fits) is None and profile.ratio(longer) is None
    assert fits.highest == ("optimizer", 7)
    assert profile.table().row_count == 3


@pytest.mark.slow
def test_what_does_not_fit_the_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="sequences of 5000 tokens; this model takes 4096") as raised:
        measure_recipe(RECIPE, tmp_path, lengths=[5000])
    assert "\n" not in str(raised.value)


def test_what_is_not_built_is_refused_before_any_arm_is_measured(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "recipes" / "fused-logprobs-memory.yaml"
    recipe = load_recipe(path, ["arms.treatment.rollout={engine: vllm, devices: 1}", "cluster.nodes=2"])
    with pytest.raises(
        LaunchError, match=r"arms\.treatment: rollout\.devices: got 1 with cluster\.nodes 2, not built"
    ):
        measure_recipe(recipe, tmp_path, lengths=[32])
    assert not any(tmp_path.iterdir())


def test_gpus_that_are_not_here_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LaunchError, match=r"cluster: got 1 node\(s\) x 8 GPU\(s\)"):
        recipe = RECIPE.model_copy(update={"cluster": RECIPE.cluster.model_copy(update={"gpus_per_node": 8})})
        measure_recipe(recipe, tmp_path, lengths=[32])
    assert not any(tmp_path.iterdir())


def test_ctrl_c_asks_before_it_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tidied = tmp_path / "tidied"

    def pressed(process: Popen) -> int:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", pressed)
    config = load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart.yaml").run_config("baseline")
    script = f"trap 'touch {tidied}; exit' TERM; sleep 60 & touch {tmp_path / 'ready'}; wait"
    with pytest.raises(KeyboardInterrupt):
        run_probe(["sh", "-c", script], tmp_path, environment(tmp_path, [], config))
    assert tidied.exists() and not processes_of(tmp_path)
