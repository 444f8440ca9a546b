import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.disturbed import launch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The same experiment by the local launcher on two ranks, by its number of steps."""
    runs_dir, made = tmp_path_factory.mktemp("local"), dict[int, Path]()

    def experiment(steps: int) -> Path:
        if steps not in made:
            made[steps] = runs_dir / f"steps-{steps}"
            launch(runs_dir, made[steps].name, steps, "--launcher", "local", "--set", "cluster.cpu_ranks=2")
        return made[steps]

    return experiment


@pytest.fixture(autouse=True)
def _installed(trainer_installed: None) -> None:
    """Launches of fakes are checked like those of the trainer."""


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_behaviour(step_s: float = 0.0, **runs: str) -> None:
        """`treatment_0="fail"`: what the fake trainer does in which run."""
        named = {"/seed-".join(run.split("_")): what for run, what in runs.items()}
        monkeypatch.setenv("FAKE_TRAINER", json.dumps({"step_s": step_s, "runs": named}))

    return set_behaviour
