"""Predicted peaks against those of the same step, run for real on CPU cores, and against measured ones."""

import io
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import MixtralConfig
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import LaunchError, RecipeError
from abrun.launch.memory.profile import Point, SweepPlan, Variant, measure_recipe
from abrun.messages.codes import Code
from abrun.messages.records import encode_reasons
from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig, set_microbatch_size
from abrun.tools.predict import fake_device, probes
from abrun.tools.predict.interface import make_prediction_table
from abrun.tools.predict.peaks import (
    PeakPrediction,
    SweepPrediction,
    describe_predicted_memory,
    make_prediction,
    predict_recipe,
    resolve_device_memory,
)
from abrun.tools.predict.trace import trace
from abrun.trainer import backends
from abrun.trainer.backends.dtensor import fsdp
from abrun.trainer.loop.setup import make_setup
from abrun.trainer.memory.measure import make_random_batch
from abrun.trainer.models.weights import load_network
from abrun.trainer.rollout.vllm.startup import cache_bytes
from abrun.trainer.training import make_algorithm
from tests.snapshot import Snapshot
from tests.trainer.loop.runs import single_rank

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = RECIPES / "fused-logprobs-memory.yaml"
LENGTH, NUM_SEQUENCES = 192, 2  # of a microbatch
CHUNKED = "arms.baseline={policy.logprobs: {impl: chunked, chunk_size: 1024}}"
GIB = 2**30


def config_of(*sets: str) -> OwnRunConfig:
    config = load_recipe(RECIPE, ["algorithm.ratio=old", *sets]).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    return config


def seen_by_the_tracker(by_phase: dict[str, dict[str, int]]) -> dict[str, int]:
    """Bytes by phase without what it does not count: what a GPU's libraries take."""
    return {
        phase: sum(size for kind, size in kinds.items() if kind != fake_device.LIBRARIES)
        for phase, kinds in by_phase.items()
    }


def live(config: OwnRunConfig) -> dict[str, float]:
    """The tracker's peaks of a second step."""
    with single_rank():
        config = set_microbatch_size(config, NUM_SEQUENCES)
        setup = make_setup(config, 0, None, torch.device("cpu"))
        algorithm = make_algorithm(setup)
        for _ in range(2):
            setup.phases.collect()
            algorithm.update(make_random_batch(config, LENGTH, NUM_SEQUENCES, 90, setup.ranks.device), step=1)
        _, peaks = setup.phases.collect()
    return {key.split("/")[1]: value for key, value in peaks.items()}


@pytest.mark.parametrize(
    "sets",
    [
        [
            "policy.activation_checkpointing=full",
            "policy.packing=true",
            "policy.share_prompts=true",
            "policy.micro_batch_tokens=384",
        ],
        [CHUNKED, "policy.micro_batch_size=2", "algorithm.kl_coefficient=0.1"],
    ],
    ids=["dense, recomputed, packed, prompts shared", "chunked, microbatches, a reference"],
)
def test_a_real_step_has_the_predicted_peaks(sets: list[str]) -> None:
    config = config_of(*sets)
    (row,) = trace(config, [LENGTH], NUM_SEQUENCES)
    found = seen_by_the_tracker(row["by_phase"])
    assert found == pytest.approx(live(config), rel=0.01)


@pytest.mark.parametrize("impl", ["logits", "chunked"])
def test_states_in_bfloat16_are_predicted(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step whose weights, gradients and moments are in bfloat16, as abrun itself never has them."""
    config = config_of("policy.dtype=bfloat16", f"arms.baseline={{policy.logprobs.impl: {impl}}}")
    (row,) = trace(config, [LENGTH], NUM_SEQUENCES, "bfloat16")
    (usual,) = trace(config, [LENGTH], NUM_SEQUENCES)
    for kind in ("weights", "gradients", "optimizer state"):
        in_bfloat16, in_float32 = (one["by_phase"]["optimizer"][kind] for one in (row, usual))
        assert in_bfloat16 == pytest.approx(in_float32 / 2, rel=0.01)

    opened: Any = backends.open_network
    policy: Any = fsdp.MixedPrecisionPolicy
    monkeypatch.setattr(
        backends, "open_network", lambda *args, **more: opened(*args, **more).to(torch.bfloat16)
    )
    monkeypatch.setattr(
        fsdp,
        "MixedPrecisionPolicy",
        lambda **settings: policy(**settings | {"reduce_dtype": torch.bfloat16}),
    )
    assert seen_by_the_tracker(row["by_phase"]) == pytest.approx(live(config), rel=0.02)


def test_a_sweep_of_two_keys_leaves_room_for_the_kinds(snapshot: Snapshot) -> None:
    swept = (("model.path", "models/a-rather-long-folder/qwen3-0.6b"), ("policy.packing", True))
    kinds = {"optimizer": {"weights": 5 * GIB, "activations": 5 * GIB}}
    peaks = PeakPrediction(
        arm="baseline",
        point=Point(length=16_384, swept=swept),
        by_phase=kinds,
    )
    screen = io.StringIO()
    prediction = SweepPrediction(name="x", peaks=[peaks], device_bytes=80 * GIB, master_dtype="bfloat16")
    Console(file=screen, width=120).print(make_prediction_table(prediction), *prediction.notes())
    shown = screen.getvalue()
    assert "weights 5.0, activations 5.0" in shown and "…" not in shown
    assert "path models/a-rather-long-folder/qwen3-0.6b, packing True" in shown
    assert "states in bfloat16" in shown
    snapshot(shown)


@pytest.mark.parametrize(
    "sets",
    [["model={preset: qwen3-moe-tiny}"], ["algorithm={type: ppo}", "policy.packing=true"]],
    ids=["experts in float32", "a value model"],
)
def test_steps_that_are_predicted_less_well(sets: list[str]) -> None:
    """Too low by about a tenth: experts, which are not chosen alike, and a value model's backward pass."""
    config = load_recipe(RECIPE, sets).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    (row,) = trace(config, [LENGTH], NUM_SEQUENCES)
    assert seen_by_the_tracker(row["by_phase"]) == pytest.approx(live(config), rel=0.15)
    assert make_prediction("baseline", config, row, None).max_underestimate == 0.15


@pytest.mark.parametrize(
    ("sets", "too_low"),
    [
        (["model={path: MIXTRAL}"], 0.15),  # whose configuration has num_local_experts
        ([], 0.1),
    ],
)
def test_what_is_predicted_less_well_is_known_from_the_network(
    sets: list[str], too_low: float, tmp_path: Path
) -> None:
    small = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {
        "num_hidden_layers": 1,
        "vocab_size": 128,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    MixtralConfig.from_dict({**small, **heads}).save_pretrained(tmp_path)
    sets = [one.replace("MIXTRAL", str(tmp_path)) for one in sets]
    config = load_recipe(RECIPE, sets).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    (row,) = trace(config, [16], 1)
    assert make_prediction("baseline", config, row, None).max_underestimate == too_low


def plan(recipe: Any, lengths: list[int]) -> SweepPlan:
    return SweepPlan(name=recipe.name, variants=(Variant(recipe=recipe),), lengths=lengths)


def whole_passes(by_phase: dict[str, int]) -> dict[str, int]:
    """With forward and backward as the one phase that they are to a prediction."""
    of_passes = [by_phase[phase] for phase in ("forward", "backward")]
    rest = {phase: peak for phase, peak in by_phase.items() if phase not in ("forward", "backward")}
    return rest | {"forward_backward": max(of_passes)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    ["{}", "{tensor_parallel: 2}", "{tensor_parallel: 2, sequence_parallel: true}", "{context_parallel: 2}"],
)
def test_two_real_ranks_have_the_predicted_peaks(backend: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, [f"policy.backend={backend}", "cluster.cpu_ranks=2"])
    profile = measure_recipe(replace(plan(recipe, [LENGTH]), rollouts=False), tmp_path)
    measured = {cell.arm: whole_passes(cell.by_phase) for cell in profile.cells}
    for arm, by_phase in measured.items():
        config = recipe.run_config(arm)
        assert isinstance(config, OwnRunConfig)
        (row,) = trace(config, [LENGTH], 1)
        found = seen_by_the_tracker(row["by_phase"])
        print(arm, {phase: found[phase] / by_phase[phase] for phase in found})
        assert found == pytest.approx(by_phase, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "measured"),
    [
        ("baseline", {2048: (25.8, 29.7), 4096: (28.2, 30.8), 8192: (32.8, 38.2), 16384: (42.1, 52.8)}),
        ("treatment", {2048: (23.9, 29.7), 4096: (23.9, 29.7), 8192: (24.1, 30.0), 16384: (24.6, 31.2)}),
    ],
)
def test_peaks_measured_on_a_gpu_are_predicted(arm: str, measured: dict[int, tuple[float, float]]) -> None:
    """docs/measured.md, Peak memory: the log-prob pass, and forward and backward."""
    sets = [
        "model={preset: qwen2.5-1.5b, path: null}",
        *("policy.micro_batch_size=null", "policy.micro_batch_tokens=null", "policy.packing=false"),
        *("policy.share_prompts=false", "policy.compile=false", "policy.backend.keep_gathered=false"),
        *("policy.activation_checkpointing=full", "wandb=null"),
    ]
    path = RECIPES / "grpo-qwen2.5-1.5b-1n1g-fused-logprobs.yaml"
    config = load_recipe(path, [*sets, "task={type: arithmetic}"]).run_config(arm)
    assert isinstance(config, OwnRunConfig)
    for row in trace(config, sorted(measured), 1):
        peaks = {phase: sum(kinds.values()) / GIB for phase, kinds in row["by_phase"].items()}
        found = peaks["reference_logprobs"], peaks["forward_backward"]
        assert found == pytest.approx(measured[row["length"]], rel=0.01)


@pytest.mark.slow
def test_the_table_says_what_fits(tmp_path: Path) -> None:
    """The whole way, by a process an arm."""
    recipe = load_recipe(RECIPE)
    found = predict_recipe(plan(recipe, [512]), tmp_path, device_bytes=2**27)
    written = json.loads((tmp_path / "prediction.json").read_text())
    assert [(p["arm"], p["fits"]) for p in written["cells"]] == [(p.arm, found.fits(p)) for p in found.peaks]
    dense, fused = found.peaks
    assert dense.highest_peak[1] > fused.highest_peak[1] > 0
    kinds = fused.by_phase["optimizer"]
    assert kinds["gradients"] == pytest.approx(kinds["weights"], rel=1e-3)
    assert kinds["optimizer state"] == pytest.approx(2 * kinds["weights"], rel=1e-2)


def test_vllm_beside_the_trainer_takes_its_weights_and_cache_or_a_share() -> None:
    sets = ["model.preset=qwen2-tiny-128", "rollout={engine: vllm, max_new_tokens: 100}"]
    config = config_of(
        *sets, "algorithm.prompts_per_step=4", "algorithm.group_size=2", "cluster.gpus_per_node=1"
    )
    (row,) = trace(config, [16], 1)
    network = load_network(config.model, weights=None, seed=0)
    weights = sum(weight.nbytes for weight in network.parameters())  # float32, as the policy is
    cache = cache_bytes(config, 1, network.config)
    assert cache and row["vllm"] == {"weights": weights, "cache": cache}

    def engine_bytes(one: OwnRunConfig, device_bytes: int) -> int | None:
        return make_prediction("baseline", one, row, device_bytes).engine_bytes

    assert engine_bytes(config, GIB) == weights + cache
    assert engine_bytes(config, 3 * cache) == int(0.6 * 3 * cache)
    asked = config_of(*sets, "rollout.gpu_memory_utilization=0.3", "cluster.gpus_per_node=1")
    assert engine_bytes(asked, GIB) == int(0.3 * GIB)


def test_fits_knows_its_error() -> None:
    def shown(num_bytes: int) -> str:
        by_phase = {"optimizer": {"weights": num_bytes}}
        at = Point(length=8)
        peaks = PeakPrediction(arm="baseline", point=at, by_phase=by_phase)
        return SweepPrediction(name="x", peaks=[peaks], device_bytes=100).fits(peaks)

    assert [shown(size) for size in (89, 91, 101)] == ["yes", "barely", "no"]


def test_the_table_can_be_read_at_80_columns() -> None:
    kinds = (
        "weights",
        "optimizer state",
        "gathered weights",
        "log-probs",
        "gradients",
        "activations",
        "cuBLAS",
    )
    by_phase = {"forward_backward": {kind: (place + 1) << 20 for place, kind in enumerate(kinds)}}
    at = Point(length=16_384)
    peaks = PeakPrediction(arm="treatment", point=at, by_phase=by_phase)
    console = Console(width=80, file=io.StringIO())
    console.print(make_prediction_table(SweepPrediction(name="x", peaks=[peaks], device_bytes=None)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 x 16,384 tokens, treatment" in shown and "28.0" in shown
    heads = next(line for line in shown.splitlines() if "breakdown" in line)
    text = " ".join(line[heads.index("breakdown") :].strip() for line in shown.splitlines())
    assert all(f"{kind} {place + 1}.0" in text for place, kind in enumerate(kinds))


@pytest.mark.parametrize(
    ("asked", "found"),
    [("80GiB", 80 * GIB), ("1.5 GiB", 3 * GIB // 2), ("80GB", 80 * 10**9), ("H200", 143_771 * 2**20)],
)
def test_memory_of_a_device(asked: str, found: int) -> None:
    assert resolve_device_memory(asked) == found


def test_a_dry_run_leaves_no_arm_out(snapshot: Snapshot) -> None:
    """Neither one that fits nor one that is not predicted: silence would read as if it fitted."""
    arms = "arms={baseline: {}, megatron: {policy.backend.type: megatron}}"
    recipe = load_recipe(RECIPE, [arms, "cluster.gpus_per_node=1"])
    fits, other = sorted(describe_predicted_memory(recipe, 80 * GIB), reverse=True, key=len)
    size = re.match(r"arms.baseline: .* micro-batches of \d+ x ([\d,]+) tokens", fits)
    assert size and fits.endswith("device memory 80.0 GiB")
    rollout = recipe.run_config("baseline").rollout  # pyright: ignore[reportAttributeAccessIssue]
    assert int(size[1].replace(",", "")) > rollout.max_new_tokens  # prompts are part of a sequence
    snapshot(other)
    on_cores = load_recipe(RECIPE)
    assert all("it trains on CPU cores" in line for line in describe_predicted_memory(on_cores, 80 * GIB))


SERVER = """
import os, sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

class Hollow:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch", "abrun.trainer", "abrun.tools.predict.fake_device")):
            return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return MagicMock(__path__=[])
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Hollow())
from abrun.tools.predict import trace
trace.answer = lambda directory: ANSWER
trace.run_to_end(trace.main)
"""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], int]:
    """Has the process that forks answer by an expression, without the seconds of importing the trainer."""
    monkeypatch.setattr(probes, "TRACE", "hollow_server")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "hollow_server.py"
    return lambda answer: script.write_text(SERVER.replace("ANSWER", answer))


def test_a_dry_run_without_the_model_is_still_a_plan(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[[str], int], snapshot: Snapshot
) -> None:
    """A hub's model where there is no network: said in one line, with what to do. A crash is none."""
    monkeypatch.setattr(probes, "hub_refusal", lambda name: None)  # only its trainer can tell
    why = "model.path: got 'nobody/nothing': no network; give a folder"
    line = json.dumps(encode_reasons(Code.FOREIGN_TEXT(text=why)))
    recipe = load_recipe(RECIPE, ["model={path: nobody/nothing}", "cluster.gpus_per_node=1"])
    serve(f"print({line!r}) or 2")
    (said,) = describe_predicted_memory(recipe, 80 * GIB)
    snapshot(said)
    for crash in ("0\n1 / 0", "1 / 0", "os.abort()"):  # of the process that forks, and of its forks
        serve(crash)
        with pytest.raises(LaunchError) as refusal:
            describe_predicted_memory(recipe, 80 * GIB)
        assert refusal.value.code is Code.PROBE_FAILED


def test_a_process_that_was_killed_between_questions_is_started_again(
    tmp_path: Path, serve: Callable[[str], int]
) -> None:
    config: Any = load_recipe(RECIPE).run_config("baseline")
    serve("trace.open_row_writer(directory).write({'longest': 7}) or 0")
    with probes.TracingProcesses(tmp_path) as processes:
        answers = []
        for question in ("first", "second"):
            answers.append(processes.do_job(tmp_path / question, config, probes.LONGEST_OF_RUN))
            for process, _ in processes._servers.values():
                process.kill()
                process.wait()
    assert answers == [[{"longest": 7}]] * 2


def test_a_model_that_is_not_here_is_not_asked_for_by_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, snapshot: Snapshot
) -> None:
    monkeypatch.setattr(probes, "hub_refusal", lambda name: "the hub sleeps")
    recipe: Any = load_recipe(RECIPE, ["model={path: nobody/nothing}"])
    with snapshot.refused(LaunchError):
        predict_recipe(plan(recipe, [64]), tmp_path)


@pytest.mark.parametrize("asked", ["h300", "0GiB", "-1", "80 TB", ""])
def test_memory_of_no_device(asked: str, snapshot: Snapshot) -> None:
    with snapshot.refused(RecipeError):
        resolve_device_memory(asked)


def test_brackets_in_what_is_said_of_memory_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "no peak: pip install 'abrun[triton]'"
    monkeypatch.setattr("abrun.tools.predict.interface.describe_predicted_memory", lambda *_, **__: [said])
    printed = CliRunner().invoke(app, ["launch", str(RECIPE), "--dry-run", "--device-memory", "80GiB"]).output
    assert f"Memory: {said}" in printed


def test_lengths_that_the_model_does_not_take(snapshot: Snapshot) -> None:
    config = load_recipe(RECIPE).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    with snapshot.refused(RecipeError):
        next(trace(config, [64, 5000], 1))


def test_another_backend_is_refused(tmp_path: Path, snapshot: Snapshot) -> None:
    recipe: Any = load_recipe(RECIPE, ["policy.backend.type=megatron"])
    with snapshot.refused(LaunchError):
        predict_recipe(plan(recipe, [64]), tmp_path)


def test_an_arm_that_cannot_be_predicted_leaves_the_other_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    def probed(_: Any, directory: Path, *__: Any) -> list[dict[str, Any]]:
        if directory.name.endswith("treatment"):
            raise LaunchError("no such kernel")
        phases = {"forward_backward": {"weights": 2**20}}
        return [{"length": 64, "num_sequences": 1, "by_phase": phases, "vllm": None, "experts": False}]

    monkeypatch.setattr(probes.TracingProcesses, "do_job", probed)
    command = ["memory-profile", str(RECIPE), "--predict", "--lengths", "64", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, LaunchError)
    assert str(result.exception) == "arms.treatment: not predicted: no such kernel"
    assert "1 x 64 tokens, baseline" in result.output and "treatment" not in result.output
    snapshot(result.output)
    written = json.loads((tmp_path / "prediction.json").read_text())
    assert [cell["arm"] for cell in written["cells"]] == ["baseline"]
    assert written["not_predicted"] == {"treatment": "no such kernel"}
