"""The benchmark of weak scaling: its candidates, their work, and its table."""

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import LaunchError
from abrun.reasons import Code
from tests.bench import bench_scaling as scaling
from tests.bench.bench_scaling import Candidate, Row


def figures(tokens: int, step_s: float, generation_s: float = 0.0, peak: float = 0.0) -> dict[str, Any]:
    parts = {"generation": generation_s, "forward": step_s - generation_s - 0.25, "optimizer": 0.25}
    return {
        "tokens": tokens,
        "step": step_s,
        "parts": parts,
        "last": parts,
        "busy": None,
        "peak": peak,
        "note": "",
    }


def settings(work: Path, device: str = "cuda", preset: str = "qwen2.5-1.5b") -> scaling.Settings:
    return scaling.Settings(device=device, preset=preset, shapes=scaling.SHAPES[device], work=work)


def test_every_gpu_has_the_same_work_in_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling.Bench, "write_texts", lambda *_: None)
    candidates = scaling.make_candidates(scaling.ALGORITHMS, scaling.LAYOUTS, 8)
    counts: dict[str, list[int]] = {}
    for candidate in candidates:
        tree = settings(tmp_path).bench(candidate, limit_s=0, env={}).tree("all on")
        algorithm, policy = tree["algorithm"], tree["policy"]
        work = algorithm.get("batch_size") or algorithm["prompts_per_step"] * algorithm["group_size"]
        assert work == candidate.gpus * {"sft": 96, "grpo": 64}[candidate.algorithm]
        sizes = policy["backend"].get("tensor_parallel", 1), policy["backend"].get("context_parallel", 1)
        assert policy["micro_batch_tokens"] == 12_288 * sizes[0] * sizes[1] and not policy["compile"]
        assert tree["cluster"] == {"gpus_per_node": candidate.gpus}
        counts.setdefault(f"{candidate.algorithm} {candidate.layout}", []).append(candidate.gpus)
    assert counts["sft FSDP2"] == counts["grpo megatron"] == [1, 2, 4, 8]
    assert counts["sft TP 2"] == counts["grpo CP 2"] == counts["sft megatron TP 2"] == [2, 4, 8]
    # One-GPU candidates come first: they run side by side
    assert [candidate.layout for candidate in candidates[:2]] == ["FSDP2", "megatron"]
    assert scaling.with_baselines(["megatron TP 2"]) == ["megatron", "megatron TP 2"]


def test_ratios_are_to_the_fewest_gpus_of_the_same_backend_without_generation() -> None:
    one = Candidate(algorithm="grpo", layout="FSDP2", gpus=1)
    eight = Candidate(algorithm="grpo", layout="CP 2", gpus=8)
    others = [Candidate(algorithm="grpo", layout="megatron", gpus=count) for count in (1, 2, 4)]
    rows = [
        Row(candidate=one, figures=figures(1000, 3.0, generation_s=1.0, peak=2.0**30)),
        Row(candidate=eight, figures=figures(8000, 4.5, generation_s=2.0), predicted_bytes=2**30),
        Row(candidate=others[0], note="failed: OutOfMemoryError: no room"),
        Row(candidate=others[1], figures=figures(2000, 2.0)),
        Row(candidate=others[2], figures=figures(4000, 1.6)),
    ]
    rows[0].predicted_bytes = 2**30 + 2**28
    records = [scaling.as_json(row, rows) for row in rows]
    assert [record.get("tokens_per_s_per_gpu") for record in records] == [500, 400, None, 500, 625]
    assert [record.get("ratio") for record in records] == [1, 0.8, None, 1, 1.25]
    cells = [[cell.strip() for cell in scaling.markdown(record).split("|")[1:-1]] for record in records]
    assert {len(row) for row in cells} == {len(scaling.HEADER)}
    assert cells[0][3:11] == ["500", "1.000", "3.000", "1.000", "0.000", "1.750", "0.250", "0.000"]
    assert cells[0][12:15] == ["1.0", "1.2", "+25.0%"] and cells[1][12:15] == ["-", "1.0", "-"]
    assert cells[2][-1] == "failed: OutOfMemoryError: no room" and cells[2][3:12] == ["-"] * 9
    assert cells[4][4] == "1.250 (of 2 GPUs)"


def test_a_candidate_on_several_gpus_waits_until_nothing_else_runs() -> None:
    pool, taken = scaling.GpuPool(4), list[list[int]]()
    first, second = pool.take(1), pool.take(1)
    assert (first, second) == ([0], [1])
    waiting = threading.Thread(target=lambda: taken.append(pool.take(2)))
    waiting.start()
    pool.put_back(first)
    waiting.join(0.05)
    assert waiting.is_alive() and not taken
    pool.put_back(second)
    waiting.join(5)
    assert taken == [[0, 1]]


def test_a_candidate_that_fails_is_a_row_and_none_begins_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    visible = []

    def of_abrun(bench: scaling.Bench, _: str) -> dict[str, Any]:
        visible.append(bench.env["CUDA_VISIBLE_DEVICES"])
        if bench.gpus == 2:
            raise RuntimeError("failed: ValueError: of\nits own")
        time.sleep(0.05)
        return figures(1000, 1.0)

    def predict(_: scaling.Settings, candidate: Candidate, __: int) -> int:
        if candidate.gpus == 2:
            raise LaunchError(Code.BACKEND_NOT_PREDICTED(backend="megatron"))
        return 2**30

    monkeypatch.setattr(scaling.Bench, "of_abrun", of_abrun)
    monkeypatch.setattr(scaling.Settings, "predict", predict)
    candidates = scaling.make_candidates(["sft"], ["FSDP2", "megatron"], 2)
    predictions = scaling.Predictions(settings(tmp_path), candidates, 2**36)
    rows = scaling.measure_all(settings(tmp_path), candidates, predictions, 2, time.monotonic() + 60)
    for row in rows:
        predictions.add_to(row, wait_s=5)
    assert [row.candidate for row in rows] == candidates and sorted(visible) == ["0", "0,1", "0,1", "1"]
    assert [row.note for row in rows] == ["", "", *["failed: ValueError: of its own"] * 2]
    assert [row.predicted_bytes for row in rows] == [2**30, 2**30, None, None]
    late = scaling.measure_all(settings(tmp_path), candidates, predictions, 2, time.monotonic() - 1)
    assert [row.note for row in late[2:]] == ["not begun: --limit"] * 2
    assert "| sft | FSDP2 | 1 | 1,000 | 1.000 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpus", "-1"], "no GPU to use"),
        (["--predict-only", "--gpus", "2", "--memory", "big"], "--memory: .*big"),
        (["--device", "cpu", "--predict-only"], "no device to predict for; add --memory"),
    ],
)
def test_impossible_options_are_one_line(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_scaling", *arguments])
    with pytest.raises(SystemExit) as end:
        scaling.main()
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and re.search(problem, error)


@pytest.mark.slow
def test_two_ranks_train_on_twice_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scaling.json"
    command = ["bench_scaling", "--device", "cpu", "--algorithm", "sft", "--only", "CP 2"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    assert scaling.main() == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["layout"], row["gpus"]) for row in rows] == [("FSDP2", 1), ("FSDP2", 2), ("CP 2", 2)]
    tokens = [row["tokens_per_s_per_gpu"] * row["step_s"] for row in rows]
    assert tokens == pytest.approx([8 * 32] * 3)
    assert "GPUs left out, this host has fewer: 4, 8" in capsys.readouterr().out
