"""Tables as columns: the same content in blocks of any size, and operations against plain dictionaries."""

import gzip
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abrun.errors import StoreError
from abrun.logs import csv_files, read_logs
from abrun.logs.foreign import columns, files
from abrun.logs.foreign.columns import Cells, Table, TableBuilder

LONG = "".join(
    f'{{"step": {step}, "name": "{name}", "value": {step * weight}}}\n'
    for step in range(40)
    for name, weight in (("loss", 0.5), ("reward", 2), ("kl", 1e-3))
)
FILES = {
    "plain.csv": "step,loss,reward\n" + "".join(f"{n},{n / 7:.3f},{n % 5}\n" for n in range(99)),
    "sparse.csv": "step,loss,note\n"
    + "".join(f"{n},{n if n % 3 else ''},{'x' * (n % 2)}\n" for n in range(80)),
    "quoted.csv": 'step,"a ""b""",text\n' + "".join(f'{n},{n},"x\r\ny\n{n}"\n' for n in range(50)),
    "resumed.csv": "# made by x\nstep,loss\n1,2\n2,3\nstep,kl,loss\n3,.1,4\n# pause\n4,.2,5\n",
    "marks.csv": 'step,loss,tokens\n"1,000",0.5,"1,234"\n"1,001",0.25,"12,345"\n"1,002",0.75,"1,234,567"\n',
    "comma.csv": "step;loss\n1;0,5\n2;1.234\n3;7\n",
    "torn.csv": "step,loss\n1,2\n2,3\n3,4",
    "open-quote.csv": 'step,loss\n1,2\n2,"3',
    "returns.csv": "step,loss\r1,2\r2,3\r",
    "arms.csv": "arm,seed,step,loss\n"
    + "".join(f"{arm},{seed},{n},{n + seed}\n" for n in range(9) for arm in "ab" for seed in range(3)),
    "scores.csv": "arm,seed,task,score\n"
    + "".join(f"{arm},{seed},{task},{seed}.5\n" for arm in "ab" for seed in range(4) for task in ("x", "y")),
    "prompts.csv": "arm,seed,prompt,score\n"
    + "".join(
        f"{arm},{seed},{99999999999999990000 + p},{p % 2}\n"
        for arm in "ab"
        for seed in "01"
        for p in range(7)
    ),
    "long.jsonl": LONG,
    "mixed.jsonl": "".join(
        f'{{"step": {n}, "loss": {n}.5}}\n'
        if n % 3
        else f'{{"step": {n}, "eval": {{"acc": "NaN"}}, "t": "a"}}\n'
        for n in range(70)
    ),
    "splits.jsonl": "".join(
        f'{{"step": {n}, "split": "{split}", "loss": {n}}}\n'
        for n in range(20)
        for split in ("train", "eval")
    ),
    "list.jsonl": "[" + ",".join(f'{{"step": {n}, "loss": {n}}}' for n in range(30)) + "]",
    "torn.jsonl": '{"step": 1, "loss": 2}\n\n{"step": 2, "lo',
}


def describe(path: Path) -> list[dict[str, Any]]:
    """Return everything that the logs of a file hold."""
    logs = []
    for log in read_logs(str(path)):
        content = {field.name: getattr(log, field.name) for field in fields(log)}
        content["metrics"] = {
            name: (series.steps.tolist(), series.values.astype(str).tolist())
            for name, series in log.metrics.items()
        }
        logs.append(content)
    return logs


@pytest.mark.parametrize("name", FILES)
def test_blocks_of_any_size_give_the_same_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    expected = describe(path)
    assert any(log["metrics"] for log in expected)
    for num_cells, num_bytes in ((1, 1), (5, 3), (64, 7)):
        for module in (columns, csv_files):
            monkeypatch.setattr(module, "BLOCK_CELLS", num_cells)
        monkeypatch.setattr(files, "BLOCK_BYTES", num_bytes)
        assert describe(path) == expected


@pytest.mark.parametrize("num_bytes", [4, 10, 1 << 16])
def test_files_in_other_spellings_hold_the_same(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, path = FILES["plain.csv"], tmp_path / "plain.csv"
    path.write_text(text)
    expected = describe(path)[0]["metrics"]
    monkeypatch.setattr(files, "BLOCK_BYTES", num_bytes)
    half = len(text) // 2
    members = gzip.compress(text[:half].encode()) + gzip.compress(b"") + gzip.compress(text[half:].encode())
    for content in (text.encode("utf-8-sig"), text.encode("utf-16"), members, members + b"\0padding"):
        path.write_bytes(content)
        assert describe(path)[0]["metrics"] == expected
    path.write_bytes(members[:-20])
    (log,) = read_logs(str(path))
    assert "torn" in log.notes[-1] and 80 < len(log.metrics["loss"]) < 99


@pytest.mark.parametrize(
    ("limit", "value", "content", "problem"),
    [
        ("MAX_CELLS", 10, FILES["plain.csv"], "more than 10 cells"),
        ("MAX_TEXTS", 3, FILES["quoted.csv"], "more than 3 different texts"),
    ],
)
def test_a_table_beyond_a_bound_is_one_line(
    limit: str, value: int, content: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text(content)
    monkeypatch.setattr(columns, limit, value)
    with pytest.raises(StoreError, match=problem) as error:
        read_logs(str(tmp_path / "a.csv"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("row", ["{}", '{"r": null}', "", '{"step": 1}'])
def test_too_many_lines_are_one_line(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINES", 20)
    for name, start in (("a.jsonl", '{"step": 0, "loss": 1}'), ("a.csv", "step")):
        (tmp_path / name).write_text("\n".join([start, *[row] * 40]))
        with pytest.raises(StoreError, match="more than 20 lines"):
            read_logs(str(tmp_path / name))


def test_a_file_that_unpacks_out_of_proportion_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FREE_BYTES", 100_000)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"step,loss\n" + b"1,1\n" * 10_000))  # below FREE_BYTES
    assert len(read_logs(str(path))) == 1
    path.write_bytes(gzip.compress(b"step,loss\n" + b"1,1\n" * 1_000_000))
    with pytest.raises(StoreError, match="unpacks to more than 100 times its size; unpack it"):
        next(files.TextFile(path).lines())  # before a line is parsed


def test_a_line_without_end_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 1 << 18)
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(b"\0" * (1 << 20))
        with pytest.raises(StoreError, match="a line is longer than 262144 bytes"):
            read_logs(str(tmp_path / name))


def test_a_long_table_without_values_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,metric,value,epoch\n1,loss,,0.1\n2,loss,,0.2\n")
    assert [log["metrics"] for log in describe(path)] == [{}]
    path.write_text("step,metric,value,epoch\n1,loss,5,0.1\n2,,7,0.2\n3,loss,6,0.2\n")
    assert describe(path)[0]["metrics"]["loss"] == ([1, 3], ["5.0", "6.0"])


def test_a_resumed_table_with_an_index_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",step,loss\n0,1,5\n1,2,6\n,step,loss\n0,3,7\n")
    assert describe(path)[0]["metrics"] == {"loss": ([1, 2, 3], ["5.0", "6.0", "7.0"])}


# --- operations ---


def random_rows(generator: random.Random, num_rows: int) -> list[Cells]:
    def cell() -> float | str:
        return generator.choice([generator.random(), float(generator.randrange(3)), "x", "y", "1,5"])

    names = generator.sample("abcdef", 4)
    return [{name: cell() for name in names if generator.random() < 0.7} for _ in range(num_rows)]


def make_table(rows: list[Cells]) -> Table:
    builder = TableBuilder("place")
    for line, row in enumerate(rows, 100):
        builder.add(line, row)
    return builder.build()


def rows_of(table: Table) -> list[tuple[int, Cells]]:
    return list(table.iterate())


@pytest.mark.parametrize("seed", range(20))
def test_operations_are_those_of_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(seed)
    monkeypatch.setattr(columns, "BLOCK_CELLS", generator.choice([1, 4, 1000]))
    rows = random_rows(generator, generator.choice([0, 1, 9, 40]))
    numbered, table = list(enumerate(rows, 100)), make_table(rows)
    assert rows_of(table) == numbered
    assert [table.row(index) for index in range(len(rows))] == rows
    for name in "abcdef":
        assert table.cells(name) == [row.get(name, "") for row in rows]

    selected = np.array([generator.random() < 0.5 for _ in rows], bool)
    kept = [item for item, is_kept in zip(numbered, selected, strict=True) if is_kept]
    assert rows_of(table.select(selected)) == kept
    groups = np.array([generator.randrange(3) for _ in rows], np.int64)
    for group, part in enumerate(table.split(groups, 3)):
        assert rows_of(part) == [item for item, g in zip(numbered, groups, strict=True) if g == group]

    def rename(name: str) -> str:
        return "ab" if name in "ab" else name

    renamed = [{rename(name): row[name] for name in sorted(row)} for row in rows]
    in_order = Table(
        place="", columns={name: table.columns[name] for name in sorted(table.columns)}, lines=table.lines
    )
    assert [row for _, row in rows_of(in_order.rename(rename))] == renamed


def test_texts_that_repeat_are_kept_once() -> None:
    table = make_table([{"arm": "-".join(["base", "line"]), "n": float(n)} for n in range(5)])
    assert len({id(text) for text in table.columns["arm"].texts}) == 1


def test_a_number_takes_twelve_bytes() -> None:
    column = make_table([{"loss": float(n)} for n in range(1000)]).columns["loss"]
    assert column.all_texts is None
    assert column.rows.nbytes + column.values.nbytes == 12 * 1000
