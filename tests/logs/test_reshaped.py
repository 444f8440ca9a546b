"""Foreign logs of another shape: other types, names, nesting and sizes than any trainer writes.

ABRUN_FUZZ_SEED=$RANDOM ABRUN_FUZZ_ROUNDS=20000 pytest -m slow -k reshaped
"""

import contextlib
import csv
import io
import json
import random
import resource
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from abrun import cli
from abrun.errors import AbrunError
from abrun.logs import read_logs
from tests.fuzzing import SEED, bounded, check_line, rounds
from tests.logs import test_fuzz
from tests.logs.test_fuzz import messages, tensorboard_file, wandb_file

Event: Any = test_fuzz.Event
Summary: Any = test_fuzz.Summary
MOST_MIB = 600  # that one log of a few kB may take
VALUES: list[Any] = [
    None, True, False, 0, -1, 2**31, 2**63, -(2**63), 10**40, 10**400, 0.5, 1e308, -1e308, 5e-324, 1e17,
    float("inf"), float("nan"), "", "x", "NaN", "1e-6", "1_000", "0x1F", "١٢", "a\nb", "\x00", "\x1b[31m",
    "[/x]", "ü\u2028", "\u202e", "=1+1", "1,5", "9" * 5000, "a" * 100_000, [], {}, [None], [[[]]], [1, 2],
    {"a": 1}, {"": {"": 1}}, {"_type": "table"}, {"_type": "histogram", "values": [1], "bins": "x"},
    {"min": "x"}, 10**15, 2**53 + 1,
]  # fmt: skip
NAMES = (
    "step", "_step", "global_step", "epoch", "train/reward", "loss", "_timestamp", "_runtime", "seed", "run",
    "arm", "", " ", "a" * 5000, "[/x]", "\x1b[31m", "a\nb", "\x00", "../x", "a.b", "a/b/c", "\u202ex", "1",
    "nan", "é", "train/reward__MAX", "x - step", "value", "name", "log_history", "__proto__",
)  # fmt: skip


def rows(draw: random.Random) -> list[Any]:
    """Rows of a log, and what is not as it should be in them."""
    found: list[Any] = [
        {"step": step, "train/reward": step / 7, "loss": 1 / (step + 1)} for step in range(30)
    ]
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(found))
        row = found[at] if isinstance(found[at], dict) else {}
        match draw.randrange(8):
            case 0 | 1:
                row[draw.choice([*row, *NAMES])] = draw.choice(VALUES)
            case 2:
                row.pop(draw.choice([*row, "step"]), None)
            case 3:
                found[at] = draw.choice([draw.choice(VALUES), [row], {"row": row}, {}])
            case 4:
                found.insert(at, dict(row) or draw.choice(VALUES))
            case 5:
                old, new = draw.choice(["step", "train/reward", "loss"]), draw.choice(NAMES)
                found = [
                    {new if k == old else k: v for k, v in r.items()} if isinstance(r, dict) else r
                    for r in found
                ]
            case 6:
                key, value = draw.choice(["step", "train/reward", *NAMES]), draw.choice(VALUES)
                found = [{**r, key: value} if isinstance(r, dict) else r for r in found]
            case 7:
                nested: Any = draw.choice(VALUES)
                for _ in range(draw.choice([2, 50, 3000])):
                    nested = [nested] if draw.random() < 0.5 else {"a": nested}
                row[draw.choice(NAMES)] = nested
    return found


def as_json(value: Any) -> str:
    """JSON of any depth."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        return json.dumps(value)
    except RecursionError:  # C code has a fixed limit on Python 3.12
        return "".join(json.JSONEncoder().iterencode(value))
    finally:
        sys.setrecursionlimit(limit)


def jsonl(found: list[Any], draw: random.Random) -> bytes:
    return draw.choice(["\n", "\r\n", "\n\n", " \n"]).join(map(as_json, found)).encode()


def trainer_state(found: list[Any], draw: random.Random) -> bytes:
    whole: Any = {"log_history": found, "global_step": 30, "best_metric": None}
    if draw.random() < 0.3:
        whole[draw.choice(["log_history", "global_step"])] = draw.choice(VALUES)
    return as_json(draw.choice([whole, whole, whole, found, [whole], {"x": whole}])).encode()


def table(found: list[Any], draw: random.Random) -> bytes:
    out, columns = (
        io.StringIO(),
        list(dict.fromkeys(k for row in found if isinstance(row, dict) for k in row)),
    )
    writer = csv.writer(
        out, delimiter=draw.choice([",", ",", ";", "\t"]), lineterminator=draw.choice(["\n", "\r"])
    )
    writer.writerow([*columns, *draw.choice([[], columns, [""]])])
    for row in found:
        cells = [row.get(column, "") for column in columns] if isinstance(row, dict) else [row]
        texts = [as_json(cell) if isinstance(cell, list | dict) else str(cell)[:5000] for cell in cells]
        writer.writerow(texts[: draw.choice([len(texts), len(texts), 1])])
    return out.getvalue().encode(draw.choice(["utf-8", "utf-8-sig", "utf-16", "latin-1"]), errors="replace")


def parquet(found: list[Any], draw: random.Random) -> bytes:
    dicts = [row for row in found if isinstance(row, dict)]
    plain = [{k: v if len(as_json(v)) < 60 else "long" for k, v in row.items()} for row in dicts]
    out = io.BytesIO()
    try:
        pd.DataFrame(plain).to_parquet(out, compression=draw.choice(["zstd", None]))
    except Exception:  # pyarrow takes no column of several types: all of them as texts
        out = io.BytesIO()
        pd.DataFrame([{k: str(v) for k, v in row.items()} for row in plain]).to_parquet(out)
    return out.getvalue()


def wandb_run(found: list[Any], draw: random.Random) -> bytes:
    record, item = messages.Record, messages.HistoryItem
    records = [
        record(run={"run_id": draw.choice(["a1", "", "[/x]", "../x"]), "display_name": draw.choice(NAMES)})
    ]
    for step, row in enumerate(found):
        texts = row.items() if isinstance(row, dict) else [("x", row)]
        items = [item(key=key, value_json=as_json(value)) for key, value in texts]
        items += [item(nested_key=[draw.choice(NAMES)] * draw.choice([0, 1, 40]), value_json="1")]
        number = draw.choice([step, step, step, -step, 2**62])
        records.append(record(history={"step": {"num": number}, "item": items}))
    return wandb_file([each.SerializeToString() for each in records])


def events(found: list[Any], draw: random.Random) -> bytes:
    written = []
    for step, row in enumerate(found):
        values = []
        for key, value in row.items() if isinstance(row, dict) else []:
            number = float(value) if isinstance(value, float) else 1.0
            tag = draw.choice([key, key, key, draw.choice(NAMES)])
            kinds: list[dict[str, Any]] = [
                {"simple_value": number if abs(number) < 1e38 else 0.0},
                {"tensor": {"dtype": draw.randrange(24), "float_val": [1.0] * draw.choice([0, 1, 5])}},
                {"tensor": {"dtype": 1, "tensor_content": b"\0" * draw.choice([0, 3, 4, 8])}},
                {"tensor": {"dtype": 1, "tensor_shape": {"dim": [{"size": draw.choice([-1, 2**40])}]}}},
                {"image": {"height": 2**30, "width": 2**30}},
                {"histo": {"min": 1.0}},
            ]
            values.append(Summary.Value(tag=tag, **draw.choice([kinds[0], kinds[0], *kinds])))
        number = draw.choice([step, step, step, -step, 2**62])
        event = Event(
            step=number, wall_time=draw.choice([0.0, float("nan"), 1e300]), summary=Summary(value=values)
        )
        written.append(event.SerializeToString())
    return tensorboard_file(written)


FILES = {
    "a.jsonl": jsonl,
    "a.csv": table,
    "trainer_state.json": trainer_state,
    "a.parquet": parquet,
    "run-a1.wandb": wandb_run,
    "events.out.tfevents.1.host": events,
}


def compare(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`abrun compare` of two copies of a log, in this process."""
    argv = ["compare", f"baseline={file}", f"treatment={file}", "--claim", "train/reward:last 20%:0.05"]
    monkeypatch.setattr(sys, "argv", ["abrun", *argv, "--output", str(folder / "report")])
    error = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(error), bounded():
        try:
            cli.main()
        except SystemExit as ended:
            assert ended.code in (0, 2), ended.code
            if ended.code == 2:
                refusals = [line for line in error.getvalue().splitlines() if line.startswith("abrun: ")]
                assert len(refusals) == 1 and error.getvalue().rstrip("\n").isprintable(), error.getvalue()[
                    :300
                ]


def reshape(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, read = list[str](), 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_ in range(count):
        draw = random.Random(f"{SEED} reshaped {round_}")
        name = list(FILES)[round_ % len(FILES)]
        path = folder / name
        path.write_bytes(FILES[name](rows(draw), draw))
        try:
            if draw.random() < 0.2:
                compare(folder, path, monkeypatch)
                continue
            with bounded():
                logs = read_logs(str(path))
            read += 1
            texts = [text for log in logs for text in (log.name, log.place, *log.notes, *log.metrics)]
            assert all(text.isprintable() for text in texts), "texts that no terminal takes"
        except Exception as error:
            with contextlib.suppress(AssertionError):
                if isinstance(error, AbrunError):
                    check_line(error)
                    continue
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename[-50:]}:{last.lineno}"
            failures.append(f"round {round_}, {name}: {type(error).__name__}: {str(error)[:200]} at {place}")
    assert not failures, "\n".join([f"{len(failures)} of {count}", *failures[:40]])
    taken_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert taken_kib < MOST_MIB * 1024, taken_kib
    assert read > count / 5


def test_a_sample_of_reshaped_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshape(tmp_path, 90, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_reshaped_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshape(tmp_path, rounds(500), monkeypatch)
