"""What `abrun doctor` says of a machine: this one, ones with GPUs, and broken ones."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from abrun.experiment.preflight.machine import Machine
from abrun.messages import sentence, sentences
from abrun.messages.codes import Reason, in_words
from abrun.report import doctor
from abrun.report.doctor import Diagnosis, diagnosis_of, read_gpus, try_import
from tests.snapshot import Snapshot
from tests.test_cli import run

__all__ = ["run"]

H200 = "0, NVIDIA H200, 143771, 570.1, 9.0"
WORKS = {"torch": ["12.9", 1], "transformers": 0, "triton": 0}


def refusals(diagnosis: Diagnosis) -> dict[str, Reason | None]:
    return {part.name: part.refusal for part in diagnosis.parts}


def diagnosis(imported: dict[str, Any], listed: str = H200, **versions: str) -> Diagnosis:
    """A diagnosis of a machine of which everything is told."""
    known = {"torch": "2.11.0", "transformers": "5.17.0", "triton": "3.6.0", "vllm": "0.33.0", "ray": "2.50"}
    here = Machine(gpus=(), cores=8, packages=known | versions, ask_hub=lambda _: None)
    return diagnosis_of(here, read_gpus(listed), WORKS | imported)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shutil, "which", lambda command: f"/bin/{command}")


def test_with_a_gpu_everything_is_usable() -> None:
    found = diagnosis({}, **{"megatron-core": "0.19.2"})
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H200"]
    assert not any(refusals(found).values())
    shown = table(found)
    assert re.search(r"GPU 0 +NVIDIA H200, 140 GiB, compute capability 9\.0, driver 570\.1", shown)


@pytest.mark.parametrize(
    ("found", "listed", "refused", "words"),
    [
        ({"torch": [None, 0]}, H200, {"cuda", "vllm", "triton"}, "is built without CUDA; "),
        ({"torch": ["12.9", 0]}, H200, {"cuda", "vllm", "triton"}, "built for CUDA 12.9, finds no GPU"),
        ({"torch": ["12.9", 0]}, "", {"cuda", "vllm", "triton"}, "nvidia-smi lists no GPU"),
        (
            {"triton": in_words("triton is slow")},
            H200,
            {"triton"},
            "triton is slow",
        ),
        (
            {"torch": in_words("torch cannot be imported")},
            H200,
            {
                "cpu",
                "cuda",
                "dtensor",
                "megatron",
                "torch",
                "vllm",
                "recorded",
                "logits",
                "chunked",
                "triton",
            },
            "torch cannot be imported",
        ),
        (
            {"transformers": in_words("transformers is missing")},
            H200,
            {"dtensor", "megatron", "torch", "vllm", "recorded", "logits", "chunked"},
            "transformers is missing",
        ),
    ],
)
def test_what_is_broken_is_a_reason(found: Any, listed: str, refused: set[str], words: str) -> None:
    shown = diagnosis(found, listed)
    reasons = {name: reason for name, reason in refusals(shown).items() if reason}
    assert reasons.keys() - {"megatron"} == refused - {"megatron"}
    assert any(words in sentence(reason) for reason in reasons.values())
    for line in map(sentence, reasons.values()):
        assert "\n" not in line
        assert "".join(line.split()) in "".join(table(shown).split()), "with its brackets"


def test_versions_that_were_not_tested_are_warnings() -> None:
    assert diagnosis({}).warnings == ()
    versions = {"torch": "99.0.0+cu140", "triton": "3.5.0", "vllm": "99.0"}
    found = diagnosis({}, **versions)
    lines = sentences(found.warnings)
    assert [line.partition(";")[0] for line in lines] == [
        "torch 99.0.0+cu140: not tested with abrun",
        "triton 3.5.0: not tested with abrun",
    ]
    assert lines[0] in table(found)
    content = json.loads(found.as_json())
    assert content["warnings"] == lines
    assert not any(refusals(found)[name] for name in ("dtensor", "triton"))  # a warning refuses nothing


def table(diagnosis: Diagnosis) -> str:
    console = Console(width=400)
    with console.capture() as shown:
        console.print(diagnosis.render())
    return shown.get()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('libcudart.so.12:\\n cannot open')", "cannot open"),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11"),
        ("", "AttributeError: "),  # an empty folder of that name
        ("import os; os._exit(0)", "IndexError: "),
        (
            "try:\n    raise OSError('torchaudio.so: no such file')\n"
            "except OSError as error:\n    raise ImportError('see above') from error",
            "OSError: torchaudio.so: no such file",
        ),
        ("import time; time.sleep(60)", None),
    ],
)
def test_a_broken_package_is_one_line(
    source: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "installed_packages", lambda: {"torch": "2.11.0"})
    reason = try_import("torch", 2 if "sleep" in source else 60)
    if error is None:
        assert sentence(reason).startswith("importing torch took more than 2 s; ")
    else:
        said = sentence(reason)
        assert said.startswith(f"torch cannot be imported: {error}") and "\n" not in said
        assert ("pip uninstall torchaudio" in said) == ("torchaudio" in source)
    if error != "AttributeError: ":
        snapshot(sentence(reason))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert sentence(try_import("torch")) == "the package torch is missing; pip install 'abrun[train]'"
