"""Check that the installed vLLM can report the tokens that its filters kept, without importing it."""

import importlib.metadata

from abrun.recipe.vllm_versions import CPU_BUILD, RELEASES, installed_packages, release_of


def missing_sampling_masks() -> str | None:
    """Return why the installed vLLM cannot report the tokens that it kept; None if it can."""
    installed = installed_packages()
    if not installed:
        return "without vLLM"
    name, version = next(iter(installed.items()))
    release = release_of(version)
    if release is None or not release.sampling_mask:
        oldest = next(release.number for release in RELEASES if release.sampling_mask)
        return (
            f"with {name} {version}, which does not report the tokens that it kept "
            f"(vLLM does from {oldest[0]}.{oldest[1]})"
        )
    if name == CPU_BUILD and not release.cpu_build_finds_triton:
        oldest = next(release.number for release in RELEASES if release.cpu_build_finds_triton)
        return (
            f"with {name} {version}, which finds no Triton for CPUs and so does not report the tokens "
            f"that it kept ({name} does from {oldest[0]}.{oldest[1]})"
        )
    if (name == CPU_BUILD or "cpu" in version) and not _has_triton_for_cpus():
        return (
            f"with {name} {version} and no Triton for CPUs, without which vLLM does not report the tokens "
            "that it kept (install triton-cpu)"
        )
    return None


def _has_triton_for_cpus() -> bool:
    return any(entry.name == "cpu" for entry in importlib.metadata.entry_points(group="triton.backends"))
