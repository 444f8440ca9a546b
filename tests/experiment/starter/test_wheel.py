"""What `pip install` brings, away from any checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = folder.iterdir()
    return wheel


def test_uvx_runs_the_wheel_without_an_installation(wheel: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uv", "tool", "run", "--from", wheel, "abrun", "demo"],
        cwd=tmp_path,
        env=os.environ | {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "MISMATCH" in done.stdout, done.stderr
    assert (tmp_path / "abrun-demo/quickstart/report/report.html").is_file()


def test_an_installed_abrun_launches_what_ships_by_name_anywhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def abrun(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "abrun", *words],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout + done.stderr

    there = abrun("launch", "quickstart", "--dry-run")
    assert f"quickstart: {tmp_path}/site/abrun/shipped/quickstart.yaml" in there
    for name in ("quickstart-regression", "quickstart-injected-fault", "trl"):
        assert " at once.\n" in abrun("launch", name, "--dry-run"), name
    abrun("init", "--kind", "regression", "--name", "mine", "--recipe", "quickstart-regression")
    assert (elsewhere / ".github/actions/regression/action.yml").is_file()
    assert " at once.\n" in abrun("launch", "mine.yaml", "--dry-run")
