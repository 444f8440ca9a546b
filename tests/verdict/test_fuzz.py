"""Damaged stores: `compare` and `status` do their work or refuse it in one line; a cache changes nothing."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun import watch
from abrun.errors import AbrunError
from abrun.logs.recorded.reference import freeze, load_reference
from abrun.logs.recorded.stored import load_experiment
from abrun.report.comparing import compare
from abrun.runs import layout
from abrun.runs.experiment import EXPERIMENT, planned_runs
from tests.fuzzing import SEED, bounded, check_line, damaged, rounds
from tests.recipe.test_recipe import mutate
from tests.verdict.simulate import write, write_experiment


def experiment(folder: Path) -> Path:
    """A small experiment with every kind of file."""
    directory = write_experiment(folder / "experiment", steps=12, seeds=[0, 1, 2])
    for run in directory.glob("*/seed-0"):
        prompts = {"prompts_sha256": "ab", "rewards": [0, 1], "lengths": [3, 4]}
        rows = [json.dumps({"step": step, "attempt": 1, **prompts}) + "\n" for step in (0, 6, 12)]
        (run / layout.VALIDATION).write_text("".join(rows))
        (run / layout.EVENTS).write_text('{"event": "finished", "step": 12}\n')
        write(run / layout.HEARTBEAT, {"time_s": 0.0, "step": 12, "pid": 1, "attempt": 1})
        write(run / layout.LAUNCH, {"git": None, "launches": [{"started_s": 0.0, "pid": 1, "host": "x"}]})
    return directory


def replaced(path: Path, content: bytes, draw: random.Random) -> None:
    """Put something else in the place of a file: damaged, of other values, gone, or no file at all."""
    path.unlink()
    kind = draw.randrange(10)
    if kind < 4 or (kind < 8 and path.suffix not in (".json", ".jsonl")):
        path.write_bytes(damaged(content, draw))
    elif kind < 8 and path.suffix == ".json":
        path.write_text(json.dumps(mutate(json.loads(content), draw)))
    elif kind < 8:
        lines = content.decode().splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(mutate(json.loads(lines[at]), draw))
        path.write_text("\n".join(lines) + "\n")
    elif kind == 8:
        others: list[Callable[[], None]] = [path.mkdir, lambda: os.mkfifo(path)]
        others += [lambda: path.symlink_to("/nowhere"), lambda: path.symlink_to("/dev/zero")]
        draw.choice(others)()


def restore(path: Path, content: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.write_bytes(content)


def fuzz(folder: Path, count: int) -> None:
    directory, report, frozen = experiment(folder), folder / "report", folder / "frozen.json"

    def compared() -> None:
        compare(load_experiment(directory), output=report, formats=("json", "markdown"))

    def shown() -> None:
        watch.render(directory.name, watch.ExperimentReader(directory).read(), 100)
        planned_runs(directory)

    compared()
    freeze(load_experiment(directory), "baseline", frozen)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "launcher.lock")
    assert {path.name for path in files} > {layout.METRICS, layout.CONFIG, layout.ENVIRONMENT}
    done = {"worked": 0, "refused": 0}
    for round_ in range(count):
        draw = random.Random(f"{SEED} stores {round_}")
        path = draw.choice([*files, directory / EXPERIMENT, frozen])
        content = path.read_bytes()
        replaced(path, content, draw)
        for work in (lambda: load_reference(frozen),) if path == frozen else (compared, shown):
            try:
                with bounded():
                    work()
                done["worked"] += 1
            except AbrunError as error:
                check_line(error)
                done["refused"] += 1
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                raise AssertionError(f"round {round_}, {path.relative_to(folder)}: {said}") from error
        restore(path, content)
    assert min(done.values()) > count / 20, done


def test_fuzz_a_sample_of_damaged_stores(tmp_path: Path) -> None:
    fuzz(tmp_path, 25)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_fuzz_damaged_stores(tmp_path: Path) -> None:
    fuzz(tmp_path, rounds(500))
