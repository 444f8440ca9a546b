"""Packer of the runs that `abrun demo` judges: two experiments of the trainer, as they ran.

abrun launch quickstart && abrun launch quickstart-injected-fault      # on a CPU, torch 2.13, 2026-11-28
python docs/demo_runs.py runs                                          # from the repository

It keeps the files that a comparison reads, without weights, logs and process ids. Of the metrics of time only
the seconds of a step stay: two runs shared two busy cores, so that the others say nothing.
"""

import json
import lzma
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from abrun.api.demo import ARCHIVE, EXPERIMENTS
from abrun.runs import layout
from abrun.runs.experiment import planned_runs, run_dir
from abrun.runs.files import read_json
from abrun.runs.layout import RunName
from abrun.runs.lines import CHECKSUM, json_line
from abrun.runs.metric_names import STEP_TIME

KEPT_FILES = (layout.CONFIG, layout.ENVIRONMENT, layout.RESULT)
ATTEMPT_KEYS = ("number", "status", "started_s", "ended_s", "exit_code")
TIMINGS = ("timing/", "performance/")


def pack(runs_dir: Path) -> bytes:
    """Return the archive: a compressed JSON object of file contents by path."""
    contents: dict[str, str] = {}
    for experiment in EXPERIMENTS:
        directory = runs_dir / experiment
        contents[f"{experiment}/{layout.EXPERIMENT}"] = (directory / layout.EXPERIMENT).read_text()
        for name in planned_runs(directory):
            files = _run_files(run_dir(directory, name), name)
            contents |= {f"{experiment}/{name}/{file}": text for file, text in files.items()}
    return lzma.compress(json.dumps(contents, sort_keys=True).encode(), preset=9 | lzma.PRESET_EXTREME)


def _run_files(folder: Path, name: RunName) -> dict[str, str]:
    """Return the files of a run that a comparison reads. Raises SystemExit if it was started twice."""
    (attempt,) = (folder / layout.ATTEMPTS).iterdir()
    end = {key: value for key, value in read_json(attempt).items() if key in ATTEMPT_KEYS}
    if end["status"] != "finished":
        raise SystemExit(f"{name}: {end['status']}; launch it again")
    files = {file: (folder / file).read_text() for file in KEPT_FILES}
    files[f"{layout.ATTEMPTS}/{attempt.name}"] = json.dumps(end)
    files[layout.METRICS] = "".join(map(_trim, (folder / layout.METRICS).read_text().splitlines()))
    files[layout.SAMPLES] = (folder / layout.SAMPLES).read_text()
    return files


def _trim(line: str) -> str:
    """Return a row of metrics without the timings that are not kept."""
    row: dict[str, Any] = json.loads(line)
    kept = {
        key: value
        for key, value in row.items()
        if key != CHECKSUM and (key == STEP_TIME or not key.startswith(TIMINGS))
    }
    return json_line(kept).decode()


if __name__ == "__main__":
    archive = pack(Path(sys.argv[1]))
    ARCHIVE.write_bytes(archive)
    print(f"{ARCHIVE}: {len(archive):,} bytes")
