"""Reader for Stable-Baselines3's `monitor.csv`: a line `#{"t_start": ...}`, then the episodes `r,l,t`.

A run has a file for each of its parallel environments. As `load_results` does, episodes are put in the order
in which they ended, `t_start + t` (DLR-RM/stable-baselines3 2.7, `common/monitor.py`). Runs have no steps of
the environment in common, since episodes differ in length: the step is the number of the episode.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from abrun.errors import StoreError
from abrun.logs.csv_files import read_csv_table
from abrun.logs.foreign.columns import Cells, table_of
from abrun.logs.foreign.files import TextFile
from abrun.logs.foreign.values import as_mapping, as_number, parse_json
from abrun.logs.log import Log
from abrun.logs.tables import TORN_NOTE, log_from_table, path_text

STEP, END = "episode", "t"
NAMES = {"r": "episode/reward", "l": "episode/length"}


def read_monitor(files: Sequence[Path], name: str, place: Path) -> Log:
    """Return a run from the files of its workers. Raises StoreError if one is no table of episodes."""
    episodes: list[tuple[float, Cells]] = []  # with the seconds of their ends
    notes: dict[str, None] = {}
    for path in files:
        header = as_mapping(parse_json(next(TextFile(path).lines()).lstrip(b"#")))
        start_s = as_number(header.get("t_start")) or 0.0
        content = read_csv_table(path, None)
        if absent := {*NAMES, END} - {*content.header}:
            raise StoreError(
                f"{path_text(path)}: no column {', '.join(sorted(absent))} of episodes; restore its header "
                "r,l,t, or remove the file"
            )
        table, _ = content.run_table(path, END)
        for _, row in content.complete(table).iterate():
            episodes.append((start_s + (as_number(row.get(END)) or 0.0), row))
        notes |= {TORN_NOTE: None} if content.torn else {}
    episodes.sort(key=lambda episode: episode[0])
    rows = [
        {STEP: float(number), **{NAMES.get(key, key): cell for key, cell in row.items() if key != END}}
        for number, (_, row) in enumerate(episodes, 1)
    ]
    workers = f" of {len(files)} workers, in the order of their ends" if len(files) > 1 else ""
    log = log_from_table(place, table_of(rows, path_text(place)), STEP)
    guess = f"episodes{workers}: the number of an episode is the step, whatever its length"
    return replace(log, name=name, guesses=(guess,), notes=(*log.notes, *notes))
