"""What is missing is said in one line with the extra that brings it, and the core does without."""

import email.message
import html
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from abrun.api import compare
from abrun.errors import AbrunError, ComparisonError
from abrun.recipe import extras
from abrun.recipe.extras import megatron_refusal
from tests.launch.test_local import SMALL
from tests.logs.layouts import LAYOUTS
from tests.snapshot import Snapshot
from tests.verdict.simulate import write_experiment

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An environment without a package: nothing finds it."""
    found = importlib.util.find_spec
    monkeypatch.chdir(tmp_path)

    def hide(package: str) -> None:
        def find(name: str, *rest):
            return None if name.split(".")[0] == package else found(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    return hide


def test_every_extra_that_is_named_brings_what_is_looked_for() -> None:
    for extra, packages in extras.EXTRAS.items():
        wanted = " ".join(PROJECT["optional-dependencies"][extra]).replace("-", "_")
        assert all(re.search(rf"\b{package}\b", wanted) for package in packages)
        is_installed = all(map(importlib.util.find_spec, packages))
        assert (extras.missing_package(extra) is None) == is_installed
    core = " ".join(PROJECT["dependencies"])
    assert not re.search(r"torch|transformers|matplotlib|wandb|pandas|tensorboard", core)


def test_what_a_trainer_imports_is_what_its_configuration_uses() -> None:
    plain = {"rollout.engine": "torch", "policy.backend.type": "dtensor", "task.verifier": "math"}
    found = {name: extras.is_imported(name, plain) for name in (*extras.IMPORTED_WITH, "torch")}
    assert [name for name, imported in found.items() if imported] == ["torch"]
    assert extras.is_imported("vllm", plain | {"rollout.engine": "vllm"})
    assert extras.is_imported("vllm", plain | {"task.verifier": "judge:by_a_model"})  # a module of the user's


@pytest.mark.parametrize("command", ["launch", "memory-profile", "faults run"])
def test_training_without_torch_is_one_line(without, abrun, command: str) -> None:
    without("torch")
    code, _, said = abrun(*command.split(), SMALL)
    assert code == 2 and len(said.strip().splitlines()) == 1
    assert said.rstrip().endswith("needs torch: pip install 'abrun[train]'")


def test_figures_are_left_out_or_refused(without, abrun, tmp_path: Path) -> None:
    sources = LAYOUTS["two CSV files"](tmp_path / "runs")
    without("matplotlib")
    report = ["--output", tmp_path / "report"]
    _, printed, _ = abrun("compare", *sources, *report, "-v")
    assert "PNG and SVG: needs matplotlib: pip install 'abrun[figures]'" in " ".join(printed.split())
    assert sorted(path.suffix for path in (tmp_path / "report").glob("[!.]*")) == [".html", ".json", ".md"]
    with pytest.raises(
        ComparisonError, match=r"png and svg: needs matplotlib: pip install 'abrun\[figures\]'"
    ):
        compare(*map(str, sources), output=tmp_path / "report", formats=["png"])


def test_data_frames_without_pandas_are_one_line(without, tmp_path: Path) -> None:
    write_experiment(tmp_path / "apart", shift=0.2)
    result = compare("apart", runs_dir=tmp_path)
    without("pandas")
    missing = "needs pandas: pip install 'abrun[frames]'"
    for table in (lambda: result.claims, lambda: result.metrics, lambda: result.experiment.runs):
        with pytest.raises(AbrunError) as refusal:
            table()
        assert str(refusal.value) == f"data frames: {missing}"
    for shown in (result._repr_html_(), result.experiment._repr_html_()):  # a notebook shows the rest
        assert html.escape(missing) in shown
    assert "MISMATCH: apart" in result._repr_html_() and result.content["claims"]


def test_a_package_that_a_python_lacks_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    """The markers of pyproject.toml and the refusals name the same Pythons."""
    marked = {}
    for requirement in map(Requirement, chain(*PROJECT["optional-dependencies"].values())):
        if requirement.marker and "python_version" in str(requirement.marker):
            minors = [n for n in range(11, 21) if requirement.marker.evaluate({"python_version": f"3.{n}"})]
            marked[requirement.name] = (3, minors[-1])
    assert marked == extras.NEWEST_PYTHON
    install, lacks = "is missing", "has no wheel for Python"
    for minor, problem in ((13, install), (14, lacks), (15, lacks)):
        version = (3, minor, 0)
        monkeypatch.setattr(sys, "version_info", version)
        monkeypatch.setattr(importlib.metadata, "version", missing_distribution)
        refusal = megatron_refusal()
        assert refusal and f"but the package megatron-core {problem}" in refusal
        snapshot(refusal)


def missing_distribution(package: str) -> str:
    raise importlib.metadata.PackageNotFoundError(package)


@pytest.fixture
def installed_metadata(monkeypatch: pytest.MonkeyPatch):
    """abrun's metadata as pip writes them from these lines of pyproject.toml."""

    def declare(*requirements: str) -> None:
        message = email.message.Message()
        message["Provides-Extra"] = "train"
        message["Provides-Extra"] = "megatron"
        for requirement in requirements:
            message["Requires-Dist"] = requirement
        monkeypatch.setattr(importlib.metadata, "metadata", lambda _: message)
        extras.range_of_tested_versions.cache_clear()

    yield declare
    extras.range_of_tested_versions.cache_clear()


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.11.0", True),
        ("2.15.1+cu130", True),
        ("2.15.1rc1", True),
        ("2.16.0", False),
        ("2.16.0.dev20261101", False),
        ("2.10.0+cpu", False),
        ("3.0", False),
        (None, True),
        ("of no version", True),  # torn metadata say nothing
    ],
)
def test_the_tested_versions_are_those_of_the_metadata(
    version: str | None, is_tested: bool, installed_metadata
) -> None:
    installed_metadata("numpy>=2", "torch<2.16,>=2.11; extra == 'train'")
    install = "pip install 'torch<2.16,>=2.11'"
    untested = f"torch {version}: not tested with abrun; if runs fail: {install}"
    assert extras.untested_version("torch", version) == (None if is_tested else untested)


def test_ranges_of_several_extras_hold_together_and_only_where_they_apply(installed_metadata) -> None:
    installed_metadata(
        "Some.Kernels>=3.6; extra == 'train'",
        "some-kernels<3.10; extra == 'megatron'",
        "some_kernels<3.7; extra == 'train' and python_version < '3'",
        "other",
    )
    assert extras.untested_version("some-kernels", "3.9.1") is None
    assert extras.untested_version("some-kernels", "3.10.0")
    assert extras.untested_version("some-kernels", "3.5")
    assert extras.untested_version("other", "99") is None, "any version"
    assert extras.untested_version("nothing", "1") is None
    assert extras.install_command("other", "--upgrade") == "pip install --upgrade 'other'"


def test_without_metadata_every_version_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "metadata", missing)
    extras.range_of_tested_versions.cache_clear()
    assert extras.untested_version("torch", "99") is None
    extras.range_of_tested_versions.cache_clear()
