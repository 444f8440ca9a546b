"""What cannot work: one line on stderr, exit code 2, and a `failed` event where that can be written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.processes import progress
from abrun.runs.records import recorded_reason
from abrun.runs.rundir import RunDir
from abrun.trainer.__main__ import out_of_memory_reason
from tests.trainer.loop.runs import Trainer
from tests.written_runs import events, make_run, run_config

LONG_PROMPT = ("task={type: jsonl, path: FOLDER/long-prompt.jsonl}", "cluster.cpu_ranks=2")
TO_COME = ("cluster.nodes=2", "rollout={engine: vllm, devices: 1}")
TWO: dict[str, Any] = {"ranks": 2}
NO_TRITON: dict[str, Any] = {"env": {"TRITON_INTERPRET": ""}}
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {  # message, overrides, how it is started
    "no checkpoint": ("model.path: got '/no/model'", ("model={preset: null, path: /no/model}",), {}),
    "no task file": ("task.path: got '/no/x.jsonl", ("task={type: gsm8k, path: /no/x.jsonl}",), {}),
    "a bad line": ("bad-line.jsonl, line 2: ", ("task={type: jsonl, path: FOLDER/bad-line.jsonl}",), {}),
    "too long": ("rollout.max_new_tokens: got 2000", ("rollout.max_new_tokens=2000",), {}),
    "a prompt too long": ("long-prompt.jsonl, line 2: ", LONG_PROMPT, TWO),
    "too few ranks": ("needs 2 ranks, but 1 were started", ("cluster.cpu_ranks=2",), {}),
    "too many ranks": ("needs 1 ranks, but 2 were started", (), TWO),
    "to come": ("rollout.devices: got 1 with cluster.nodes 2, which is not supported yet", TO_COME, TWO),
    "no kernel": ("policy.logprobs.impl: 'triton' needs", ("policy.logprobs.impl=triton",), NO_TRITON),
    "no CUDA": ("cluster.gpus_per_node: no CUDA device", ("cluster.gpus_per_node=1",), {}),
}


def expect_failure(directory: Path, part: str, **options: object) -> str:
    trainer = Trainer(directory, **options)  # pyright: ignore
    assert trainer.wait() == 2, trainer.stderr
    assert trainer.stderr.startswith("error: ") and trainer.stderr.count("\n") == 1, trainer.stderr
    assert part in trainer.stderr
    assert not (directory / "result.json").exists()
    return trainer.stderr.removeprefix("error: ").rstrip()


def expect_failed_event(directory: Path, message: str) -> None:
    last = RunDir(directory).events()[-1]
    assert (last["event"], last["message"], last["attempt"]) == ("failed", message, 1)


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_a_failed_event(case: str, tmp_path: Path) -> None:
    """Of the first rank alone, which writes down why a run failed."""
    if case == "no CUDA" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    message, overrides, start = CASES[case]
    (tmp_path / "bad-line.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1="}\n')
    prompts = ({"prompt": "7" * length, "answer": "7"} for length in (1018, 1020))
    (tmp_path / "long-prompt.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    overrides = (text.replace("FOLDER", str(tmp_path)) for text in overrides)
    directory = make_run(tmp_path / "run", run_config(*overrides))
    expect_failed_event(directory, expect_failure(directory, message, **start))
    assert events(directory).count("failed") == 1


@pytest.mark.parametrize(
    ("error", "on_gpu"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"), True),
        (RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error ... Last error:\nFailed to CUDA calloc async 24 bytes"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), None),  # may be anything
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you"
            ),
            False,
        ),
        (MemoryError(), False),
        (RuntimeError("The size of tensor a (3) must match"), None),
    ],
)
def test_memory_that_was_wanting_is_told_from_other_errors(error: Exception, on_gpu: bool | None) -> None:
    reason = out_of_memory_reason(error)
    assert (reason and (reason.code, reason["on_gpu"])) == (
        None if on_gpu is None else (Code.MEMORY_RAN_OUT, on_gpu)
    )
    assert reason is None or "\n" not in sentence(reason)


@pytest.mark.parametrize(("free_gib", "theirs"), [(0, True), (120, False)])
def test_memory_that_others_hold_is_said_to_be_theirs(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, theirs: bool, snapshot
) -> None:
    monkeypatch.setattr(progress, "current_activity", lambda: "the start")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 12 << 30)
    error = "CUDA out of memory. Tried to allocate 2.00 GiB."
    reason = out_of_memory_reason(torch.OutOfMemoryError(error))
    held = {"other_bytes": 128 << 30, "total_bytes": 140 << 30, "own_bytes": 12 << 30}
    assert reason is not None
    assert (reason["others"], reason["error"]) == (held if theirs else None, error)
    snapshot(sentence(reason))


@pytest.mark.slow
def test_a_rank_without_memory_says_so_and_during_what(tmp_path: Path) -> None:
    """A real refusal of torch's allocator, of a petabyte."""
    directory = make_run(tmp_path / "run", run_config("steps=1", "task.max_operand=9"))
    code = (
        "import runpy, sys, torch, abrun.trainer.training as loop\n"
        "loop.make_setup = lambda *_: torch.empty(1 << 50, dtype=torch.uint8)\n"
        "sys.argv = ['abrun.trainer', sys.argv[1]]\n"
        "runpy.run_module('abrun.trainer', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    reason = recorded_reason(RunDir(directory).attempt())
    assert reason and (reason.code, reason["on_gpu"], reason["doing"]) == (Code.MEMORY_RAN_OUT, False, "")
    assert done.stderr.splitlines()[-1] == f"error: {sentence(reason)}"
    expect_failed_event(directory, sentence(reason))


def test_initial_weights_that_are_gone(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", run_config(), initial_weights=tmp_path / "nowhere" / "final")
    expect_failed_event(directory, expect_failure(directory, "nowhere/final"))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    expect_failure(tmp_path, "config.json: no such file")
    assert not (tmp_path / "events.jsonl").exists()


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", run_config())
    (directory / "metrics.jsonl").mkdir()
    expect_failure(directory, "metrics.jsonl: cannot be written")


def test_without_an_argument_it_says_how_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from abrun.trainer.__main__ import main

    monkeypatch.setattr("sys.argv", ["abrun.trainer"])
    assert main() == 2
    assert capsys.readouterr().err == "usage: python -m abrun.trainer RUN_DIR\n"
