"""The run store: whole files, torn lines, resumed runs, states, and one launcher at a time."""

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from abrun import store
from abrun.errors import StoreError
from abrun.plan import RunName

NAME = RunName(arm="baseline", seed=0)


# --- files ---


def test_json_and_lines_keep_nan_and_infinity(tmp_path: Path) -> None:
    row = {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1 + 0.2, "e": "text"}
    writer = store.LineWriter(tmp_path / "rows.jsonl")
    writer.write(row)
    writer.close()
    assert '"a": "NaN", "b": "Infinity", "c": "-Infinity"' in (tmp_path / "rows.jsonl").read_text()
    (read,) = store.read_lines(tmp_path / "rows.jsonl")
    assert math.isnan(read.pop("a")) and read == {key: row[key] for key in "bcde"} | {"step": 1}
    store.write_json(tmp_path / "x.json", {"nested": {"list": [math.nan, 1]}})
    assert store.read_json(tmp_path / "x.json") == {"nested": {"list": ["NaN", 1]}}


def test_a_torn_last_line_is_not_read_and_reopening_drops_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "tr')
    assert [row["step"] for row in store.read_lines(path)] == [1, 2]
    writer = store.LineWriter(path)
    writer.write({"step": 3})
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize(("content", "left"), [(b"", b""), (b"torn", b""), (b"a\n" + b"x" * 200_000, b"a\n")])
def test_reopening_looks_for_the_last_newline_however_far(
    tmp_path: Path, content: bytes, left: bytes
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    store.LineWriter(path).close()
    assert path.read_bytes() == left


def test_a_reader_follows_a_growing_file_without_reading_twice(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    reader = store.LineReader(path)
    assert reader.read() == []
    with path.open("a", buffering=1) as file:
        file.write('{"step": 1}\n{"ste')
        assert reader.read() == [{"step": 1}]
        assert reader.read() == []
        file.write('p": 2}\n')
        assert reader.read() == [{"step": 2}]
        file.write("garbage\n")
    with pytest.raises(StoreError, match=r"rows.jsonl, line 3: got 'garbage'"):
        reader.read()


@pytest.mark.parametrize("bad", ["{", "[1]", "3", '{"step": "1"}', '{"step": 1.5}', '{"no": 1}'])
def test_a_corrupt_line_is_one_line_with_file_and_number(tmp_path: Path, bad: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + bad + '\n{"step": 3}\n')
    with pytest.raises(StoreError, match=r"metrics.jsonl, line 2: got") as caught:
        store.read_metrics(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_metrics_are_by_step_and_the_last_attempt_wins(tmp_path: Path) -> None:
    rows = [(1, 1, 0.1), (2, 1, 0.2), (3, 1, 0.3), (2, 2, 0.22), (3, 2, math.nan), (4, 2, 0.44)]
    writer = store.LineWriter(tmp_path / "metrics.jsonl")
    for step, attempt, reward in rows:
        writer.write({"step": step, "attempt": attempt, "train/reward": reward})
    writer.write({"step": 4, "attempt": 1, "train/reward": 9.0})  # a zombie's: an older attempt never wins
    writer.close()
    reward = store.read_metrics(tmp_path)["train/reward"]
    assert reward.steps.tolist() == [1, 2, 3, 4]
    assert reward.values.tolist() == pytest.approx([0.1, 0.22, math.nan, 0.44], nan_ok=True)
    assert store.read_metrics(tmp_path / "nowhere") == {}


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for the full disk: the kernel refuses to let a file grow."""
    store.write_json(tmp_path / "kept.json", {"old": True})
    writer = store.LineWriter(tmp_path / "rows.jsonl")
    writer.write({"step": 1})
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            for write in (
                lambda: store.write_json(tmp_path / "kept.json", {"new": "x" * 1000}),
                lambda: writer.write({"step": 2, "text": "x" * 1000}),
            ):
                with pytest.raises(StoreError, match=r"cannot be written: .*free the space"):
                    write()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.close()
    assert store.read_json(tmp_path / "kept.json") == {"old": True}
    assert (tmp_path / "rows.jsonl").read_text() == '{"step": 1}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "rows.jsonl"]


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"half":')
    (tmp_path / "b.json").write_text("[]")
    for name, words in (
        ("a.json", "not readable as JSON"),
        ("b.json", "got list"),
        ("c.json", "no such file"),
    ):
        with pytest.raises(StoreError, match=words):
            store.read_json(tmp_path / name)
    with pytest.raises(StoreError, match="a file is where a folder has to be"):
        store.write_json(tmp_path / "a.json" / "below.json", {})


# --- experiments and runs ---


def make_run(experiment_dir: Path, name: RunName = NAME, **files: dict) -> Path:
    store.write_json(
        experiment_dir / "experiment.json",
        {"schema_version": 1, "runs": [{"arm": name.arm, "seed": name.seed, "rerun": name.rerun}]},
    )
    directory = store.run_dir(experiment_dir, name)
    store.write_json(directory / "config.json", {"config": {"steps": 60}})
    for stem, content in files.items():
        store.write_json(directory / f"{stem}.json", content)
    return directory


@pytest.mark.parametrize(
    ("files", "status", "step"),
    [
        ({}, "pending", 0),
        ({"meta": {"status": "running", "attempts": [{"started_s": time.time()}]}}, "running", 0),
        (
            {
                "meta": {"status": "running", "attempts": [{"started_s": 1.0}]},
                "heartbeat": {"time_s": time.time(), "step": 7},
            },
            "running",
            7,
        ),
        (
            {
                "meta": {"status": "running", "attempts": [{"started_s": 1.0}]},
                "heartbeat": {"time_s": 2.0, "step": 7},
            },
            "stalled",
            7,
        ),
        ({"meta": {"status": "failed", "message": "why"}}, "failed", 0),
        ({"meta": {"status": "failed", "message": "why"}, "result": {}}, "finished", 0),
    ],
)
def test_run_states(tmp_path: Path, files: dict, status: str, step: int) -> None:
    make_run(tmp_path, **files)
    state = store.run_state(tmp_path, *store.planned_runs(tmp_path))
    assert (state.status, state.step, state.num_steps) == (status, step, 60)
    assert state.message == ("why" if status == "failed" else None)


def test_attempts_count_from_one(tmp_path: Path) -> None:
    assert store.current_attempt(tmp_path) == 1
    store.write_json(tmp_path / "meta.json", {"attempts": [{}, {}]})
    assert store.current_attempt(tmp_path) == 2


def test_opening_what_is_no_experiment_lists_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no experiment here; launch a recipe first"):
        store.open_experiment(tmp_path / "mine")
    make_run(tmp_path / "other")
    with pytest.raises(StoreError, match="no experiment here; there are: other"):
        store.open_experiment(tmp_path / "mine")
    store.write_json(tmp_path / "other" / "experiment.json", {"schema_version": 99})
    with pytest.raises(StoreError, match="schema_version: got 99"):
        store.open_experiment(tmp_path / "other")


# --- the launcher's lock ---

HOLD = """
import sys, time
from pathlib import Path
from abrun import store
with store.launcher_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_living_launcher_keeps_others_out_and_a_dead_one_does_not(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        words = f"process {holder.pid} on host {socket.gethostname()} launches this"
        with pytest.raises(store.Locked, match=words), store.launcher_lock(tmp_path):
            pass
        assert store.launcher_of(tmp_path) == f"process {holder.pid} on host {socket.gethostname()}"
    finally:
        holder.kill()
        holder.wait()
    assert store.launcher_of(tmp_path) is None
    with store.launcher_lock(tmp_path) as note:
        assert (
            note
            == f"took over the lock of process {holder.pid} on host {socket.gethostname()}, which is gone"
        )
    with store.launcher_lock(tmp_path) as note:
        assert note is None


def test_a_reused_process_id_does_not_keep_a_dead_lock_alive(tmp_path: Path) -> None:
    owner = {"pid": os.getppid(), "host": socket.gethostname()}  # alive, but no launcher
    (tmp_path / store.LOCK).write_text(json.dumps(owner))
    with store.launcher_lock(tmp_path) as note:
        assert note and str(os.getppid()) in note


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_lock_file_of_a_writer_that_crashed_is_nobodys(tmp_path: Path, content: str) -> None:
    (tmp_path / store.LOCK).write_text(content)
    with store.launcher_lock(tmp_path) as note:
        assert note is None


def test_a_lock_of_another_host_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / store.LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(store.Locked, match="process 1 on host elsewhere"), store.launcher_lock(tmp_path):
        pass
    assert store.launcher_of(tmp_path) == "process 1 on host elsewhere"


def test_the_lock_is_released_when_the_launch_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), store.launcher_lock(tmp_path):
        raise ZeroDivisionError
    with store.launcher_lock(tmp_path), pytest.raises(store.Locked), store.launcher_lock(tmp_path):
        pass
    with store.launcher_lock(tmp_path) as note:
        assert note is None


# --- metrics, quickly ---


def as_lists(metrics: dict) -> dict:
    return {
        name: (one.steps.tolist(), [repr(value) for value in one.values]) for name, one in metrics.items()
    }


@pytest.mark.parametrize(
    "odd",  # what makes one row of a usual file an unusual one
    [
        {},
        {"x": math.nan},
        {"x": math.inf, "y": -math.inf},
        {"x": None},
        {"x": None, "y": math.nan},
        {"z": 3.0},
        {"x": True},
        {"step": 2},
        {"step": 1, "attempt": 2},
    ],
)
def test_the_quick_way_of_reading_metrics_says_what_the_careful_one_says(tmp_path: Path, odd: dict) -> None:
    writer = store.LineWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        row = {"step": step, "attempt": 1, "time_s": 0.5, "x": step / 3, "y": -1e300}
        writer.write(row | (odd if step == 4 else {}))
    writer.close()
    content = (tmp_path / "metrics.jsonl").read_bytes()
    careful = as_lists(store._rows_of_anything(tmp_path / "metrics.jsonl"))
    assert as_lists(store.read_metrics(tmp_path)) == careful
    quick = store._rows_of_numbers(content)
    assert quick is None or as_lists(quick) == careful
    if not odd or ("None" not in repr(odd) and set(odd) <= {"x", "y"}):
        assert quick is not None, "numbers alone are read quickly"


def test_the_cache_follows_its_file(tmp_path: Path) -> None:
    def write(*values: float) -> None:
        writer = store.LineWriter(tmp_path / "metrics.jsonl")
        for value in values:
            writer.write(
                {"step": round(value), "attempt": 1, "x": value, **({"y": 1.0} if value > 1 else {})}
            )
        writer.close()

    write(1, 2)
    store.read_metrics(tmp_path)
    assert not (tmp_path / store.METRICS_CACHE).exists(), "the run goes on"
    (tmp_path / "result.json").write_text("{}")
    first = as_lists(store.read_metrics(tmp_path))
    assert (tmp_path / store.METRICS_CACHE).exists() and as_lists(store.read_metrics(tmp_path)) == first
    write(3)
    assert as_lists(store.read_metrics(tmp_path))["x"][0] == [1, 2, 3]
    (tmp_path / store.METRICS_CACHE).write_bytes(b"torn")
    assert as_lists(store.read_metrics(tmp_path))["y"][0] == [2, 3]


def test_many_large_runs_are_read_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WORTH_A_PROCESS", 100)
    for index in range(4):
        (tmp_path / str(index)).mkdir()
        row = {"step": 1, "x": float(index)}
        (tmp_path / str(index) / "metrics.jsonl").write_text(json.dumps(row) + "\n" * (index != 3))
    directories = [tmp_path / name for name in ("2", "0", "gone", "3", "1")]
    found = [as_lists(metrics).get("x") for metrics in store.read_metrics_of(directories)]
    assert found == [
        ([1], ["np.float64(2.0)"]),
        ([1], ["np.float64(0.0)"]),
        None,
        None,
        ([1], ["np.float64(1.0)"]),
    ]


# --- validation ---


def validation_line(step: object, attempt: int, rewards: list) -> str:
    row = {"step": step, "attempt": attempt, "prompts_sha256": "ab", "rewards": rewards, "lengths": [3, 4]}
    return json.dumps(row) + "\n"


def test_of_several_attempts_the_last_validation_counts(tmp_path: Path) -> None:
    assert store.read_validation(tmp_path) == {}
    lines = [
        validation_line(4, 1, [0, 0.5]),
        validation_line(0, 2, [0, 1]),
        validation_line(4, 2, [1, -0.5]),
        validation_line(8, 1, [1, 1]),  # an older attempt's last words
        '{"step": 12, "attem',
    ]
    (tmp_path / "validation.jsonl").write_text("".join(lines))
    found = store.read_validation(tmp_path)
    assert list(found) == [0, 4, 8]
    assert found[4].rewards.tolist() == [1, -0.5] and found[4].lengths.tolist() == [3, 4]
    assert found[0].prompts_sha256 == "ab"


@pytest.mark.parametrize(
    "line",
    [
        "{}\n",
        validation_line(1, 1, [1]),
        validation_line(1, 1, [1, "x"]),
        validation_line(1, 1, [[1, 2], [3, 4]]),
        validation_line(None, 1, [1, 2]),
    ],
)
def test_a_corrupt_validation_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "validation.jsonl").write_text(validation_line(0, 1, [0, 0]) + line)
    with pytest.raises(StoreError, match=r"validation\.jsonl, line 2: not a validation") as raised:
        store.read_validation(tmp_path)
    assert len(str(raised.value).splitlines()) == 1
