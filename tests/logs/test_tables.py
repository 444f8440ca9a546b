"""CSV, JSON lines, Parquet and trainer_state.json: whole, torn, odd and hostile files."""

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from abrun.errors import ComparisonError, StoreError
from abrun.logs import Log, read_log, read_logs
from abrun.logs.foreign import files
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources
from abrun.recipe.claims import Claim
from abrun.report.comparing import with_options
from abrun.runs.files import open_regular
from tests.snapshot import Snapshot


def one(path: Path, step_column: str | None = None) -> Log:
    (log,) = read_logs(str(path), step_column=step_column)
    return log


def values(log: Log, metric: str) -> dict[int, float]:
    series = log.metrics[metric]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


# --- CSV ---


def test_a_folder_named_like_files_of_wandb_hides_no_table(tmp_path: Path) -> None:
    (tmp_path / "x.wandb").mkdir()
    (tmp_path / "a.csv").write_text("step,train/reward\n1,0.5\n2,0.75\n")
    assert values(one(tmp_path), "train/reward") == {1: 0.5, 2: 0.75}


def test_csv_keeps_nan_apart_from_not_recorded(tmp_path: Path, snapshot: Snapshot) -> None:
    path = tmp_path / "a.csv"
    path.write_text('step,"train/reward, mean",loss,note\n1,0.5,nan,hi\n2,,inf,\n3,0.25,-Infinity,1e3\n')
    log = one(path)
    assert sorted(log.metrics) == ["loss", "note", "train/reward, mean"]
    assert values(log, "train/reward, mean") == {1: 0.5, 3: 0.25}
    loss = values(log, "loss")
    assert math.isnan(loss[1]) and loss[2] == math.inf and loss[3] == -math.inf
    snapshot(log.notes)
    assert (log.name, log.status, log.config, log.environment) == ("a.csv", "unknown", None, None)


def test_csv_of_pandas_in_any_order_with_a_step_twice(tmp_path: Path, snapshot: Snapshot) -> None:
    frame = pd.DataFrame(
        {"loss": [3.0, 1.0, 2.0, 9.0], "global_step": [30, 10, 20, 10], "text": list("abcd")}
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    log = one(tmp_path / "a.csv")
    assert values(log, "loss") == {10: 9.0, 20: 2.0, 30: 3.0}
    snapshot(log.notes)
    assert list(log.metrics) == ["loss"]


def test_the_index_of_pandas_is_no_metric_and_can_be_named_as_the_step(tmp_path: Path) -> None:
    pd.DataFrame({"step": [10, 20], "loss": [3.0, 1.0]}).to_csv(tmp_path / "both.csv")
    assert list(one(tmp_path / "both.csv").metrics) == ["loss"]
    pd.DataFrame({"loss": [3.0, 1.0]}).to_csv(tmp_path / "index.csv")
    with pytest.raises(StoreError, match="columns: 'Unnamed: 0', 'loss'; name the step column"):
        one(tmp_path / "index.csv")
    assert values(one(tmp_path / "index.csv", "Unnamed: 0"), "loss") == {0: 3.0, 1: 1.0}


def test_the_step_column_is_the_first_that_every_row_has(tmp_path: Path, snapshot: Snapshot) -> None:
    path = tmp_path / "a.csv"
    path.write_text("_step,train/global_step,iter,loss\n0,10,1,1.5\n1,20,2,2.5\n")
    assert values(one(path), "loss") == {10: 1.5, 20: 2.5}
    assert values(one(path, "iter"), "loss") == {1: 1.5, 2: 2.5}
    path.write_text("_step,train/global_step,loss\n0,10,1.5\n1,,2.5\n")
    assert values(one(path), "loss") == {0: 1.5, 1: 2.5}
    path.write_text("step,loss\n0,1.5\n,2.5\n1,3.5\n")
    assert values(one(path), "loss") == {0: 1.5, 1: 3.5}
    snapshot(one(path).notes)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,loss\n1,0.5\n2,0.2")  # of 0.25, perhaps
    assert values(one(path), "loss") == {1: 0.5}
    assert "torn" in one(path).notes[0]
    path.write_bytes('step,loss,π\n1,0.5,2\n2,0.25,"'.encode() + "π".encode()[:1])
    assert values(one(path), "loss") == {1: 0.5}
    path.write_text('step,loss,t\n1,0.5,a\n2,0.25,"b, c')  # a quote that is still open
    assert values(one(path), "loss") == {1: 0.5} and "torn" in one(path).notes[0]
    path.write_text("step,lo")
    assert one(path).metrics == {} and "torn" in one(path).notes[0]


@pytest.mark.parametrize("header", ["step,loss,reward", "step,kl,loss,reward", "# step,loss,reward"])
def test_a_header_written_again_in_another_order_or_with_more_columns(tmp_path: Path, header: str) -> None:
    kl = "9," if "kl" in header else ""
    path = tmp_path / "a.csv"
    path.write_text(f"step,reward,loss\n1,0.1,2.5\n{header}\n2,{kl}2.4,0.2\n3,{kl}2.3,0.3\n")
    log = one(path)
    assert values(log, "reward") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert values(log, "loss") == {1: 2.5, 2: 2.4, 3: 2.3}
    assert not log.notes and (values(log, "kl") == {2: 9, 3: 9} if kl else "kl" not in log.metrics)


def test_a_long_table_that_was_appended_to_with_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    head, rows = "arm,seed,step,reward\n", "".join(f"old,{s},{i},0.{i}\n" for s in (0, 1) for i in (1, 2))
    path.write_text(head + rows + head + rows.replace("old", "new"))
    logs = read_logs(str(path))
    assert [str(log.identity) for log in logs] == ["new/seed-0", "new/seed-1", "old/seed-0", "old/seed-1"]


@pytest.mark.parametrize(
    "content",
    [
        b"epoch,loss\n1,2\n",
        b"step,loss\n1,2,3\n",
        b"step,step,loss\n1,2,3\n",
        b"step,seed,loss,seed\n1,2,3,4\n",
        b"arm,seed,score,score\na,0,3,4\n",
        b"step,loss,loss\n1,2,3\nloss,step\n",
        b"step,loss\n1.5,2\n",
        b"step,loss\n1e300,2\n",
        b"step,loss\ninf,2\n",
        b"step,loss\n1,\xff\xfe\n",
        b"\x1b[31m,loss\n1,2\n",
        b"hello\nworld\n",
        b"step,loss\n1,1\n9007199254740993,2\n",
        b'step,loss,t\n1,2,"x\n2,3,y\n3,4,z\n',
        b'step,loss\n"1"5,2\n',
        b"step," + b",".join(b"m%d" % i for i in range(100_001)) + b"\n",
    ],
)
def test_csv_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes, snapshot: Snapshot) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(StoreError) as refused:
        one(path)
    snapshot(refused.value)
    assert "a.csv" in str(refused.value) and str(refused.value).isprintable()


def test_a_metric_of_two_columns_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Which of them counts is unknown; a claim on another metric does not need to know."""
    for arm in ("a", "b"):
        for seed in (0, 1):
            (tmp_path / f"{arm}-s{seed}.csv").write_text("step,reward,lr,lr\n1,0.1,7,8\n2,0.2,7,8\n")
    log = read_logs(str(tmp_path / "a-s0.csv"))[0]
    assert values(log, "reward") == {1: 0.1, 2: 0.2} and "lr" not in log.metrics
    problem = f"{tmp_path}/a-s0.csv: duplicate column 'lr'; rename one of them"
    assert log.unread == {"lr": problem} and log.notes == (f"not read: {problem}",)
    experiment = open_sources([str(tmp_path)], ReadingOptions())
    with pytest.raises(ComparisonError, match=re.escape(problem)):
        with_options(experiment, [Claim(metric="lr", margin=0.1)])


def test_a_table_of_a_run_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (0, 1):
        (tmp_path / f"a-s{seed}.csv").write_text("step,reward\n1,0.1\n")
    denied = tmp_path / "a-s1.csv"

    def read(path: Path) -> Any:
        if path == denied:
            raise PermissionError(13, "Permission denied", str(path))
        return open_regular(path)

    monkeypatch.setattr(files, "open_regular", read)
    _, log = read_logs(str(tmp_path))
    assert (log.status, log.forbidden) == ("unreadable", True) and "Permission denied" in log.failure


def test_a_step_column_that_is_not_there(tmp_path: Path, snapshot: Snapshot) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n1,2\n")
    with snapshot.refused(StoreError):
        one(tmp_path / "a.csv", "x")


# --- JSON ---


def test_jsonl_in_every_spelling_of_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"step": 1, "a": NaN, "b": Infinity, "c": {"d": {"e": 1}}, "t": "text", "f": true, "n": null}\n'
        '{"step": 2, "a": "NaN", "b": "-Infinity", "c": {"d": {"e": 2.5}}, "l": [1, 2]}\n\n'
        '{"step": 3, "a": 1' + "0" * 400 + "}\n"
    )
    log = one(path)
    assert sorted(log.metrics) == ["a", "b", "c/d/e"]
    a = values(log, "a")
    assert math.isnan(a[1]) and math.isnan(a[2]) and a[3] == math.inf
    assert values(log, "b") == {1: math.inf, 2: -math.inf}
    assert values(log, "c/d/e") == {1: 1.0, 2: 2.5}


def test_rows_nested_as_deep_as_json_goes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"step": 1, ' + '"a": {' * 900 + '"b": NaN' + "}" * 901 + "\n")
    (name,) = one(tmp_path / "a.jsonl").metrics
    assert name == "a/" * 900 + "b"


def test_what_only_python_takes_for_a_number_is_text(tmp_path: Path, snapshot: Snapshot) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n1,0.5\n2,1_0\n3,\u0661\n")
    assert values(one(tmp_path / "a.csv"), "loss") == {1: 0.5}
    snapshot(one(tmp_path / "a.csv").notes)


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2, "loss": 0.2\n', "{"])
def test_a_torn_last_line_of_jsonl_is_left_out(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "a.ndjson"
    path.write_text('{"step": 1, "loss": 0.5}\n' + torn)
    assert values(one(path), "loss") == {1: 0.5}
    assert "torn" in one(path).notes[0]
    path.write_text(torn)
    assert one(path).metrics == {}
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}')  # whole, though it has no newline
    assert values(one(path), "loss") == {1: 0.5, 2: 0.25}


@pytest.mark.parametrize(
    "content",
    [
        b'{"step": 1}\nxx\n{"step": 2}\n',
        b'{"step": 1, "a": 1}\n[1, 2]\n',
        b"\x00\xff\x1b garbage",
        b'{"epoch": 1, "loss": 2}\n',
        b'{"a": ' + b"[" * 100_000 + b"\n{}\n",
        '{"step": 1}'.encode("utf-16-le") + b"\n{}",
        b'{"step": 1}\n{"step": ' + b"9" * 4000 + b', "a": 1}\n',
    ],
)
def test_jsonl_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes, snapshot: Snapshot) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(StoreError) as refused:
        one(tmp_path / "a.jsonl")
    snapshot(refused.value)
    assert "a.jsonl" in str(refused.value) and str(refused.value).isprintable()


def test_trainer_state_of_transformers(tmp_path: Path) -> None:
    history = [
        {"step": 10, "epoch": 0.1, "reward": 0.5, "loss": math.nan},
        {"step": 10, "eval_reward": 0.75},
        {"step": 20, "epoch": 0.2, "reward": 0.6, "loss": 1.0},
    ]
    for folder in ("a-s0", "a-s0/checkpoint-10"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    log = one(tmp_path)
    assert log.name == "a-s0"
    assert values(log, "train/reward") == {10: 0.5, 20: 0.6}
    assert values(log, "eval/reward") == {10: 0.75}
    (tmp_path / "a-s0" / "trainer_state.json").write_text("{}")
    with pytest.raises(StoreError, match="with a log_history"):
        one(tmp_path)


def test_a_row_of_evaluation_and_a_closing_row_repeat_no_metric(tmp_path: Path) -> None:
    """Epoch, seconds and tokens stand in both kinds of rows; transformers closes with a row of totals."""
    rows = [
        row
        for step in range(10, 60, 10)
        for row in (
            {"step": step, "epoch": step / 50, "time": 2.0 * step, "lr": 1e-5, "loss": 50.0 / step},
            {"step": step, "epoch": step / 50, "time": 2.0 * step + 1, "lr": 1e-5, "eval_loss": 60.0 / step},
        )
    ]
    rows.append({"step": 50, "epoch": 1.0, "train_loss": 3.0, "train_runtime": 101.0, "total_flos": 1e9})
    names = sorted({name for row in rows for name in row} - {"step"})
    lines = [["step", *names], *([str(row.get(name, "")) for name in ["step", *names]] for row in rows)]
    for file, text in (
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ("trainer_state.json", json.dumps({"log_history": rows})),
        ("a.csv", "".join(",".join(line) + "\n" for line in lines)),
    ):
        folder = tmp_path / file.replace(".", "-")
        folder.mkdir()
        (folder / file).write_text(text)
        assert one(folder).notes == (), file

    repeated = [*rows, {"step": 50, "epoch": 1.0, "time": 110.0, "lr": 1e-5, "loss": 0.9}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in repeated))
    assert one(tmp_path / "a.jsonl").notes == (
        "1 point was recorded again at the same step; the last counts",
    )


# --- Parquet ---


def test_parquet_of_pandas(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"step": [1, 2, 2], "loss": [0.5, None, 0.25], "text": ["a", "b", "c"], "n": [1, 2, 3]}
    )
    frame.to_parquet(tmp_path / "a.parquet")
    log = one(tmp_path / "a.parquet")
    assert values(log, "loss") == {1: 0.5, 2: 0.25}
    assert values(log, "n") == {1: 1.0, 2: 3.0}
    assert sorted(log.metrics) == ["loss", "n"]


def test_parquet_keeps_nan_where_the_file_does(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"step": [1.0, 2.0, 3.0], "loss": pa.array([float("nan"), None, 1.0])})
    pq.write_table(table, tmp_path / "a.parquet")
    loss = values(one(tmp_path / "a.parquet"), "loss")
    assert math.isnan(loss[1]) and loss[3] == 1.0 and 2 not in loss


def test_torn_and_foreign_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pd.DataFrame({"step": range(100), "loss": range(100)}).to_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert one(path).metrics == {} and "no footer" in one(path).notes[0]
    path.write_bytes(whole[:200] + b"\xff" * 300 + whole[500:])
    with pytest.raises(StoreError, match=r"a\.parquet: not valid Parquet"):
        one(path)
    path.write_bytes(os.urandom(100))
    with pytest.raises(StoreError, match=r"a\.parquet: not valid Parquet"):
        one(path)


def test_parquet_that_claims_more_than_a_log_holds(tmp_path: Path, snapshot: Snapshot) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    million = pa.table({"step": pa.array([1] * 10**6), "loss": pa.array([0.5] * 10**6)})
    with pq.ParquetWriter(path, million.schema, compression="zstd") as writer:
        for _ in range(10):
            writer.write_table(million)
    assert path.stat().st_size < 10**5
    with pytest.raises(StoreError, match=r"a\.parquet: claims 20000000 values; allowed: at most 16777216"):
        one(path)
    pq.write_table(
        pa.Table.from_arrays([pa.array([1]), pa.array([2.0]), pa.array([3.0])], ["step", "a", "a"]), path
    )
    with snapshot.refused(StoreError):
        one(path)


def test_parquet_whose_pages_have_checksums_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    frame = pd.DataFrame({"step": range(1000), "loss": [step / 3 for step in range(1000)]})
    frame.to_parquet(path, compression=None, use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[12_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"a\.parquet: not valid Parquet: .*(CRC|corrupt)"):
        one(path)


# --- all of them ---


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a.wandb", "events.out.tfevents.1.a"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(StoreError, match=f"{name}: .* a regular file"):
        one(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "a.wandb", "events.out.tfevents.1.a"])
def test_an_empty_file_is_a_run_that_recorded_nothing(tmp_path: Path, name: str, snapshot: Snapshot) -> None:
    (tmp_path / name).touch()
    log = one(tmp_path / name)
    assert log.metrics == {}
    snapshot(log.notes)
    assert log.status == "unknown"


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet", "wandb", "tensorboard"])
def test_a_run_that_has_not_begun_can_be_followed(tmp_path: Path, format: str, snapshot: Snapshot) -> None:
    snapshot(read_log(tmp_path / "later", format).notes)
    snapshot(read_log(tmp_path, format).notes)


def test_a_growing_file_can_be_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b"".join(json.dumps({"step": step, "loss": step / 3}).encode() + b"\n" for step in range(20))
    num_steps = []
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        log = read_log(tmp_path if end % 2 else path, "jsonl")
        num_steps.append(len(log.metrics["loss"]) if log.metrics else 0)
    assert num_steps == sorted(num_steps) and num_steps[-1] >= 19


def test_folders_of_many_runs_in_natural_order(tmp_path: Path) -> None:
    for seed in (0, 2, 10):
        (tmp_path / "a" / f"seed-{seed}").mkdir(parents=True)
        (tmp_path / "a" / f"seed-{seed}" / "log.csv").write_text(f"step,loss\n1,{seed}\n")
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.csv").write_text("garbage")
    logs = read_logs(str(tmp_path))
    assert [log.name for log in logs] == [f"a/seed-{seed}/log.csv" for seed in (0, 2, 10)]
    assert [log.metrics["loss"].value_at(1) for log in logs] == [0, 2, 10]


def test_of_mixed_folders_the_kind_with_most_runs_is_read_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n1,2\n")
    (tmp_path / "b.jsonl").write_text('{"step": 1, "loss": 3}\n')
    (log,) = read_logs(str(tmp_path))
    assert log.name == "b.jsonl" and log.guesses == (f"{tmp_path}: read the jsonl logs, ignored csv",)
    (tmp_path / "c.csv").write_text("step,loss\n1,2\n")
    assert [log.name for log in read_logs(str(tmp_path))] == ["a.csv", "c.csv"]
    assert [log.name for log in read_logs(f"jsonl:{tmp_path}")] == ["b.jsonl"]
    (tmp_path / "odd.log").write_text("step,loss\n1,2\n")
    assert [log.name for log in read_logs(f"csv:{tmp_path / 'odd.log'}")] == ["odd.log"]


@pytest.mark.parametrize(
    "source",
    [
        "nowhere",
        "wandb:nowhere",
        "csv:.",
        ".",
        "odd.txt",
        "tb:a.csv/",
        "x" * 5000,
    ],
)
def test_sources_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, snapshot: Snapshot
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.txt").write_text("hi")
    if "a.csv" in source:
        (tmp_path / "a.csv").write_text("step\n1\n")
    with snapshot.refused(StoreError):
        read_logs(source.rstrip("/"))


def test_names_from_files_cannot_move_the_cursor(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\n.csv").write_text('step,"<b>\n\x07"\n1,2\n')
    log = one(tmp_path)
    assert log.name == "a\\x1b[2J\\n.csv" and list(log.metrics) == ["<b>\\n\\x07"]
    assert log.place.isprintable()


def test_a_missing_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 5)
    for module in [module for module in sys.modules if module.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with snapshot.refused(StoreError):
        one(tmp_path / "a.parquet")
