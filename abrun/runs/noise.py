"""History of the noise of paired differences: `noise.jsonl`, a line for each experiment, metric and window.

A launch reads it once, before the runs, and records what it takes from it: verdicts of experiments read that
record. `abrun compare --noise FILE` reads one for other runs. Each report adds to it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from abrun.runs.files import PUBLIC_MODE, is_directory
from abrun.runs.lines import LineWriter, read_json_lines
from abrun.runs.metric_names import Transform
from abrun.runs.schemas import Flag, checked

NOISE = "noise.jsonl"  # in the folder of experiments
Scale = tuple[str, str, Transform, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRecord:
    """Spread of an experiment's paired differences over seeds; 0 if its arms were identical."""

    experiment: str
    recipe: str  # hash of the baseline's settings; empty: of logs
    arms: str  # hash of all arms' settings; of logs: of the first seed's numbers
    seeds: list[int]
    metric: str
    window: str
    transform: Transform
    recorded: Flag  # pairs on recorded rollouts
    sd: Annotated[float, Field(strict=True, ge=0, le=1e100, allow_inf_nan=False)]
    dof: Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]

    @property
    def scale(self) -> Scale:
        return self.metric, self.window, self.transform, self.recorded


def read_noise(path: Path) -> list[NoiseRecord]:
    """Return an experiment's last record of each scale; none without a file. Raises StoreError."""
    rows = read_json_lines(path) if is_directory(path.parent) else []
    records = (checked(NoiseRecord, row, Path(f"{path}, record {n}")) for n, row in enumerate(rows, 1))
    return list({(record.experiment, record.recipe, record.scale): record for record in records}.values())


def add_noise(path: Path, records: Iterable[NoiseRecord]) -> None:
    """Append the records that the file does not have yet. Raises StoreError."""
    stored = read_noise(path)
    if new_records := [record for record in records if record not in stored]:
        writer = LineWriter(path, PUBLIC_MODE)
        for record in new_records:
            writer.write(asdict(record))
        writer.close()
