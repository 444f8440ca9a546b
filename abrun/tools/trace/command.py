"""abrun trace: run one step of two arms in processes, and leave their captures.

<output>/baseline/, <output>/ARM/      captures (abrun.runs.captures)
<output>/replicas.json                 errors of the baseline's one-ULP replicas
<output>/trace.json                    the comparison (abrun.runs.traces)
<output>/jobs/                         the processes' jobs and output
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from abrun.errors import RecipeError, StoreError
from abrun.experiment.plan import make_draft
from abrun.experiment.probe import run_probe, scratch_folder
from abrun.recipe.experiment import BASELINE, CommandRecipe, Recipe
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig, recorded_source, unsupported_settings
from abrun.runs.captures import is_capture, read_capture
from abrun.runs.experiment import run_dir
from abrun.runs.files import (
    PUBLIC_MODE,
    encode_non_finite,
    is_directory,
    read_json,
    wrap_write_errors,
    write_json,
)
from abrun.runs.layout import RunName
from abrun.runs.redaction import shortened
from abrun.runs.rundir import RunDir
from abrun.runs.traces import FOLDER, RESULT, StoredTrace, write_trace
from abrun.tools.trace.judge import NUM_REPLICAS, TensorError, errors_from_json, judge_trace

MODULE = "abrun.tools.trace.measure"
REPLICAS = "replicas.json"
# Fields, or the sections that they are in, which two arms of one batch and model have in common
BATCH_FIELDS = (
    "algorithm.type.",
    "algorithm.prompts_per_step.",
    "algorithm.group_size.",
    "algorithm.batch_size.",
    "model.preset.",
    "model.shape.",
    "task.",
)
MAX_TOKENS = 2048  # of whole sequences, whose activations are kept


def trace_recipe(
    recipe: Recipe | CommandRecipe,
    experiment: Path,
    *,
    step: int = 1,
    arm: str | None = None,
    num_replicas: int = NUM_REPLICAS,
    output: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[StoredTrace, Path]:
    """Compare a step of the baseline and of another arm on the same rollouts; return the output folder too.

    Both arms start from the baseline's weights and optimizer state before the step. `experiment` is the
    folder with warm-started weights, if any, and by default with the output. Raises AbrunError if
    the recipe's arms cannot be traced on this machine.
    """
    arm = _choose_arm(recipe, arm)
    seed = recipe.seeds[0]
    configs = {name: _traced_config(recipe, name, step) for name in (BASELINE, arm)}
    _check_same_batch(configs[BASELINE], configs[arm], arm)
    weights = _initial_weights(recipe, experiment, seed)
    run = run_dir(experiment, RunName(arm=BASELINE, seed=seed))  # beside which recorded rollouts may lie
    output = output or experiment / FOLDER
    with scratch_folder(output, "abrun trace", is_capture) as recorded:
        with wrap_write_errors(output):
            (output / RESULT).unlink(missing_ok=True)
        for name, config in configs.items():
            is_baseline = name == BASELINE
            repeats = (
                f", and {num_replicas} times perturbed by one ULP" if is_baseline and num_replicas else ""
            )
            say(f"{recipe.name}: step {step} of {name}{repeats}")
            job: dict[str, Any] = {
                "recorded": str(recorded.resolve()),
                "captures": str(output.resolve()),
                "arm": name,
                "seed": seed,
                "step": step,
                "initial_weights": None if weights is None else str(weights.resolve()),
                "records": is_baseline,
                "replicas": num_replicas,
                "max_tokens": MAX_TOKENS,
                "run": None if recorded_source(configs[BASELINE]) is None else str(run.resolve()),
            }
            run_probe(MODULE, output / "jobs" / name, _on_rollouts_of(config, configs[BASELINE]), job)
    baseline, treatment = (read_capture(output / name) for name in configs)
    judged = judge_trace(baseline, treatment, read_replicas(output))
    traced = {name: config.model_dump(mode="json") for name, config in configs.items()}
    facts = {field.name: getattr(judged, field.name) for field in fields(judged)}
    result = StoredTrace(**facts, arm=arm, seed=seed, configs=traced)
    write_trace(output, result)
    return result, output


def write_replicas(output: Path, errors: Sequence[Mapping[str, Any]]) -> None:
    write_json(output / REPLICAS, encode_non_finite({"replicas": list(errors)}), mode=PUBLIC_MODE)


def read_replicas(output: Path) -> list[dict[str, TensorError]]:
    """Return the errors of each replica. Raises StoreError if the file is missing or damaged."""
    path = output / REPLICAS
    try:
        return [errors_from_json(replica) for replica in read_json(path)["replicas"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: damaged; trace again") from error


def _choose_arm(recipe: Recipe | CommandRecipe, arm: str | None) -> str:
    arms = [name for name in recipe.arms if name != BASELINE]
    if arm is None and len(arms) == 1:
        return arms[0]
    if arm not in arms:
        got = "none" if arm is None else repr(arm)
        raise RecipeError(
            f"--arm: got {got}; give one of {', '.join(arms) or 'the arms, of which there are none'}"
        )
    return arm


def _traced_config(recipe: Recipe | CommandRecipe, arm: str, step: int) -> OwnRunConfig:
    """Return an arm's configuration. Raises RecipeError if it cannot be traced."""
    drafted = make_draft(recipe)
    config = next(run.config for run in drafted.runs if run.name.arm == arm)
    source = f"arms.{arm}"
    if not isinstance(config, OwnRunConfig):
        raise RecipeError(f"{source}: a command trains it; trace arms of abrun's own trainer")
    for line in unsupported_settings(config):
        raise RecipeError(f"{source}: {line}")
    if step > config.steps:
        raise RecipeError(f"--step: got {step}, but {arm} ends at step {config.steps}; give one up to it")
    return config


def _check_same_batch(baseline: OwnRunConfig, config: OwnRunConfig, arm: str) -> None:
    """Raise RecipeError if two arms train on different batches, or have no weights in common."""
    own, others = (dotted(of.model_dump(mode="json")) for of in (config, baseline))
    for key in [*own, *(key for key in others if key not in own)]:
        if f"{key}.".startswith(BATCH_FIELDS) and own.get(key) != others.get(key):
            raise RecipeError(
                f"arms.{arm}.{key}: got {shortened(own.get(key))}, but baseline has "
                f"{shortened(others.get(key))}; trace arms that train the same model on the same batch"
            )


def _on_rollouts_of(config: OwnRunConfig, baseline: OwnRunConfig) -> OwnRunConfig:
    """Return an arm's configuration with the recorded rollouts that the baseline trains on, if it does."""
    source = recorded_source(baseline)
    if source is None:
        return config
    rollout = {**config.rollout.model_dump(mode="json"), "engine": "recorded", "from": source}
    return OwnRunConfig.model_validate({**config.model_dump(mode="json"), "rollout": rollout})


def _initial_weights(recipe: Recipe | CommandRecipe, experiment: Path, seed: int) -> Path | None:
    """Return the baseline's warm-started weights, from its run; None if the recipe has no warm start."""
    config = recipe.run_config(BASELINE)
    if not isinstance(config, OwnRunConfig) or not config.warm_start:
        return None
    run = RunDir(run_dir(experiment, RunName(arm=BASELINE, seed=seed)))
    weights = run.initial_weights if run.exists else None
    if weights is None or not is_directory(weights):
        raise RecipeError(
            f"warm_start: {run.path} has no warm-started weights; launch the recipe first, or use "
            "--set warm_start=null"
        )
    return weights
