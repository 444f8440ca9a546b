"""Which run and which weights: found, or refused in one line."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import AbrunError
from abrun.experiment.probe import scratch_folder
from abrun.runs.files import read_json, write_json
from abrun.runs.launches import write_config
from abrun.runs.layout import RunName
from abrun.runs.lines import LineWriter
from abrun.runs.rundir import RunDir
from abrun.tools.logprob_diff.command import choose_run
from abrun.tools.logprob_diff.variations import on_one_rank, variations_of
from tests.snapshot import Snapshot
from tests.written_runs import make_run, run_config


def refused(run: str | Path, runs_dir: Path, step: int | None = None) -> str:
    with pytest.raises(AbrunError) as raised:
        choose_run(str(run), runs_dir, step)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def with_checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = {"rank-0.safetensors": {"bytes": 1, "sha256": "0"}}
    identity = RunDir(run).identity()
    state: dict[str, Any] = {"run": identity, "step": step, "num_ranks": 1, "attempt": 1, "files": files}
    write_json(folder / "state.json", state)
    return folder


def recorded(run: Path, *steps: int) -> None:
    writer = LineWriter(run / "metrics.jsonl")
    for step in steps:
        writer.write({"step": step, "attempt": 1, "time_s": 1.0, "train/reward": 0.5})
    writer.close()


def test_the_newest_checkpoint_is_taken(tmp_path: Path, snapshot: Snapshot) -> None:
    run = make_run(tmp_path / "run", run_config())
    assert (choose_run(str(run), tmp_path, None).step, choose_run("run", tmp_path, 0).checkpoint) == (0, None)
    recorded(run, 1, 2, 3, 4, 5, 6, 7)
    three, six = with_checkpoint(run, 3), with_checkpoint(run, 6)
    assert choose_run(str(run), tmp_path, None).checkpoint == six
    assert choose_run(str(run), tmp_path, 3).checkpoint == three
    assert "--step: got 4;" in (said := refused(run, tmp_path, 4)) and "after steps 0, 3, 6" in said
    shutil.rmtree(run / "checkpoints")
    snapshot(refused(run, tmp_path))
    assert choose_run(str(run), tmp_path, 0).step == 0


def test_of_an_experiment_a_run_with_weights_is_chosen(tmp_path: Path, snapshot: Snapshot) -> None:
    names = [
        RunName(arm="treatment", seed=0),
        RunName(arm="baseline", seed=0),
        RunName(arm="baseline", seed=1),
    ]
    runs = [{"arm": name.arm, "seed": name.seed} for name in names]
    snapshot(_experiment_refused(tmp_path, runs))
    for name in names:
        make_run(tmp_path / "x" / str(name), run_config())
    assert choose_run("x", tmp_path, None).run.path == tmp_path / "x" / "baseline" / "seed-0"
    with_checkpoint(tmp_path / "x" / "baseline" / "seed-1", 3)
    assert choose_run("x", tmp_path, None).run.path == tmp_path / "x" / "baseline" / "seed-1"


def _experiment_refused(runs_dir: Path, runs: list[dict[str, Any]]) -> str:
    write_json(runs_dir / "x" / "experiment.json", {"schema_version": 1, "runs": runs})
    return refused("x", runs_dir)


def test_what_has_no_weights_of_an_engine_s_policy_is_refused(tmp_path: Path, snapshot: Snapshot) -> None:
    snapshot(refused("nowhere", tmp_path))
    sft = make_run(tmp_path / "sft", run_config("algorithm={type: sft}", "task={type: arithmetic}"))
    assert "algorithm.type: got 'sft'" in refused(sft, tmp_path)
    foreign = make_run(tmp_path / "foreign", run_config())
    record = RunDir(foreign).record()
    config = {
        "trainer": {
            "type": "command",
            "argv": ["x"],
            "metrics": {"format": "csv", "path": "{run_dir}/m.csv"},
        },
        "steps": 3,
    }
    write_config(RunDir(foreign), "x", record.name, config)
    snapshot(refused(foreign, tmp_path))
    gone = make_run(tmp_path / "gone", run_config(), initial_weights=tmp_path / "warm")
    assert "are missing; launch it again" in refused(gone, tmp_path)
    other = make_run(tmp_path / "other", run_config())
    folder = with_checkpoint(other, 3)
    state = read_json(folder / "state.json") | {"run": "baseline/seed-9 0000"}
    write_json(folder / "state.json", state)
    snapshot(refused(other, tmp_path))


def test_one_rank_stands_for_all(tmp_path: Path) -> None:
    spread = "policy.backend={type: megatron, tensor_parallel: 2, pipeline_parallel: 2}"
    config = on_one_rank(run_config("cluster.cpu_ranks=8", spread))
    assert config.cluster.ranks == 1 and not config.policy.backend.is_spread
    assert config.policy.micro_batch_size == 4 * 8 // 2  # of each of two replicas
    assert on_one_rank(run_config()).policy.micro_batch_size is None


def test_what_a_change_asks_to_be_scored(snapshot: Snapshot) -> None:
    config = run_config("policy.dtype=bfloat16", "policy.packing=true", "policy.logprobs.impl=chunked")
    keys = {change.key: change.scoring for change in variations_of(config, ["rollout.temperature=0.9"])}
    assert {
        "alone",
        "padded",
        "head_float32",
        "float32",
        "logprobs_logits",
        "weights_before",
        "set_0",
    } <= set(keys)
    assert "packed" not in keys
    sharing = run_config("policy.packing=true", "policy.share_prompts=true")
    assert {"alone", "padded", "packed"} <= {change.key for change in variations_of(sharing, [])}
    asked = keys["set_0"]
    assert asked is not None and asked.config.rollout.temperature == 0.9
    sharing = run_config("policy={packing: true, share_prompts: true, micro_batch_tokens: 60}")
    unpacked = {"alone": (False, False, 1), "padded": (False, False, None)}
    for of, shapes in ((config, unpacked), (sharing, unpacked | {"packed": (True, False, None)})):
        scored = {one.key: one.scoring for one in variations_of(of, []) if one.kind == "batch shape"}
        policies = {key: scoring.config.policy for key, scoring in scored.items() if scoring}
        found = {key: (of.packing, of.share_prompts, of.micro_batch_size) for key, of in policies.items()}
        assert found == shapes
    with snapshot.refused(AbrunError):
        variations_of(config, ["cluster.cpu_ranks=2"])
    with snapshot.refused(AbrunError):
        variations_of(config, ["policy.dtyp=float32"])


def test_a_run_that_may_not_be_written_to_needs_an_output(tmp_path: Path, snapshot: Snapshot) -> None:
    from abrun.tools.logprob_diff.command import measure_run

    run = make_run(tmp_path / "run", run_config())
    (run / "mismatch").write_text("in the way")
    with pytest.raises(AbrunError) as raised:
        measure_run(str(run), tmp_path)
    snapshot(raised.value)
    assert os.linesep not in str(raised.value)


def test_two_at_once_do_not_mix_and_what_a_killed_one_left_is_removed(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    left = tmp_path / "mismatch" / ".scratch-killed"
    left.mkdir(parents=True)
    (left / "weights.safetensors").write_bytes(b"x")
    with scratch_folder(tmp_path / "mismatch", "abrun logprob-diff") as folder:
        assert not left.exists() and folder.is_dir()
        with (
            pytest.raises(AbrunError) as refusal,
            scratch_folder(tmp_path / "mismatch", "abrun logprob-diff"),
        ):
            pass
        snapshot(refusal.value)
        assert folder.is_dir()
    assert not list((tmp_path / "mismatch").iterdir())


@pytest.mark.parametrize("override", ["steps=20", "rollout.engine=vllm", "rollout.temperature=1.0"])
def test_a_change_that_changes_no_scoring_is_refused(override: str, snapshot: Snapshot) -> None:
    with snapshot.refused(AbrunError):
        variations_of(on_one_rank(run_config()), [override])
