"""Packer of the runs that `abrun demo` judges: three experiments of the trainer, as they ran.

for name in quickstart quickstart-injected-fault quickstart-small-batch; do abrun launch $name; done
python docs/demo_runs.py runs     # from the repository

They ran on CPUs with torch 2.13, the first on 2026-11-28, the others on 2026-11-29. Packed are the files that
a comparison reads, without weights, logs and process ids; of all but the first experiment only the metrics
in FEW_METRICS, to keep the package small. Of the metrics of time only the seconds of a step stay: two runs
shared two busy cores, so the others say nothing. The planning assumptions (`sigma`, `correlation`) are those
of today's recipes, which follow from these runs.
"""

import json
import lzma
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from abrun.api.demo import ARCHIVE, EXPERIMENTS
from abrun.experiment.plan import compare_hash
from abrun.experiment.starter.shipped import find_recipe
from abrun.recipe.experiment import load_recipe
from abrun.runs import layout
from abrun.runs.experiment import planned_runs, run_dir
from abrun.runs.files import read_json
from abrun.runs.layout import RunName
from abrun.runs.lines import CHECKSUM, json_line
from abrun.runs.metric_names import STEP_TIME

KEPT_FILES = (layout.CONFIG, layout.ENVIRONMENT, layout.RESULT)
ATTEMPT_KEYS = ("number", "status", "started_s", "ended_s", "exit_code")
FEW_METRICS = ("step", "attempt", "time_s", "train/reward", "train/loss", "train/grad_norm", STEP_TIME)
FEW_METRICS += ("train/token_mult_prob_error", "train/entropy", "train/advantages/max")
TIMINGS = ("timing/", "performance/")


def pack(runs_dir: Path) -> bytes:
    """Return the archive: a compressed JSON object of file contents by path."""
    contents: dict[str, str] = {}
    for experiment in EXPERIMENTS:
        directory = runs_dir / experiment
        contents[f"{experiment}/{layout.EXPERIMENT}"] = _declaration(directory)
        for name in planned_runs(directory):
            files = _run_files(run_dir(directory, name), name)
            contents |= {f"{experiment}/{name}/{file}": text for file, text in files.items()}
    return lzma.compress(json.dumps(contents, sort_keys=True).encode(), preset=9 | lzma.PRESET_EXTREME)


def _declaration(directory: Path) -> str:
    """Return the stored declaration with the planning assumptions of the built-in recipe."""
    stored = read_json(directory / layout.EXPERIMENT)
    compare = load_recipe(find_recipe(Path(directory.name))).compare
    for claim, planned in zip(stored["recipe"]["compare"]["claims"], compare.claims, strict=True):
        claim |= {"sigma": planned.sigma, "correlation": planned.correlation}
    return json.dumps(stored | {"compare_sha256": compare_hash(compare)})


def _run_files(folder: Path, name: RunName) -> dict[str, str]:
    """Return the files of a run that a comparison reads. Raises SystemExit if it was started twice."""
    (attempt,) = (folder / layout.ATTEMPTS).iterdir()
    end = {key: value for key, value in read_json(attempt).items() if key in ATTEMPT_KEYS}
    if end["status"] != "finished":
        raise SystemExit(f"{name}: {end['status']}; launch it again")
    files = {file: (folder / file).read_text() for file in KEPT_FILES}
    files[f"{layout.ATTEMPTS}/{attempt.name}"] = json.dumps(end)
    trim = _trim if folder.parents[1].name == next(iter(EXPERIMENTS)) else _trim_to_few
    files[layout.METRICS] = "".join(map(trim, (folder / layout.METRICS).read_text().splitlines()))
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


def _trim_to_few(line: str) -> str:
    row: dict[str, Any] = json.loads(line)
    return json_line({key: value for key, value in row.items() if key in FEW_METRICS}).decode()


if __name__ == "__main__":
    archive = pack(Path(sys.argv[1]))
    ARCHIVE.write_bytes(archive)
    print(f"{ARCHIVE}: {len(archive):,} bytes")
