"""The benchmark of a step: what it counts, and to which part it puts the time."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from abrun.runs.rundir import RunDir
from tests.bench import bench_step
from tests.bench.step_parts import Steps, busy_seconds, shares

SEQUENCES = 8  # a step's, on a CPU
OF_ALL = {"forward", "head", "backward", "optimizer", "all else"}


def bench(algorithm: str, work: Path) -> Any:
    shapes = bench_step.SHAPES["cpu"]
    found = bench_step.Bench(
        algorithm=algorithm, device="cpu", gpus=1, shapes=shapes, overrides=[], limit_s=240, work=work
    )
    bench_step.make_model(shapes.preset, work / "model", "cpu", vocab_size=shapes.vocab_size)
    found.write_texts("one")
    return found


def test_kernels_that_overlap_are_busy_once_and_those_between_parts_count_elsewhere() -> None:
    second = 10**9
    segments = [("forward", 0, 4 * second), ("backward", 4 * second, 10 * second)]
    kernels = [(start * second, end * second) for start, end in ((3, 5), (1, 2), (4, 6), (9, 12), (1, 2))]
    busy = busy_seconds(segments, kernels)
    assert busy == {"forward": 2.0, "backward": 3.0, "all else": 2.0}
    row = {"busy": busy, "step": 12.0, "parts": {"rewards": 1.5}}
    found = shares(row)
    assert found["idle"] == 12 - 7 - 1.5 and sum(found.values()) == row["step"]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    steps = Steps("cpu")
    unusual = {"forward": 9.0, "all else": 9.0}
    usual = [{"forward": 3.0, "all else": 1.0}, {"forward": 1.0}, {"forward": 1.0, "sync": 2.0}]
    steps.rows = [unusual, unusual, *usual, unusual]
    row = steps.row()
    assert (row["step"], row["parts"], row["last"]) == (3.0, {"forward": 1.0, "sync": 2.0}, unusual)


def test_a_row_of_the_table(tmp_path: Path) -> None:
    shapes = bench_step.SHAPES["cuda"]
    asked = bench_step.Bench(
        algorithm="grpo", device="cuda", gpus=1, shapes=shapes, overrides=[], limit_s=1, work=tmp_path
    )
    row = {
        "step": 2.0,
        "parts": {"generation": 1.0, "forward": 0.25, "backward": 0.25},
        "busy": {"generation": 0.5, "forward": 0.5},
        "tokens": 1000,
        "through": 800,
        "parameters": 10**11,
        "peak": 2**31,
    }
    cells = bench_step.shown(asked, "x", row, row | {"step": 4.0}).split()
    passes, step = (6 * 10**11 * 800 / seconds / 989e12 for seconds in (0.5, 2.0))
    assert cells[1:6] == ["2.000", "500", "2.00", "1.000", "3.00"]
    assert cells[6:] == [f"{passes:.3f}", f"{step:.3f}", "0.50", "2.0"]


def test_a_supervised_step_on_a_gpu_has_the_micro_batch_that_auto_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = bench_step.SHAPES["cuda"]
    asked = bench_step.Bench(
        algorithm="sft", device="cuda", gpus=1, shapes=shapes, overrides=[], limit_s=1, work=tmp_path
    )
    decided = {"policy.micro_batch_tokens": {"value": 16_384}}
    recipes: list[Any] = []
    monkeypatch.setattr(
        bench_step, "decide_values", lambda recipe, *_, **__: recipes.append(recipe) or decided
    )
    tree, note = bench_step.decide_auto(asked.tree("all on"))
    assert tree["policy"]["micro_batch_tokens"] == 16_384 and recipes[0].policy.compile
    assert note == "policy.micro_batch_tokens 16384, decided in 0 s"
    assert asked.tree("smaller microbatches")["policy"]["micro_batch_tokens"] == 8_192
    assert bench_step.decide_auto(asked.tree("padded"))[1] == ""
    fixed = replace(asked, overrides=["policy.micro_batch_tokens=4096"]).tree("all on")
    assert bench_step.decide_auto(fixed) == (fixed, "") and len(recipes) == 2


@pytest.mark.slow
def test_a_supervised_step_has_all_its_tokens_and_parts(tmp_path: Path) -> None:
    row = bench("sft", tmp_path).of_abrun("all on")
    assert row["tokens"] == row["through"] == SEQUENCES * bench_step.SHAPES["cpu"].length
    assert set(row["last"]) == OF_ALL and set(row["parts"]) == OF_ALL - {"head", "backward"}


@pytest.mark.slow
def test_a_step_with_rollouts_counts_shared_prompts_once_in_the_model(tmp_path: Path) -> None:
    row = bench("grpo", tmp_path).of_abrun("all on")
    metrics = RunDir(next(tmp_path.glob("*/run"))).metrics()
    each = [
        metrics[f"train/{key}"].values[-1] for key in ("mean_prompt_length", "mean_gen_tokens_per_sample")
    ]
    assert row["tokens"] == pytest.approx(SEQUENCES * sum(each))
    shapes = bench_step.SHAPES["cpu"]
    again = shapes.prompts * (shapes.group - 1) * (each[0] - 1)
    assert row["through"] == row["tokens"] - again
    assert set(row["last"]) == OF_ALL | {"generation", "rewards", "sync"}


def test_what_fails_is_one_line() -> None:
    command = [sys.executable, "-c", "import warnings; warnings.warn('w'); raise ValueError('of\\nits own')"]
    with pytest.raises(RuntimeError, match=r"failed: ValueError: of$"):
        bench_step.finish(command, 60)


def test_ranks_in_sessions_of_their_own_end_with_a_candidate_that_takes_too_long(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    rank = f"os.setsid(); open({str(pid_file)!r}, 'w').write(str(os.getpid()))"
    code = f"import os, time\nif not os.fork(): {rank}\ntime.sleep(60)"
    with pytest.raises(RuntimeError, match="failed: not done after 2 s"):
        bench_step.finish([sys.executable, "-I", "-S", "-c", code], 2)
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_trl_trains_on_the_same_tokens_padded_and_packed(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    of_sft = bench("sft", tmp_path)
    padded, packed = of_sft.of_trl("TRL"), of_sft.of_trl("TRL, packed")
    assert padded["tokens"] == packed["tokens"] == SEQUENCES * bench_step.SHAPES["cpu"].length
    assert set(padded["last"]) == set(packed["last"]) == OF_ALL
