"""Table of settings that need a package, a command or a GPU, for `doctor` and launches."""

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from abrun.recipe.extras import installed_packages, megatron_refusal, needs_package, vllm_refusal

Packages = Mapping[str, str]  # installed package -> version


def triton_refusal(packages: Packages | None = None, *, on_gpu: bool) -> str | None:
    """Return why `impl: triton` cannot run with these packages, by default the installed ones."""
    packages = installed_packages() if packages is None else packages
    if missing := _missing_package("triton", packages, "policy.logprobs.impl", "triton", "impl: chunked"):
        return missing
    if on_gpu or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return (
        "policy.logprobs.impl: got 'triton' with cluster.gpus_per_node: 0, but on CPU cores it needs "
        "Triton's slow interpreter (TRITON_INTERPRET=1 in the environment); use impl: chunked, or GPUs"
    )


def ray_refusal(packages: Packages | None = None) -> str | None:
    """Return why a Ray cluster cannot be used with these packages, by default the installed ones."""
    return _missing_package(
        "ray", installed_packages() if packages is None else packages, "launcher.type", "ray"
    )


def _missing_package(
    package: str, packages: Packages, field: str, got: Any, instead: str | None = None
) -> str | None:
    if package in packages:
        return None
    install = f"pip install 'abrun[{package.removesuffix('-kernel')}]'"
    return needs_package(field, got, package, install, instead)


# (key, value) -> function of packages and on_gpu that returns why the value is unavailable
SETTINGS: dict[tuple[str, Any], Callable[[Packages, bool], str | None]] = {
    ("task.type", "reasoning_gym"): lambda packages, _: (
        None
        if "reasoning-gym" in packages
        else "task.type: got 'reasoning_gym', but the package is missing; pip install 'abrun[reasoning]'"
    ),
    ("policy.liger", True): lambda packages, on_gpu: (
        _missing_package("liger-kernel", packages, "policy.liger", True, "liger: false")
        if on_gpu
        else "policy.liger: got true with cluster.gpus_per_node: 0, but its kernels need a GPU; use false"
    ),
    ("policy.logprobs.impl", "triton"): lambda packages, on_gpu: triton_refusal(packages, on_gpu=on_gpu),
    ("policy.backend.type", "megatron"): lambda packages, _: megatron_refusal(packages),
    ("rollout.engine", "vllm"): lambda packages, on_gpu: vllm_refusal(packages, on_gpu=on_gpu),
    ("launcher.type", "slurm"): lambda *_: (
        None if shutil.which("sbatch") else "the command sbatch is not on PATH; run abrun on a login node"
    ),
    ("launcher.type", "ray"): lambda packages, _: ray_refusal(packages),
}


def setting_refusal(field: str, value: Any, packages: Packages, *, on_gpu: bool) -> str | None:
    """Return why a value is unavailable with these packages; None if it is available."""
    refusal = SETTINGS.get((field, value))
    return refusal and refusal(packages, on_gpu)
