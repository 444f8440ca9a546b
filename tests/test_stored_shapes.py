"""Stored files of another shape: every reader does its work, or refuses in one line of file and field."""

import copy
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from abrun import watch
from abrun.errors import AbrunError, StoreError
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.launch.prepare import own_experiment
from abrun.launch.ray import launcher as ray_launcher
from abrun.launch.slurm import launcher as slurm_launcher
from abrun.logs.completions import pair_samples, read_run_samples
from abrun.logs.recorded.reference import freeze, load_reference
from abrun.logs.recorded.stored import load_experiment
from abrun.logs.stored import read_run_dir
from abrun.messages.codes import Code
from abrun.recipe.experiment import load_recipe
from abrun.report.comparing import compare
from abrun.runs.experiment import REFERENCE, read_reported_verdict
from abrun.runs.files import MAX_LINE_BYTES
from abrun.runs.lines import Sample, read_json_lines, sample_row
from abrun.runs.lock import LOCK, find_owner
from abrun.runs.records import read_saved_state
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from tests.fuzzing import SEED, bounded, check_line, rounds
from tests.launch.fakes import run_to_end
from tests.reasons import only
from tests.verdict.simulate import edit, write, write_experiment

FOREIGN = Path(__file__).parent / "external" / "foreign.yaml"
MISSING, UNKNOWN = object(), object()
DEEP: Any = "end"
for _ in range(100):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e308 * 10, float("nan"), "", "text", "a\0b", "\udc80", [], ["a"], [1, {}], {}),
    *({"a": {"b": 1}}, DEEP, 10**400, MISSING, UNKNOWN),
)
CONTENTS: tuple[bytes, ...] = (
    *(b"", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"null", b"true", b"-1", b"1e400", b'""', b'"text"', b"[]"),
    *(
        b'["a"]',
        b"{}",
        b'{"a": {"b": 1}}',
        b"[" * 100 + b"]" * 100,
        b"9" * 5000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ),
)


@pytest.fixture(scope="module")
def plan() -> ExperimentPlan:
    changes = ["seeds=[0, 1]", "trainer.parameters.script=" + str(FOREIGN.with_name("foreign_trainer.py"))]
    return make_plan(load_recipe(FOREIGN, changes))


@pytest.fixture(scope="module")
def recorded(plan: ExperimentPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real experiment of a command, and every file that other ways to launch it leave."""
    runs_dir = tmp_path_factory.mktemp("recorded")
    assert run_to_end(plan, runs_dir).exit_code == 0
    directory = runs_dir / "foreign"
    _add_what_other_launchers_write(directory)
    for run in directory.glob("*/seed-0"):
        prompts = {"prompts_sha256": "ab", "rewards": [0, 1], "lengths": [3, 4]}
        (run / "validation.jsonl").write_text(json.dumps({"step": 5, "attempt": 1, **prompts}) + "\n")
        sample = Sample(prompt="1+1=", text="2", reward=1.0, logprob_error=0.1, num_tokens=1, truncated=False)
        (run / "samples.jsonl").write_text(json.dumps(sample_row(5, 1, [sample])) + "\n")
        write(run / "wandb.json", {"id": "a", "url": "https://wandb.ai/a/b/runs/c"})
        node = {"attempt": 1, "node": 0, "host": "n", "time_s": 1.0, "silent_since_s": 1.0}
        rank = {"rank": 0, "place": "read (a.py:1)", "doing": "rollout", "waits": False}
        write(run / "nodes" / "0000.json", {**node, "ranks": [rank]})
        files = {"rank-0.safetensors": {"bytes": 3, "sha256": "ab"}}
        state = {"run": RunDir(run).identity(), "step": 5, "num_ranks": 1, "attempt": 1, "files": files}
        write(run / "checkpoints" / "step-000005" / "state.json", state)
        (run / "checkpoints" / "final").mkdir()
        result = json.loads((run / "result.json").read_text())
        write(run / "result.json", {**result, "final_weights": files})
    compare(load_experiment(directory), output=directory / "report", formats=("json", "markdown"))
    freeze(load_experiment(directory), "baseline", directory / REFERENCE)
    return directory


def _add_what_other_launchers_write(directory: Path) -> None:
    slurm = {"jobs": {"17": [["baseline/seed-0"]]}, "compare": "18", "settings": {}, "user": "a", "git": None}
    write(directory / "_slurm" / "jobs.json", {**slurm, "submitting": {"pairs": [["baseline/seed-1"]]}})
    ray = {
        "name": "x",
        "attempt": 1,
        "job": "x-a1",
        "url": "http://127.0.0.1:9",
        "compare": True,
        "git": None,
    }
    ray |= {"settings": {"restarts": 1, "save_s": 30}, "cwd": "/", "python": "python", "env": {"A": "b"}}
    write(directory / "_ray" / "job.json", ray)
    write(directory / "_ray" / "driver.json", {"job": "x-a1", "waiting": {"a": "b"}, "ended": None})


def readers(directory: Path, plan: ExperimentPlan) -> dict[str, Callable[[], object]]:
    run, other = directory / "baseline" / "seed-0", directory / "treatment" / "seed-0"

    def resumed() -> None:
        with own_experiment(plan, directory, resume=True) as lease:
            lease.refresh()

    def shown() -> None:
        watch.render(directory.name, watch.ExperimentReader(directory).read(), 100)

    def read_of_a_run() -> None:
        here = RunDir(run)
        for read in (
            here.attempts,
            here.code_versions,
            here.git,
            here.identity,
            here.wandb_location,
            here.record,
            here.events,
        ):
            read()
        _ = (
            here.describe_weights_damage(),
            here.describe_missing_steps(5),
            here.start_step,
            here.initial_weights,
        )
        _ = here.heartbeat(), here.nodes(1), read_state(here, here.record().name), find_owner(directory)

    return {
        "status of all": lambda: watch.status_json(directory.parent, None),
        "status": lambda: watch.status_json(directory.parent, directory),
        "watch": shown,
        "compare": lambda: compare(load_experiment(directory), output=directory / "new", formats=("json",)),
        "samples": lambda: pair_samples(read_run_samples(run), read_run_samples(other)),
        "resume": resumed,
        "logs": lambda: list(watch.read_log(run, lambda directory: None, follow=False)),
        "foreign": lambda: read_run_dir(run, "run"),
        "run": read_of_a_run,
        "checkpoint": lambda: read_saved_state(run / "checkpoints" / "step-000005"),
        "reference": lambda: load_reference(directory / REFERENCE),
        "verdict": lambda: read_reported_verdict(directory),
        "slurm": lambda: slurm_launcher.read_record(directory),
        "ray": lambda: ray_launcher.read_driver(directory, str(ray_launcher.read_job(directory).get("job"))),
    }


READ_BY = {  # files that one reader alone reads; all others are tried with all readers
    "state.json": ("checkpoint",),
    "reference.json": ("reference",),
    "verdict.json": ("verdict",),
    "jobs.json": ("slurm",),
    "job.json": ("ray",),
    "driver.json": ("ray",),
}


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every field of a tree, and of the tree itself."""
    yield at
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from places(child, (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a tree with another value at one place, without it, or with one more key beside it."""
    if not at:
        return tree if value in (MISSING, UNKNOWN) else value
    tree = copy.deepcopy(tree)
    node = tree
    for key in at[:-1]:
        node = node[key]
    if value is MISSING:
        del node[at[-1]]
    elif value is UNKNOWN:
        node.update(unknown=1) if isinstance(node, dict) else node.append("unknown")
    else:
        node[at[-1]] = value
    return tree


def mutations(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield contents of another shape for a stored file, each with what it is."""
    is_json, content = path.suffix == ".json", path.read_bytes()
    if path.suffix not in (".json", ".jsonl") or not content.strip():
        return
    last = json.loads(content if is_json else content.splitlines()[-1])
    before = b"" if is_json else content[: content.rstrip().rfind(b"\n") + 1]
    for at in places(last):
        for value in VALUES:
            text = json.dumps(changed(last, at, value)).encode()
            what = "gone" if value is MISSING else "beside" if value is UNKNOWN else repr(value)[:20]
            yield f"{'.'.join(map(str, at))}: {what}", before + text + b"\n"
    for text in CONTENTS:
        yield f"whole: {text[:20]!r}", before + text


def put(path: Path, content: bytes | None) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    if content is not None:
        path.write_bytes(content)


def check(directory: Path, plan: ExperimentPlan, path: Path, what: str, seen: set[str]) -> None:
    """Run every reader of a file that was changed; `seen` gets which of them refused it."""
    for name, read in readers(directory, plan).items():
        if name not in READ_BY.get(path.name, (name,)):
            continue
        try:
            with bounded():
                read()
        except AbrunError as error:
            check_line(error)
            seen.add(name)
        except Exception as error:
            where = f"{path.relative_to(directory)}, {what}, {name}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}"[:400]) from error


def fuzz(recorded: Path, plan: ExperimentPlan, folder: Path, count: int) -> None:
    directory = folder / "runs" / "foreign"
    shutil.copytree(recorded, directory)
    paths = [path for path in sorted(directory.rglob("*.json*")) if "seed-1" not in path.parts]
    assert len(paths) > 25
    seen: set[str] = set()
    draw = random.Random(f"{SEED} shapes")
    for path in draw.sample(paths, min(len(paths), count)):
        content = path.read_bytes()
        every = list(mutations(path))
        for what, text in draw.sample(every, min(len(every), -(-count // len(paths)))):
            put(path, text)
            check(directory, plan, path, what, seen)
        others: dict[str, Callable[[], object]] = {
            "folder": path.mkdir,
            "pipe": lambda path=path: os.mkfifo(path),
            "device": lambda path=path: path.symlink_to("/dev/zero"),
            "nowhere": lambda path=path: path.symlink_to("/nowhere"),
        }
        for what in draw.sample(sorted(others), 4 if count > 500 else 1):
            put(path, None)
            others[what]()
            check(directory, plan, path, what, seen)
        put(path, content)
    assert {"status", "compare", "resume", "ray", "slurm", "reference"} <= seen


def test_fuzz_a_sample_of_shapes(recorded: Path, plan: ExperimentPlan, tmp_path: Path) -> None:
    fuzz(recorded, plan, tmp_path, 20)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_fuzz_shapes(recorded: Path, plan: ExperimentPlan, tmp_path: Path) -> None:
    fuzz(recorded, plan, tmp_path, rounds(1000))


@pytest.fixture
def experiment_dir(tmp_path: Path) -> Path:
    return write_experiment(tmp_path / "runs" / "demo", steps=12, seeds=[0, 1, 2])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("versions", "torch 2", "versions: got 'torch 2'; expected a mapping"),
        ("versions", ["a"], "versions: got ['a']; expected a mapping"),
        ("versions", {"torch": {"a": 1}}, "versions.torch: got {'a': 1}; expected text"),
        ("devices", {"a": 1}, "devices: got {'a': 1}; expected a list"),
        ("started_from", {"step": "x"}, "started_from.step: got 'x'; expected a whole number"),
    ],
)
def test_an_environment_of_another_shape_is_a_line_of_the_report(
    experiment_dir: Path, field: str, value: Any, words: str
) -> None:
    path = experiment_dir / "treatment" / "seed-1" / "environment.json"
    edit(path, lambda content: content.update({field: value}))
    comparison = compare(load_experiment(experiment_dir), output=experiment_dir / "new", formats=("json",))
    assert comparison.verdict == "INVALID"
    reason = only(comparison.content.reasons, Code.RUN_UNREADABLE)
    assert reason["run"] == "treatment/seed-1" and words in reason["problem"]


@pytest.mark.parametrize("name", ["launch.json", "config.json", "result.json", "metrics.jsonl"])
def test_a_file_of_gigabytes_is_one_line_of_its_run(experiment_dir: Path, name: str) -> None:
    write_experiment(experiment_dir.parent / "other", steps=3, seeds=[0, 1])
    path = experiment_dir / "treatment" / "seed-1" / name
    path.touch()
    os.truncate(path, 9 * 10**9)
    began_s = time.process_time()
    content = watch.status_json(experiment_dir.parent, None)
    states = {run.label: run.state for run in watch.ExperimentReader(experiment_dir).read()}
    assert time.process_time() - began_s < 3
    assert [one["experiment"] for one in content["experiments"]] == ["demo", "other"]
    if name != "result.json":  # which status does not open
        assert f"{name}: cannot be read: " in str(states.pop("treatment/seed-1").message)
    assert all(state.status == "finished" and not state.message for state in states.values())


def test_keys_of_other_versions_are_let_be(experiment_dir: Path) -> None:
    for path in experiment_dir.rglob("*.json"):
        edit(path, lambda content: content.update(unknown={"a": [1]}))
    for path in experiment_dir.glob("*/*/environment.json"):
        edit(path, lambda content: content.pop("hosts"))
    comparison = compare(load_experiment(experiment_dir), output=experiment_dir / "new", formats=("json",))
    assert comparison.verdict == "MATCH"


def test_a_line_without_end_is_refused_where_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n')
    os.truncate(path, 9 * 10**9)
    with pytest.raises(StoreError, match=f"longer than {MAX_LINE_BYTES} bytes"):
        read_json_lines(path)
    path.write_text('{"a": ' + "[" * 100 + "]" * 100 + "}\n")
    with pytest.raises(StoreError, match="line 1: got"):
        read_json_lines(path)


def test_an_owner_is_no_group_of_processes(tmp_path: Path) -> None:
    """Whoever cancels sends it a signal: -1 is all processes of this user."""
    for pid in (-1, 0, "7", 10**30):
        owner = {"pid": pid, "host": os.uname().nodename, "boot_id": None, "process_started": None}
        (tmp_path / LOCK).write_text(json.dumps(owner))
        assert find_owner(tmp_path) is None
