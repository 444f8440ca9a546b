"""Prepares an experiment's directory before the first process: new or resumed, never half-written.

The same for every engine and cluster. `--resume` does the same after every fault: see `_write_experiment`.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError, RecipeError, StoreError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, RunName, compare_hash, describe_decisions, diff_configs
from abrun.experiment.preflight.checks import refuse_unset_variables
from abrun.launch.cluster import find_cluster_jobs
from abrun.launch.git import record_checkout
from abrun.messages.numbers import listed, plural
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.command import Command, CommandRunConfig
from abrun.recipe.experiment import BASELINE, parse_stored_run, refuse_removed_settings
from abrun.recipe.run import RunConfig
from abrun.runs import files
from abrun.runs.experiment import (
    REFERENCE,
    WARM_STARTS,
    is_experiment,
    open_experiment,
    planned_runs,
    read_run_state,
    run_dir,
    warm_start_dir,
    write_experiment,
)
from abrun.runs.launches import write_config
from abrun.runs.layout import EXPERIMENT, NAME_PATTERN
from abrun.runs.lock import LOCK, Lease, launcher_lock
from abrun.runs.redaction import yaml_text
from abrun.runs.rundir import RunDir

Say = Callable[[str], object]


@contextlib.contextmanager
def prepare_experiment(
    plan: ExperimentPlan, options: LaunchOptions, problems: list[str], say: Say
) -> Iterator[tuple[Path, Lease, dict[str, Any] | None]]:
    """Own the directory of a plan without problems; yield it, its lease and the code checkout.

    Raises the same errors as `own_experiment`.
    """
    experiment_dir = resolve_experiment_dir(plan.recipe.name, options)
    refuse_impossible(plan, problems)
    with own_experiment(
        plan, experiment_dir, resume=options.resume, take_over=options.take_over, say=say
    ) as lease:
        git = record_checkout(experiment_dir, diff=plan.recipe.record_diff)
        yield experiment_dir, lease, git


def resolve_experiment_dir(recipe_name: str, options: LaunchOptions) -> Path:
    """Return the directory of an experiment. Raises LaunchError if its name cannot be a folder name."""
    name = recipe_name if options.name is None else options.name
    if not re.fullmatch(NAME_PATTERN, name) or name == WARM_STARTS:
        raise LaunchError(
            f"--name: got {name!r}; allowed: letters, digits, '.', '_' and '-', at most 100, but not "
            f"{WARM_STARTS!r}"
        )
    return Path(os.path.realpath(options.runs_dir)) / name


def refuse_impossible(plan: ExperimentPlan, problems: list[str]) -> None:
    """Raise LaunchError, in one line, if there are reasons why a plan cannot run."""
    if problems:
        omitted = f" (and {len(problems) - 1} more: see --dry-run)" if len(problems) > 1 else ""
        raise LaunchError(f"{plan.recipe.name}: {problems[0]}{omitted}")


def refuse_existing(experiment_dir: Path) -> None:
    """Raise LaunchError if something else already exists in the experiment's place."""
    if is_experiment(experiment_dir):
        names = planned_runs(experiment_dir)
        finished = sum(read_run_state(experiment_dir, name).status == "finished" for name in names)
        raise LaunchError(
            f"{experiment_dir}: an experiment already exists here ({finished} of {len(names)} runs "
            "finished); continue it with --resume, or choose another --name"
        )
    names = (
        {path.name for path in experiment_dir.iterdir()} if files.is_directory(experiment_dir) else set[str]()
    )
    # A launcher that was killed before it wrote experiment.json leaves these
    leftovers = {*files.partial_files(names), *((LOCK, REFERENCE) if LOCK in names else ())}
    if names - leftovers:
        raise LaunchError(f"{experiment_dir}: is not empty and not an experiment; choose another --name")


def refuse_nothing_to_resume(experiment_dir: Path) -> None:
    """Raise StoreError if there is no experiment to resume, or none that can be read."""
    if not os.path.lexists(experiment_dir / EXPERIMENT):
        raise StoreError(f"{experiment_dir}: there is nothing to resume; leave out --resume")
    open_experiment(experiment_dir)


@contextlib.contextmanager
def own_experiment(
    plan: ExperimentPlan,
    experiment_dir: Path,
    *,
    resume: bool,
    take_over: bool = False,
    say: Say = lambda line: None,
) -> Iterator[Lease]:
    """Own a plan's directory, with every run's `config.json` written; `say` reports stale locks.

    A new experiment that cannot be written completely leaves nothing behind. Raises LaunchError or StoreError
    if the experiment exists already (with `resume`: does not exist), has other configurations, or is in use.
    """
    refuse = _refuse_queued if resume else refuse_existing
    if resume:
        refuse_nothing_to_resume(experiment_dir)
        plan = _as_recorded(plan, experiment_dir)
    refuse(experiment_dir)
    states = {run.name: read_run_state(experiment_dir, run.name) for run in plan.runs} if resume else {}
    finished_names = [name for name, state in states.items() if state.status == "finished"]
    refuse_unset_variables(run for run in plan.runs if run.name not in finished_names)
    new_folders = [path for path in (experiment_dir, *experiment_dir.parents) if not os.path.lexists(path)]
    try:
        with launcher_lock(experiment_dir, take_over=take_over, say=say) as lease:
            files.remove_partial_files(experiment_dir)
            # Check again: a faster launcher may have submitted or created it meanwhile.
            refuse(experiment_dir)
            if resume:
                _refuse_other_recipe(plan, experiment_dir)
                if cluster_jobs := find_cluster_jobs(experiment_dir):  # these jobs have ended
                    cluster_jobs.clear_jobs()
                _write_experiment(plan, experiment_dir, resume=True)
            else:
                try:
                    _write_experiment(plan, experiment_dir, resume=False)
                except StoreError:
                    shutil.rmtree(experiment_dir, ignore_errors=True)
                    raise
                for line in (*describe_decisions(plan.decided), *find_ineffective_settings(plan)):
                    say(line)
            if experiment_dir.parent in new_folders:  # keeps `git add` from adding runs
                files.write_file(experiment_dir.parent / ".gitignore", b"*\n", mode=0o644)
            yield lease
    finally:
        for path in new_folders:
            with contextlib.suppress(OSError):
                path.rmdir()  # removes a folder that nothing came to lie in


def write_run_record(
    directory: Path, experiment: str, name: RunName, config: RunConfig, warm_start: Path | None = None
) -> None:
    """Write a run's record, which tells its process what to do."""
    weights = warm_start and os.path.relpath(RunDir(warm_start).final_weights, directory)
    write_config(RunDir(directory), experiment, name, config.model_dump(mode="json"), weights)


def _write_experiment(plan: ExperimentPlan, experiment_dir: Path, *, resume: bool) -> None:
    """Write what is missing. To resume, that includes removed runs and the recipe's current limits.

    Finished runs keep their results, and damaged records are repaired. A run that cannot be read fails by
    itself, when it is its turn. `LaunchJob.claim` resumes all others from their newest checkpoints.
    """
    reference = plan.recipe.compare.reference
    stored_reference = experiment_dir / REFERENCE
    if reference and not (is_experiment(experiment_dir) and files.is_file(stored_reference)):
        with files.wrap_write_errors(
            stored_reference
        ):  # copied once: later changes to the file have no effect
            files.write_file(stored_reference, Path(reference).expanduser().read_bytes())
    declared: dict[str, Any] = {
        "compare_sha256": compare_hash(plan.recipe.compare),
        "launched_pairs": len(plan.recipe.seeds),
        "decided": plan.decided,
    }
    if is_experiment(experiment_dir):  # the first launch's stay
        first_launch = open_experiment(experiment_dir)
        declared |= {key: value for key, value in first_launch.items() if key in declared}
    content = {
        "experiment": experiment_dir.name,
        "recipe": plan.recipe.model_dump(mode="json"),
        "runs": [asdict(run.name) for run in plan.runs],
        "treatment_diff": plan.treatment_diff,
    }
    write_experiment(experiment_dir, {**content, **declared})
    for run in plan.runs:
        directory = run_dir(experiment_dir, run.name)
        try:
            with files.wrap_read_errors(directory):
                stored_run_dir = RunDir(directory)
                if not stored_run_dir.exists:
                    warm_start = warm_start_dir(experiment_dir, run.warm_start) if run.warm_start else None
                    write_run_record(directory, experiment_dir.name, run.name, run.config, warm_start)
                elif not stored_run_dir.finished:
                    _update_record(stored_run_dir, run.config)
        except StoreError:
            if not resume:
                raise


def _update_record(run: RunDir, config: RunConfig) -> None:
    """Give an unfinished run the recipe's limits, GPU share, aliases and folder: the old ones may be why."""
    record, content = run.record(), config.model_dump(mode="json")
    share = {"runs_per_gpu": config.cluster.runs_per_gpu}
    changed = {"limits": content["limits"], "cluster": {**record.config["cluster"], **share}}
    if isinstance(config, CommandRunConfig):
        current = {key: content["trainer"][key] for key in ("aliases", "recipe_dir")}
        changed["trainer"] = {**record.config["trainer"], **current}
    if any(record.config.get(key) != value for key, value in changed.items()):
        config_json = {**record.config, **changed}
        write_config(run, record.experiment, record.name, config_json, record.initial_weights)


def _as_recorded(plan: ExperimentPlan, experiment_dir: Path) -> ExperimentPlan:
    """Return the plan with `{recipe_dir}` filled in if the experiment was launched by a version that did."""

    def convert(config: Any) -> Any:
        trainer = config.trainer.with_recipe_dir() if isinstance(config.trainer, Command) else config.trainer
        return config.model_copy(update={"trainer": trainer})

    recipe, trainer = convert(plan.recipe), open_experiment(experiment_dir).get("recipe", {}).get("trainer")
    if not isinstance(trainer, dict) or trainer.get("argv") != getattr(recipe.trainer, "argv", ()):
        return plan
    runs = tuple(replace(run, config=convert(run.config)) for run in plan.runs)
    return replace(plan, recipe=recipe, runs=runs)


def _refuse_queued(experiment_dir: Path) -> None:
    cluster_jobs = find_cluster_jobs(experiment_dir)
    active = cluster_jobs.active_job_ids if cluster_jobs else []
    if active:
        raise LaunchError(
            f"{experiment_dir}: --resume: its jobs are still in the queue ({listed(active)}); wait for them, "
            f"or cancel them: abrun stop {experiment_dir}"
        )


def _refuse_other_recipe(plan: ExperimentPlan, experiment_dir: Path) -> None:
    """Refuse to mix experiments: every stored run must be planned with its stored configuration.

    A run to be added must start from the same weights as the stored runs of its arm. Unreadable runs are
    skipped here; `LaunchJob.claim` refuses them one by one.
    """
    planned = {run.name: run for run in plan.runs}
    recorded: dict[RunName, RunDir] = {}
    can_rename_aliases = True
    for name in planned_runs(experiment_dir):
        if name not in planned:
            raise LaunchError(
                f"{experiment_dir}: --resume: the recipe no longer has the run {name}, which exists here; "
                "restore arms, seeds and aa_reruns (adding runs is allowed), or choose another --name"
            )
        run, has_old_aliases = RunDir(run_dir(experiment_dir, name)), True
        with contextlib.suppress(StoreError), files.wrap_read_errors(run.path):
            recorded |= {name: run} if run.exists else {}
            has_old_aliases = run.finished
        can_rename_aliases = can_rename_aliases and not has_old_aliases
    weights: dict[str, Path] = {}
    for name, run in recorded.items():
        config = planned[name].config
        with contextlib.suppress(StoreError), files.wrap_read_errors(run.path):
            refuse_removed_settings(run.record().config, f"{run.path}: --resume")
            if difference := _describe_difference(run, config, can_rename_aliases=can_rename_aliases):
                raise LaunchError(
                    f"{run.path}: --resume: the run was launched with another recipe: {difference}; restore "
                    "the recipe, or choose another --name"
                )
            weights |= {name.arm: run.initial_weights} if run.initial_weights else {}
    for run in plan.runs:
        recorded_weights = weights.get(run.name.arm) if run.name not in recorded and run.warm_start else None
        planned_weights = RunDir(warm_start_dir(experiment_dir, run.warm_start or "")).final_weights
        if recorded_weights and os.path.normpath(recorded_weights) != os.path.normpath(planned_weights):
            raise LaunchError(
                f"{experiment_dir}: --resume: {run.name} would start from the warm start {run.warm_start}, "
                f"but the other runs of its arm started from {recorded_weights.parent.parent.name}; this "
                "version of abrun makes warm starts differently; resume with the version that launched them, "
                "or choose another --name"
            )


def _describe_difference(run: RunDir, config: RunConfig, *, can_rename_aliases: bool) -> str | None:
    """Return the first difference between a run's stored and planned configuration, or None.

    Limits and shares of a GPU may differ, and with `can_rename_aliases` aliases too, as long as no run has
    finished with the old ones.
    """
    try:
        recorded = parse_stored_run(run.record().config)
    except RecipeError:
        return "its record has no configuration that this version of abrun can read"
    cluster = recorded.cluster.model_copy(update={"runs_per_gpu": config.cluster.runs_per_gpu})
    recorded = recorded.model_copy(update={"limits": config.limits, "cluster": cluster})
    if can_rename_aliases and isinstance(recorded, CommandRunConfig) and isinstance(config, CommandRunConfig):
        trainer = recorded.trainer.model_copy(update={"aliases": config.trainer.aliases})
        recorded = recorded.model_copy(update={"trainer": trainer})
    differences = diff_configs(recorded, config)
    suffix = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    for key, (stored, planned) in differences.items():
        return f"{key} is {yaml_text(stored)} there and {yaml_text(planned)} in the recipe{suffix}"
    return None


RATIO_LOSSES = ("gspo", "cispo")  # differ from a policy gradient only by their importance ratio
CLIPPING = ("clip_low", "clip_high", "dual_clip", "value_clip_range")
SEVERAL_UPDATES = "algorithm.minibatches_per_step: 2 or more"


def find_ineffective_settings(plan: ExperimentPlan) -> list[str]:
    """Return a line for each setting without effect, with the arms that have it.

    With one update per step, the importance ratio is 1 where the gradient is taken, and nothing is clipped.
    For the default loss and clip range that is common and not reported. It is reported for a loss that is
    chosen for its ratio, for clip ranges that a recipe states, and for arms that differ in nothing else: up
    to rounding, all losses of the GRPO family then have the same gradient, if the tokens of a sequence share
    one advantage and weight. Commands that are the same for every seed are reported, too.
    """
    configs = {run.name.arm: run.config for run in plan.runs if not run.is_control}
    algorithms = {arm: getattr(config, "algorithm", None) for arm, config in configs.items()}
    one_update = {
        arm: settings
        for arm, settings in algorithms.items()
        if isinstance(settings, PolicyGradientSettings) and settings.num_updates == 1
    }
    arms_of: dict[str, list[str]] = {}
    for arm, settings in one_update.items():
        loss, fields = getattr(settings, "loss", None), type(settings).model_fields
        stated = {name: getattr(settings, name) for name in CLIPPING if name in fields}
        stated = {name: value for name, value in stated.items() if value != fields[name].default}
        key, got, drop = "loss", f"'{loss}'", ""
        why = "the importance ratio is 1 and nothing is ever clipped"
        if loss not in RATIO_LOSSES:
            got = ", ".join(f"{name} {json.dumps(value)}" for name, value in stated.items())
            key, why, drop = next(iter(stated), ""), "nothing is ever clipped", ", or drop it"
        if key:
            line = (
                f"algorithm.{key}: got {got}, but with one update per step {why}; use {SEVERAL_UPDATES}{drop}"
            )
            arms_of.setdefault(line, []).append(arm)
    found = [f"{plural(arms, 'arm')} {', '.join(arms)}: {line}" for line, arms in arms_of.items()]

    for arm, changes in plan.treatment_diff.items():
        if not {arm, BASELINE} <= one_update.keys():
            continue
        baseline, keys = one_update[BASELINE], {f"algorithm.{name}" for name in CLIPPING}
        is_per_token = baseline.importance_correction or baseline.kl_in == "reward_to_go"
        if changes.keys() <= (keys if is_per_token else keys | {"algorithm.loss"}):
            found.append(
                f"arm {arm}: differs from the baseline only in {', '.join(changes)}, but with one update per "
                f"step this changes no gradient; use {SEVERAL_UPDATES}"
            )

    commands = {arm: config for arm, config in configs.items() if isinstance(config, CommandRunConfig)}
    arms = [arm for arm, config in commands.items() if not config.trainer.uses_seed]
    if arms and len(plan.recipe.seeds) > 1:
        found.append(
            f"{plural(arms, 'arm')} {', '.join(arms)}: trainer.argv and trainer.env do not use {{seed}}, so "
            "all seeds run the same command unless it reads ABRUN_SEED"
        )
    return found
