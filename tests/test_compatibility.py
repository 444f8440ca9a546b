"""The newest versions that each extra allows, and the lowest of the core, each in a fresh environment.

Slow: extras with torch download gigabytes. pip's own variables choose versions, such as a CPU build of torch:

    PIP_CONSTRAINT=versions.txt pytest -m slow -s tests/test_compatibility.py -k "newest and wandb"
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.logs.layouts import LAYOUTS, every_run, rows

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
QUICK = ("--seeds", "0", "--no-compare", "--set", "compare.claims=[]")
SHORT = ("--set", "steps=2", "--set", "controls.aa_reruns=0")
QUICKSTART = ("abrun", "launch", "quickstart", *QUICK, *SHORT, "--set", "warm_start.steps=2")
BOTH_ARMS = "arms={baseline: {}, treatment: {policy.logprobs.impl: chunked}}"
WRITE_WANDB = """
import json, sys, wandb
for run in json.load(sys.stdin):
    name = f"{run['arm']}-seed{run['seed']}"
    with wandb.init(mode="offline", name=name, group=run["arm"], dir=sys.argv[1]) as mirror:
        for row in run["rows"]:
            mirror.log({"reward": row["reward"], "loss": row["loss"]}, step=row["step"])
"""
WRITE_PARQUET = """
import json, pathlib, sys, pyarrow, pyarrow.parquet
for run in json.load(sys.stdin):
    path = pathlib.Path(sys.argv[1], run["arm"], f"seed{run['seed']}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(run["rows"]), path)
"""
READ_FRAME = """
import sys, abrun
frame = abrun.load(*sys.argv[1:]).metrics
assert len(frame) > 100 and "train/reward" in set(frame["metric"]), frame
"""

pytestmark = pytest.mark.timeout(3600)


class Failed(Exception):
    """A command's end, in one line."""


@dataclass(frozen=True)
class Environment:
    folder: Path
    extra: str

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    def run(self, *command: str | Path, stdin: str | None = None, **variables: str) -> str:
        """Return the standard output. `abrun` and the like are those of the environment."""
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        clean |= {"PATH": f"{self.python.parent}:{clean['PATH']}", "HF_HUB_OFFLINE": "1", **variables}
        words = [str(word) for word in command]
        done = subprocess.run(
            [str(self.python.parent / words[0]), *words[1:]],
            cwd=self.folder,
            env=clean,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            output = f"{done.stdout}\n{done.stderr}".strip()
            print(output)
            lines = [line for line in output.splitlines() if not line.startswith("WARNING")]
            raise Failed(f"{' '.join(words)}: exit code {done.returncode}: {lines[-1] if lines else ''}")
        return done.stdout

    def versions(self) -> dict[str, str]:
        """Return the installed version of each package that pyproject.toml names for the extra."""
        listed = json.loads(self.run("python", "-m", "pip", "list", "--format", "json"))
        named = {package_of(line) for line in requirements(self.extra)}
        return {one["name"]: one["version"] for one in listed if canonical(one["name"]) in named}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def package_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return canonical(match[0])


def requirements(extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, those of the extras it contains included; of "" the core's."""
    for line in EXTRAS[extra] if extra else PROJECT["dependencies"]:
        inner = re.match(r"abrun\[(.+)\]", line)
        if inner is None:
            yield line
        else:
            for name in inner[1].split(","):
                yield from requirements(name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    return next(folder.iterdir())


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """Create a virtual environment for the core, and remove it after the test: packages take gigabytes."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    yield Environment(tmp_path, "")
    shutil.rmtree(tmp_path / "venv")


def compare(environment: Environment, *sources: str | Path, options: tuple[str, ...] = ()) -> None:
    shown = environment.run("abrun", "compare", *sources, *options)
    assert "train/reward" in shown


def compare_csv(environment: Environment, *options: str) -> list[str]:
    sources = LAYOUTS["two CSV files"](environment.folder / "csv")
    compare(environment, *sources, options=options)
    return sources


def runs_as_json() -> str:
    return json.dumps([{"arm": arm, "seed": seed, "rows": rows(arm, seed)} for arm, seed in every_run()])


def check_core(environment: Environment) -> None:
    compare_csv(environment)
    compare_csv(environment, "--output", "report")
    environment.run("abrun", "recipes")
    environment.run("abrun", "power", "quickstart", "--json")
    environment.run("abrun", "recipes", "--schema")


def check_figures(environment: Environment) -> None:
    compare_csv(environment, "--output", "report")


def check_wandb(environment: Environment) -> None:
    environment.run("python", "-c", WRITE_WANDB, environment.folder, stdin=runs_as_json())
    compare(environment, environment.folder / "wandb")


def check_parquet(environment: Environment) -> None:
    environment.run("python", "-c", WRITE_PARQUET, environment.folder / "tables", stdin=runs_as_json())
    compare(environment, environment.folder / "tables")


def check_frames(environment: Environment) -> None:
    environment.run("python", "-c", READ_FRAME, *compare_csv(environment))


def check_ray(environment: Environment) -> None:
    """Without a cluster the client has nobody to ask: launches are tested in tests/launch/ray."""
    environment.run("python", "-c", "from abrun.launch.ray import gangs, launcher")


def check_train(environment: Environment, *settings: str, **variables: Any) -> None:
    """Train two steps of two arms. A warning in a run's log is a failure."""
    options = [word for setting in settings for word in ("--set", setting)]
    environment.run(*QUICKSTART, *options, **variables)
    logs = "".join(path.read_text() for path in (environment.folder / "runs").rglob("stdout.log"))
    warnings = re.findall(r"^.*(?:Warning: |not tested with).*$", logs, re.M)
    if warnings:
        raise Failed(f"a run's log warns: {warnings[0]}")


def check_triton(environment: Environment) -> None:
    arms = BOTH_ARMS.replace("chunked", "triton")
    check_train(environment, arms, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def check_liger(environment: Environment) -> None:
    environment.run("python", "-c", "from liger_kernel.transformers import monkey_patch")


def check_megatron(environment: Environment) -> None:
    backend = "policy.backend={type: megatron, tensor_parallel: 2}"
    check_train(environment, backend, "cluster.cpu_ranks=2", BOTH_ARMS, CUDA_VISIBLE_DEVICES="")


def check_reasoning(environment: Environment) -> None:
    task = "make_task(ReasoningGym(type='reasoning_gym', name='chain_sum'))"
    imports = "from abrun.recipe import ReasoningGym; from abrun.trainer.tasks import make_task"
    environment.run("python", "-c", f"{imports}; {task}")


def check_external(environment: Environment) -> None:
    environment.run("abrun", "launch", "trl", *QUICK, *SHORT)


def check_vllm(environment: Environment) -> None:
    """Without a GPU the engine's CUDA build cannot start: its start is tested in tests/trainer/rollout."""
    check_train(environment)


def check_docs(environment: Environment) -> None:
    environment.run("mkdocs", "build", "-f", ROOT / ".mkdocs.yml", "-d", environment.folder / "site")


CHECKS: dict[str, Callable[[Environment], None]] = {
    "train": check_train,
    "figures": check_figures,
    "wandb": check_wandb,
    "triton": check_triton,
    "liger": check_liger,
    "vllm": check_vllm,
    "megatron": check_megatron,
    "reasoning": check_reasoning,
    "slurm": check_core,
    "ray": check_ray,
    "parquet": check_parquet,
    "frames": check_frames,
    "docs": check_docs,
    "external": check_external,
}
OF_THE_TESTS = {"test", "test-core", "test-slow"}  # every run of the suite checks them


def check(environment: Environment, function: Callable[[Environment], None]) -> None:
    """Run doctor and a check; fail with the extra and the versions that were installed for it."""
    try:
        diagnosis = json.loads(environment.run("abrun", "doctor", "--json"))
        if diagnosis.get("warnings"):
            raise Failed(f"abrun doctor: {diagnosis['warnings'][0]}")
        function(environment)
    except Failed as failure:
        versions = ", ".join(f"{name} {version}" for name, version in environment.versions().items())
        pytest.fail(f"{environment.extra or 'core'} with {versions}: {failure}", pytrace=False)
    print(environment.extra or "core", environment.versions())


def test_every_extra_has_a_check() -> None:
    assert EXTRAS.keys() - CHECKS.keys() == OF_THE_TESTS


@pytest.mark.slow
@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra in CHECKS])
def test_the_newest_that_an_extra_allows(extra: str, wheel: Path, environment: Environment) -> None:
    environment = replace(environment, extra=extra)
    try:
        environment.run("python", "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]")
    except Failed as failure:
        pytest.fail(f"extra {extra}: {failure}", pytrace=False)
    check(environment, CHECKS[extra])


@pytest.mark.slow
def test_the_core_at_the_lowest_versions_it_allows(wheel: Path, environment: Environment) -> None:
    """Lowest with a wheel for this Python: a floor may be older than the Python."""
    environment.run("python", "-m", "pip", "install", "--quiet", "uv")
    lowest = ("--resolution", "lowest-direct", "--only-binary", ":all:")
    install = ("uv", "pip", "install", "--quiet", "--python", environment.python)
    environment.run(*install, *lowest, "--requirements", ROOT / "pyproject.toml")  # a wheel's are not direct
    environment.run(*install, "--no-deps", wheel)
    versions = environment.versions()
    for name in ("rich", "typer"):  # without compiled code: each Python has the lowest
        assert f"{name}>={versions[name].removesuffix('.0')}" in PROJECT["dependencies"]
    check(environment, check_core)


@pytest.mark.slow
def test_extras_share_an_environment(environment: Environment) -> None:
    """Resolve all extras at once, without installing them. uv names the packages that conflict."""
    environment.run("python", "-m", "pip", "install", "--quiet", "uv")
    compile_all = ("uv", "pip", "compile", "--quiet", "--all-extras", "--python", environment.python)
    try:
        environment.run(*compile_all, ROOT / "pyproject.toml")
    except Failed as failure:
        pytest.fail(str(failure), pytrace=False)
