"""Reader for console output: lines with a step and metrics, among any other lines.

Lines are pairs of a key and a number, with or without `:` or `=`, or a dictionary in JSON or Python:

    step:125/3250 val_loss:9.08789 train_time:11875ms              modded-nanogpt
    iter 10: loss 2.0431, time 12.3ms                              nanoGPT
    step: 10  loss: 4.1234  memory: 10.2GiB(12%)  tps: 1,234       torchtitan, coloured
    iteration 100/ 500 | consumed samples: 25600 | lm loss: 1.0E+00 |       Megatron-LM
    step:10 - actor/entropy:0.5 - critic/score/mean:0.25           verl
    {'loss': 0.5, 'grad_norm': 1.2, 'epoch': 0.1}                  transformers, without a step
    Step 3/100 Train step done.  then  │ ppo_actor/task_reward/avg │ 0.5 │  AReaL, a table after each step

A file of rows of numbers alone is read, too: `step loss`, as torchtitan keeps losses for its tests.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.foreign.columns import Cell, Table, TableBuilder
from abrun.logs.foreign.files import TextFile
from abrun.logs.foreign.values import MAX_NAME_CHARACTERS, as_number, as_step, parse_json
from abrun.logs.log import Log
from abrun.logs.naming import SEED_LIMIT
from abrun.logs.rows import STEP_COLUMNS, flat_cells
from abrun.logs.tables import log_from_table, name_as_logged, path_text
from abrun.logs.words import find_columns
from abrun.runs.redaction import printable

MAX_BYTES = 1 << 28
MAX_ROWS = 1_000_000  # parsed in a minute
MAX_LINE_CHARACTERS = 1 << 16  # a longer line is no row of metrics
MAX_WORDS = 6  # of a key: "elapsed time per iteration (ms)"
MIN_ROWS = 2
STEP, EPOCH = "step", "epoch"
STEPS_BY_KEY = tuple(name for name in STEP_COLUMNS if name != "steps")  # these are a total
STEP_WORDS = {*STEPS_BY_KEY, "it", "itr"}
NO_STEP_AFTER = {"per", "of", "max", "each", "every"}  # "number of nan iterations: 0"
MAY_HAVE_STEP = re.compile("step|it[er]|epoch|update|^s:|^[|│┃]".encode(), re.IGNORECASE)
BORDER = "|│┃"
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
DICTIONARY = re.compile(r"\{\s*['\"]")
WRAPPED = re.compile(r"\b(?:np\.|numpy\.)?(?:float|int|tensor|array)\d*\(([^(),]*)\)")  # np.float64(0.5)
PYTHON_WORD = re.compile(r"\b(?:None|True|False|nan|inf)\b")
JSON_WORDS = {"None": "null", "True": "true", "False": "false", "nan": "NaN", "inf": "Infinity"}
NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER += r"|[-+]?(?:nan|inf)(?=m?s|%|\W|$)"
VALUE = re.compile(rf"({NUMBER})(%|[A-Za-zµ/]{{0,12}})(?:\([^()]*\))?[,;.]?")  # 10.2GiB(12%)
STEP_NUMBER = re.compile(r"#?(\d[\d,]{0,20})(?:/\d[\d,]*)?[,;.)=]?")  # 10/100
WORD = re.compile(r"\(?[A-Za-z_][\w./@%()+-]*=?")
RANK = re.compile(r"\[?(?:default|rank) ?(\d{1,9})\]?:")  # of torchrun, in front of a line
# Logs may begin with the source of their program
CODE = re.compile(
    r"(?:def|class|if|elif|for|while|return|from|assert|with|print\w*\(|#|@)\b|.*?(?:[=!+*/-]=|\bself\.)"
)
SOURCE = re.compile(r"(?:import|from|def|class) |#|\"\"\"|'''")
SEPARATOR = re.compile(rb"\s*={20,}\s*")
SOURCE_FILE = re.compile(r".*\.(py|cc|cpp|cu|rs)=?")  # train.py:12
SEED = re.compile(r"\W*(?:random_|rng_)?seed\s*[:=]\s*(\d{1,10})\W*", re.IGNORECASE)

Rows = list[tuple[int, dict[str, Cell]]]  # line numbers and cells


@dataclass(slots=True)
class _Content:
    """Lines of one file that are read."""

    rows: Rows = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)  # metric -> its unit
    mixed: set[str] = field(default_factory=set)  # metrics whose unit changes: 59.0s, then 1.0m
    numbers: list[tuple[int, list[float]]] = field(default_factory=list)  # lines of numbers alone
    header: list[str] = field(default_factory=list)  # the last line of words above them
    num_others: int = 0  # lines that are neither numbers nor comments
    has_dictionaries: bool = False
    has_separator: bool = False
    last_step: Cell | None = None
    seed: int | None = None
    rank: str = ""  # the first whose lines are metrics
    num_other_ranks: int = 0
    first_line: str = ""


def read_console(path: Path, name: str, step_column: str | None, *, one_run: bool) -> list[Log]:
    """Return the run in a file of console output. Raises StoreError if it has no metrics by step."""
    content = _parse_file(path)
    guess = ""
    if len(content.rows) < MIN_ROWS:
        table = _number_table(path, content)
    else:
        if step_column is None:
            _check_restarts(path, content)
        table, guess = _metric_table(path, content)
    log = log_from_table(path, table, step_column if step_column is not None else STEP)
    notes = [f"{printable(key)}: left out, its unit changes" for key in sorted(content.mixed)]
    if content.num_other_ranks:
        notes.append(f"{content.num_other_ranks} lines of other ranks than {content.rank or 0} left out")
    config = None if content.seed is None else {"seed": content.seed}
    guesses = ("console output: its lines with a step and metrics", *([guess] if guess else []))
    return [replace(log, name=name, config=config, guesses=guesses, notes=(*log.notes, *notes))]


def _parse_file(path: Path) -> _Content:
    content, size = _Content(), 0
    for number, line in enumerate(TextFile(path).lines(), 1):
        size += len(line) + 1
        is_large = size > MAX_BYTES or len(content.rows) > MAX_ROWS
        if b"\0" in line or is_large:
            problem = f"more than {MAX_BYTES} bytes or {MAX_ROWS} steps" if is_large else "binary"
            raise StoreError(f"{path_text(path)}: {problem}; expected console output with metrics by step")
        for part in line.split(b"\r"):  # progress bars
            if part and not part.isspace() and len(part) <= MAX_LINE_CHARACTERS:
                _add_line(content, number, part)
    return content


def _add_line(content: _Content, number: int, line: bytes) -> None:
    if not content.has_separator and SEPARATOR.fullmatch(line):
        content.has_separator = True
        if SOURCE.match(content.first_line):  # what looked like rows was in the program
            content.rows.clear()
    if content.rows and b"{" not in line and not MAY_HAVE_STEP.search(line):
        return
    text = COLOUR.sub("", line.decode(errors="replace")).strip()
    content.first_line = content.first_line or text
    cells = _parse_box(content, text) or _parse_dictionary(content, text) or _parse_pairs(content, text)
    content.last_step = cells.get(STEP, content.last_step)
    if cells.keys() - {STEP, EPOCH} and cells.keys() & {STEP, EPOCH}:
        rank = match[1] if (match := RANK.match(text)) else ""
        content.rank = content.rank or rank
        content.num_other_ranks += rank != content.rank
        if rank == content.rank:
            content.rows.append((number, cells))
    elif not content.rows:
        match = SEED.fullmatch(text)
        if match and int(match[1]) < SEED_LIMIT:
            content.seed = int(match[1])
        _add_numbers(content, number, text)


# --- lines of pairs ---


def _parse_pairs(content: _Content, text: str) -> dict[str, Cell]:
    """Return the step and the numbers of a line `step 10/100: loss 0.5, lr=1e-4`; empty without a step.

    Without `:` or `=`, a key is all words since the last number or separator; ahead of the step such words
    are those of a logger.
    """
    cells: dict[str, Cell] = {}
    if CODE.match(text):
        return cells
    words: list[str] = []  # since the last number or separator; `=` ends a key that had `:` or `=`
    for token in _tokens(text):
        word, is_marked = words[-1].removesuffix("=") if words else "", bool(words) and words[-1][-1] == "="
        is_step = word.lower() in (*STEP_WORDS, EPOCH) or words == ["s="]  # llm.c: s:10 trl:3.2
        if is_step and (step := STEP_NUMBER.fullmatch(token)):
            kind = EPOCH if word.lower() == EPOCH else STEP
            if kind not in cells and not (len(words) > 1 and words[-2].lower() in NO_STEP_AFTER):
                cells[kind] = float(step[1].replace(",", ""))
            words = []
        elif word and word.lower() not in NO_STEP_AFTER and (value := VALUE.fullmatch(token)):
            key = " ".join(words).removesuffix("=")
            is_key = is_marked or (STEP in cells or EPOCH in cells)
            is_key = is_key and len(words) <= MAX_WORDS and len(key) <= MAX_NAME_CHARACTERS
            if is_key and not SOURCE_FILE.fullmatch(key):
                if content.units.setdefault(key, value[2]) != value[2]:
                    content.mixed.add(key)
                cells[key] = float(value[1].replace(",", ""))
            words = []
        elif WORD.fullmatch(token):
            # After `key=`, a word is a value that is no number
            words = [token] if is_marked else [*words[-MAX_WORDS:], token]
        else:
            words = []
    return cells if STEP in cells or EPOCH in cells else {}


def _parse_box(content: _Content, text: str) -> dict[str, Cell]:
    """Return the numbers in a row of a table, `| key | 0.5 |`, which belong to the last step printed."""
    if content.last_step is None or not text or text[0] not in BORDER or text[-1] not in BORDER:
        return {}
    box_cells = [cell.strip() for cell in re.split(f"[{BORDER}]", text[1:-1])]
    values = {key: VALUE.fullmatch(cell) for key, cell in zip(box_cells[::2], box_cells[1::2], strict=False)}
    cells = {
        key: float(value[1].replace(",", ""))
        for key, value in values.items()
        if value and WORD.fullmatch(key)
    }
    return {STEP: content.last_step, **cells} if cells else {}


def _tokens(text: str) -> list[str]:
    """Return words and numbers; a key that had `:` or `=` ends in `=`, and a separator is `|`."""
    text = WRAPPED.sub(r"\1", text)
    text = re.sub(r"[\[\]]", " ", text)
    text = re.sub(r"(?<=\d) ?/ {0,20}(?=\d)", "/", text)  # 100/ 500
    text = re.sub(r"(?<![\s:=])[ \t]{0,20}[:=]+(?!/)", "= ", text)
    return re.sub(r"[,;](?=\s|$)|[|│]", " | ", text).split()


# --- dictionaries ---


def _parse_dictionary(content: _Content, text: str) -> dict[str, Cell]:
    """Return the metrics of the dictionary in a line, and the step in it or in front of it."""
    start = DICTIONARY.search(text)
    if start is None:
        return {}
    source = text[start.start() : text.rfind("}") + 1]
    row: Any = parse_json(source)
    if row is None:  # as Python writes it
        source = PYTHON_WORD.sub(lambda word: JSON_WORDS[word[0]], WRAPPED.sub(r"\1", source))
        row = parse_json(source.replace("'", '"'))
    if not isinstance(row, dict):
        return {}
    cells = dict(flat_cells(row))
    steps = (name for name in find_columns(cells, STEPS_BY_KEY) if as_step(cells[name]) is not None)
    step = next(map(cells.pop, steps), None)
    if step is None:
        step = _parse_pairs(_Content(), text[: start.start()]).get(STEP)
    content.has_dictionaries = True
    return cells if step is None else {STEP: step, **cells}


# --- lines of numbers alone ---


def _add_numbers(content: _Content, number: int, text: str) -> None:
    words = text.replace(",", " ").split()
    if len(words) <= 1 or len(words) > 100:
        content.num_others += not text.startswith("#")
    elif words[0].isdecimal() and all(re.fullmatch(NUMBER, word) for word in words):
        content.numbers.append((number, [float(word) for word in words]))
    else:
        content.num_others += not text.startswith("#")
        if not content.numbers:
            content.header = [word for word in words if word != "#"]


def _number_table(path: Path, content: _Content) -> Table:
    """Return lines of `step loss`, or with the columns of the line above; raise StoreError for other text."""
    widths = {len(values) for _, values in content.numbers}
    header = [word.lstrip("#") for word in content.header]
    names = header if {len(header)} == widths else [STEP, "loss"]
    steps = [values[0] for _, values in content.numbers]
    is_table = widths == {len(names)} and names[0].lower() in {*STEP_WORDS, EPOCH} and content.num_others <= 1
    if (
        len(steps) < MIN_ROWS
        or not is_table
        or any(step <= previous_step for previous_step, step in pairwise(steps))
    ):
        excerpt = f" (it begins '{printable(content.first_line[:40])}')" if content.first_line else ""
        raise StoreError(
            f"{path_text(path)}: console output without metrics by step{excerpt}; expected lines such as "
            "'step:10 loss:0.5': write a CSV file with a column step and one per metric"
        )
    builder = TableBuilder(path_text(path))
    for number, values in content.numbers:
        builder.add(number, dict(zip([STEP, *names[1:]], values, strict=True)))
    return builder.build()


# --- steps ---


def _metric_table(path: Path, content: _Content) -> tuple[Table, str]:
    rows, guess = content.rows, ""
    if not any(STEP in cells for _, cells in rows):
        rows, guess = _number_rows(rows)
    builder = TableBuilder(path_text(path))
    for line, cells in rows:
        builder.add(line, {name: cell for name, cell in cells.items() if name not in content.mixed})
    table = builder.build()
    # Dictionaries without a step are those of transformers' Trainer
    return table.rename(name_as_logged) if guess and content.has_dictionaries else table, guess


def _number_rows(rows: Rows) -> tuple[Rows, str]:
    """Return rows with steps, and what they are: epochs, or the number of a log if an epoch has several."""
    numbered: Rows = []
    recorded: set[str] = set()  # metrics of the present number
    number, last_epoch, are_epochs = 0, None, True
    for line, cells in rows:
        epoch = as_number(cells[EPOCH])
        is_repeated = epoch == last_epoch and not recorded.isdisjoint(cells.keys() - {EPOCH})
        if epoch != last_epoch or is_repeated:
            number, last_epoch, recorded = number + 1, epoch, set()
        recorded |= cells.keys() - {EPOCH}
        are_epochs = are_epochs and not is_repeated and epoch is not None and epoch % 1 == 0
        numbered.append((line, {STEP: float(number), **cells}))
    if are_epochs:
        return [
            (line, {**cells, STEP: cells[EPOCH]}) for line, cells in numbered
        ], "no line has a step: epochs count"
    return numbered, "no line has a step: the logs are counted"


def _check_restarts(path: Path, content: _Content) -> None:
    """Raise StoreError if the steps begin again with every epoch: later epochs would replace earlier ones."""
    numbers = [(as_number(cells.get(STEP)), as_number(cells.get(EPOCH))) for _, cells in content.rows]
    both = [(step, epoch) for step, epoch in numbers if step is not None and epoch is not None]
    restarts = [
        epoch < next_epoch for (step, epoch), (next_step, next_epoch) in pairwise(both) if next_step < step
    ]
    if restarts and all(restarts):
        raise StoreError(
            f"{path_text(path)}: its steps begin again with each epoch; expected steps of the whole run: "
            "write a CSV file with a column step and one per metric, or name --step-column epoch"
        )
