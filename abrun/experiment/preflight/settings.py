"""Values of settings that need a package, a command or a GPU: one table for `doctor` and launches."""

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from abrun.extras import installed_packages
from abrun.reasons import Code, Reason
from abrun.recipe.packages import megatron_refusal, vllm_refusal

Packages = Mapping[str, str]  # version by name, of those that are installed


def triton_refusal(packages: Packages | None = None, *, on_gpu: bool) -> Reason | None:
    """Return why `policy.logprobs: {impl: triton}` cannot run with these packages, or this environment's."""
    packages = installed_packages() if packages is None else packages
    if missing := _missing_package("triton", packages, "policy.logprobs.impl", "triton", "impl: chunked"):
        return missing
    return None if on_gpu or os.environ.get("TRITON_INTERPRET") == "1" else Code.TRITON_NEEDS_GPU()


def liger_refusal(packages: Packages, *, on_gpu: bool) -> Reason | None:
    if not on_gpu:
        return Code.LIGER_NEEDS_GPU()
    return _missing_package("liger-kernel", packages, "policy.liger", True, "liger: false")


def ray_refusal(packages: Packages | None = None) -> Reason | None:
    """Return why a Ray cluster cannot be asked with these packages, or from this environment."""
    return _missing_package(
        "ray", installed_packages() if packages is None else packages, "launcher.type", "ray"
    )


def _missing_package(
    package: str, packages: Packages, field: str, got: Any, instead: str | None = None
) -> Reason | None:
    if package in packages:
        return None
    install = f"pip install 'abrun[{package.removesuffix('-kernel')}]'"
    return Code.SETTING_NEEDS_PACKAGE(field=field, got=got, package=package, install=install, instead=instead)


# By key and value: why it cannot be had with such packages, on a GPU or not.
SETTINGS: dict[tuple[str, Any], Callable[[Packages, bool], Reason | None]] = {
    ("task.type", "reasoning_gym"): lambda packages, _: (
        None if "reasoning-gym" in packages else Code.REASONING_GYM_MISSING()
    ),
    ("policy.liger", True): lambda packages, on_gpu: liger_refusal(packages, on_gpu=on_gpu),
    ("policy.logprobs.impl", "triton"): lambda packages, on_gpu: triton_refusal(packages, on_gpu=on_gpu),
    ("policy.backend.type", "megatron"): lambda packages, _: megatron_refusal(packages),
    ("rollout.engine", "vllm"): lambda packages, on_gpu: vllm_refusal(packages, on_gpu=on_gpu),
    ("launcher.type", "slurm"): lambda *_: None if shutil.which("sbatch") else Code.SBATCH_MISSING(),
    ("launcher.type", "ray"): lambda packages, _: ray_refusal(packages),
}


def setting_refusal(field: str, value: Any, packages: Packages, *, on_gpu: bool) -> Reason | None:
    """Return why a value cannot be had with these packages; None if it can, or needs nothing."""
    refusal = SETTINGS.get((field, value))
    return refusal and refusal(packages, on_gpu)
