"""What `abrun doctor` says of a machine: this one, ones with GPUs, and broken ones."""

import importlib.metadata
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from abrun.implementations import BACKENDS, ENGINES, LAUNCHERS, SCHEDULERS
from abrun.launch import doctor
from abrun.launch.doctor import KERNELS, Diagnosis, diagnose
from tests.test_cli import Run, run

__all__ = ["run"]

H200 = "0, NVIDIA H200, 143771, 570.1, 9.0"
WORKS = {"torch": ["12.9", 1], "transformers": 0, "triton": 0}


def refusals(diagnosis: Diagnosis) -> dict[str, str | None]:
    return {part.name: part.refusal for part in diagnosis.parts}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A diagnosis of a machine of which everything is told."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def of(found: dict[str, Any], listed: str = H200, **versions: str) -> Diagnosis:
        known = {"torch": "2.11.0", "transformers": "5.17.0", "triton": "3.6.0"} | versions
        monkeypatch.setattr(doctor, "_imported", lambda package: (WORKS | found)[package])
        monkeypatch.setattr(doctor, "_version", known.get)
        monkeypatch.setattr(doctor, "vllm_refusal", lambda on_gpu: None if on_gpu else "no vllm [for] it")
        monkeypatch.setattr(doctor, "ray_refusal", lambda: None)
        monkeypatch.setattr(shutil, "which", lambda command: f"/bin/{command}")
        answer = subprocess.CompletedProcess([], 0, stdout=listed, stderr="")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
        return diagnose()

    return of


def test_of_this_machine_as_a_table_and_for_machines(run: Run) -> None:
    code, output, _ = run("doctor", "--json")
    found = json.loads(output)
    assert code == 0 and found["versions"]["torch"] == importlib.metadata.version("torch")
    parts = {(part["kind"], part["name"]): part["refusal"] for part in found["parts"]}
    kinds = {"policy.backend": BACKENDS, "rollout.engine": ENGINES, "policy.logprobs.impl": KERNELS}
    expected = {
        (kind, name)
        for kind, names in (kinds | {"launcher": (*LAUNCHERS, *SCHEDULERS)}).items()
        for name in names
    }
    assert expected | {("device", "cpu"), ("device", "cuda")} == parts.keys()
    assert parts["policy.backend", "dtensor"] is None and parts["rollout.engine", "torch"] is None
    assert (parts["device", "cuda"] is None) == torch.cuda.is_available()


def test_with_a_gpu_everything_is_usable(machine: Any) -> None:
    diagnosis = machine({}, **{"megatron-core": "0.19.2"})
    assert [gpu.name for gpu in diagnosis.gpus] == ["NVIDIA H200"]
    assert {name for name, refusal in refusals(diagnosis).items() if refusal} <= {"megatron"}
    shown = table(diagnosis)
    assert re.search(r"GPU 0 +NVIDIA H200, 140 GiB, compute capability 9\.0, driver 570\.1", shown)


@pytest.mark.parametrize(
    ("found", "listed", "refused", "words"),
    [
        ({"torch": [None, 0]}, H200, {"cuda", "vllm", "triton"}, "is built without CUDA; pip install"),
        ({"torch": ["12.9", 0]}, H200, {"cuda", "vllm", "triton"}, "the driver may be older"),
        ({"torch": ["12.9", 0]}, "", {"cuda", "vllm", "triton"}, "nvidia-smi lists no GPU"),
        ({"triton": "triton cannot be imported: x"}, H200, {"triton"}, "triton cannot be imported: x"),
        (
            {"torch": "torch cannot be imported: libcudart.so.12: not found; pip install torch"},
            H200,
            {"cpu", "cuda", "dtensor", "megatron", "torch", "vllm", "logits", "chunked", "triton"},
            "libcudart.so.12",
        ),
        (
            {"transformers": "without the package transformers; pip install transformers"},
            H200,
            {"dtensor", "megatron", "torch", "vllm", "logits", "chunked"},
            "pip install transformers",
        ),
    ],
)
def test_what_is_broken_is_a_reason(
    found: Any, listed: str, refused: set[str], words: str, machine: Any
) -> None:
    diagnosis = machine(found, listed)
    reasons = {name: reason for name, reason in refusals(diagnosis).items() if reason}
    assert reasons.keys() - {"megatron"} == refused - {"megatron"}
    assert any(words in reason for reason in reasons.values())
    assert all("\n" not in reason for reason in reasons.values())
    for reason in reasons.values():
        assert "".join(reason.split()) in "".join(table(diagnosis).split()), "with its brackets"


def test_versions_that_were_not_tested_are_warnings(machine: Any) -> None:
    assert machine({}).warnings == ()
    versions = {"torch": "99.0.0+cu140", "triton": "3.5.0", "vllm": "99.0"}
    diagnosis = machine({}, **versions)
    torch_line, triton_line = diagnosis.warnings
    assert re.fullmatch(r"torch 99\.0\.0\+cu140: not tested .*: pip install 'torch.*>=2\.11'", torch_line)
    assert triton_line.startswith("triton 3.5.0: not tested")
    assert torch_line in table(diagnosis)
    assert json.loads(diagnosis.as_json())["warnings"] == [*diagnosis.warnings]
    assert not any(refusals(diagnosis)[name] for name in ("dtensor", "triton")), "a warning refuses nothing"


def table(diagnosis: Diagnosis) -> str:
    console = Console(width=400)
    with console.capture() as shown:
        console.print(diagnosis.render())
    return shown.get()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libcudart.so.12:\\n cannot open')", "cannot be imported: cannot open; pip"),
        ("import os; os.kill(os.getpid(), 11)", "cannot be imported: exit code -11; pip"),
        ("", "cannot be imported: AttributeError: "),  # an empty folder of that name
        ("import os; os._exit(0)", "cannot be imported: IndexError: "),
        (
            "try:\n    raise OSError('torchaudio.so: no such file')\n"
            "except OSError as error:\n    raise ImportError('see above') from error",
            "OSError: torchaudio.so: no such file; pip uninstall torchaudio, which",
        ),
        ("import time; time.sleep(60)", "importing torch took more than 2 s; run abrun doctor again"),
    ],
)
def test_a_broken_package_is_one_line(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "SECONDS", 2 if "sleep" in source else 60)
    reason = doctor._imported("torch")
    assert words in reason and "\n" not in reason


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert doctor._imported("torch") == "without the package torch; pip install 'abrun[train]'"
