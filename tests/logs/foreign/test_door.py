"""The door for foreign data: who may open files, links, folders, SQLite, and interrupts."""

import ast
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import abrun.logs
from abrun.cli import main
from abrun.errors import StoreError
from abrun.logs import read_logs
from abrun.logs.foreign import files, sqlite, values
from abrun.logs.foreign.files import walk
from abrun.logs.foreign.values import as_config, as_number, as_step, as_text, parse_foreign_yaml, parse_json
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources
from tests.logs.test_trackers import (
    check_runs,
    read,
    write_mlflow,
    write_mlflow_database,
    write_swanlab,
    write_trackio,
)
from tests.logs.test_trackers import protobuf_records as swanlab_records
from tests.verdict.simulate import write_experiment

MODULES = {
    "sqlite3",
    "yaml",
    "orjson",
    "json",
    "google.protobuf",
    *(f"abrun.runs.files.{name}" for name in ("open_regular", "read_regular", "read_tail", "iter_lines")),
    *(f"abrun.runs.files.{name}" for name in ("exists", "is_file", "is_directory")),
    "gzip",
    "shutil",
    "tempfile",
}
CALLS = {"open", "iterdir", "glob", "rglob", "walk", "scandir", "listdir", "stat", "lstat"}
CALLS |= {"read_bytes", "read_text", "is_file", "is_dir", "exists"}
# The server's client writes into a folder of its own; the metric names are a file of the package.
EXCEPTIONS = {"wandb_api.py", "aliases.py", "words.py"}


def forbidden_uses(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if any(name == module or name.startswith(f"{module}.") for module in MODULES):
                yield name
        if isinstance(node, ast.Call):
            called = node.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in CALLS and not (isinstance(called, ast.Name) and name == "walk"):  # the door's own
                yield f"{name}()"


def test_only_the_door_opens_files_and_parses_them() -> None:
    found = {
        path.name: [*forbidden_uses(path)]
        for path in Path(abrun.logs.__file__).parent.glob("*.py")
        if path.name not in EXCEPTIONS
    }
    assert {name: uses for name, uses in found.items() if uses} == {}
    assert [*forbidden_uses(Path(files.__file__))]


# --- links and folders ---


def test_links_out_of_a_source_are_not_followed_and_named(tmp_path: Path) -> None:
    write_mlflow(tmp_path / "here")
    write_mlflow(tmp_path / "elsewhere", arms=("other",))
    (tmp_path / "secret").write_text("canary")
    (tmp_path / "here" / "more").symlink_to(tmp_path / "elsewhere")
    run = next((tmp_path / "here").rglob("params"))
    (run / "x").symlink_to(tmp_path / "secret")
    logs = read(tmp_path / "here")
    check_runs(logs)
    assert any(
        "links that lead out of the folder were not followed: 'more'; compare a copy: cp -rL" in guess
        for guess in logs[0].guesses
    )
    (noted,) = (log for log in logs if "params/x" in str(log.notes))
    assert "canary" not in repr([(log.config, log.notes) for log in logs]) and "x" not in (noted.config or {})
    assert [log.name for log in read(tmp_path / "here" / "more")] == [
        "other-s0",
        "other-s1",
    ]  # the user named it


def test_a_source_of_links_alone_says_that_they_are_not_followed(tmp_path: Path) -> None:
    write_mlflow(tmp_path / "elsewhere")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "m.csv").write_text("step,loss\n1,2\n2,3\n")
    (tmp_path / "here" / "b.csv").symlink_to(tmp_path / "m.csv")
    with pytest.raises(
        StoreError, match=r"no runs found; .*links .* not followed: 'a', 'b.csv'; compare a copy"
    ) as error:
        read(tmp_path / "here")
    assert "\n" not in str(error.value)
    names = [log.name for log in read(tmp_path)]
    assert names and len({*names}) == len(names)  # links within it are no runs twice


@pytest.mark.parametrize("layout", ["files", "folders"])
def test_a_linked_run_beside_its_kind_counts_as_unreadable(tmp_path: Path, layout: str) -> None:
    """Seeds that are links would vanish, and a verdict stand on fewer pairs than the user sees."""
    for arm in ("a", "b"):
        for seed in range(3):
            name = f"{arm}/seed-{seed}.csv" if layout == "files" else f"{arm}/seed-{seed}/metrics.csv"
            path = tmp_path / "runs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("step,loss\n1,2\n2,3\n")
    linked = tmp_path / "runs" / "b" / ("seed-2.csv" if layout == "files" else "seed-2")
    shutil.move(linked, tmp_path / "moved")
    linked.symlink_to(tmp_path / "moved")
    (tmp_path / "runs" / "data").symlink_to(tmp_path / "moved")
    logs = read(tmp_path / "runs")
    assert len(logs) == 6
    (unread,) = (log for log in logs if log.status == "unreadable")
    assert unread.name.startswith("b/seed-2") and "copy its target" in unread.failure
    experiment = open_sources([str(tmp_path / "runs")], ReadingOptions())
    assert {(name.arm, name.seed) for name in experiment.runs} == {
        (arm, seed) for arm in ("a", "b") for seed in range(3)
    }


def test_links_to_files_within_a_source_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0a1b").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 3}\n')
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.jsonl").symlink_to("../blobs/0a1b")
    assert [log.name for log in read(tmp_path)] == ["runs/a.jsonl"]
    with pytest.raises(StoreError, match=r"not followed: 'a\.jsonl'"):
        read(tmp_path / "runs")
    assert read(tmp_path / "runs" / "a.jsonl")[0].metrics["loss"].values.tolist() == [
        2,
        3,
    ]  # named by the user


@pytest.mark.parametrize("depth", [600, 5000])
def test_deep_folders_are_one_line(tmp_path: Path, depth: int) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(before)
    with pytest.raises(StoreError, match=r"nested more than 50 levels deep; name the folder of the runs$"):
        read(tmp_path)
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


def test_folders_of_too_many_files_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("")
    monkeypatch.setattr(files, "MAX_ENTRIES", 30)
    with pytest.raises(StoreError, match=r"too many files \(31 so far\); name the folder of the runs$"):
        read(tmp_path)
    monkeypatch.setattr(files, "MAX_ENTRIES", 1000)
    monkeypatch.setattr(files, "MAX_WALK_S", -1.0)
    with pytest.raises(StoreError, match="too many files"):
        next(walk(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "environment.json", "metrics.jsonl", "result.json"])
def test_a_link_in_a_run_of_abrun_brings_no_other_file_into_a_report(tmp_path: Path, name: str) -> None:
    experiment = write_experiment(tmp_path / "runs" / "demo", steps=4, seeds=[0, 1])
    run = experiment / "treatment" / "seed-1"
    (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    line = f"{name}: is a symbolic link, but has to be a file; remove the link"
    experiment.rename(tmp_path / "moved")
    (tmp_path / "named").symlink_to(tmp_path / "moved")  # a link that the user names is followed
    recorded = open_sources([str(tmp_path / "named")], ReadingOptions())
    assert line in repr([recorded.runs, recorded])
    assert len([run for run in recorded.runs.values() if run.metrics]) >= 3


# --- SQLite ---


def write_view(path: Path) -> None:
    write_trackio(path)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            "DROP TABLE metrics; CREATE VIEW metrics AS WITH RECURSIVE "
            "c(id, run_id, run_name, step, metrics) AS (SELECT 1, 'a', 'a', 1, '{}' UNION ALL "
            "SELECT id + 1, 'a', 'a', id, '{}' FROM c) SELECT * FROM c;"
        )


def write_generated(path: Path) -> None:
    write_trackio(path)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            "ALTER TABLE metrics ADD COLUMN x AS (hex(zeroblob(4000000)) LIKE '%1%1%1%1');"
        )


def write_disguised(path: Path) -> None:
    """A view that claims to be a table."""
    write_view(path)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            "PRAGMA writable_schema = ON; "
            "UPDATE sqlite_master SET type = 'table', rootpage = 2 WHERE name = 'metrics'"
        )


@pytest.mark.parametrize("write", [write_view, write_generated, write_disguised])
def test_only_stored_tables_are_read(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "p.db")
    with pytest.raises(StoreError, match="no runs found"):
        read(tmp_path)


def test_a_table_whose_pages_repeat_ends(tmp_path: Path) -> None:
    """All interior pages point to one leaf: billions of rows in a small file."""
    path = write_trackio(tmp_path / "p.db")
    with closing(sqlite3.connect(path)) as database:
        rows = [("a", f"r{number}", number, '{"loss": 1}') for number in range(4000)]
        database.executemany(
            "INSERT INTO metrics (run_id, run_name, step, metrics) VALUES (?, ?, ?, ?)", rows
        )
        database.commit()
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'metrics'").fetchone()
    content = bytearray(path.read_bytes())
    root = (page - 1) * 4096
    assert content[root] == 5  # an interior page
    number = int.from_bytes(content[root + 3 : root + 5])
    for index in range(number):  # every child is the root itself
        pointer = int.from_bytes(content[root + 12 + 2 * index : root + 14 + 2 * index])
        content[root + pointer : root + pointer + 4] = page.to_bytes(4)
    path.write_bytes(content)
    start_s = time.process_time()
    with pytest.raises(StoreError, match=r"p.db: SQLite cannot read it"):
        read(path)
    assert time.process_time() - start_s < 5


def test_a_budget_of_steps_ends_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trackio(tmp_path / "p.db")
    monkeypatch.setattr(sqlite, "BASE_STEPS", -(1 << 40))
    monkeypatch.setattr(sqlite, "STEPS_BETWEEN_CHECKS", 10)
    with pytest.raises(
        StoreError, match=r"SQLite cannot read it \(its tables are larger than the file\); copy it again$"
    ):
        list(iter_rows(path))


def iter_rows(path: Path) -> Iterator[object]:
    with sqlite.open_sqlite(path) as database:
        yield from database.rows("SELECT * FROM metrics, configs")


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_companions_of_a_database_are_regular_files(tmp_path: Path, suffix: str, kind: str) -> None:
    path = write_trackio(tmp_path / "p.db")
    companion = tmp_path / f"p.db{suffix}"
    (tmp_path / "target").write_text("x")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to("target"), "folder": Path.mkdir}[kind](companion)
    with pytest.raises(StoreError, match=rf"'p.db{suffix}' is not a regular file; remove it$"):
        read(path)


def test_a_hot_journal_is_one_line_and_stays(tmp_path: Path) -> None:
    path = write_mlflow_database(tmp_path / "mlflow.db")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    journal = tmp_path / "mlflow.db-journal"
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504) + str(victim).encode())
    with pytest.raises(StoreError, match="a write was interrupted or is under way"):
        read(path)
    assert journal.exists() and victim.read_text() == "precious"
    journal.write_bytes(bytes(512))  # what journal_mode=PERSIST leaves
    check_runs(read(path))


def test_a_write_ahead_log_is_read_and_nothing_is_written_beside_it(tmp_path: Path) -> None:
    path = write_mlflow_database(tmp_path / "source.db")
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("UPDATE metrics SET value = 7 WHERE step = 20")
        database.commit()
        for suffix in ("", "-wal"):
            (tmp_path / f"copy.db{suffix}").write_bytes((tmp_path / f"source.db{suffix}").read_bytes())
    path.unlink()
    (log, *_) = read(tmp_path / "copy.db")
    assert log.metrics["train/reward"].values.tolist()[-1] == 7
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["copy.db", "copy.db-wal"]


def test_points_without_name_or_step_are_left_out_with_their_number(tmp_path: Path) -> None:
    path = write_mlflow_database(tmp_path / "mlflow.db")
    with closing(sqlite3.connect(path)) as database:
        for key, value, step in ((None, 1.0, 1), (b"\xff" * 3000, 1.0, 1), ("a", "x", 1), ("a", 1.0, 2**53)):
            database.execute("INSERT INTO metrics VALUES (?, ?, 5, 'run0', ?, 0)", (key, value, step))
        database.execute("UPDATE runs SET name = NULL WHERE run_uuid = 'run1'")
        database.commit()
    logs = {log.run_id: log for log in read(path)}
    assert "4 points left out" in str(logs["run0"].notes) and "a" not in logs["run0"].metrics
    assert logs["run1"].name == "run1" and not logs["run1"].notes


def test_swanlab_run_whose_configuration_cannot_be_read_says_so(tmp_path: Path) -> None:
    write_swanlab(tmp_path / "a", swanlab_records("hf", 0), 2, 0, "run-a.swanlab")
    for text in ("a: &x [1]\nb: *x\n", "a: !!int b", "[1]", "a: " + "[" * 99, "x: " + "y" * 200_000):
        (tmp_path / "a" / "files" / "config.yaml").write_text(text)
        (log,) = read(tmp_path)
        assert log.metrics and log.config is None and "config" in log.notes[-1], text
    (tmp_path / "a" / "files" / "config.yaml").write_text("id2label:\n  value:\n    0: a\n    1: b\n")
    assert read(tmp_path)[0].config == {"id2label.0": "a", "id2label.1": "b"}


# --- values and texts ---


def test_values_of_other_types_are_converted_or_none() -> None:
    assert [as_text(value) for value in (None, [1], {}, b"\xff", 10**400, 10**5000, 1.5)] == [
        *(None, None, None, "\N{REPLACEMENT CHARACTER}", "1" + "0" * 400, None, "1.5"),
    ]
    assert len(as_text("x" * 10**6) or "") == 10_000
    assert [as_number(value) for value in (None, [], "x", "1e3", b"2", 10**400, -(10**400), True)] == [
        *(None, None, None, 1000.0, 2.0, float("inf"), float("-inf"), 1.0),
    ]
    assert [
        as_step(value) for value in (None, True, "3", 2.0, 2.5, 2**53, -(2**53), "9" * 5000, float("nan"))
    ] == [
        *(None, None, 3, 2, None, None, None, None, None),
    ]
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    config = as_config({"a": {"b": 1, "c": deep}, "k" * 3000: 2, "d": [1], "e": "x" * 20_000})
    assert (config["a.b"], config["d"], len(config["e"])) == (1, [1], 10_000)
    assert repr(config["a.c"]).count("[") < 25 and len(config) == 4
    assert as_config({"e": "x" * 20_000 + "y"}) != as_config({"e": "x" * 20_001})


def test_yaml_of_another_program_ends_soon() -> None:
    for text in (
        "a: " + "1_" * 30_000 + "x",
        "[" * 20 + "a," * 30_000 + "]" * 20,
        "- " * 2000,
        "? a\n" * 15_000,
    ):
        start_s = time.process_time()
        with suppress(StoreError):
            parse_foreign_yaml(text.encode(), "x.yaml")
        assert time.process_time() - start_s < 10, text[:9]  # 1.5 s on an idle core
    with pytest.raises(StoreError, match="nested too deeply"):
        parse_foreign_yaml(b"{" * 21, "x.yaml")


def test_json_of_too_many_values_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_JSON_UNITS", 100)
    assert len(parse_json("[" + "1," * 97 + "1]")) == 98
    for text in (
        "[" + "[]," * 40 + "1]",
        b"[" + b"1," * 101 + b"1]",
        '{"a":' * 13 + " " * 50 + "1" + "}" * 13,
    ):
        with pytest.raises(StoreError, match=r"x\.json: .* too many values"):
            parse_json(text, "x.json")


@pytest.mark.parametrize("kind", ["params", "tags", "metrics"])
def test_a_folder_of_a_run_that_is_a_link_is_not_read(tmp_path: Path, kind: str) -> None:
    write_mlflow(tmp_path / "runs")
    run = next((tmp_path / "runs").rglob("params")).parent
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("1 0.25 canary" if kind == "metrics" else "canary")
    shutil.rmtree(run / kind)
    (run / kind).symlink_to(tmp_path / "secret")
    with suppress(StoreError):
        logs = read(tmp_path / "runs")
        assert "canary" not in repr([(log.config, log.notes, log.metrics) for log in logs])
        assert all("key" not in log.metrics for log in logs)


def test_names_of_thousands_of_digits_are_sorted(tmp_path: Path) -> None:
    names = ["s2", "s010", "s10", "s" + "9" * 5000]
    cells = "".join(f"{name},{step},1\n" for name in reversed(names) for step in (1, 2))
    (tmp_path / "a.csv").write_text(f"run,step,loss\n{cells}")
    assert [log.name[:9] for log in read_logs(str(tmp_path / "a.csv"))] == [name[:9] for name in names]


def test_too_little_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise MemoryError

    write_trackio(tmp_path / "p.db")
    monkeypatch.setattr("abrun.logs.trackers.parse_json", fill)
    with pytest.raises(
        StoreError, match=r"p.db: out of memory while it was read; log less often, or read fewer"
    ):
        read_logs(str(tmp_path))


def test_a_command_that_runs_out_of_memory_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("abrun.logs.recorded.sources.read_logs", fill)
    monkeypatch.setattr(sys, "argv", ["abrun", "compare", str(tmp_path)])
    with pytest.raises(SystemExit) as ending:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert (ending.value.code, len(lines)) == (2, 1) and "out of memory for data" in lines[0]


# --- interrupts ---


def interrupt(folder: Path, code: str) -> float:
    """Return how long Python takes to end after SIGINT, sent a second into `code`."""
    handler = (
        "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background jobs ignore it
    )
    script = f"import signal, sys; from pathlib import Path; path = Path(sys.argv[1]); {handler}\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout and process.stdout.readline() == b"ready\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    assert process.wait(60) != 0
    return time.monotonic() - start_s


def test_an_interrupt_ends_a_query_and_a_walk(tmp_path: Path) -> None:
    path = write_trackio(tmp_path / "p.db")
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    query = (
        "from abrun.logs.foreign import sqlite; sqlite.BASE_STEPS = 1 << 60\n"
        "print('ready', flush=True)\n"
        f"with sqlite.open_sqlite(path) as database: [*database.rows({endless!r})]"
    )
    assert interrupt(path, query) < 5
    for name in ("a", "a/b"):
        (tmp_path / name).mkdir()
    walks = (
        "from abrun.logs.foreign import files\nprint('ready', flush=True)\n"
        "while True:\n  for _ in files.walk(path): pass"
    )
    assert interrupt(tmp_path, walks) < 5
