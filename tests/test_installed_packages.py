"""Another package adds a command and a reader: that of docs/how-to/extend.md, installed as a wheel by pip."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "extend.md"
WHEEL = "abrun_blackbox-1.0-py3-none-any.whl"


def install(folder: Path, *, broken: bool = False, replaced: tuple[str, str] | None = None) -> Path:
    """Install the page's package into a folder and return it: by pip, unless it is changed."""
    text = PAGE.read_text(encoding="utf-8")
    modules = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    (entry_points,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    entry_points = entry_points[entry_points.index("[project.entry-points") :]
    entry_points = re.sub(r'project\.entry-points\."([\w.]+)"', r"\1", entry_points).replace('"', "")
    info = "abrun_blackbox-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, code in modules:
            wheel.writestr(
                name, "import no_such_module\n" if broken else code.replace(*(replaced or ("", "")))
            )
        wheel.writestr(f"{info}/entry_points.txt", entry_points)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: abrun-blackbox\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    target = folder / "installed"
    if broken or replaced:
        shutil.unpack_archive(folder / WHEEL, target, "zip")
        return target
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "-q", "--target", str(target)]
    subprocess.run([*pip, str(folder / WHEEL)], check=True)
    return target


def abrun(packages: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    command = [sys.executable, "-m", "abrun", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("package"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for arm, shift in (("old", 0.0), ("new", 0.001)):
        for seed in range(4):
            path = tmp_path / arm / f"seed-{seed}.blackbox"
            path.parent.mkdir(exist_ok=True)
            rows = (f"{step} train/reward {step / 40 + seed / 100 + shift:.4f}" for step in range(1, 21))
            path.write_text("\n".join(rows))
    return tmp_path


def test_a_package_adds_a_command_under_a_heading(packages: Path, runs: Path) -> None:
    listed = abrun(packages, runs, "--help").stdout
    assert re.search(
        r"blackbox-metrics +List the metrics of a blackbox file\.", listed.split("Diagnostics:")[1]
    )
    done = abrun(packages, runs, "blackbox-metrics", "old/seed-0.blackbox")
    assert (done.returncode, done.stdout) == (0, "seed-0.blackbox: train/reward\n")
    helped = abrun(packages, runs, "blackbox-metrics", "--help").stdout
    assert "abrun blackbox-metrics run.blackbox" in helped
    missed = abrun(packages, runs, "blackbox-metrics", "new/none.blackbox")
    assert missed.returncode == 2 and "none.blackbox: no such file" in missed.stderr and missed.stdout == ""


def test_a_package_adds_a_reader_of_files_folders_and_a_prefix(packages: Path, runs: Path) -> None:
    claim = ("--claim", "train/reward:last 20%:0.02")
    for old, new in (("old", "new"), ("blackbox:old", "blackbox:new")):
        done = abrun(packages, runs, "compare", old, new, *claim)
        assert done.returncode == 0 and "MATCH" in done.stdout, done.stdout + done.stderr
    (runs / "new" / "seed-1.blackbox").write_text("1 train/reward")
    done = abrun(packages, runs, "compare", "old", "new", *claim)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "seed-1.blackbox: line 1: expected STEP METRIC VALUE" in done.stderr


def test_a_package_that_cannot_be_loaded_is_named_and_the_rest_works(tmp_path: Path, runs: Path) -> None:
    broken = install(tmp_path, broken=True)
    done = abrun(broken, runs, "--help")
    assert done.returncode == 0 and "compare" in done.stdout and "trace" in done.stdout
    assert "blackbox of abrun-blackbox cannot be loaded: ModuleNotFoundError" in done.stderr
    assert done.stderr.count("\n") == 1
    assert abrun(broken, runs, "recipes").returncode == 0
    done = abrun(broken, runs, "compare", "old", "new")  # which only that package reads
    assert done.returncode == 2 and "no runs found" in done.stderr
    for path in runs.rglob("*.blackbox"):
        rows = (line.split() for line in path.read_text().splitlines())
        lines = ["step,train/reward", *(f"{step},{value}" for step, _, value in rows)]
        path.with_suffix(".csv").write_text("\n".join(lines))
    done = abrun(broken, runs, "compare", "old", "new", "--claim", "train/reward:last 20%:0.02")
    assert done.returncode == 0 and "MATCH" in done.stdout, done.stdout + done.stderr
    assert "pip uninstall abrun-blackbox" in done.stderr and done.stderr.count("\n") == 1


def test_an_error_of_a_reader_is_one_line_that_names_it(tmp_path: Path, runs: Path) -> None:
    mended = 'raise StoreError(f"{path}: line {number}: expected STEP METRIC VALUE") from None'
    target = install(tmp_path, replaced=(mended, "raise KeyError(line)"))
    (runs / "old" / "seed-0.blackbox").write_text("1 train/reward")
    done = abrun(target, runs, "compare", "old", "new")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "seed-0.blackbox: the reader blackbox failed: KeyError" in done.stderr
