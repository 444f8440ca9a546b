"""Check that the installed vLLM can report the tokens that its filters kept, without importing it."""

import importlib.metadata
from collections.abc import Mapping

from abrun.extras import installed_packages
from abrun.reasons import Code, Reason
from abrun.recipe.vllm_versions import CPU_BUILD, RELEASES, installed_vllm, release_of


def missing_sampling_masks(packages: Mapping[str, str] | None = None) -> Reason | None:
    """Return why the vLLM of these packages, or the installed one, cannot report the tokens that it kept."""
    installed = installed_vllm(installed_packages() if packages is None else packages)
    if not installed:
        return Code.VLLM_ABSENT()
    name, version = next(iter(installed.items()))
    release = release_of(version)
    if release is None or not release.sampling_mask:
        oldest = next(release.number for release in RELEASES if release.sampling_mask)
        return Code.VLLM_WITHOUT_SAMPLING_MASKS(
            package=name, version=version, oldest=f"{oldest[0]}.{oldest[1]}"
        )
    if name == CPU_BUILD and not release.cpu_build_finds_triton:
        oldest = next(release.number for release in RELEASES if release.cpu_build_finds_triton)
        return Code.VLLM_FINDS_NO_TRITON(package=name, version=version, oldest=f"{oldest[0]}.{oldest[1]}")
    if (name == CPU_BUILD or "cpu" in version) and not _has_triton_for_cpus():
        return Code.TRITON_FOR_CPUS_MISSING(package=name, version=version)
    return None


def _has_triton_for_cpus() -> bool:
    return any(entry.name == "cpu" for entry in importlib.metadata.entry_points(group="triton.backends"))
