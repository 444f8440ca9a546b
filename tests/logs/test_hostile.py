"""Foreign files made to harm: each field of each format missing, of another type, huge, nested or linked.

Every one is read, left out with a note, or refused in one line, in bounded time and memory, and no link in a
source brings another file's content into what is read. A new field is a line in `fields_of`.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from abrun.errors import AbrunError
from abrun.logs import read_logs
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources
from tests.fuzzing import MOST_S, SEED, bounded, check_line, rounds
from tests.logs.hostile_tables import LAYOUTS, Change, bombs, cells_of_tables, write_table
from tests.logs.test_fuzz import messages, tensorboard_file, wandb_file
from tests.logs.test_trackers import (
    field,
    json_records,
    protobuf_records,
    write_mlflow,
    write_mlflow_database,
    write_swanlab,
    write_trackio,
)

CANARY = "canary-4711"
MAX_BYTES = 1 << 30
DEEP = 3000
IMPORTS_S = 3.0  # of CPU, before a command reads anything
# Texts in the place of a value of JSON or YAML
TEXTS = (
    "", "null", "true", "-1", "1.5", "NaN", "1e999", '""', '"x"', "[]", "{}", '[{"a": [1]}]', "2023-13-45",
    "0x_", "0b_", "1:30", "!!int abc", "!!python/object:os.system {}", "&a [*a]", "&a {b: *a}", "? [a]\n: b",
    str(2**53), str(2**63), "1" * 400, "9" * 10_000, '"' + "9" * 5000 + '"', '"' + "x" * 1_000_000 + '"',
    "[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * 900 + "1" + "}" * 900, "1_" * 30_000 + "x",
    '"\\ud800"', '"a\\u0000\\u001b[31m"', "\x00\x1b[31m", '{"_type": "table"}', '{"1": {"2": 3}}',
    '{"' + "k" * 100_000 + '": {' + ", ".join(f'"{i}": 1' for i in range(3000)) + "}}",
)  # fmt: skip
CELLS: tuple[Any, ...] = (
    None, "", "x", "nan", "9" * 5000, "x" * 1_000_000, b"", b"\xff\x00", b"9" * 5000,
    -1, 1.5, 2**53, 2**63 - 1, float("inf"), "2026-13-45", "[" * DEEP, '{"a": 1}', "a\x1b[31m\nb",
)  # fmt: skip


LM_EVAL_ROW = {
    "doc_id": 0, "doc_hash": "a", "filter": "none", "metrics": ["acc"], "acc": 1.0, "prompt_hash": "b"
}  # fmt: skip


def write_lm_eval(folder: Path, rows: Sequence[str] = ()) -> Path:
    path = folder / "samples_arc_2026-11-28T10-00-00.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*rows, json.dumps(LM_EVAL_ROW)]) + "\n")
    return path


def write_wandb(folder: Path, extra: Sequence[bytes] = ()) -> Path:
    item, record = messages.HistoryItem, messages.Record
    rows = [
        record(
            history={"step": {"num": step}, "item": [item(key="train/reward", value_json=str(step / 10))]}
        ).SerializeToString()
        for step in range(4)
    ]
    run = record(run={"run_id": "a1", "display_name": "x-s3"}).SerializeToString()
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "wandb-metadata.json").write_text('{"python": "3.11", "host": "h", "gpu": "H100"}')
    (folder / "files" / "requirements.txt").write_text("torch==2.11.0\n")
    (folder / "run-a1.wandb").write_bytes(wandb_file([run, *rows, *extra]))
    return folder / "run-a1.wandb"


def write_tensorboard(folder: Path, extra: Sequence[bytes] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    value = Summary.Value(tag="train/reward", simple_value=0.5)
    events = [Event(step=step, summary=Summary(value=[value])).SerializeToString() for step in range(4)]
    (folder / "events.out.tfevents.1.host").write_bytes(tensorboard_file([*events, *extra]))
    return folder / "events.out.tfevents.1.host"


def write_swanlab_file(path: Path, records: Sequence[bytes]) -> Path:
    path.write_bytes(path.read_bytes()[:7] + wandb_file([*records])[7:])  # the framing is wandb's
    return path


def write_json_swanlab(folder: Path, extra: Sequence[bytes] = ()) -> Path:
    path = write_swanlab(folder, [], 1, 0, "backup.swanlab")
    return write_swanlab_file(path, [*json_records("hf", 0)[:-1], *extra])


def write_protobuf_swanlab(folder: Path, extra: Sequence[bytes] = ()) -> Path:
    path = write_swanlab(folder, [], 2, 0, "run-a.swanlab")
    write_swanlab_file(path, [*protobuf_records("hf", 0), *extra])
    (folder / "files" / "swanlab-metadata.json").write_text('{"runtime": {"hostname": "h"}}')
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "mlflow": write_mlflow,
    "mlflow.db": lambda folder: write_mlflow_database(folder / "mlflow.db"),
    "trackio": lambda folder: write_trackio(folder / "dpo.db"),
    "swanlab-json": lambda folder: write_json_swanlab(folder / "run-1"),
    "swanlab": lambda folder: write_protobuf_swanlab(folder / "run-1"),
    "wandb": lambda folder: write_wandb(folder / "offline-run-1"),
    "tensorboard": write_tensorboard,
    "lm-eval": write_lm_eval,
    "csv": partial(write_table, "csv", LAYOUTS["runs"]),
    "jsonl": partial(write_table, "jsonl", LAYOUTS["runs"]),
    "trainer_state": partial(write_table, "state", LAYOUTS["wide"]),
}


def update(database: str, table: str, column: str, value: Any, source: Path) -> None:
    with closing(sqlite3.connect(source / database)) as connection:
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid % 2 = 1", (value,))
        connection.commit()


def replace_line(pattern: str, prefix: str, text: str, source: Path) -> None:
    """Replace the first line that starts so, or the whole content, in a file of each run."""
    for path in sorted(source.rglob(pattern)):
        lines = path.read_text().split("\n")
        index = next((number for number, line in enumerate(lines) if line.startswith(prefix)), 0)
        lines[index] = prefix + text
        path.write_text("\n".join(lines) if prefix else text, errors="replace")


def changed(row: Any, key: str, text: str) -> str:
    """Return a JSON object with a text in the place of a value; `key`: dotted."""
    content = json.loads(json.dumps(row))
    *parents, leaf = key.split(".")
    branch = content
    for parent in parents:
        branch = branch[parent]
    branch[leaf] = CANARY * 2
    return json.dumps(content).replace(json.dumps(CANARY * 2), text or "null")


def rewrite(write: Callable[[Path, Sequence[bytes]], Path], folder: str, record: bytes, source: Path) -> None:
    shutil.rmtree(source / folder)
    write(source / folder, [record])


def fields_of(reader: str) -> Iterator[tuple[str, Change]]:
    """Yield a name and a change for each value of each field of a format."""
    item, record = messages.HistoryItem, messages.Record
    match reader:
        case "mlflow":
            keys = ("", "artifact_uri", "lifecycle_stage", "run_id", "run_name", "status", "name")
            places = [("meta.yaml", f"{key}: " if key else "") for key in keys]
            places += [(name, "") for name in ("reward", "seed", "lr", "mlflow.runName")]
            places += [("reward", "1 0.5 "), ("reward", "1 "), ("reward", "1 0.5 1\n2 ")]
            for name, prefix in places:
                for text in TEXTS:
                    yield f"{name} {prefix!r}: {text[:20]!r}", partial(replace_line, name, prefix, text)
        case "mlflow.db":
            columns = {
                "experiments": "experiment_id name lifecycle_stage",
                "runs": "run_uuid name status start_time lifecycle_stage experiment_id",
                "metrics": "key value timestamp run_uuid step is_nan",
                "params": "key value run_uuid",
                "tags": "key value run_uuid",
            }
            for table, names in columns.items():
                for column in names.split():
                    for value in CELLS:
                        change = partial(update, "mlflow.db", table, column, value)
                        yield f"{table}.{column}: {str(value)[:20]!r}", change
        case "trackio":
            contents = [text.encode() for text in TEXTS]
            contents += [b'{"train/reward": ' + text.encode() + b"}" for text in TEXTS]
            for table, names in (
                ("metrics", "run_id timestamp run_name step"),
                ("configs", "run_id run_name"),
            ):
                for column in names.split():
                    for value in CELLS:
                        change = partial(update, "dpo.db", table, column, value)
                        yield f"{table}.{column}: {str(value)[:20]!r}", change
            for table, column in (("metrics", "metrics"), ("configs", "config")):
                for value in (*CELLS, *contents):
                    change = partial(update, "dpo.db", table, column, value)
                    yield f"{table}.{column}: {str(value)[:20]!r}", change
        case "swanlab-json":
            for row, keys in (
                ({"model_type": "Project", "data": {"name": "x"}}, ("data", "data.name", "model_type")),
                ({"model_type": "Experiment", "data": {"id": "x", "name": "y"}}, ("data.id", "data.name")),
                ({"model_type": "Footer", "data": {"success": True}}, ("data", "data.success")),
                (
                    {"model_type": "Scalar", "data": {"metric": {"data": 1.0}, "key": "k", "step": 1}},
                    ("data.metric", "data.metric.data", "data.key", "data.step"),
                ),
            ):
                for key in keys:
                    for text in TEXTS:
                        content = changed(row, key, text).encode(errors="replace")
                        yield f"{key}: {text[:20]!r}", partial(rewrite, write_json_swanlab, "run-1", content)
        case "swanlab":
            wires = [
                value for number in (1, 2, 5) for value in (field(number, 2**63), field(number, b"\xff"))
            ]
            wires += [field(1, "k" * 300_000), field(1, "9" * 5000) + field(2, 1) + field(5, field(1, 1e300))]
            for number in (10, 11, 13):
                for wire in wires:
                    change = partial(rewrite, write_protobuf_swanlab, "run-1", field(number, wire))
                    yield f"record {number}: {wire[:20]!r}", change
            for text in TEXTS:
                for prefix in ("", "seed: ", "  value: ", "    lr: "):
                    change = partial(replace_line, "config.yaml", prefix, text)
                    yield f"config.yaml {prefix!r}: {text[:20]!r}", change
                for content in (text, f'{{"runtime": {text}}}', f'{{"runtime": {{"hostname": {text}}}}}'):
                    change = partial(replace_line, "swanlab-metadata.json", "", content)
                    yield f"metadata: {content[:30]!r}", change
        case "wandb":
            safe = [text.encode(errors="replace").decode() for text in TEXTS]
            config = [{"key": "a", "value_json": text} for text in safe]
            records = [record(config={"update": [update]}) for update in config]
            rows = [[item(key="train/reward", value_json=text)] for text in safe]
            rows += [
                [item(key=key, value_json="1")] for key in ("", "9" * 5000, "k" * 300_000, "a/_type", "\n")
            ]
            rows.append([item(nested_key=["x"] * 3000, value_json="1")])
            records += [record(history={"step": {"num": 5}, "item": items}) for items in rows]
            steps = (-1, 2**53, 2**63 - 1)
            records += [record(history={"step": {"num": step}, "item": rows[3]}) for step in steps]
            records += [
                record(metric={"glob_name": glob, "step_metric": "s"}) for glob in ("*" * 500, "[", "*a" * 99)
            ]
            records += [
                record(environment={"python": "x" * 300_000, "gpu_count": 2**32 - 1, "gpu_type": "g"})
            ]
            records += [record(config={"update": [{"nested_key": ["x"] * 3000, "value_json": "1"}]})]
            records += [record(run={"run_id": "9" * 5000, "display_name": "9" * 5000})]
            for number, each in enumerate(records):
                change = partial(rewrite, write_wandb, "offline-run-1", each.SerializeToString())
                yield f"record {number}", change
            for text in safe:
                for key in ("python", "host", "gpu", "gpu_count", "gpu_nvidia", ""):
                    content = f'{{"{key}": {text}}}' if key else text
                    yield f"{key}: {text[:20]!r}", partial(replace_line, "wandb-metadata.json", "", content)
        case "tensorboard":
            values = [
                Summary.Value(tag=tag, simple_value=1) for tag in ("", "9" * 5000, "k" * 300_000, "\x1b[31m")
            ]
            values += [Summary.Value(tag="t", simple_value=value) for value in (float("nan"), float("inf"))]
            for dtype in range(30):
                values.append(Summary.Value(tag="t", tensor={"dtype": dtype, "tensor_content": b"\xff" * 8}))
                values.append(Summary.Value(tag="t", tensor={"dtype": dtype, "int_val": [7]}))
                values.append(Summary.Value(tag="t", tensor={"dtype": dtype, "half_val": [-1]}))
            hparam = field(1, "lr") + field(2, field(5, field(1, field(1, "a") + field(2, field(3, "b")))))
            for content in (b"\xff", field(3, field(1, hparam)), field(3, field(1, field(1, "9" * 5000)))):
                plugin = {"plugin_data": {"plugin_name": "hparams", "content": content}}
                values.append(Summary.Value(tag="h", metadata=plugin))
            events = [Event(step=step, summary=Summary(value=[value])) for value in values for step in (5,)]
            events += [Event(step=step, summary=Summary(value=values[:1])) for step in (-1, 2**53, 2**63 - 1)]
            for number, event in enumerate(events):
                content = event.SerializeToString()
                yield (
                    f"event {number}",
                    partial(lambda content, source: write_tensorboard(source, [content]), content),
                )
        case "lm-eval":
            for key in LM_EVAL_ROW:
                for text in TEXTS:
                    content = changed(LM_EVAL_ROW, key, text)
                    yield (
                        f"{key}: {text[:20]!r}",
                        partial(lambda content, source: write_lm_eval(source, [content]), content),
                    )
            for text in TEXTS:
                content = changed(LM_EVAL_ROW, "metrics", f"[{text}]")
                yield (
                    f"metrics: [{text[:20]!r}]",
                    partial(lambda content, source: write_lm_eval(source, [content]), content),
                )


def files_of(reader: str, names: Sequence[str]) -> Iterator[tuple[str, Change]]:
    """Yield a name and a change for each kind of thing in the place of each of a source's files."""

    def sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(6 << 30)

    def linked_folder(path: Path) -> None:
        shutil.rmtree(path.parent)
        path.parent.symlink_to(path.parents[2] / "outside", target_is_directory=True)

    def nested(path: Path) -> None:
        for _ in range(200):
            path.mkdir()
            path = path / "d"

    things: dict[str, Change] = {
        "missing": lambda path: None,
        "empty": lambda path: path.write_bytes(b""),
        "zeros": sparse,
        "pipe": os.mkfifo,
        "folder": lambda path: path.mkdir(),
        "nested folders": nested,
        "endless": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path.name),
        "nowhere": lambda path: path.symlink_to("nowhere"),
        "link to its folder": lambda path: path.symlink_to("."),
        "link to /": lambda path: path.symlink_to("/"),
    }
    for name in names:
        for what, put in things.items():

            def change(source: Path, name: str = name, put: Change = put) -> None:
                (source / name).unlink(missing_ok=True)
                put(source / name)

            yield f"{name}: {what}", change

        def link(source: Path, name: str = name) -> None:
            content = (source / name).read_bytes().replace(b"hf", CANARY.encode())
            outside = source.parent / "outside" / Path(name).name
            outside.write_bytes(content + f"\n{CANARY}: {CANARY}\n".encode() * (reader != "mlflow"))
            (source / name).unlink()
            (source / name).symlink_to(outside)

        yield f"{name}: linked", link


def cases(folder: Path) -> dict[str, tuple[str, Change]]:
    """Return every directed change by its name, with the reader of its source."""
    every: dict[str, tuple[str, Change]] = {}
    for reader, write in WRITERS.items():
        example = folder / reader
        example.mkdir()
        write(example)
        names = [
            path.relative_to(example).as_posix() for path in sorted(example.rglob("*")) if path.is_file()
        ]
        databases = [
            f"{name}{suffix}" for name in names if name.endswith(".db") for suffix in ("-wal", "-journal")
        ]
        changes = [*fields_of(reader), *files_of(reader, names[:8]), *files_of(reader, databases)]
        every |= {f"{reader}, {name}": (reader, change) for name, change in changes}
    return every | {f"table, {name}": ("", change) for name, change in cells_of_tables()}


def check(folder: Path, reader: str, name: str, change: Change) -> None:
    """Make a source, change it, and read it as `abrun compare` does."""
    source = folder / "source"
    for path in (source, folder / "outside"):
        path.mkdir()
    if reader:
        WRITERS[reader](source)
    with suppress(FileNotFoundError):  # a companion that the source does not have
        change(source)
    entries = sorted(str(path) for path in source.rglob("*"))
    earlier_peak = peak_bytes()  # of the tests before this one
    try:
        with bounded():
            texts = [repr(log) for log in read_logs(str(source))]
            open_sources([str(source)], ReadingOptions())
    except AbrunError as error:
        check_line(error)
        texts = [str(error)]
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    assert "linked" not in name or CANARY not in "".join(texts), name
    assert sorted(str(path) for path in source.rglob("*")) == entries, f"{name}: written beside it"
    used = peak_bytes() - earlier_peak
    assert used < MAX_BYTES, f"{name}: {used} bytes"
    for path in (source, folder / "outside"):
        shutil.rmtree(path)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(folder: Path, count: int) -> None:
    (folder / "examples").mkdir()
    every = cases(folder / "examples")
    names = random.Random(f"{SEED} hostile").sample(sorted(every), min(count, len(every)))
    for name in names:
        check(folder, every[name][0], name, every[name][1])


def test_fuzz_a_sample_of_hostile_fields(tmp_path: Path) -> None:
    fuzz(tmp_path, 60)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_fuzz_hostile_fields(tmp_path: Path) -> None:
    fuzz(tmp_path, rounds(1500))


def cost(arguments: Sequence[str], folder: Path) -> tuple[int, float, int, str]:
    """Run a command; return its exit code, CPU seconds, peak of bytes, and output."""
    with (folder / "output").open("wb+") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        timer = threading.Timer(12 * MOST_S, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return process.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, text


def check_bomb(change: Change, folder: Path) -> None:
    """Compare a folder with a hostile file, in a process of its own, by the command line."""
    source = folder / "source"
    source.mkdir()
    writer = multiprocessing.get_context("fork").Process(target=change, args=(source,))
    writer.start()  # a process starts with the peak of the one that it was forked from
    writer.join()
    assert writer.exitcode == 0
    code, cpu_s, num_bytes, text = cost([sys.executable, "-m", "abrun", "compare", str(source)], folder)
    assert "Traceback" not in text, text
    assert code in (0, 2), text
    assert code == 0 or (len(text.splitlines()) == 1 and len(text) < 1500), text
    assert cpu_s < MOST_S + IMPORTS_S, f"{cpu_s:.1f} CPU seconds: {text}"
    assert num_bytes < 2 * MAX_BYTES, f"{num_bytes} bytes: {text}"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", bombs())
def test_work_and_memory_are_bounded_whatever_a_table_claims(name: str, tmp_path: Path) -> None:
    check_bomb(bombs()[name], tmp_path)
