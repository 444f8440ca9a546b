"""abrun logprob-diff: choose run and weights, score the tokens in processes, and compute the budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from abrun.errors import LaunchError, RecipeError, StoreError
from abrun.experiment.probe import run_probe, scratch_folder
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.experiment import BASELINE, parse_stored_run
from abrun.recipe.run import OwnRunConfig, unsupported_settings
from abrun.runs.experiment import find_experiment, is_experiment, list_experiments, planned_runs, run_dir
from abrun.runs.files import (
    PUBLIC_MODE,
    decode_non_finite,
    is_directory,
    is_file,
    wrap_read_errors,
    write_json,
)
from abrun.runs.layout import RunName
from abrun.runs.metric_names import TOKEN_MULT_PROB_ERROR
from abrun.runs.records import SAVED_STATE, list_checkpoints, read_saved_state
from abrun.runs.rundir import RunDir
from abrun.tools.logprob_diff.findings import Budget, MeasuredRun, Scored, budget_of
from abrun.tools.logprob_diff.variations import Scoring, on_one_rank, variations_of

MODULE = "abrun.tools.logprob_diff.measure"
FOLDER, FILE = "mismatch", "mismatch.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRun:
    """The run to measure, and the step after which it is measured."""

    run: RunDir
    name: RunName
    experiment: str
    config: OwnRunConfig
    step: int
    checkpoint: Path | None  # None: the run's initial weights


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
    """Measure a run's mismatch budget and write mismatch.json; return the budget and the output folder.

    Raises AbrunError if the run does not exist or cannot be continued on this machine.
    """
    chosen = choose_run(run, runs_dir, step)
    config = on_one_rank(chosen.config)
    config = config.model_copy(update={"steps": max(config.steps, chosen.step + 2)})
    changes = variations_of(config, sets)
    scorings = {change.key: change.scoring for change in changes if change.scoring is not None}
    output = output or chosen.run.path / FOLDER
    with scratch_folder(output, "abrun logprob-diff") as folder:
        say(f"{chosen.run.path}: after step {chosen.step}, by {len(scorings)} scorings")
        record, scored = _score(folder, output / "jobs", chosen, config, scorings, num_sequences, say)
        with np.load(folder / "recorded.npz", allow_pickle=False) as arrays:
            recorded = {name: arrays[name] for name in arrays.files}
    mask = recorded["token_mask"]
    sequences, _ = mask.nonzero()
    facts = MeasuredRun(
        run=str(chosen.run.path),
        experiment=chosen.experiment,
        name=chosen.name,
        step=chosen.step,
        grad_norm=decode_non_finite(record["grad_norm"]),
        engine=config.rollout.engine,
        dtype=config.policy.dtype,
        spread=chosen.config.cluster.ranks,
        num_sequences_sampled=record["num_sequences_sampled"],
        seen=_repeated_steps(chosen, record),
        worst=record["worst"],
    )
    budget = budget_of(
        facts,
        inference=recorded["inference_logprobs"][mask].astype(float),
        trainer=Scored(logprobs=recorded["own_logprobs"].astype(float), routes=recorded.get("own_routes")),
        sequences=sequences,
        prompts=recorded["prompts"][sequences],
        changes=[(change, scored.get(change.key)) for change in changes],
    )
    write_json(output / FILE, budget.content(), mode=PUBLIC_MODE)
    return budget, output


def _score(
    folder: Path,
    jobs: Path,
    chosen: ChosenRun,
    config: OwnRunConfig,
    scorings: Mapping[str, Scoring],
    num_sequences: int | None,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Scored | str]]:
    """Return the record of the tokens, and by key each scoring or why it failed."""
    recorded = str(folder.resolve())
    in_process = {key: scoring for key, scoring in scorings.items() if not scoring.has_process}
    job: dict[str, Any] = {
        "recorded": recorded,
        "run": str(chosen.run.path.resolve()),
        "seed": chosen.name.seed,
        "checkpoint": str(chosen.checkpoint.resolve()) if chosen.checkpoint else None,
        "sequences": num_sequences,
        "scorings": {key: scoring.as_job() for key, scoring in in_process.items()},
    }
    record, *rows = run_probe(MODULE, jobs / "record", config, job)
    scored = _read(jobs / "record", rows)
    for key, scoring in scorings.items():
        if key in in_process:
            continue
        ranks = scoring.config.cluster.ranks
        say(f"in a separate process: {scoring.method}" + f" on {ranks} ranks" * (ranks > 1))
        job = {"recorded": recorded, "scorings": {key: scoring.as_job()}}
        try:
            scored |= _read(jobs / key, run_probe(MODULE, jobs / key, scoring.config, job))
        except LaunchError as error:
            scored[key] = str(error)
    return record, scored


def _read(directory: Path, rows: list[dict[str, Any]]) -> dict[str, Scored | str]:
    """Read the scorings of a job and delete their files."""
    scored: dict[str, Scored | str] = {}
    for row in rows:
        key = row["scoring"]
        if "reason" in row:
            scored[key] = row["reason"]
            continue
        path = directory / f"{key}.npz"
        with np.load(path, allow_pickle=False) as arrays:
            scored[key] = Scored(logprobs=arrays["logprobs"].astype(float), routes=arrays.get("routes"))
        path.unlink()
    return scored


def _repeated_steps(chosen: ChosenRun, record: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the metric of each repeated step: its value here and the one that the run recorded."""
    with wrap_read_errors(chosen.run.path):
        series = chosen.run.metrics().get(TOKEN_MULT_PROB_ERROR) if chosen.run.has_metrics else None
    recorded_values = (
        {} if series is None else dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    )
    return [
        {"step": step, "here": value, "run": recorded_values[step]}
        for step, value in record["metrics"]
        if value is not None and step in recorded_values
    ]


# --- which run ---


def choose_run(run: str, runs_dir: Path, step: int | None) -> ChosenRun:
    """Return a run given by directory, or an experiment's first run with a checkpoint, baseline first.

    Raises AbrunError if there is none.
    """
    for path in (Path(run), runs_dir / run):
        if RunDir(path).exists:
            return _checked_choice(RunDir(path), step)
    experiment = find_experiment(run, runs_dir)
    if not is_experiment(experiment):
        names_of_experiments = [path.name for path in list_experiments(runs_dir)]
        there = (
            f"experiments under {runs_dir}: {', '.join(names_of_experiments)}"
            if names_of_experiments
            else "launch a recipe first"
        )
        raise StoreError(
            f"{run}: no such run; give a run's folder, such as {runs_dir}/EXPERIMENT/baseline/seed-0, or an "
            f"experiment ({there})"
        )
    names = sorted(planned_runs(experiment), key=lambda name: name.arm != BASELINE)
    runs = [RunDir(run_dir(experiment, name)) for name in names]
    started = [candidate for candidate in runs if candidate.exists]
    if not started:
        raise StoreError(f"{experiment}: no run has started yet; launch it first")
    return _checked_choice(
        next((candidate for candidate in started if _checkpoints(candidate)), started[0]), step
    )


def _checked_choice(run: RunDir, step: int | None) -> ChosenRun:
    record = run.record()
    config = parse_stored_run(record.config, str(run.path))
    if not isinstance(config, OwnRunConfig):
        raise RecipeError(
            f"{run.path}: was made by a foreign trainer, whose weights abrun cannot read; give a run of "
            "abrun's own trainer"
        )
    if not isinstance(config.algorithm, PolicyGradientSettings):
        raise RecipeError(
            f"{run.path}: algorithm.type: got {config.algorithm.type!r}, which does not use a rollout "
            "engine; give a run of grpo or ppo"
        )
    for line in unsupported_settings(config):
        raise RecipeError(f"{run.path}: {line}")
    checkpoints = _checkpoints(run)
    if step is None and not checkpoints and run.step_attempts():
        raise StoreError(
            f"{run.path}: has no checkpoint; use its initial weights with --step 0, or launch it again with "
            "checkpoint.every below its number of steps"
        )
    start_step = run.start_step
    chosen_step = (max(checkpoints) if checkpoints else start_step) if step is None else step
    if chosen_step not in checkpoints and chosen_step != start_step:
        steps_text = ", ".join(map(str, sorted({start_step, *checkpoints})))
        raise StoreError(
            f"--step: got {step}; {run.path} has the weights after steps {steps_text}; give one of them"
        )
    checkpoint = checkpoints.get(chosen_step)
    if checkpoint is not None and (writer := read_saved_state(checkpoint).run) not in run.identities():
        raise StoreError(f"{checkpoint}: was written by {writer!r}, not by this run, {run.identity()!r}")
    if checkpoint is None and config.checkpoint.start_from:
        checkpoint = Path(config.checkpoint.start_from).expanduser()
    weights = run.initial_weights
    if checkpoint is None and weights is not None and not is_directory(weights):
        raise StoreError(
            f"{weights}: the initial weights of {run.path} are missing; launch it again with --resume, or "
            "give the step of a checkpoint"
        )
    return ChosenRun(
        run=run,
        name=record.name,
        experiment=record.experiment,
        config=config,
        step=chosen_step,
        checkpoint=checkpoint,
    )


def _checkpoints(run: RunDir) -> dict[int, Path]:
    """Return the complete checkpoints by step."""
    with wrap_read_errors(run.checkpoints):
        checkpoints = list_checkpoints(run.checkpoints)
    return {step: path for step, path in checkpoints.items() if is_file(path / SAVED_STATE)}
