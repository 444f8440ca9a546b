"""abrun mismatch: which run and weights, the processes that score, and the budget that comes of it."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from abrun.diagnose.logprob_diff.findings import Budget, Facts, Scored, budget_of
from abrun.diagnose.logprob_diff.report import write_report
from abrun.diagnose.logprob_diff.variations import Scoring, changes_of, on_one_rank
from abrun.errors import LaunchError, RecipeError, StoreError
from abrun.experiment.probe import probe
from abrun.metric_names import TOKEN_MULT_PROB_ERROR
from abrun.reasons import Code
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.experiment import BASELINE, stored_run
from abrun.recipe.run import OwnRunConfig, not_built
from abrun.regular_files import is_directory, is_file
from abrun.runs.experiment import experiments_in, find_experiment, is_experiment, planned_runs, run_dir
from abrun.runs.files import decode, explained, readable
from abrun.runs.layout import RunName
from abrun.runs.lock import folder_lock
from abrun.runs.records import SAVED_STATE, saved_state
from abrun.runs.rundir import RunDir

MODULE = "abrun.diagnose.logprob_diff.measure"
FOLDER, SCRATCH = "mismatch", ".scratch-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which run, and after which of its steps."""

    run: RunDir
    name: RunName
    experiment: str
    config: OwnRunConfig
    step: int
    checkpoint: Path | None  # None: the weights that the run began with


def measure_run(
    run: str,
    runs_dir: Path,
    *,
    step: int | None = None,
    sets: Sequence[str] = (),
    num_sequences: int | None = None,
    output: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Budget, Path]:
    """Measure a run's mismatch budget, and write it into `output`; returns both.

    Raises AbrunError, one line, where there is no such run, or it cannot go on here.
    """
    chosen = choose(run, runs_dir, step)
    config = on_one_rank(chosen.config)
    config = config.model_copy(update={"steps": max(config.steps, chosen.step + 2)})
    changes = changes_of(config, sets)
    scorings: list[Scoring] = []
    for each in changes:
        if each.scoring is not None and each.scoring not in scorings:
            scorings.append(each.scoring)
    output = output or chosen.run.path / FOLDER
    with _scratch(output) as folder:
        say(f"{chosen.run.path}: after step {chosen.step}, by {len(scorings)} scorings")
        record, found = _score(folder, output / "jobs", chosen, config, scorings, num_sequences, say)
        with np.load(folder / "recorded.npz", allow_pickle=False) as arrays:
            recorded = {name: arrays[name] for name in arrays.files}
    mask = recorded["token_mask"]
    sequences, _ = mask.nonzero()
    facts = Facts(
        run=str(chosen.run.path),
        experiment=chosen.experiment,
        name=chosen.name,
        step=chosen.step,
        grad_norm=decode(record["grad_norm"]),
        engine=config.rollout.engine,
        dtype=config.policy.dtype,
        spread=chosen.config.cluster.ranks,
        num_sequences_sampled=record["num_sequences_sampled"],
        seen=_seen(chosen, record),
        worst=record["worst"],
    )
    own = Scored(logprobs=recorded["own_logprobs"].astype(float), routes=recorded.get("own_routes"))
    budget = budget_of(
        facts,
        inference=recorded["inference_logprobs"][mask].astype(float),
        own=own,
        sequences=sequences,
        prompts=recorded["prompts"][sequences],
        changes=[(each, _of(each.scoring, scorings, found)) for each in changes],
    )
    write_report(budget, output)
    return budget, output


@contextlib.contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A folder in `output` for weights and tokens; those that killed measurements have left are removed.

    Raises StoreError where another one is at work there.
    """
    with folder_lock(output, "abrun mismatch"):
        with explained(output):
            for left in output.glob(f"{SCRATCH}*"):
                shutil.rmtree(left, ignore_errors=True)
            kept = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=output)
        with kept as folder:
            yield Path(folder)


def _of(
    scoring: Scoring | None, scorings: list[Scoring], found: Mapping[int, Scored | str]
) -> Scored | str | None:
    """What a scoring gave, or why it did not; None of no scoring."""
    return None if scoring is None else found[scorings.index(scoring)]


def _score(
    folder: Path,
    jobs: Path,
    chosen: Chosen,
    config: OwnRunConfig,
    scorings: list[Scoring],
    num_sequences: int | None,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[int, Scored | str]]:
    """What was recorded, and by the index of a scoring what it gave, or why it could not be had."""
    here = {index: each for index, each in enumerate(scorings) if not each.has_process}
    job: dict[str, Any] = {
        "recorded": str(folder.resolve()),
        "run": str(chosen.run.path.resolve()),
        "seed": chosen.name.seed,
        "checkpoint": str(chosen.checkpoint.resolve()) if chosen.checkpoint else None,
        "sequences": num_sequences,
        "scorings": {_name(index): _asked(each) for index, each in here.items()},
    }
    first, *rows = probe(MODULE, jobs / "record", config, job)
    found = _found(jobs / "record", rows)
    for index, scoring in enumerate(scorings):
        if not scoring.has_process:
            continue
        ranks = scoring.config.cluster.ranks
        say(f"in a process of its own: {scoring.method}" + f" on {ranks} ranks" * (ranks > 1))
        job = {"recorded": str(folder.resolve()), "scorings": {_name(index): _asked(scoring)}}
        try:
            directory = jobs / _name(index)
            found |= _found(directory, probe(MODULE, directory, scoring.config, job))
        except LaunchError as error:
            found[index] = str(error)
    return first, found


def _name(index: int) -> str:
    return f"scoring-{index:02d}"


def _asked(scoring: Scoring) -> dict[str, Any]:
    config = scoring.config.model_dump(mode="json")
    return {
        "config": config,
        "method": scoring.method,
        "weights": scoring.weights,
        "on_recorded_sets": scoring.on_recorded_sets,
    }


def _found(directory: Path, rows: list[dict[str, Any]]) -> dict[int, Scored | str]:
    found: dict[int, Scored | str] = {}
    for row in rows:
        index = int(row["scoring"].rpartition("-")[2])
        if "reason" in row:
            found[index] = row["reason"]
            continue
        path = directory / f"{row['scoring']}.npz"
        with np.load(path, allow_pickle=False) as arrays:
            logprobs, routes = arrays["logprobs"].astype(float), arrays.get("routes")
        path.unlink()
        found[index] = Scored(logprobs=logprobs, routes=routes)
    return found


def _seen(chosen: Chosen, record: Mapping[str, Any]) -> list[dict[str, float]]:
    """The metric of the step that was gone through here, and what the run itself recorded of it."""
    with readable(chosen.run.path):
        series = chosen.run.metrics().get(TOKEN_MULT_PROB_ERROR) if chosen.run.has_metrics else None
    there = {} if series is None else dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    return [
        {"step": step, "here": here, "run": there[step]}
        for step, here in record["metrics"]
        if here is not None and step in there
    ]


# --- which run ---


def choose(run: str, runs_dir: Path, step: int | None) -> Chosen:
    """A run directory, or of an experiment the first run that has a checkpoint, the baseline's first.

    Raises AbrunError.
    """
    for path in (Path(run), runs_dir / run):
        if RunDir(path).exists:
            return _chosen(RunDir(path), step)
    experiment = find_experiment(run, runs_dir)
    if not is_experiment(experiment):
        known = [path.name for path in experiments_in(runs_dir)]
        there = f"experiments under {runs_dir}: {', '.join(known)}" if known else "launch a recipe first"
        raise StoreError(Code.NO_RUN(run=run, runs_dir=runs_dir, runs=there))
    names = sorted(planned_runs(experiment), key=lambda name: name.arm != BASELINE)
    runs = [RunDir(run_dir(experiment, name)) for name in names]
    there = [each for each in runs if each.exists]
    if not there:
        raise StoreError(Code.NO_RUN_STARTED(experiment=experiment))
    return _chosen(next((each for each in there if _checkpoints(each)), there[0]), step)


def _chosen(run: RunDir, step: int | None) -> Chosen:
    record = run.record()
    config = stored_run(record.config, str(run.path))
    if not isinstance(config, OwnRunConfig):
        raise RecipeError(Code.WEIGHTS_NOT_KNOWN(run=run.path))
    if not isinstance(config.algorithm, PolicyGradientSettings):
        raise RecipeError(Code.ALGORITHM_WITHOUT_ENGINE(run=run.path, algorithm=config.algorithm.type))
    for line in not_built(config):
        raise RecipeError(Code.OF_SUBJECT(subject=run.path, problem=line))
    there = _checkpoints(run)
    if step is None and not there and run.step_attempts():
        raise StoreError(Code.NO_CHECKPOINT(run=run.path))
    first = run.first_step
    at = (max(there) if there else first) if step is None else step
    if at not in there and at != first:
        known = ", ".join(map(str, sorted({first, *there})))
        raise StoreError(Code.STEP_WITHOUT_CHECKPOINT(got=step, run=run.path, steps=known))
    checkpoint = there.get(at)
    if checkpoint is not None and (wrote := saved_state(checkpoint).run) != run.identity():
        raise StoreError(
            Code.CHECKPOINT_OF_OTHER_RUN(checkpoint=checkpoint, written_by=wrote, run=run.identity())
        )
    if checkpoint is None and config.checkpoint.start_from:
        checkpoint = Path(config.checkpoint.start_from).expanduser()
    weights = run.initial_weights
    if checkpoint is None and weights is not None and not is_directory(weights):
        raise StoreError(Code.FIRST_WEIGHTS_GONE(weights=weights, run=run.path))
    return Chosen(
        run=run,
        name=record.name,
        experiment=record.experiment,
        config=config,
        step=at,
        checkpoint=checkpoint,
    )


def _checkpoints(run: RunDir) -> dict[int, Path]:
    """By step, those that are whole as far as their state says."""
    try:
        names = os.listdir(run.checkpoints)
    except OSError:
        return {}
    found = {}
    for name in names:
        if re.fullmatch(r"step-\d{6,18}", name) and is_file(run.checkpoints / name / SAVED_STATE):
            found[int(name[5:])] = run.checkpoints / name
    return found
