"""MLflow's folders and database, trackio's and SwanLab's files, in the form that their writers give them.

The shapes were compared with files that mlflow 3.17, trackio 0.43 and swanlab 0.6 and 0.10 wrote.
"""

import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.logs import Log, read_logs
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources

ARMS = ("hf", "megatron")
REWARDS = [0.25, math.nan, 0.75]
META = (
    "artifact_uri: file:///x\nlifecycle_stage: {stage}\nrun_id: {run}\nrun_name: {name}\nstatus: {status}\n"
)


def read(path: Path) -> list[Log]:
    return read_logs(str(path))


def check_runs(logs: Sequence[Log], *, status: str = "finished") -> None:
    """Check the logs of two arms with two seeds, each with REWARDS at steps 0, 10 and 20."""
    assert [log.name for log in logs] == [f"{arm}-s{seed}" for arm in ARMS for seed in (0, 1)]
    for log, seed in zip(logs, (0, 1, 0, 1), strict=True):
        series = log.metrics["train/reward"]
        assert series.steps.tolist() == [0, 10, 20]
        assert series.values.tolist() == pytest.approx([*REWARDS[:2], REWARDS[2] + seed], nan_ok=True)
        assert log.config is not None
        assert (log.config["seed"], log.config["optim.lr"]) == (seed, 1e-5)
        assert (log.status, log.axis) == (status, "steps")


# --- MLflow ---


def write_mlflow_run(
    folder: Path, name: str, points: dict[str, str], params: dict[str, str], status: int = 3, **tags: str
) -> Path:
    run = folder / name.encode().hex().ljust(32, "0")
    meta = META.format(stage=tags.pop("stage", "active"), run=run.name, name=name, status=status)
    texts = {"meta.yaml": meta, "tags/mlflow.runName": name}
    texts |= {f"metrics/{metric}": text for metric, text in points.items()}
    texts |= {f"params/{key}": text for key, text in params.items()}
    texts |= {f"tags/{key.replace('__', '.')}": text for key, text in tags.items()}
    (run / "metrics").mkdir(parents=True)
    for place, text in texts.items():
        (run / place).parent.mkdir(parents=True, exist_ok=True)
        (run / place).write_text(text)
    return run


def write_mlflow(folder: Path, arms: Sequence[str] = ARMS) -> Path:
    experiment = folder / "mlruns" / "578691686344968864"
    experiment.mkdir(parents=True)
    (experiment / "meta.yaml").write_text("name: dpo backends\nlifecycle_stage: active\n")
    for arm in arms:
        for seed in (0, 1):
            lines = [
                f"17958235418{step} {value + seed if step == 20 else value} {step}\n"
                for step, value in zip((0, 10, 20), REWARDS, strict=True)
            ]
            params = {"seed": str(seed), "optim/lr": "1e-05", "backend": arm, "fused": "True"}
            write_mlflow_run(experiment, f"{arm}-s{seed}", {"train/reward": "".join(lines)}, params)
    return experiment


def test_mlflow_folders(tmp_path: Path) -> None:
    experiment = write_mlflow(tmp_path)
    write_mlflow_run(experiment, "removed", {"train/reward": "1 0.5 0\n"}, {}, stage="deleted")
    check_runs(read(tmp_path / "mlruns"))
    check_runs(read_logs(f"mlflow:{experiment}"))
    (log, *_) = read(experiment)
    assert log.config == {"seed": 0, "optim.lr": 1e-5, "backend": "hf", "fused": True}
    assert log.group == "dpo backends"


def test_mlflow_takes_arms_from_tags_and_seeds_from_parameters(tmp_path: Path) -> None:
    experiment = tmp_path / "mlruns" / "1"
    for index, (arm, seed) in enumerate((arm, seed) for arm in ARMS for seed in (3, 4)):
        points = {"acc": f"1 {0.5 + 0.01 * index} 0\n2 0.5 1\n"}
        write_mlflow_run(experiment, f"bold-crab-{810 + 97 * index}", points, {"seed": str(seed)}, arm=arm)
    experiment_of_runs = open_sources([str(tmp_path / "mlruns")], ReadingOptions())
    assert sorted(map(str, experiment_of_runs.runs)) == [
        f"{arm}/seed-{seed}" for arm in ARMS for seed in (3, 4)
    ]


def test_mlflow_runs_of_several_experiments_are_named_by_both(tmp_path: Path) -> None:
    for number, arm in enumerate(ARMS):
        experiment = tmp_path / "mlruns" / str(number)
        for seed in (0, 1):
            write_mlflow_run(experiment, f"seed-{seed}", {"acc": "1 0.5 0\n2 0.6 1\n"}, {})
        (experiment / "meta.yaml").write_text(f"name: {arm}\n")
    assert [log.name for log in read(tmp_path / "mlruns")] == [
        f"{arm}/seed-{s}" for arm in ARMS for s in (0, 1)
    ]


def test_mlflow_metrics_without_steps_failed_and_nested_runs(tmp_path: Path) -> None:
    experiment = tmp_path / "mlruns" / "1"
    parent = write_mlflow_run(experiment, "sweep", {}, {})
    write_mlflow_run(
        experiment, "a-s0", {"loss": "1 3.0 0\n2 2.0 0\n3 inf 0\n"}, {}, 4, mlflow__parentRunId=parent.name
    )
    write_mlflow_run(experiment, "b-s0", {"loss": "1 3.0 5\n2 2.0 5\n"}, {"x": "y"}, 1)
    first, second = read(experiment)
    assert (first.name, first.status, first.failure) == ("a-s0", "failed", "MLflow's status is FAILED")
    assert first.metrics["loss"].steps.tolist() == [0, 1, 2]
    assert first.metrics["loss"].values.tolist() == [3.0, 2.0, math.inf]
    assert first.notes == ("logged without a step, so numbered from 0: loss",)
    assert (second.status, second.metrics["loss"].values.tolist()) == ("running", [2.0])
    assert "recorded again at the same step" in second.notes[0]


def test_mlflow_runs_with_one_value_of_each_metric_are_final_scores(tmp_path: Path) -> None:
    for arm in ARMS:
        for seed in (0, 1):
            points = {"eval/ifeval": f"1 {0.5 + seed} 0\n", "eval/gsm8k": "1 0.25 0\n"}
            write_mlflow_run(tmp_path / "mlruns" / "1", f"{arm}-s{seed}", points, {})
    assert {log.axis for log in read(tmp_path / "mlruns")} == {"final"}


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        (
            "metrics/train/reward",
            "1 0.5 0\nx y z\n1 0.5 1\n",
            "line 2: got 'x y z'; expected MLflow's 'time value",
        ),
        ("meta.yaml", "[1, 2", "not MLflow's meta.yaml; restore or remove the run's folder"),
    ],
)
def test_damaged_mlflow_files_are_named(tmp_path: Path, place: str, text: str, message: str) -> None:
    experiment = write_mlflow(tmp_path)
    run = next(path for path in sorted(experiment.iterdir()) if path.is_dir())
    (run / place).write_text(text)
    with pytest.raises(StoreError) as error:
        read(experiment)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert place.split("/")[-1] in str(error.value)


def write_mlflow_database(path: Path) -> Path:
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE experiments (experiment_id INTEGER, name VARCHAR(256), lifecycle_stage VARCHAR(32));
            CREATE TABLE runs (run_uuid VARCHAR(32), name VARCHAR(250), status VARCHAR(9), start_time BIGINT,
                lifecycle_stage VARCHAR(20), experiment_id INTEGER);
            CREATE TABLE metrics (key VARCHAR(250), value FLOAT, timestamp BIGINT, run_uuid VARCHAR(32),
                step BIGINT, is_nan BOOLEAN);
            CREATE TABLE params (key VARCHAR(250), value VARCHAR(8000), run_uuid VARCHAR(32));
            CREATE TABLE tags (key VARCHAR(250), value VARCHAR(8000), run_uuid VARCHAR(32));
            INSERT INTO experiments VALUES (1, 'dpo backends', 'active');
            INSERT INTO runs VALUES ('gone', 'removed', 'FINISHED', 0, 'deleted', 1);
            INSERT INTO metrics VALUES ('train/reward', 9, 1, 'gone', 0, 0);
            """
        )
        for number, (arm, seed) in enumerate((arm, seed) for arm in ARMS for seed in (0, 1)):
            run = f"run{number}"
            row = (run, f"{arm}-s{seed}", "FINISHED", number, "active", 1)
            database.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", row)
            database.executemany(
                "INSERT INTO params VALUES (?, ?, ?)", [("seed", str(seed), run), ("optim/lr", "1e-05", run)]
            )
            points = [(0, 0.25, 0), (10, 0.0, 1), (20, 0.75 + seed, 0)]  # MLflow stores NaN as a flagged 0
            database.executemany(
                "INSERT INTO metrics VALUES ('train/reward', ?, ?, ?, ?, ?)",
                [(value, 1000 + step, run, step, is_nan) for step, value, is_nan in points],
            )
    return path


def test_mlflow_database(tmp_path: Path) -> None:
    check_runs(read(write_mlflow_database(tmp_path / "mlflow.db")))
    check_runs(read(tmp_path))
    check_runs(read_logs(f"mlflow:{tmp_path / 'mlflow.db'}"))


# --- trackio ---


def write_trackio(path: Path, *, has_ids: bool = True) -> Path:
    identity = "run_id TEXT, " if has_ids else ""
    with sqlite3.connect(path) as database:
        database.execute(
            f"CREATE TABLE metrics (id INTEGER PRIMARY KEY, {identity}timestamp TEXT, run_name TEXT, "
            "step INTEGER, metrics TEXT)"
        )
        database.execute(
            f"CREATE TABLE configs (id INTEGER PRIMARY KEY, {identity}run_name TEXT, config TEXT, "
            "created_at TEXT)"
        )
        for arm in ARMS:
            for seed in (0, 1):
                name = f"{arm}-s{seed}"
                run = [name.encode().hex()] * has_ids
                config = {"seed": seed, "optim": {"lr": 1e-5}, "_Group": arm, "_Created": "2026"}
                row = (*run, name, json.dumps(config).encode(), "2026")
                names = f"({'run_id, ' * has_ids}run_name, config, created_at)"
                database.execute(f"INSERT INTO configs {names} VALUES ({','.join('?' * len(row))})", row)
                for step, reward in ((0, 0.25), (10, "NaN"), (20, 0.75 + seed)):  # NaN is a text
                    metrics = json.dumps(
                        {"train/reward": reward, "text": "x", "table": {"_type": "trackio.table"}}
                    )
                    row = (*run, "2026", name, step, metrics.encode())
                    names = f"({'run_id, ' * has_ids}timestamp, run_name, step, metrics)"
                    database.execute(f"INSERT INTO metrics {names} VALUES ({','.join('?' * len(row))})", row)
    return path


@pytest.mark.parametrize("has_ids", [True, False])
def test_trackio(tmp_path: Path, has_ids: bool) -> None:
    logs = read(write_trackio(tmp_path / "dpo.db", has_ids=has_ids))
    check_runs(logs, status="unknown")
    assert [log.group for log in logs] == ["hf", "hf", "megatron", "megatron"]
    assert [*logs[0].metrics] == ["train/reward"]
    check_runs(read_logs(f"trackio:{tmp_path}"), status="unknown")


def test_a_trackio_file_that_is_being_written_and_one_that_is_not(tmp_path: Path) -> None:
    path = write_trackio(tmp_path / "dpo.db")
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
    check_runs(read(path), status="unknown")
    assert [entry.name for entry in tmp_path.iterdir()] == ["dpo.db"]
    with closing(sqlite3.connect(path)) as database:
        row = ("7", "2026", "hf-s0", 30, '{"train/reward": 0.875}')
        database.execute(
            "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) "
            "SELECT run_id, ?2, ?3, ?4, ?5 FROM configs WHERE run_name = ?3 AND ?1 = '7'",
            row,
        )
        database.commit()
        assert read(path)[0].metrics["train/reward"].steps.tolist() == [0, 10, 20, 30]


def test_other_sqlite_files_and_damaged_ones_are_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE metrics (x INTEGER)")
    with pytest.raises(StoreError, match=r"no runs found; allowed: runs logged as .*trackio.*'other.db'"):
        read(tmp_path)
    with pytest.raises(StoreError, match=r"not a metrics file \(a database of another .*MLflow or trackio"):
        read(tmp_path / "other.db")
    path = write_trackio(tmp_path / "dpo.db")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE metrics SET metrics = '[1]' WHERE id = 2")
    with pytest.raises(StoreError, match=r"dpo.db: got '\[1\]' as a row of trackio; expected a JSON object"):
        read(path)
    content = bytearray(write_trackio(tmp_path / "torn.db").read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    (tmp_path / "torn.db").write_bytes(bytes(content))
    with pytest.raises(StoreError, match=r"torn.db: SQLite cannot read it|not a metrics file") as error:
        read(tmp_path / "torn.db")
    assert "\n" not in str(error.value)


# --- SwanLab ---


def field(number: int, value: str | int | float | bytes) -> bytes:
    """Return a field of a protobuf message on the wire."""
    if isinstance(value, float):
        return bytes([number << 3 | 1]) + struct.pack("<d", value)
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def write_swanlab(folder: Path, records: Sequence[bytes], version: int, seed: int, name: str) -> Path:
    """Write records as SwanLab does: a chunk of checksum, length and type each."""
    content = b":SWL\xd6\xe1" + bytes([version])
    for record in records:
        body = b"\x01" + record
        content += struct.pack("<IH", zlib.crc32(body), len(record)) + body
    (folder / "files").mkdir(parents=True)
    config = f"seed:\n  sort: 0\n  value: {seed}\noptim:\n  desc: ''\n  value:\n    lr: 1.0e-05\n"
    (folder / "files" / "config.yaml").write_text(config)
    (folder / "files" / "requirements.txt").write_text("torch==2.11.0\npip==26.0\n")
    (folder / name).write_bytes(content)
    return folder / name


def protobuf_records(arm: str, seed: int, state: int = 1) -> list[bytes]:
    start = field(1, "dpo") + field(4, f"{arm}-s{seed}") + field(7, arm) + field(10, f"id{arm}{seed}")
    points = [(0, 0.25), (10, math.nan), (20, 0.75 + seed)]
    scalars = [
        field(1, "train/reward") + field(2, step) + field(5, field(1, value)) for step, value in points
    ]
    scalars.append(field(1, "__swanlab__.cpu.pct") + field(2, 1) + field(5, field(1, 3.0)))
    finish = field(1, state) + (field(2, "CUDA out of memory") if state == 2 else b"")
    return [field(1, 1) + field(10, start), *(field(13, scalar) for scalar in scalars), field(11, finish)]


def json_records(arm: str, seed: int) -> list[bytes]:
    rows: list[dict[str, Any]] = [{"model_type": "Project", "data": {"name": "dpo", "workspace": None}}]
    rows.append(
        {"model_type": "Experiment", "data": {"id": f"{arm}{seed}", "name": f"{arm}-s{seed}", "tags": []}}
    )
    for step, value in ((0, 0.25), (10, "NaN"), (20, 0.75 + seed)):
        metric = {"index": step, "data": value, "create_time": "2026"}
        rows.append({"model_type": "Scalar", "data": {"metric": metric, "key": "train/reward", "step": step}})
    rows.append({"model_type": "Footer", "data": {"success": True}})
    return [json.dumps(row).encode() for row in rows]


@pytest.mark.parametrize("version", [1, 2])
def test_swanlab(tmp_path: Path, version: int) -> None:
    for arm in ARMS:
        for seed in (0, 1):
            folder = tmp_path / f"run-20261127_2353{seed}0-{arm}{seed}"
            records = json_records(arm, seed) if version == 1 else protobuf_records(arm, seed)
            name = "backup.swanlab" if version == 1 else f"run-{arm}{seed}.swanlab"
            write_swanlab(folder, records, version, seed, name)
    logs = read(tmp_path)
    check_runs(logs)
    check_runs(read_logs(f"swanlab:{tmp_path}"))
    assert [*logs[0].metrics] == ["train/reward"]
    assert logs[0].environment == {"versions": {"torch": "2.11.0"}}
    assert [log.group for log in logs] == (
        [None] * 4 if version == 1 else ["hf", "hf", "megatron", "megatron"]
    )


def test_swanlab_files_that_are_torn_of_a_failed_run_or_unreadable(tmp_path: Path) -> None:
    path = write_swanlab(tmp_path / "a", protobuf_records("hf", 0, 2), 2, 0, "run-a.swanlab")
    (log,) = read(path)
    assert (log.status, log.failure) == ("failed", "CUDA out of memory")
    path.write_bytes(path.read_bytes()[:-30])
    (log,) = read(path)
    assert log.status == "running" and "are torn or damaged and were left out" in log.notes[0]
    path.write_bytes(b":SWL\xd6\xe1\x09" + path.read_bytes()[7:])
    with pytest.raises(StoreError, match=r"version 9 of SwanLab's format; abrun reads 1 and 2: .* as CSV"):
        read(path)
    path.write_bytes(b"PK\x03\x04 zip")
    with pytest.raises(StoreError, match="not a SwanLab file"):
        read(path)
