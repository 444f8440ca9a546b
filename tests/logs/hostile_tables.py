"""Tables made to harm: each cell of each layout, and whole files whose size misleads."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
Change = Callable[[Path], object]
STEPS = [
    {"step": str(step), "train/reward": str(step / 8), "loss": str(1 / (step + 1)), "note": "hf"}
    for step in range(6)
]
RUNS = [{"arm": arm, "seed": str(seed)} for arm in ("hf", "vllm") for seed in (0, 1)]
LAYOUTS: dict[str, list[Row]] = {
    "wide": STEPS,
    "runs": [{**run, **row} for run in RUNS for row in STEPS],
    "long": [
        {"step": row["step"], "metric": name, "value": row[name]}
        for row in STEPS
        for name in ("loss", "note")
    ],
    "scores": [{**run, "ifeval": "0.5", "gsm8k": "0.25"} for run in RUNS],
    "benchmarks": [{**run, "benchmark": name, "score": "0.5"} for run in RUNS for name in ("arc", "mmlu")],
    "prompts": [{**run, "prompt": str(number), "score": "1"} for run in RUNS for number in range(3)],
    "chart": [{"Step": row["step"], "hf-s0 - loss": row["loss"], "b-s0 - loss": "1"} for row in STEPS],
    "download": [{"Wall time": "1.5", "Step": row["step"], "Value": row["loss"]} for row in STEPS],
}
CELLS = (
    "", " ", "x", "nan", "-inf", "1e999", "1_0", "-1", "1.5", "1,5", "1.234", "1,234.5", "5/60", "9" * 5000,
    "x" * 1_000_000, "2026-13-45", '"', "'", "=1+1", "a\x1b[31m", "a\nb", "a\r", "\x00", "\ufeff", "#",
    "1 " * 999, str(2**53), str(2**63), "[" * 3000, '{"a": 1}', "١٢", "step", "sep=;", "," * 300, " - " * 300,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, [], [[1]], {}, {"a": 1}, {"_type": "table"}, 2**53, 2**63, -1, 1.5, 10**400, "x", "nan", "",
    "9" * 5000, "x" * 1_000_000, "\x00\x1b[31m", {"k" * 100_000: 1},
    {"a": {str(key): 1 for key in range(3000)}},
)  # fmt: skip


def csv_text(rows: Sequence[Row], delimiter: str = ",") -> str:
    def cell(text: str) -> str:
        is_quoted = any(mark in text for mark in (delimiter, '"', "\n", "\r"))
        return '"' + text.replace('"', '""') + '"' if is_quoted else text

    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "".join(delimiter.join(map(cell, line)) + "\n" for line in lines)


def repeated(rows: Sequence[Row]) -> str:
    """Write the header twice, the second time with the columns in the other order."""
    return csv_text(rows) + csv_text([dict(reversed(row.items())) for row in rows])


def json_lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


ENCODERS: dict[str, tuple[str, Callable[[Sequence[Row]], bytes]]] = {
    "csv": ("m.csv", lambda rows: csv_text(rows).encode()),
    "csv.gz": ("m.csv.gz", lambda rows: gzip.compress(csv_text(rows).encode())),
    "utf-16": ("m.csv", lambda rows: csv_text(rows).encode("utf-16")),
    "semicolons": ("m.csv", lambda rows: csv_text(rows, ";").encode()),
    "repeated": ("m.csv", lambda rows: repeated(rows).encode()),
    "jsonl": ("m.jsonl", lambda rows: json_lines(rows).encode()),
    "list": ("m.json", lambda rows: json.dumps(rows).encode()),
    "state": ("trainer_state.json", lambda rows: json.dumps({"log_history": rows}).encode()),
}


def write_table(encoder: str, rows: Sequence[Row], folder: Path) -> Path:
    name, encode = ENCODERS[encoder]
    (folder / name).write_bytes(encode(rows))
    return folder / name


def cells_of_tables() -> Iterator[tuple[str, Change]]:
    """Yield a name and a writer for each value in the place of each cell and column name of each layout."""
    for layout, rows in LAYOUTS.items():
        texts = [encoder for encoder in ENCODERS if layout == "wide" or encoder in ("csv", "jsonl")]
        for encoder in texts:
            is_json = encoder in ("jsonl", "list", "state")
            for column in rows[0]:
                for number, value in enumerate((*CELLS, *VALUES) if is_json else CELLS):
                    for place in ("first", "all") if encoder == "csv" else ("last",):
                        changed = [dict(row) for row in rows]
                        for index in {"first": [0], "last": [-1], "all": range(len(rows))}[place]:
                            changed[index][column] = value
                        name = f"{layout}, {encoder}, {column}, {place}: {number}"
                        yield name, partial(write_table, encoder, changed)
                if encoder == "csv":
                    for number, text in enumerate(CELLS):
                        renamed = [{text if key == column else key: row[key] for key in row} for row in rows]
                        yield f"{layout}, name of {column}: {number}", partial(write_table, encoder, renamed)


def packed(name: str, head: bytes, row: bytes, count: int, folder: Path) -> None:
    """Write a row many times; the file is a thousand times smaller."""
    block = row * max(1, (1 << 20) // len(row))
    with gzip.open(folder / name, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(max(1, count * len(row) // len(block))):
            file.write(block)


def sparse(name: str, head: bytes, num_bytes: int, folder: Path) -> None:
    with (folder / name).open("wb") as file:
        file.write(head)
        file.truncate(num_bytes)


def text(name: str, make: Callable[[], str], folder: Path) -> None:
    (folder / name).write_text(make())


def members(count: int, folder: Path) -> None:
    start = gzip.compress(b"step,loss\n1,2\n")
    (folder / "m.csv.gz").write_bytes(start + gzip.compress(b"") * count)


def torn(folder: Path) -> None:
    content = gzip.compress(csv_text(STEPS * 10_000).encode())
    (folder / "m.csv.gz").write_bytes(content[: len(content) // 2])


def parquet(columns: Callable[[], dict[str, Any]], folder: Path, **options: Any) -> None:
    pq.write_table(pa.table(columns()), folder / "m.parquet", **options)


def dictionary(num_rows: int, length: int) -> dict[str, Any]:
    indices = pa.array(np.zeros(num_rows, np.int32))
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * length]))
    return {"step": np.arange(num_rows), "loss": np.ones(num_rows), "text": texts}


def duplicate_columns(folder: Path) -> None:
    columns = [pa.array([1, 2])] * 3
    pq.write_table(pa.Table.from_arrays(columns, names=["step", "loss", "loss"]), folder / "m.parquet")


def wide(count: int, repeats: int = 1) -> str:
    names = ",".join(f"m{number}" for number in range(count))
    return f"step,{names}\n{'1' + ',1' * count}\n" * repeats


def bombs() -> dict[str, Change]:
    """Return writers of whole files whose work, or memory, is out of proportion to their size."""
    lines = {
        # CSV
        "header of commas": lambda: "," * 5_000_000 + "\n1\n",
        "quoted line ends": lambda: 'step,loss\n1,"' + "\n" * 1_000_000 + '"\n2,3\n',
        "a quote without end": lambda: 'step,loss\n1,"' + "2\n" * 2_000_000,
        "header only": lambda: "step,loss\n",
        "zeros in lines": lambda: "step,loss\n1,2\n" + "\x00" * 100_000 + "\n3,4\n",
        "100,000 columns": lambda: wide(100_000),
        "a million columns without rows": lambda: wide(1_000_000).partition("\n")[0] + "\n",
        "wide headers repeated": lambda: wide(20_000, 4),
        "headers that grow": lambda: "step,a\n1,2\n" + "".join(f"step,b{i}\n{i},2\n" for i in range(10_000)),
        "rows wider than the header": lambda: "step\n" + ("10," * 999 + "10\n") * 60_000,
        "steps of text": lambda: "step,loss\n1,2\n" + "x,\n" * 20_000,
        "columns of splits": lambda: (
            "step"
            + "".join(f",t{i},m{i}" for i in range(1000))
            + "\n"
            + "".join(f"{step}" + f",{'ab'[step % 2]},1" * 1000 + "\n" for step in range(6))
        ),
        "many metrics": lambda: "step,metric,value\n" + "".join(f"1,m{i},2\n" for i in range(500_000)),
        "many runs of scores": lambda: "arm,seed,x\n" + "".join(f"a{i},{i % 7},1\n" for i in range(50_000)),
        "many runs of prompts": lambda: (
            "arm,seed,prompt,x\n" + "".join(f"a{i},{i % 7},p,1\n" for i in range(50_000))
        ),
        "chart of many runs": lambda: (
            "Step" + "".join(f",r{i} - x" for i in range(20_000)) + "\n1" + ",1" * 20_000
        ),
        "chart's name of dashes": lambda: 'Step,"a' + " - b" * 100_000 + '\nx"\n1,2\n',
        "cell of commas": lambda: 'step,loss\n1,"1,5"\n2,"' + "," * 200_000 + '\nx"\n',
    }
    every: dict[str, Change] = {name: partial(text, "m.csv", make) for name, make in lines.items()}
    prefix = '"' + "k" * 1900 + '": {' + ", ".join(f'"{key}": 1' for key in range(400_000)) + "}"
    every |= {
        "a new name in each row": partial(
            text, "m.jsonl", lambda: "".join(f'{{"a{i}": 1, "step": 1}}\n' for i in range(500_000))
        ),
        "names below a long one": partial(text, "m.jsonl", lambda: f'{{"step": 1, {prefix}}}\n'),
        "state, names below a long one": partial(
            text, "trainer_state.json", lambda: f'{{"log_history": [{{"step": 1, {prefix}}}]}}\n'
        ),
        "state of many rows": partial(
            text, "trainer_state.json", lambda: '{"log_history": [' + '{"a":1},' * 8_000_000 + '{"a":1}]}'
        ),
        "list of many names": partial(
            text, "m.json", lambda: "[\n{" + ",".join(f'"{key}":1' for key in range(8_000_000)) + "}]"
        ),
        "state of zeros": partial(sparse, "trainer_state.json", b"", (1 << 30) - 1),
        "list of zeros": partial(sparse, "m.json", b"[\n{", (1 << 30) - 1),
        **{
            f"{name} of 9 GB": partial(sparse, name, head, 9 << 30)
            for name, head in (
                *(
                    ("m.csv", b"step,loss\n1,2\n"),
                    ("m.jsonl", b'{"step": 1}\n'),
                    ("trainer_state.json", b"{"),
                ),
                *(("m.parquet", b"PAR1"), ("m.json", b"[\n{")),
            )
        },
        "gzip, empty members": partial(members, 500_000),
        "gzip, torn": torn,
        "gzip, a line without end": partial(packed, "m.csv.gz", b"step,loss\n", b"1", 400_000_000),
        "gzip, JSON without end": partial(packed, "m.jsonl.gz", b'{"step":', b"1", 400_000_000),
        "gzip, rows": partial(packed, "m.csv.gz", b"step,loss\n", b"1,1\n", 100_000_000),
        "gzip, texts": partial(packed, "m.csv.gz", b"note\n", b"ab\n", 100_000_000),
        "gzip, spaces": partial(packed, "m.csv.gz", b"step\n", b" \n", 300_000_000),
        "gzip, line ends": partial(packed, "m.csv.gz", b"step\n", b"\n", 500_000_000),
        "gzip, comments": partial(packed, "m.csv.gz", b"", b"#\n", 300_000_000),
        "gzip, a row of many lines": partial(packed, "m.csv.gz", b'step,loss\n"', b'ab\n","', 30_000_000),
        "gzip, empty objects": partial(packed, "m.jsonl.gz", b"", b"{}\n", 100_000_000),
        "gzip, objects of text": partial(packed, "m.jsonl.gz", b"", b'{"a":"b"}\n', 50_000_000),
        "parquet, one text": partial(parquet, partial(dictionary, 1 << 20, 1 << 20)),
        "parquet, five million rows": partial(parquet, partial(dictionary, 5_000_000, 1)),
        "parquet, one text of 500 MB": partial(
            parquet, lambda: {"step": [1], "t": ["x" * 500_000_000]}, use_dictionary=False, compression="zstd"
        ),
        "parquet, many texts": partial(
            parquet, lambda: {"step": np.arange(1 << 18), "t": [f"text {i}" for i in range(1 << 18)]}
        ),
        "parquet, 20,000 columns": partial(parquet, lambda: {f"m{i}": [1.0, 2.0] for i in range(20_000)}),
        "parquet, nested": partial(
            parquet,
            lambda: {
                "step": [1, 2],
                "a": [{"b": 1}, None],
                "l": [[1], []],
                "a.b": [1.5, 2.5],
                "n": [None, None],
            },
        ),
        "parquet, nulls": partial(
            parquet, lambda: {"step": pa.nulls(100_000), "loss": pa.nulls(100_000, pa.int8())}
        ),
        "parquet, duplicates": duplicate_columns,
    }
    return every
