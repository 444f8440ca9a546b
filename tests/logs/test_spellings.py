"""Tables as spreadsheets, trackers and Windows write them: text, encodings, long form, odd files."""

import gzip
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from abrun.errors import StoreError
from abrun.logs import Log, read_logs
from tests.logs.test_fuzz import messages, wandb_file
from tests.logs.test_tables import one, values
from tests.snapshot import Snapshot

ROWS = [{"step": step, "reward": round(0.1 + step / 70, 4), "loss": 2 - step / 70} for step in range(1, 41)]


def table(rows: list[dict[str, object]], between: str = ",") -> str:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(between.join(map(str, line)) + "\n" for line in lines)


def lines_of_json(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def guesses(logs: list[Log]) -> str:
    return "\n".join(dict.fromkeys(guess for log in logs for guess in log.guesses))


# --- numbers and steps as text ---


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('step,tokens\n1,"1,234"\n2,"2,468,000"\n', {1: 1234.0, 2: 2468000.0}),
        ('step,tokens,loss\n1,"1,234",0.5\n2,"2,468",0.4\n', {1: 1234.0, 2: 2468.0}),
        ('step,tokens\n"999",1\n"1,000",2\n"12,000",3\n', {999: 1.0, 1000: 2.0, 12000: 3.0}),
        ("step;tokens\n1\u202f000;12\u00a0345.5\n2\u202f000;1\n", {1000: 12345.5, 2000: 1.0}),
        ("step,tokens\n1/60,7\n60/60,8\n", {1: 7.0, 60: 8.0}),
        ("step,tokens\n1.0,\u22127\n2.0,1e3\n", {1: -7.0, 2: 1000.0}),
        ("step,tokens\n1.000,7\n2.000,8\n", {1: 7.0, 2: 8.0}),
    ],
)
def test_numbers_that_can_be_read_one_way(tmp_path: Path, content: str, expected: dict[int, float]) -> None:
    log = one(written(tmp_path / "a.csv", content))
    assert values(log, "tokens") == expected and not log.notes and not log.dropped


@pytest.mark.parametrize(
    "content",
    [
        'step,tokens\n1,"1,234"\n2,"2,468"\n3,5\n',  # thousands, or decimals
        'step,tokens,loss\n1,"1,234","0,5"\n2,"2,468",0.5\n3,5,1\n',  # one of each
        "step;tokens;loss\n1;1.234;0,5\n2;2.468;0,4\n3;5;1\n",
        "step,tokens\n1,50%\n2,1_0\n3,5\n",
        "step,tokens\n1,55.1 GB\n2,1'2\n3,5\n",
    ],
)
def test_numbers_that_cannot_are_left_out_and_remembered(tmp_path: Path, content: str) -> None:
    log = one(written(tmp_path / "a.csv", content))
    assert values(log, "tokens") == {3: 5.0} and log.dropped["tokens"] == (1, 2)
    assert any(note.startswith("tokens: 2 values left out") for note in log.notes)
    assert "a.csv, line 2, column tokens: got " in log.unread["tokens"]


def test_the_last_of_two_values_at_a_step_counts_text_or_not(tmp_path: Path) -> None:
    content = "step,loss\n1,0.5\n2,x\n2,0.25\n1,y\n3,z\n"
    assert one(written(tmp_path / "a.csv", content)).dropped["loss"] == (1, 3)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["500", "1k", "1500"], "line 3, column step: got '1k' "),
        (["1", "Step 2", "3"], "line 3, column step: got 'Step 2' "),
        (["500", "1.000", "1.500"], "line 3, column step: got '1.000' "),  # 1, or a thousand
        (["1.5", "2", "3"], "line 2: step: got 1.5 as the step; "),
        (["Step 1", "Step 2", "Step 3"], "line 2, column step: got 'Step 1'; .*--step-column"),
        (["1", "2", "Average"], "line 4, column step: got 'Average' "),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_a_step_that_is_no_number_is_refused(
    tmp_path: Path, kind: str, steps: list[str], message: str, snapshot: Snapshot
) -> None:
    rows: list[dict[str, object]] = [{"step": step, "loss": 0.5} for step in steps]
    content = {"csv": table(rows), "jsonl": lines_of_json(rows), "json": json.dumps(rows)}[kind]
    if kind != "csv":
        number = int(message[5]) - 1
        message = f"line {number}{message[6:]}"
    with pytest.raises(StoreError, match=message) as refusal:
        one(written(tmp_path / f"a.{kind}", content))
    if kind == "csv":
        snapshot(refusal.value)


def test_rows_without_a_step_or_without_numbers_are_no_reason_to_refuse(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    log = one(written(tmp_path / "a.csv", "step,loss\n[-],[-]\n1,0.5\nstep,loss\n,0.75\n2,0.25\n"))
    assert values(log, "loss") == {1: 0.5, 2: 0.25}
    snapshot(log.notes)
    assert not log.dropped


def test_numbers_in_quotes_in_json_lines(tmp_path: Path, snapshot: Snapshot) -> None:
    rows = [{"step": str(step), "loss": f"{step / 8}", "note": "ok", "epoch": f"{step}/9"} for step in (1, 2)]
    log = one(written(tmp_path / "a.jsonl", lines_of_json([dict(row) for row in rows])))
    assert {name: values(log, name) for name in log.metrics} == {"loss": {1: 0.125, 2: 0.25}}
    snapshot(log.notes)


def test_numbers_in_quotes_in_parquet(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"step": ["1", "2"], "loss": ["0.5", None], "n": [1, 2]})
    frame.to_parquet(tmp_path / "a.parquet")
    log = one(tmp_path / "a.parquet")
    assert values(log, "loss") == {1: 0.5} and values(log, "n") == {1: 1.0, 2: 2.0}


def test_numbers_in_quotes_in_wandb(tmp_path: Path, snapshot: Snapshot) -> None:
    records = [messages.Record(run={"run_id": "a1", "display_name": "x-s3"})]
    for step in range(4):
        reward = f"{step / 8:.4f}" if step != 2 else "55%"
        items = [
            messages.HistoryItem(key="train/reward", value_json=json.dumps(reward)),
            messages.HistoryItem(nested_key=["a", "b"], value_json=json.dumps("1e-3")),
        ]
        records.append(messages.Record(history={"step": {"num": step}, "item": items}))
    content = wandb_file([record.SerializeToString() for record in records])
    log = one(written(tmp_path / "run-a1.wandb", content))
    assert values(log, "train/reward") == {0: 0.0, 1: 0.125, 3: 0.375}
    assert values(log, "a/b") == dict.fromkeys(range(4), 0.001)
    assert log.dropped == {"train/reward": (2,)}
    assert "row 3, column train/reward: got '55%'" in log.unread["train/reward"]
    snapshot(log.notes[0])


def test_ms_swift(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "loss": f"{1 / step:.6g}",
            "global_step/max_steps": f"{step}/40",
            "percentage": f"{step / 0.4:.2f}%",
            "elapsed_time": f"{3 * step}s",
            "memory(GiB)": 22.5,
        }
        for step in range(1, 41)
    ]
    rows.append({"best_metric": None, "global_step": 40, "log_history": rows[:2], "memory": 22.5})
    log = one(written(tmp_path / "logging.jsonl", lines_of_json(rows)))
    assert sorted(log.metrics) == ["loss", "memory(GiB)"] and log.notes == ()
    assert values(log, "loss")[40] == 0.025 and len(log.metrics["loss"]) == 40


# --- long form ---

LONG = [("loss", 1, 0.5), ("reward", 1, 0.1), ("loss", 2, 0.25), ("reward", 2, 0.2)]


@pytest.mark.parametrize(
    "row",
    [
        lambda name, step, value: {"step": step, "metric": name, "value": value},
        lambda name, step, value: {"name": name, "step": step, "value": str(value)},
        lambda name, step, value: {"name": name, "data": {"epoch": 0.1, "step": step, "value": value}},
        lambda name, step, value: {"global_step": step, "metric": {"name": name, "value": value}},
    ],
)
def test_rows_of_one_metric_each_in_json_lines(tmp_path: Path, row) -> None:
    path = written(tmp_path / "a.jsonl", lines_of_json([row(*one) for one in LONG]))
    for step_column in (None, "data/step" if "data" in row("", 0, 0) else None):
        log = one(path, step_column)
        assert {name: values(log, name) for name in log.metrics} == {
            "loss": {1: 0.5, 2: 0.25},
            "reward": {1: 0.1, 2: 0.2},
        }


@pytest.mark.parametrize("name", ["name", "metric", "Name"])
@pytest.mark.parametrize("step", ["step", "at"])
def test_rows_of_one_metric_each_in_csv(tmp_path: Path, name: str, step: str) -> None:
    rows: list[dict[str, object]] = [{step: at, name: metric, "value": value} for metric, at, value in LONG]
    path = written(tmp_path / "a.csv.gz", gzip.compress(table(rows).encode()))
    log = one(path, None if step == "step" else step)
    assert sorted(log.metrics) == ["loss", "reward"] and values(log, "loss") == {1: 0.5, 2: 0.25}


def test_a_name_of_runs_beside_a_value_names_runs(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"step": step, "name": f"{arm}-s{seed}", "value": seed}
        for arm in "ab"
        for seed in (1, 2)
        for step in (1, 2)
    ]
    names = [log.name for log in read_logs(str(written(tmp_path / "x.csv", table(rows))))]
    assert names == ["a-s1", "a-s2", "b-s1", "b-s2"]


def test_json_lines_of_several_runs(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"step": step, "arm": arm, "seed": seed, "metric": name, "value": f"{seed + step / 8}"}
        for arm in ("old", "new")
        for seed in (1, 2)
        for step in (1, 2)
        for name in ("loss", "reward")
    ]
    logs = read_logs(str(written(tmp_path / "x.jsonl", lines_of_json(rows))))
    assert [log.name for log in logs] == ["new/seed-1", "new/seed-2", "old/seed-1", "old/seed-2"]
    assert values(logs[1], "loss") == {1: 2.125, 2: 2.25} and not logs[1].notes
    plain = [{"step": step, "seed": 3, "method": "grpo", "loss": 0.5} for step in (1, 2)]
    assert one(written(tmp_path / "y.jsonl", lines_of_json([dict(row) for row in plain]))).name == "y.jsonl"


def test_a_text_in_a_long_table_is_named_with_its_own_line(tmp_path: Path) -> None:
    content = "step,metric,value\n1,loss,0.5\n2,loss,0.4\n2,acc,5%\n3,loss,n/a\n"
    log = one(written(tmp_path / "a.csv", content))
    assert "line 5, column loss: got 'n/a'" in log.unread["loss"] and log.dropped["loss"] == (3,)


# --- encodings and spellings of files ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", table(ROWS, "\t").encode()),
        ("a.CSV", table(ROWS).encode()),
        ("a.csv", table(ROWS).replace("\n", "\r\n").encode("utf-8-sig")),
        ("a.csv", table(ROWS, "\t").encode("utf-16")),
        ("a.csv", b"\xfe\xff" + table(ROWS, ";").encode("utf-16-be")),
        ("a.csv", b"# a run\n#{\"a\":1,\"b\":2}\n\n" + table(ROWS).encode()),
        ("a.csv", b"#" + table(ROWS).encode()),
        ("a.csv", b"sep=;\r\n" + table(ROWS, ";").encode()),
        ("a.csv", table(ROWS).replace("\n20,", "\n# resumed\n20,").encode()),
        ("a.csv", table(ROWS).encode() + b",,\n"),
        ("a.csv.gz", gzip.compress(table(ROWS).encode())),
        ("a.TSV.GZ", gzip.compress(table(ROWS, "\t").encode())),
        ("a.jsonl", lines_of_json([dict(row) for row in ROWS]).encode("utf-8-sig")),
        ("a.jsonl", lines_of_json([dict(row) for row in ROWS]).encode("utf-16")),
        ("a.ndjson.gz", gzip.compress(lines_of_json([dict(row) for row in ROWS[:20]]).encode())
         + gzip.compress(lines_of_json([dict(row) for row in ROWS[20:]]).encode())),
        ("a.json", json.dumps(ROWS, indent=1).encode("utf-8-sig")),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
    ],
)  # fmt: skip
@pytest.mark.parametrize("folder", [False, True])
def test_one_table_in_every_spelling(tmp_path: Path, name: str, content: bytes, folder: bool) -> None:
    written(tmp_path / "runs" / name, content)
    log = one(tmp_path / "runs" if folder else tmp_path / "runs" / name)
    assert log.name == name and log.notes == ()
    assert values(log, "reward") == {row["step"]: row["reward"] for row in ROWS}
    assert sorted(log.metrics) == ["loss", "reward"]


def test_commas_in_the_names_of_a_table_with_tabs(tmp_path: Path) -> None:
    log = one(written(tmp_path / "a.tsv", "step\treward, mean\tloss, mean, sum\n1\t0.5\t2\n"))
    assert sorted(log.metrics) == ["loss, mean, sum", "reward, mean"]


def test_torn_and_damaged_gzip(tmp_path: Path) -> None:
    import random

    draw = random.Random(0)
    whole = "step,loss\n" + "".join(f"{step},{draw.random()}\n" for step in range(2000))
    packed = gzip.compress(whole.encode())
    path = written(tmp_path / "a.csv.gz", packed[:-9000])
    log = one(path)
    assert 0 < len(log.metrics["loss"]) < 2000 and "torn" in log.notes[0]
    written(path, packed[:100] + b"\xff" * 50 + packed[150:])
    with pytest.raises(StoreError, match=r"a\.csv\.gz: (damaged gzip file|line|byte)"):
        one(path)


# --- folders ---


def test_an_odd_table_beside_good_ones_is_left_aside_with_a_line(tmp_path: Path, snapshot: Snapshot) -> None:
    for seed in (0, 1, 2):
        run = tmp_path / f"seed_{seed}"
        written(run / "progress.csv", table(ROWS).replace("step,", "time/iterations,"))
        written(run / "0.episodes.csv", '#{"t_start": 1.5, "env_id": "E"}\nr,l,t\n1.5,20,3\n')
        written(run / "ragged.csv", "a,b\n1\n2,3,4\n")
        written(run / "empty.csv", "")
        written(run / "garbage.csv", b"\x81\x82\x00")
    logs = read_logs(str(tmp_path), step_column="time/iterations")
    assert [log.name for log in logs] == [f"seed_{seed}/progress.csv" for seed in (0, 1, 2)]
    said = guesses(logs)
    for name in ("0.episodes.csv:", "ragged.csv, line 2:", "empty.csv:", "garbage.csv:"):
        assert f"ignored: {tmp_path}/seed_0/{name} " in said
    assert said.count("(and 2 more ") == 4
    with snapshot.refused(StoreError):
        read_logs(str(tmp_path / "seed_0" / "0.episodes.csv"), step_column="time/iterations")


def test_a_damaged_table_that_is_called_like_the_runs_is_a_run_that_cannot_be_read(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    for seed in (1, 2):
        written(tmp_path / f"seed{seed}.csv", table(ROWS))
    written(tmp_path / "seed3.csv", table(ROWS).replace("\n20,", "\n20k,"))
    damaged = read_logs(str(tmp_path))[2]
    assert damaged.status == "unreadable"
    snapshot(damaged.failure)
    for seed in (1, 2):
        (tmp_path / f"seed{seed}.csv").unlink()
    with snapshot.refused(StoreError):
        read_logs(str(tmp_path))


def test_where_most_files_are_no_logs_the_format_that_has_numbers_is_read(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    written(tmp_path / "metrics.csv", table(ROWS))
    for name in ("x", "y"):
        written(tmp_path / f"{name}.jsonl", '{"prompt": "a", "score": 1}\n')
    written(tmp_path / "list.json", json.dumps([{"prompt": "a"}]))
    written(tmp_path / "config.json", '{"step": 1}')
    written(tmp_path / "sheet.xlsx", b"PK")
    logs = read_logs(str(tmp_path))
    assert [log.name for log in logs] == ["metrics.csv"]
    assert guesses(logs).splitlines() == [
        f"{tmp_path}: read the csv logs, ignored jsonl, json",
        f"{tmp_path}: unsupported format, not read: 'sheet.xlsx' (a spreadsheet: export it as CSV)",
    ]
    (tmp_path / "metrics.csv").unlink()
    with snapshot.refused(StoreError):
        read_logs(str(tmp_path))
    for path in tmp_path.glob("*.json*"):
        path.unlink()
    with pytest.raises(StoreError, match=r"no runs found; .*; it holds 'sheet\.xlsx' \(a spreadsheet: "):
        read_logs(str(tmp_path))
    with pytest.raises(
        StoreError, match=r"sheet\.xlsx: not a metrics file \(a spreadsheet: export it as CSV\);"
    ):
        read_logs(str(tmp_path / "sheet.xlsx"))
    written(tmp_path / "notes.txt", "hello\n")
    with pytest.raises(
        StoreError, match=r"notes\.txt: console output without .*not read: 'sheet\.xlsx' \(a sp"
    ):
        read_logs(str(tmp_path))


def test_names_unpacked_from_windows(tmp_path: Path) -> None:
    for arm in ("old", "new"):
        written(tmp_path / f"runs\\{arm}\\seed1.csv", table(ROWS).replace("\n", "\r\n"))
    assert [log.name for log in read_logs(str(tmp_path))] == ["runs/new/seed1.csv", "runs/old/seed1.csv"]


def test_ray_tune(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"episode_reward_mean": 2.5, "training_iteration": step, "trial_id": "3d", "config/seed": 7}
        | {"config/env": "Cart", "config/lr": 0.1 / step}
        for step in (1, 2)
    ]
    log = one(written(tmp_path / "progress.csv", table(rows)))
    assert values(log, "episode_reward_mean") == {1: 2.5, 2: 2.5}
    assert sorted(log.metrics) == ["config/lr", "episode_reward_mean"]  # one that changes is no configuration
    assert log.config == {"seed": 7, "env": "Cart"}


@pytest.mark.parametrize(
    ("name", "content", "metric", "counter"),
    [
        ("training.csv", "epoch,loss,val_loss\n0,2.5,3\n1,2.0,2.5\n", "val_loss", "epoch"),  # Keras
        ("results.csv", "   epoch,  metrics/mAP50(B)\n  1,  0.5\n  2,  0.6\n", "metrics/mAP50(B)", "epoch"),
        ("progress.csv", "a,time/iterations,time/total_timesteps\n1,1,64\n2,2,128\n", "a", "time/iterations"),
        ("logs.csv", "learner_steps,learner_walltime,loss\n10,1.5,2\n20,2.5,1\n", "loss", "learner_steps"),
        ("reward.csv", "0,0.5\n10,0.6\n", "reward", ""),  # torchrl
        ("metrics.json", '{"iteration": 19, "loss": 2}\n{"iteration": 39, "loss": 1}\n', "loss", ""),
        ("log.txt", '{"update": 0.5, "num_updates": 100, "loss": "2"}\n' * 2, "loss", ""),  # fairseq
    ],
)
def test_steps_of_other_programs(tmp_path: Path, name: str, content: str, metric: str, counter: str) -> None:
    log = one(written(tmp_path / name, content).parent)
    assert len(log.metrics[metric]) == (1 if "txt" in name else 2)
    assert (f"no step has its usual name: read from {counter}" in log.guesses) == bool(counter)


@pytest.mark.parametrize(
    "content", ["epoch,loss\n1,2\n1,1\n", "epoch,loss\n0.5,2\n1,1\n", "hours,loss\n1,2\n2,1\n"]
)
def test_what_does_not_count_up_is_no_step(tmp_path: Path, content: str) -> None:
    with pytest.raises(StoreError, match="no column has the step"):
        one(written(tmp_path / "a.csv", content))


# --- what is not read, and names ---


def test_true_false_and_lists_are_told_where_they_stand(tmp_path: Path) -> None:
    rows = [{"step": 1, "solved": True, "reward": 0.1}, {"step": 2, "solved": False, "reward": [0.2]}]
    log = one(written(tmp_path / "a.jsonl", lines_of_json(rows)))
    assert log.unread["solved"].startswith(f"{tmp_path}/a.jsonl, line 1, column solved: got 'true'")
    assert values(log, "reward") == {1: 0.1} and log.dropped["reward"] == (2,)


def test_a_rotated_log_that_is_not_read_is_named(tmp_path: Path) -> None:
    written(tmp_path / "seed0/log.jsonl", lines_of_json(ROWS[20:]))
    written(tmp_path / "seed0/log.jsonl.1", lines_of_json(ROWS[:20]))
    assert "not read: 'seed0/log.jsonl.1'" in guesses(read_logs(str(tmp_path)))


def test_files_below_a_folder_without_runs_are_named(tmp_path: Path) -> None:
    written(tmp_path / "seed0/log_1718000000.md", "Step 1 | loss:2.3\n")
    with pytest.raises(StoreError, match=r"no runs found.*it holds 'seed0/log_1718000000.md'"):
        read_logs(str(tmp_path))


def test_a_link_to_a_file_of_the_folder_is_no_second_run(tmp_path: Path) -> None:
    written(tmp_path / "seed3.jsonl", lines_of_json(ROWS))
    (tmp_path / "latest.jsonl").symlink_to("seed3.jsonl")
    assert [log.name for log in read_logs(str(tmp_path))] == ["seed3.jsonl"]


@pytest.mark.parametrize("runs", [["old - s0", "old - s1"], ["old-s0", "old-s1"]])
@pytest.mark.parametrize("metric", ["train/reward", "pass - at 1"])
def test_dashes_in_the_names_of_a_chart_of_wandb(tmp_path: Path, runs: list[str], metric: str) -> None:
    header = ",".join(f'"{run} - {metric}"' for run in runs)
    path = written(tmp_path / "a.csv", f"Step,{header}\n1,0.1,0.2\n2,0.3,0.4\n")
    if " - " in runs[0] and " - " in metric:
        return  # nothing tells the two apart
    logs = read_logs(str(path))
    assert [(log.name, [*log.metrics]) for log in logs] == [(run, [metric]) for run in runs]


# --- rows of several splits, and steps within an epoch ---


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_splits_of_the_same_metric_are_two_metrics(tmp_path: Path, suffix: str, snapshot: Snapshot) -> None:
    rows = [
        {"step": step, "split": split, "reward": step / 10 + 0.5 * (split == "eval")}
        for step in (1, 2, 3)
        for split in ("train", "eval")
    ]
    content = table(rows) if suffix == "csv" else lines_of_json(rows)
    log = one(written(tmp_path / f"a.{suffix}", content))
    assert values(log, "train/reward") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert values(log, "eval/reward") == {1: 0.6, 2: 0.7, 3: 0.8}
    snapshot(log.notes)
    assert "reward" not in log.metrics


@pytest.mark.parametrize("steps", [(1, 2, 3, 2, 3, 4), (1, 2, 3, 4, 5, 6)])
def test_words_that_divide_no_metric_change_no_name(tmp_path: Path, steps: tuple[int, ...]) -> None:
    hosts = ("a", "a", "a", "b", "b", "b") if steps[3] == 2 else ("a", "b") * 3
    rows = [{"step": step, "host": host, "reward": 1} for step, host in zip(steps, hosts, strict=True)]
    assert [*one(written(tmp_path / "a.jsonl", lines_of_json(rows))).metrics] == ["reward"]


def test_a_step_within_the_epoch_is_not_the_step(tmp_path: Path) -> None:
    rows = [{"epoch": n // 3, "step": n % 3, "global_step": n + 1, "reward": n} for n in range(12)]
    log = one(written(tmp_path / "a.jsonl", lines_of_json(rows)))
    assert [*values(log, "reward")] == [*range(1, 13)] and not log.metrics["reward"].recounted


def test_train_and_eval_files_of_a_run_are_one_run(tmp_path: Path) -> None:
    written(tmp_path / "seed0/train.jsonl", lines_of_json(ROWS))
    written(
        tmp_path / "seed0/eval.jsonl", lines_of_json([{"step": 10, "reward": "10%"}, {"step": 20, "acc": 1}])
    )
    log = one(tmp_path)
    assert log.name == "seed0" and len(log.metrics["reward"]) == len(ROWS)
    assert values(log, "acc") == {20: 1} and log.dropped == {"eval/reward": (10,)}


@pytest.mark.parametrize("with_run", [True, False])
@pytest.mark.parametrize("name", ["aim.csv", "aim.parquet", "aim.json"])
def test_data_frames_of_aim(tmp_path: Path, name: str, with_run: bool) -> None:
    """Hashes may look like numbers. Parameters are configuration, contexts are prefixes."""
    runs = {"123456789e2": (1, "adam"), "00ab": (2, "muon")} if with_run else {"00ab": (2, "muon")}
    rows = [
        {"idx": step, "step": step, "value": step / seed, "epoch": 0.5, "time": "2025-01-01 10:00:00"}
        | ({"run.hash": run, "run.hparams.seed": seed, "run.hparams.opt": opt} if with_run else {})
        | {"metric.name": "loss", "metric.context.subset": subset}
        for run, (seed, opt) in runs.items()
        for subset in ("train", "val")
        for step in (1, 2, 3)
    ]
    frame = pd.DataFrame(rows)
    write = {
        ".csv": frame.to_csv,
        ".parquet": frame.to_parquet,
        ".json": partial(frame.to_json, orient="records"),
    }
    write[Path(name).suffix](tmp_path / name)
    logs = {log.name: log for log in read_logs(str(tmp_path / name))}
    assert logs.keys() == ({*runs} if with_run else {name})
    log = logs["00ab" if with_run else name]
    assert log.metrics.keys() == {"train/loss", "val/loss"} and values(log, "val/loss") == {
        1: 0.5,
        2: 1,
        3: 1.5,
    }
    assert log.config == ({"hparams.seed": 2, "hparams.opt": "muon"} if with_run else None)
