"""memory-profile on a CPU: what the fused path saves, where the peak is, how far arms go, refusals."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from abrun.errors import LaunchError, RecipeError, StoreError
from abrun.experiment.command import run_environment
from abrun.experiment.probe import _run_command, is_never_cancelled
from abrun.launch.memory.profile import (
    Cell,
    MemoryProfile,
    Point,
    SizeLimit,
    SweepPlan,
    Variant,
    expand_sweep,
    format_progress,
    measure_recipe,
)
from abrun.launch.memory.show import describe_files, make_tables
from abrun.processes import find_run_processes
from abrun.recipe.experiment import ExperimentDeclaration, load_recipe
from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict.peaks import predict_recipe
from tests.snapshot import Snapshot
from tests.trainer.loop.runs import single_rank

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = RECIPES / "fused-logprobs-memory.yaml"
VOCABULARY, WIDE = 8192, 32_768  # the second the recipe's own
QUICK = (
    f"model.shape.vocab_size={VOCABULARY}",
    "arms.treatment={policy.logprobs.impl: chunked, policy.logprobs.chunk_size: 1024}",
)
RECIPE = load_recipe(SMALL, QUICK)


def measured_here(
    module: str, directory: Path, config: OwnRunConfig, job: dict[str, Any], control: object
) -> list[dict[str, Any]]:
    """Replace `run_probe` without a separate process, which takes seconds to import torch."""
    from abrun.trainer.memory.measure import Measurement

    assert config.cluster.ranks == 1
    cpu = torch.device("cpu")
    with single_rank():
        row = Measurement(config, cpu, directory, **job).measure()
    return [json.loads(json.dumps(row))]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("abrun.launch.memory.profile.run_probe", measured_here)
    # Fewer tokens than the measured step has, as on a GPU
    monkeypatch.setattr("abrun.trainer.memory.measure.WARM_UP_TOKENS", 16)


def plan(recipe: ExperimentDeclaration = RECIPE, **options: Any) -> SweepPlan:
    return SweepPlan(name=recipe.name, variants=[Variant(recipe=recipe)], rollouts=False, **options)


def test_the_fused_arm_does_not_hold_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("abrun.launch.memory.profile.run_probe", measured_here)
    said: list[str] = []
    with_old_pass = load_recipe(SMALL, ["algorithm.ratio=old"])  # a pass for the log-probs of old
    profile = measure_recipe(plan(with_old_pass, lengths=[32, 256]), tmp_path, said.append)
    cells = {(cell.arm, cell.point.length): cell for cell in profile.cells}
    assert list(cells) == [("baseline", 32), ("treatment", 32), ("baseline", 256), ("treatment", 256)]
    grown = {
        (arm, phase): cells[arm, 256].by_phase[phase] - cells[arm, 32].by_phase[phase]
        for arm in RECIPE.arms
        for phase in ("logprobs", "forward", "backward")
    }
    logits = (256 - 32) * WIDE * 4
    assert grown["baseline", "logprobs"] >= logits and grown["baseline", "forward"] >= logits
    assert max(grown["treatment", phase] for phase in ("logprobs", "forward", "backward")) < logits / 2
    dense, fused = cells["baseline", 256], cells["treatment", 256]
    # The exponentials of the logits, their gradient, and the one-hot gradient; short steps peak elsewhere.
    held = sum(dense.held.values()) + dense.held["weights"]  # and what FSDP has gathered
    assert 3 <= (dense.by_phase["backward"] - held) / (255 * WIDE * 4) < 3.3
    assert dense.fitting_peak == ("backward", dense.by_phase["backward"])
    ratio = profile.ratio(fused)
    assert ratio is not None and ratio < 0.62
    weights = 4 * sum(parameter.numel() for parameter in some_network(with_old_pass).parameters())
    assert dense.held["weights"] == weights
    assert 2 * weights <= dense.held["optimizer_state"] <= 2 * weights + 4 * 1000  # two moments, and counters
    assert profile.counter == "peak_live_tensor_bytes" and "live tensors" in make_tables(profile)[0].title
    assert [line.split(":")[0] for line in said] == [
        f"[{n}/4] {arm}, {length} tokens" for n, (arm, length) in enumerate(cells, 1)
    ]
    check_peak(dense, "abrun/trainer/kernels/logits.py", at_least=255 * WIDE * 4)
    check_files(tmp_path, profile)


def test_two_profiles_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    """The second would end the first one's processes, whose folders are its own, and mix its cells in."""
    refused: list[str] = []

    def busy(*_: Any) -> list[dict[str, Any]]:
        for work in (measure_recipe, predict_recipe):
            with pytest.raises(StoreError) as raised:
                work(plan(lengths=[32]), tmp_path)
            refused.append(str(raised.value))
        raise LaunchError("enough")

    monkeypatch.setattr("abrun.launch.memory.profile.run_probe", busy)
    with pytest.raises(LaunchError) as refusal:
        measure_recipe(plan(lengths=[32]), tmp_path)
    snapshot(refusal.value)
    assert len(refused) == 2 and len(set(refused)) == 1
    snapshot(refused[0])
    with pytest.raises(LaunchError) as refusal:  # nothing of the first is left in the way
        measure_recipe(plan(lengths=[32]), tmp_path)
    snapshot(refusal.value)


def test_large_random_weights_are_made_in_parts_where_they_are_needed() -> None:
    from abrun.trainer.memory.measure import _make_weights_on
    from abrun.trainer.models.weights import RandomWeights

    weights = RandomWeights(some_network(RECIPE), seed=0)
    name, part = "model.embed_tokens.weight", (slice(2, 6), slice(0, 64))
    usual = weights.read(name, part)
    with _make_weights_on(torch.device("cpu")):
        made = weights.read(name, part)
        norm = weights.read("model.norm.weight", (slice(0, 8),))
    assert (
        made.shape == usual.shape and made.untyped_storage().nbytes() == 4 * 64 * 4
    )  # no more than its part
    assert 0.3 < made.std() / usual.std() < 3 and torch.equal(norm, torch.ones(8))
    assert torch.equal(weights.read(name, part), usual)


def some_network(recipe: ExperimentDeclaration) -> Any:
    from abrun.trainer.models.weights import load_network

    return load_network(recipe.run_config("baseline").model, weights=None, seed=0)  # pyright: ignore


def check_peak(cell: Cell, line: str, at_least: int) -> None:
    """The peak is the tracker's own, and the logits are named."""
    peak = cell.peak
    assert peak and peak["peak_bytes"] == cell.by_phase["backward"]
    assert sum(site["bytes"] for site in peak["sites"] if line in site["line"]) >= at_least
    assert {site["phase"] for site in peak["sites"]} == {"logprobs", "forward", "backward"}


def check_files(output: Path, profile: MemoryProfile) -> None:
    written = json.loads((output / "peaks.json").read_text())
    assert [cell["by_phase"] for cell in written["cells"]] == [cell.by_phase for cell in profile.cells]
    assert written["cells"][0]["peak"] == profile.cells[0].peak
    held = [table for table in make_tables(profile) if "held" in str(table.title)]
    assert [str(table.title).split(",")[0] for table in held] == ["baseline", "treatment"]
    assert held[0].rows[0][-1] == "allocated before the step"
    assert len(describe_files(profile, output)) == 1  # a CPU has no snapshot


@pytest.mark.usefixtures("here")
def test_a_budget_ends_a_step_with_its_phase_and_how_far_it_came(tmp_path: Path, snapshot: Snapshot) -> None:
    """And the search finds the longest sequence: one step longer runs out."""
    budget = 60 * 2**20
    said: list[str] = []
    options: dict[str, Any] = {"lengths": [32, 512], "budget_bytes": budget, "searched_size": "length"}
    only = RECIPE.model_copy(update={"arms": {"baseline": {}}})
    profile = measure_recipe(plan(only, **options), tmp_path, said.append)
    ended = profile.cells[1]
    assert (ended.out_of_memory, ended.fitting_peak) == ("forward", None)
    assert budget < ended.highest_peak[1] < 2 * budget  # with what was one too many
    assert "512 tokens: out of memory" in said[1]
    (longest,) = profile.size_limits
    tried = {cell.point.length: cell for cell in profile.cells}
    assert longest.fits and longest.fails and longest.fails - longest.fits <= max(1, longest.fits // 32)
    assert (
        tried[longest.fits].highest_peak[1] <= budget
        and tried[longest.fails].out_of_memory == longest.failed_in
    )
    assert json.loads((tmp_path / "peaks.json").read_text())["longest"][0]["fits"] == longest.fits
    with pytest.raises(LaunchError) as refusal:
        measure_recipe(plan(lengths=[32], searched_size="length"), tmp_path)
    snapshot(refusal.value)


@pytest.mark.usefixtures("here")
def test_several_microbatches_meet_the_gradients_of_the_first(tmp_path: Path) -> None:
    """The second one's forward pass has all gradients beside its activations."""
    only = {"arms": {"baseline": {}}}
    one = measure_recipe(plan(RECIPE.model_copy(update=only), lengths=[64]), tmp_path).cells[0]
    several = load_recipe(SMALL, [*QUICK, "policy.micro_batch_size=1"]).model_copy(update=only)
    two = measure_recipe(plan(several, lengths=[64]), tmp_path).cells[0]
    assert two.by_phase["forward"] - one.by_phase["forward"] == pytest.approx(one.held["weights"], rel=0.02)


@pytest.mark.usefixtures("here")
def test_a_sweep_measures_the_arms_at_every_combination(tmp_path: Path) -> None:
    quick = ("model.preset=qwen2-tiny", "arms.treatment={policy.logprobs.impl: chunked}")
    variants = expand_sweep(SMALL, quick, ["model.shape.vocab_size=1024,8192"])
    asked = SweepPlan(name="x", variants=variants, lengths=[64], sequences=[1, 2], rollouts=False)
    profile = measure_recipe(asked, tmp_path)
    points = [(cell.arm, cell.point.num_sequences, dict(cell.point.swept)) for cell in profile.cells]
    assert points == [
        (arm, number, {"model.shape.vocab_size": size})
        for size in (1024, 8192)
        for number in (1, 2)
        for arm in ("baseline", "treatment")
    ]
    of = {
        (arm, number, *swept.values()): cell
        for (arm, number, swept), cell in zip(points, profile.cells, strict=True)
    }
    for size in (1024, 8192):
        more = of["baseline", 2, size].by_phase["forward"] - of["baseline", 1, size].by_phase["forward"]
        assert more >= 64 * size * 4
    assert of["baseline", 1, 8192].held["weights"] - of["baseline", 1, 1024].held["weights"] == 4 * 96 * 7168
    headings = [column.title for column in make_tables(profile)[0].columns]
    assert headings[:4] == ["tokens", "sequences", "vocab size", "arm"]


@pytest.mark.usefixtures("here")
def test_a_rollout_is_measured_as_the_recipe_says_it(tmp_path: Path) -> None:
    asked = SweepPlan(name="x", variants=[Variant(recipe=RECIPE)], lengths=[32])
    (cell, _) = measure_recipe(asked, tmp_path).cells
    assert cell.by_phase["generation"] > 256 * VOCABULARY * 4  # a token of 256 completions, in float32
    assert cell.by_phase.keys() == {"generation", "forward", "backward", "optimizer"}


@pytest.mark.usefixtures("here")
def test_what_random_sequences_do_not_show_is_said(tmp_path: Path) -> None:
    assert not SweepPlan(name="x", variants=expand_sweep(SMALL, (), ())).note()
    shared = ("policy.packing=true", "arms.treatment.policy.share_prompts=true")
    plan = SweepPlan(name="x", variants=expand_sweep(SMALL, shared, ()), lengths=(32,), rollouts=False)
    profile = measure_recipe(plan, tmp_path)
    assert profile.note.startswith("policy.share_prompts: ")


def test_what_a_command_line_can_get_wrong_is_one_line(snapshot: Snapshot) -> None:
    for sweep in (
        "vocab",
        "policy.dtype=",
        "policy.logprobs.chunk_size=1,2",
        "policy.backend.tensor_parallel=1,4",
        "model.shape.vocab_size=7",
    ):
        with pytest.raises(RecipeError) as raised:
            expand_sweep(SMALL, (), [sweep])
        snapshot(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_dpo_is_measured_in_pairs(tmp_path: Path, snapshot: Snapshot) -> None:
    recipe = load_recipe(RECIPES / "dpo-fused-logprobs.yaml")
    cell = measure_recipe(plan(recipe, lengths=[16]), tmp_path).cells[0]
    assert cell.point.num_sequences == 2
    assert cell.by_phase.keys() == {"reference_logprobs", "forward", "backward", "optimizer"}
    assert cell.held["reference_weights"] == cell.held["weights"]
    with pytest.raises(LaunchError) as refusal:
        measure_recipe(plan(recipe, lengths=[16], sequences=[3]), tmp_path)
    snapshot(refusal.value)


@pytest.mark.slow
def test_ranks_that_run_out_of_memory_are_a_result_and_leave_no_process(tmp_path: Path) -> None:
    recipe = load_recipe(SMALL, ["cluster.cpu_ranks=2"])
    profile = measure_recipe(plan(recipe, lengths=[512], budget_bytes=200 * 2**20), tmp_path)
    dense, fused = profile.cells
    assert dense.out_of_memory == "forward" and fused.out_of_memory is None
    assert not find_run_processes(tmp_path)


def cell_of_bytes(arm: str, length: int, by_phase: dict[str, int], **more: Any) -> Cell:
    return Cell(arm=arm, point=Point(length=length), by_phase=by_phase, **more)


def test_a_length_that_ran_out_of_memory_has_no_ratio(snapshot: Snapshot) -> None:
    fits = cell_of_bytes("treatment", 64, {"logprobs": 5, "optimizer": 7})
    ended = cell_of_bytes("baseline", 64, {"logprobs": 7}, out_of_memory="forward")
    longer = cell_of_bytes("treatment", 128, {"optimizer": 9})  # the baseline did not get there
    profile = MemoryProfile(name="x", counter="", cells=[ended, fits, longer])
    assert ended.fitting_peak is None and profile.ratio(fits) is None and profile.ratio(longer) is None
    assert ended.highest_peak == ("logprobs", 7)
    assert fits.fitting_peak == ("optimizer", 7)
    assert len(make_tables(profile)[0].rows) == 3
    assert "out of memory" in str(make_tables(profile)[0].rows)
    snapshot(format_progress(ended, ("MiB", 1)))


def test_what_a_gpu_s_allocator_says_and_how_far_arms_go_have_tables_of_their_own() -> None:
    of_gpu = {"reserved_bytes": 6 * 2**30, "inactive_bytes": 2**29, "allocator_retries": 3}
    cells = [
        cell_of_bytes(
            "baseline", 64, {"backward": 5 * 2**30}, device_used_bytes={"training": 2**33}, **of_gpu
        ),
        cell_of_bytes("treatment", 64, {"backward": 2**30}),
    ]
    longest = [
        SizeLimit(arm="baseline", swept=(), what="length", fits=1000, fails=1024, failed_in="backward"),
        SizeLimit(arm="treatment", swept=(), what="length", fits=4096, fails=None, failed_in=None),
    ]
    profile = MemoryProfile(name="x", counter="peak_allocated_bytes", cells=cells, size_limits=longest)
    peaks, allocator, most = ([*map(list, zip(*table.rows, strict=True))] for table in make_tables(profile))
    assert peaks[-1] == ["1.000", "0.200"]  # the ratio
    assert [column[0] for column in allocator[2:]] == ["5.0", "6.0", "0.5", "3", "8.0"]
    *most_of_treatment, reason, _, ratio = (column[1] for column in most)
    assert (most_of_treatment, ratio) == (["treatment", "4,096"], "4.10") and "maximum fits" in reason


@pytest.mark.slow
def test_what_does_not_fit_the_model_is_one_line(tmp_path: Path, snapshot: Snapshot) -> None:
    with pytest.raises(LaunchError) as raised:
        measure_recipe(plan(lengths=[5000]), tmp_path)
    snapshot(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_not_built_is_refused_before_any_arm_is_measured(tmp_path: Path, snapshot: Snapshot) -> None:
    recipe = load_recipe(SMALL, ["arms.treatment.rollout={engine: vllm, devices: 1}", "cluster.nodes=2"])
    with pytest.raises(LaunchError) as refusal:
        measure_recipe(plan(recipe, lengths=[32]), tmp_path)
    snapshot(refusal.value)
    assert not any(tmp_path.iterdir())


def test_gpus_that_are_not_here_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LaunchError) as refusal:
        recipe = RECIPE.model_copy(update={"cluster": RECIPE.cluster.model_copy(update={"gpus_per_node": 8})})
        measure_recipe(plan(recipe, lengths=[32]), tmp_path)
    assert "but this machine, which measures it, has" in str(refusal.value)
    assert not any(tmp_path.iterdir())


def test_ctrl_c_asks_before_it_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tidied = tmp_path / "tidied"

    def pressed(*_: object) -> int:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("abrun.experiment.probe.wait_for_exit", pressed)
    config: Any = load_recipe(Path(__file__).parents[3] / "recipes" / "quickstart.yaml").run_config(
        "baseline"
    )
    script = f"trap 'touch {tidied}; exit' TERM; sleep 60 & touch {tmp_path / 'ready'}; wait"
    with pytest.raises(KeyboardInterrupt):
        _run_command(
            ["sh", "-c", script], tmp_path, run_environment(tmp_path, [], config), is_never_cancelled
        )
    assert tidied.exists() and not find_run_processes(tmp_path)
