"""A run that begins from another run's checkpoint, in the same layout or in any other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from abrun.errors import RecipeError
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import fingerprint
from abrun.runs.launches import reopen
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.loop import checkpoint
from abrun.trainer.loop.checkpoint import start_from
from abrun.trainer.loop.setup import make_setup
from tests.snapshot import Snapshot
from tests.spawn import run_ranks
from tests.trainer.loop.runs import metrics_by_step, run_to_end, train_here
from tests.trainer.loop.test_ppo import PPO
from tests.written_runs import make_run, metric_values, run_config

ALL = "checkpoint={every: 1, keep: 9}"
PACKED = ("policy.packing=true", "policy.micro_batch_tokens=90")
TWO, FOUR = "cluster.cpu_ranks=2", "cluster.cpu_ranks=4"
LAYOUTS = {
    "one": (),
    "data": (TWO,),
    "tensor": (TWO, "policy.backend={tensor_parallel: 2}"),
    "context": (TWO, "policy.backend={context_parallel: 2}"),
    "sequence": (FOUR, "policy.backend={tensor_parallel: 2, sequence_parallel: true, context_parallel: 2}"),
    "experts": (TWO, "policy.backend={expert_parallel: 2}"),
    "copies": (FOUR, "policy.backend={expert_parallel: 2}"),
    "experts and tensor": (FOUR, "policy.backend={expert_parallel: 2, tensor_parallel: 2}"),
    "megatron": ("policy.backend={type: megatron}",),
    "megatron, data": (TWO, "policy.backend={type: megatron}"),
    "megatron, sequence": (
        FOUR,
        "policy.backend={type: megatron, tensor_parallel: 2, sequence_parallel: true}",
    ),
    "megatron, pipeline": (TWO, "policy.backend={type: megatron, pipeline_parallel: 2}"),
    "megatron, experts": (FOUR, "policy.backend={type: megatron, expert_parallel: 2}"),
}
MOE = "model.preset=qwen3-moe-tiny"
EVEN = "model.preset=qwen2-wide-vocab"  # in its number of layers


def checkpoint_of(run: Path, step: int) -> str:
    return str(run / "checkpoints" / f"step-{step:06d}")


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, warm_weights: Path) -> Path:
    """Five steps of one rank, all of them saved."""
    from tests.trainer.loop.runs import single_rank

    config = run_config("steps=5", *PACKED, ALL)
    directory = make_run(tmp_path_factory.mktemp("trunk"), config, initial_weights=warm_weights)
    with single_rank():
        train_here(directory)
    return directory


def branch(path: Path, trunk: Path, step: int, *overrides: str, weights: Path | None) -> Path:
    config = run_config(
        "steps=5", *PACKED, ALL, f"checkpoint.start_from={checkpoint_of(trunk, step)}", *overrides
    )
    return make_run(path, config, initial_weights=weights)


def test_the_same_layout_goes_on_bit_for_bit(
    tmp_path: Path, trunk: Path, warm_weights: Path, group: None
) -> None:
    run = branch(tmp_path / "branch", trunk, 2, weights=warm_weights)
    train_here(run)
    expected = {key: values[2:] for key, values in metric_values(trunk).items()}
    assert metric_values(run) == expected and len(expected["train/grad_norm"]) == 3
    left, right = (load_file(Path(checkpoint_of(each, 5)) / "rank-0.safetensors") for each in (run, trunk))
    assert all(torch.equal(left[name], right[name]) for name in right if not name.startswith("rng/"))
    origin = (RunDir(run).environment() or {})["started_from"]
    state = Path(checkpoint_of(trunk, 2)) / "state.json"
    assert origin == {
        "run": RunDir(trunk).identity(),
        "step": 2,
        "sha256": fingerprint(state)["sha256"],
    }
    assert RunDir(run).describe_missing_steps(5) is None  # its first is step 3


def test_a_stopped_branch_goes_on_from_its_own_checkpoint(
    tmp_path: Path, trunk: Path, warm_weights: Path, group: None
) -> None:
    run = RunDir(branch(tmp_path / "branch", trunk, 2, weights=warm_weights))
    train_here(run.path)
    whole = metric_values(run.path)
    reopen(run, "a test")
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(lines[:-1]))
    train_here(run.path)
    assert metric_values(run.path) == whole
    told = [(row["event"], row["step"]) for row in run.events() if row["event"] in ("resumed", "checkpoint")]
    assert told == [
        ("checkpoint", 3),
        ("checkpoint", 4),
        ("checkpoint", 5),
        ("resumed", 4),
        ("checkpoint", 5),
    ]


def _is_next(branched: Path, trunk: Path, step: int) -> None:
    """The first step after a branch is the trunk's to rounding."""
    ours, theirs = metrics_by_step(branched), metrics_by_step(trunk)
    assert min(ours) == step + 1
    for key in ("train/loss", "train/grad_norm", "train/reward", "train/entropy", "train/lr"):
        assert ours[step + 1][key] == pytest.approx(theirs[step + 1][key], rel=2e-5, abs=1e-7), key
    for key in ("train/loss", "train/grad_norm"):  # after an update with the moments that came along
        assert ours[step + 2][key] == pytest.approx(theirs[step + 2][key], rel=5e-3, abs=1e-4), key


@pytest.mark.slow
def test_from_layout_to_layout_and_back(tmp_path: Path, trunk: Path, warm_weights: Path, group: None) -> None:
    tensor = branch(tmp_path / "tensor", trunk, 1, *LAYOUTS["tensor"], weights=warm_weights)
    run_to_end(tensor, ranks=2)
    _is_next(tensor, trunk, 1)
    context = branch(tmp_path / "context", tensor, 2, *LAYOUTS["context"], weights=warm_weights)
    run_to_end(context, ranks=2)
    _is_next(context, tensor, 2)
    back = branch(tmp_path / "back", context, 3, weights=warm_weights)
    train_here(back)
    _is_next(back, context, 3)


@pytest.mark.megatron
def test_from_backend_to_backend_and_back(
    tmp_path: Path, trunk: Path, warm_weights: Path, group: None
) -> None:
    megatron = branch(tmp_path / "megatron", trunk, 1, *LAYOUTS["megatron"], weights=warm_weights)
    train_here(megatron)
    _is_next(megatron, trunk, 1)
    back = branch(tmp_path / "back", megatron, 2, weights=warm_weights)
    train_here(back)
    _is_next(back, megatron, 2)


# --- to the bit ---


def taken_and_saved(
    rank: int, size: int, config: OwnRunConfig, folder: str, path: Path
) -> dict[str, tuple[torch.Tensor, ShardSpec]]:
    """What a rank has after it began there, and of which parts that is made; saved once more."""
    setup = make_setup(config, 0, None, torch.device("cpu"))
    start_from(folder, setup.learner, setup.ranks, 99)
    run = RunDir(path)
    writer = begin_attempt(run) if rank == 0 else None
    checkpoint.save(run.checkpoints, setup.learner, setup.ranks, step=2, keep=1, writer=writer)
    state, pieces = setup.learner.local_state(), setup.learner.shard_specs()
    assert state.keys() == pieces.keys()
    return {name: (tensor.clone(), pieces[name]) for name, tensor in state.items()}


CASES = [
    ("data", ()),
    ("context", (PPO,)),
    ("tensor", ()),
    ("tensor", (PPO,)),
    ("sequence", ()),
    ("experts", (MOE,)),
    ("copies", (MOE,)),
    ("experts and tensor", (MOE,)),
    ("megatron", ()),
    ("megatron, data", ()),
    ("megatron, data", (PPO, "policy.dtype=bfloat16")),
    ("megatron, sequence", (PPO,)),
    ("megatron, pipeline", (EVEN, PPO)),
    ("megatron, experts", (MOE,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_every_rank_takes_its_part_to_the_bit_and_gives_it_back(
    layout: str, settings: tuple[str, ...], tmp_path: Path, group: None
) -> None:
    with_gradients = (*PACKED, *settings, "algorithm.entropy_coefficient=0.05", ALL)
    one = make_run(tmp_path / "one", run_config("steps=2", *with_gradients))
    train_here(one)
    alone = run_config("steps=3", *with_gradients)
    whole = taken_and_saved(0, 1, alone, checkpoint_of(one, 2), tmp_path / "again")
    named = {held.pieces[0][0]: tensor for tensor, held in whole.values()}
    assert min(float(named[name].abs().max()) for name in named if "/exp_avg_sq/" in name) > 0
    config, spread = run_config("steps=3", *with_gradients, *LAYOUTS[layout]), tmp_path / "spread"
    for part in run_ranks(taken_and_saved, config.cluster.ranks, config, checkpoint_of(one, 2), spread):
        for tensor, held in part.values():
            expected = held.assemble([named[name][piece.slices] for name, piece in held.pieces])
            assert torch.equal(tensor, expected.to(tensor.dtype))
    back = taken_and_saved(0, 1, alone, checkpoint_of(spread, 2), tmp_path / "back")
    assert back.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name][0]) for name, (tensor, _) in back.items())


# --- what is refused ---


def refusal(folder: Path | str, *overrides: str, steps: int = 5) -> str:
    setup = make_setup(run_config(f"steps={steps}", *overrides), 0, None, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in setup.learner.local_state().items()}
    with pytest.raises(RecipeError, match=r"^checkpoint.start_from: got ") as raised:
        start_from(str(folder), setup.learner, setup.ranks, steps)
    after = setup.learner.local_state()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_cannot_be_begun_from_is_one_line(
    trunk: Path, tmp_path: Path, group: None, snapshot: Snapshot
) -> None:
    sound = Path(checkpoint_of(trunk, 2))
    assert "no such file" in refusal(tmp_path / "nowhere")
    assert "no such file" in refusal(trunk)
    snapshot(refusal(sound, steps=2))
    snapshot(refusal(sound, MOE))
    assert "critic/weights/" in refusal(sound, PPO)


def test_damage_is_found_before_anything_is_taken(trunk: Path, tmp_path: Path, group: None) -> None:
    import shutil

    copy = Path(shutil.copytree(checkpoint_of(trunk, 2), tmp_path / "copy"))
    file = copy / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert "rank-0.safetensors" in refusal(copy)
    file.unlink()
    assert "rank-0.safetensors" in refusal(copy)
