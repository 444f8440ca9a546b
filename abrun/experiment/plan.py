"""Plan of an experiment: its runs, their order, and the exact differences between arms."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from abrun.errors import RecipeError
from abrun.recipe.algorithms import Dpo, PolicyGradientSettings, Sft
from abrun.recipe.claims import Claim, Compare, Guards
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import AUTO_SETTINGS, ExperimentDeclaration
from abrun.recipe.faults import ONE_ULP
from abrun.recipe.merging import implied_by_types
from abrun.recipe.reading import dotted
from abrun.recipe.refusals import shortened
from abrun.recipe.run import OwnRunConfig, RunConfig, recorded_source
from abrun.recipe.tasks import CompletionsTask, PreferencesTask
from abrun.runs.experiment import WARM_START
from abrun.runs.layout import RunName
from abrun.runs.metric_names import (
    FINAL_WEIGHTS,
    FIXED_BY_ROLLOUTS,
    OF_RUNS,
    Need,
    find_metric,
    is_clock,
    unrecorded_metric_problem,
)
from abrun.runs.migrations import earlier_forms, with_removed

VALIDATION_NEEDS: tuple[Need, ...] = (
    "validation",
    "validation by completions",
    "validation by loss",
    "validation by answers or pairs",
)
MAX_RUNS = 100_000  # each is a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Run to launch."""

    name: RunName
    config: OwnRunConfig | CommandRunConfig
    warm_start: str | None  # key into Plan.warm_starts
    is_control: bool = False  # compared with its baseline, but without a verdict

    def trains_on(self, arms: Collection[str]) -> RunName | None:
        """Return the run of the experiment whose recorded rollouts this run trains on, if any."""
        source = recorded_source(self.config)
        return RunName(arm=source, seed=self.name.seed) if source and source in arms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPlan:
    """Runs of an experiment in launch order: by pair, so that the first pair finishes first."""

    recipe: ExperimentDeclaration
    runs: tuple[PlannedRun, ...]
    warm_starts: dict[str, OwnRunConfig]  # hash -> the supervised run that creates shared initial weights
    # arm, those of controls included -> dotted key -> (baseline's value, the arm's)
    treatment_diff: dict[str, dict[str, tuple[Any, Any]]]
    # dotted key -> the value chosen for `auto`, and why; see abrun.tools.predict.auto
    decided: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def runs_of_first_seeds(self, num_seeds: int) -> set[RunName]:
        """Return the runs of the first seeds, including all arms, reruns and controls."""
        seeds = self.recipe.seeds[:num_seeds]
        return {run.name for run in self.runs if run.name.seed in seeds}


def describe_decisions(decided: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each group of `auto` keys that were decided together."""
    keys: dict[str, list[str]] = {}
    for key, decision in decided.items():
        keys.setdefault(decision["why"], []).append(key)
    return [f"{', '.join(reason_keys)}: {why}" for why, reason_keys in keys.items()]


def group_pairs(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Group the runs that are compared by seed; each rerun and control is a group of its own."""
    groups: dict[tuple[int, int, str], list[PlannedRun]] = {}
    for run in runs:
        unpaired_arm = run.name.arm if run.name.rerun or run.is_control else ""
        groups.setdefault((run.name.seed, run.name.rerun, unpaired_arm), []).append(run)
    return list(groups.values())


def make_plan(recipe: ExperimentDeclaration) -> ExperimentPlan:
    """Make the plan of a recipe.

    Raises RecipeError for too many runs, for an arm that changes nothing or changes `validation`, and for a
    claim that could not be judged.
    """
    controls = recipe.controls
    num_arms = len(recipe.arms) + len(controls.faults)
    num_runs = num_arms * len(recipe.seeds) + controls.aa_reruns + controls.ulp_reruns
    if num_runs > MAX_RUNS:
        raise RecipeError(
            f"{recipe.name}: got {num_runs} runs ({num_arms} arms and faults x {len(recipe.seeds)} seeds, "
            f"plus reruns); allowed: at most {MAX_RUNS} per experiment; remove some, or split the experiment"
        )
    configs = {arm: recipe.run_config(arm) for arm in recipe.arms}
    _check_claims(recipe, configs)
    _check_recordings(recipe, configs)
    treatments = [arm for arm in configs if arm != recipe.baseline]
    base = configs[recipe.baseline]
    treatment_diff = {arm: diff_configs(base, configs[arm]) for arm in treatments}
    for arm, diff in treatment_diff.items():
        if not diff:
            raise RecipeError(
                f"{recipe.name}: arms.{arm}: got {recipe.arms[arm]}, which resolves to the baseline's "
                "configuration; change at least one value (controls.aa_reruns repeats the baseline)"
            )
        if any(key.split(".")[0] == "validation" for key in diff):
            raise RecipeError(
                f"{recipe.name}: arms.{arm}.validation: differs from the baseline's, but all arms are "
                "validated alike; set validation outside of arms"
            )
    for arm in recipe.control_arms:
        configs[arm] = recipe.control_config(arm)
        treatment_diff[arm] = diff_configs(base, configs[arm])
    warm_starts: dict[str, OwnRunConfig] = {}
    warm_start_of: dict[str, str | None] = dict.fromkeys(configs)
    for arm, config in configs.items():
        if isinstance(config, OwnRunConfig) and config.warm_start:
            shared = _make_warm_start_config(base, config)
            # It samples nothing; neither its time limits nor its neighbours make it a different warm start
            ignored_keys: Any = {"limits": True, "cluster": {"runs_per_gpu"}, "rollout": {"record", "from"}}
            content = with_removed(shared.model_dump(mode="json", exclude=ignored_keys))
            key = _sha256({"seed": WARM_START.seed, **content})[:16]
            warm_starts[key] = shared
            warm_start_of[arm] = key
    return ExperimentPlan(
        recipe=recipe,
        runs=tuple(
            PlannedRun(
                name=name,
                config=configs[name.arm],
                warm_start=warm_start_of[name.arm],
                is_control=name.arm in recipe.control_arms,
            )
            for name in _order_runs(recipe)
        ),
        warm_starts=warm_starts,
        treatment_diff=treatment_diff,
    )


def make_draft(recipe: ExperimentDeclaration) -> ExperimentPlan:
    """Make a plan of a recipe with `auto` values, for uses that do not depend on the launch's choices."""
    try:
        return make_plan(recipe.with_auto_values())
    except RecipeError:
        if not recipe.auto_keys:
            raise
        slowest_values = {key: AUTO_SETTINGS[key].values[-1] for key in recipe.auto_keys}
        # With the first values, an arm that sets one of them could equal the baseline
        return make_plan(recipe.with_auto_values(slowest_values))


def _order_runs(recipe: ExperimentDeclaration) -> list[RunName]:
    """Return run names in launch order: pair by pair with their reruns, then the controls seed by seed."""
    baseline, treatments = recipe.baseline, [arm for arm in recipe.arms if arm != recipe.baseline]
    names: list[RunName] = []
    for index, seed in enumerate(recipe.seeds):
        num_reruns = _reruns_of_seed(index, recipe.controls.aa_reruns, recipe)
        names += [RunName(arm=arm, seed=seed) for arm in (baseline, *treatments)]
        names += [RunName(arm=baseline, seed=seed, rerun=1 + rerun) for rerun in range(num_reruns)]
    for index, seed in enumerate(recipe.seeds):
        num_reruns = _reruns_of_seed(index, recipe.controls.ulp_reruns, recipe)
        for arm, injected in recipe.control_arms.items():
            if injected.name != ONE_ULP or injected.draw < num_reruns:
                names.append(RunName(arm=arm, seed=seed))
    return names


def _check_recordings(
    recipe: ExperimentDeclaration, configs: dict[str, OwnRunConfig | CommandRunConfig]
) -> None:
    """Raise RecipeError for an arm that trains on the rollouts of an arm that records none."""
    for arm, config in configs.items():
        source = recorded_source(config)
        recorder = configs.get(source or "")
        if isinstance(recorder, OwnRunConfig) and not recorder.records_rollouts:
            raise RecipeError(
                f"{recipe.name}: arms.{arm}.rollout.from: got {source!r}, an arm that does not record its "
                "rollouts; set rollout.record: true"
            )


def _check_claims(recipe: ExperimentDeclaration, configs: dict[str, OwnRunConfig | CommandRunConfig]) -> None:
    """Raise RecipeError for claims that cannot be judged: unrecorded metrics, windows past the last step.

    The metrics of an external trainer are unknown in advance, except that weights are never among them.
    """
    tolerance = recipe.compare.step_one_tolerance
    if tolerance == {} or (tolerance is not None and not recipe.compare.step_one):
        why = "which names no metric" if tolerance == {} else "with step_one: false, which uses none"
        raise RecipeError(f"{recipe.name}: compare.step_one_tolerance: got {tolerance}, {why}; drop it")
    base = configs[recipe.baseline]
    tolerances = tolerance if isinstance(tolerance, dict) else {}
    required_metrics = [(f"step_one_tolerance.{metric}", metric) for metric in tolerances]
    finite = [metric for metric in recipe.compare.guards.finite if metric not in Guards().finite]
    # Not every algorithm records all of the defaults
    for key, metric in [*required_metrics, *(("guards.finite", metric) for metric in finite)]:
        if isinstance(base, OwnRunConfig) and (problem := _metric_problem(metric, base)):
            raise RecipeError(f"{recipe.name}: compare.{key}: {problem}; or drop it")
    if recipe.compare.guards.step_time_ratio is not None and base.cluster.runs_per_gpu > 1:
        problem = _shared_time_problem(recipe.compare.guards.step_time_ratio, base)
        raise RecipeError(f"{recipe.name}: compare.guards.step_time_ratio: {problem}; or drop it")
    claims = recipe.compare.claims
    for index, claim in enumerate(claims):
        if claim in claims[:index]:
            raise RecipeError(f"{recipe.name}: compare.claims.{index}: repeats an earlier claim; drop it")
        samples_alike = len({recorded_source(config) is None for config in configs.values()}) == 1
        for config in configs.values():
            field, problem = _claim_problem(claim, config, samples_alike=samples_alike)
            if problem:
                raise RecipeError(f"{recipe.name}: compare.claims.{index}.{field}: {problem}")


def _claim_problem(claim: Claim, config: RunConfig, *, samples_alike: bool) -> tuple[str, str | None]:
    """Return the field of a claim that does not fit a run, and its problem; None if all fit.

    `samples_alike`: all arms sample, or none does.
    """
    window = claim.window
    if window.startswith("steps") and int(window.split("-")[1]) > config.steps:
        ends = f"got {window!r}, but the runs end at step {config.steps}"
        return "window", f"{ends}; use an earlier window, or 'last 20%'"
    got = shortened(claim.metric)
    if is_clock(claim.metric) and config.cluster.runs_per_gpu > 1:
        return "metric", _shared_time_problem(claim.metric, config)
    if is_clock(claim.metric) and not samples_alike:
        return "metric", f"got {got}, but only some of the arms sample completions; claim no times"
    if not isinstance(config, OwnRunConfig):
        problem = "got 'final_weights' for a command, whose weights abrun cannot read"
        return "metric", problem if claim.metric == FINAL_WEIGHTS else None
    problem = _metric_problem(claim.metric, config)
    if claim.is_on_policy_loss(policy_gradient=isinstance(config.algorithm, PolicyGradientSettings)):
        problem = (
            f"got {got} for {claim.kind}, a loss that falls for other reasons than learning; claim a reward"
        )
    if not problem and claim.metric in FIXED_BY_ROLLOUTS and recorded_source(config):
        problem = (
            f"got {got} of an arm that trains on recorded rollouts, which hold it; claim train/loss, "
            "train/grad_norm or final_weights"
        )
    return "metric", problem


def _shared_time_problem(got: object, config: RunConfig) -> str:
    """Return the problem of a limit on times in an experiment whose runs share GPUs."""
    number = config.cluster.runs_per_gpu
    return (
        f"got {shortened(got)} of runs that share GPUs (cluster.runs_per_gpu: {number}), whose times depend "
        "on other runs; use runs_per_gpu: 1"
    )


def _metric_problem(metric: str, config: OwnRunConfig) -> str | None:
    """Return why a run of abrun's trainer does not record a metric; None if it does."""
    if metric in OF_RUNS:
        return None
    if problem := unrecorded_metric_problem(metric, config.algorithm.type):
        return problem
    known_metric = find_metric(metric)
    assert known_metric is not None
    unmet_need = _unmet_metric_need(known_metric.needs, config)
    return unmet_need and f"got {shortened(metric)} of {unmet_need}"


def _unmet_metric_need(need: Need | None, config: OwnRunConfig) -> str | None:
    """Return a metric's need that the run does not meet, with the fix; None if it meets all."""
    settings = config.algorithm if isinstance(config.algorithm, PolicyGradientSettings) else None
    level = settings.metrics if settings else "basic"
    penalised = settings is not None and settings.kl_coefficient > 0
    in_reward = settings is not None and settings.kl_in != "loss"
    by_loss = isinstance(config.task, CompletionsTask | PreferencesTask)
    needs: dict[str, tuple[bool, str]] = {
        "metrics basic": (level == "none", "runs of algorithm.metrics 'none'; set it to basic"),
        "metrics full": (level != "full", f"runs of algorithm.metrics {level!r}; set it to full"),
        "metrics full of GSPO": (
            level != "full" or getattr(settings, "loss", None) != "gspo",
            f"runs of algorithm.metrics {level!r} and loss {getattr(settings, 'loss', None)!r}; set metrics: "
            "full and loss: gspo",
        ),
        "an overlong punishment": (
            settings is None or settings.overlong_punishment is None,
            "runs without an overlong punishment; set algorithm.overlong_punishment",
        ),
        "a KL penalty": (not penalised, "runs without a KL penalty; set algorithm.kl_coefficient"),
        "a KL penalty in the reward": (
            not (penalised and in_reward),
            "runs whose reward has no KL penalty; set algorithm.kl_coefficient and kl_in: reward",
        ),
        "dynamic sampling": (
            getattr(settings, "dynamic_sampling", None) is None,
            "runs without dynamic sampling; set algorithm.dynamic_sampling",
        ),
        "experts": (
            config.model.preset is not None and "num_experts" not in config.model.architecture,
            f"runs of model.preset {config.model.preset!r}, which has no experts; use another model",
        ),
        "validation by completions": (by_loss, f"runs of task.type {config.task.type!r}, validated by loss"),
        "validation by loss": (not by_loss, f"runs of task.type {config.task.type!r}, which has a verifier"),
        "validation by answers or pairs": (
            by_loss and not isinstance(config.algorithm, Dpo),
            f"runs of task.type {config.task.type!r}, which has no verifier; claim validation/loss",
        ),
        "GPUs": (config.cluster.gpus_per_node == 0, "runs on CPU cores; claim peak_live_tensor_bytes"),
        "CPU cores": (config.cluster.gpus_per_node > 0, "runs on GPUs; claim peak_allocated_bytes"),
    }
    if need in VALIDATION_NEEDS and config.validation is None:
        return "runs without validation; set validation.every"
    is_unmet, problem = needs.get(need or "", (False, ""))
    return problem if is_unmet else None


def diff_configs(baseline: RunConfig, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return every dotted key whose resolved value differs, with both values.

    Left out are the recipe's folder, and defaults that only one of two section types has.
    """
    # With keys of the baseline first, in its order
    base, changed = (
        dotted(arm.model_dump(mode="json", exclude={"trainer": {"recipe_dir"}})) for arm in (baseline, config)
    )
    implied = implied_by_types(base, changed)
    values = {key: (base.get(key), changed.get(key)) for key in base | changed if key not in implied}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def compare_hash(compare: Compare) -> str:
    """Return a hash of the declared comparison, by which a later change is recognised as post hoc.

    Defaults are excluded, so a new field in abrun does not change the hash of older declarations.
    """
    return _sha256(compare.model_dump(mode="json", exclude_defaults=True))


def launched_compare_hash(stored_sha256: str, compare: Compare) -> str:
    """Return the hash stored at launch, as this version computes it if an earlier one declared the same."""
    content = compare.model_dump(mode="json", exclude_defaults=True)
    is_declared = stored_sha256 in map(_sha256, earlier_forms(content))
    return compare_hash(compare) if is_declared else stored_sha256


def _reruns_of_seed(index: int, num_reruns: int, recipe: ExperimentDeclaration) -> int:
    """Return how many of a control's reruns the seed at `index` gets; reruns are dealt out round-robin."""
    rounds, remainder = divmod(num_reruns, len(recipe.seeds))
    return rounds + (index < remainder)


def _make_warm_start_config(baseline: RunConfig, config: OwnRunConfig) -> OwnRunConfig:
    """Return the supervised run for an arm's initial weights, in the baseline's stack so arms share it."""
    warm_start, validation = config.warm_start, config.validation
    assert warm_start is not None
    if not isinstance(baseline, OwnRunConfig):  # an external trainer has no warm start to share
        baseline = config
    # The runs' schedule ends at their last step, and its minimum may exceed this learning rate.
    changes = {"learning_rate": warm_start.learning_rate, "min_learning_rate": 0.0}
    optimizer = baseline.policy.optimizer.model_copy(update=changes | {"schedule": "constant"})
    return baseline.model_copy(
        update={
            "algorithm": Sft(type="sft", batch_size=warm_start.batch_size),
            "model": config.model,
            "policy": baseline.policy.model_copy(update={"optimizer": optimizer}),
            "task": config.task,
            # Only at its start and end, so that the runs' validation interval does not change the warm start.
            "validation": validation and validation.model_copy(update={"every": warm_start.steps}),
            "warm_start": None,
            "checkpoint": baseline.checkpoint.model_copy(update={"final_weights": True, "start_from": None}),
            "steps": warm_start.steps,
            "wandb": None,
            "injected_fault": None,
        }
    )


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
