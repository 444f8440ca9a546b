"""Resolves `auto` values of a recipe to the fastest values with which every arm fits into memory.

They are decided once, before anything is stored, and are the same for all arms without own values. The
decision uses predicted peaks, and one measured step if the launch uses this machine's GPUs. The plan and
what is stored hold the decided values. docs/explanation/memory-prediction.md has their order.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.experiment.preflight.settings import triton_refusal
from abrun.launch.prepare import refuse_existing, refuse_impossible, resolve_experiment_dir
from abrun.launch.sharing import decide_sharing, drop_jobs_limit
from abrun.memory.cells import GIB, Point
from abrun.memory.predict import (
    MAX_ERROR,
    PeakPrediction,
    find_longest_sequences,
    predict_steps,
    resolve_device_memory,
    scratch_folder,
)
from abrun.memory.profile import measure_cell
from abrun.memory.sweep import microbatch_size
from abrun.messages.numbers import percent_text
from abrun.reasons import Code, Reason
from abrun.recipe.experiment import (
    AUTO_SETTINGS,
    CHECKPOINTING,
    MICRO_BATCH_TOKENS,
    RUNS_PER_GPU,
    CommandRecipe,
    Recipe,
)
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig, share_of_device
from abrun.runs.experiment import open_experiment

# Smallest micro-batch: below it, weights and optimizer state take nearly all memory.
MIN_TOKENS = 1024
# Share of device memory kept free above a measured peak, for fragmentation and memory outside of torch.
MEASURED_MARGIN = 0.05
MAX_LISTED = 3  # candidates in a message

Say = Callable[[str], object]
Values = dict[str, Any]  # by dotted key
Decisions = dict[str, dict[str, Any]]  # by dotted key, as experiment.json keeps them


def resolve_auto(
    recipe: Recipe | CommandRecipe,
    draft: ExperimentPlan,
    options: LaunchOptions,
    find_problems: Callable[[ExperimentPlan], list[Reason]],
    *,
    is_local: bool,
    dry_run: bool = False,
    say: Say = lambda line: None,
) -> ExperimentPlan:
    """Return a recipe's plan with its `auto` values decided, or `draft` if there are none.

    `is_local`: the plan runs on this machine. With options.resume, the values of the first launch are used.
    Raises RecipeError or LaunchError if nothing can be decided or nothing fits. Except in a dry run, it first
    raises for `find_problems` and for an existing experiment, before predictions take minutes.
    """
    requested_memory = options.device_memory
    if requested_memory is not None:
        resolve_device_memory(requested_memory)  # raises for an invalid value, even if it is not needed
    if not recipe.auto_keys:
        if requested_memory is not None and not dry_run:
            raise RecipeError(Code.DEVICE_MEMORY_WITHOUT_USE(keys=[*AUTO_SETTINGS]))
        return draft
    experiment_dir = resolve_experiment_dir(recipe.name, options)
    if options.resume:
        return make_plan(recipe.with_auto_values(_read_decided_values(experiment_dir, recipe.auto_keys)))
    if not dry_run:
        refuse_impossible(draft, drop_jobs_limit(recipe, find_problems(draft)))
        refuse_existing(experiment_dir)
    alone = recipe.without_sharing()
    decided: Decisions = {}
    if alone.auto_keys:
        decided = decide_values(alone, requested_memory, is_local=is_local, dry_run=dry_run, say=say)
    plan = make_plan(recipe.with_auto_values(_values_of(decided)))
    if RUNS_PER_GPU in recipe.auto_keys:
        decided |= decide_sharing(plan, options, decided, is_local=is_local, say=say)
        plan = make_plan(recipe.with_auto_values(_values_of(decided)))
    return replace(plan, decided=decided)


def _values_of(decided: Decisions) -> Values:
    return {key: decision["value"] for key, decision in decided.items()}


def decide_values(
    recipe: Recipe | CommandRecipe,
    requested_memory: str | None,
    *,
    is_local: bool,
    dry_run: bool = False,
    say: Say = lambda line: None,
) -> Decisions:
    """Return the decided value of each open key, and why. `is_local`: the plan runs on this machine's
    devices.
    """
    keys, configs = recipe.auto_keys, _open_arm_configs(recipe, {})
    request = Code.AUTO_ASKED(recipe=recipe.name, fields=[*keys])
    if not configs:
        values = {key: AUTO_SETTINGS[key].values[0] for key in keys}
        explanation = f"auto resolves to {_format_values(values)}: no arm with an open value trains on GPUs"
        return _make_decisions(values, why=explanation, device_bytes=None, measured=False, candidates=[])
    _refuse_unpredictable(request, keys, configs)
    own_bytes = resolve_device_memory(None) if is_local else None
    device_bytes = own_bytes if requested_memory is None else resolve_device_memory(requested_memory)
    runs_per_gpu = recipe.cluster.runs_per_gpu
    if device_bytes is not None and runs_per_gpu != "auto":
        device_bytes = share_of_device(device_bytes, runs_per_gpu)
    if device_bytes is None:
        raise LaunchError(
            Code.AUTO_NEEDS_DEVICE_MEMORY(asked=request, here=is_local, instead=_format_alternatives(keys))
        )
    why_not_measured = _reason_not_to_measure(own_bytes, device_bytes, is_local=is_local, dry_run=dry_run)
    trials = _CandidateSearch(recipe, request, device_bytes, say, measures=why_not_measured is None)
    choice = trials.choose(_group_candidates(recipe, configs, say))
    memory_text = f"and a device has {device_bytes / GIB:.1f} GiB"
    if choice.is_hopeless:
        raise LaunchError(
            Code.AUTO_FITS_NOWHERE(
                asked=request, tried=_describe_trials([choice]), device_gib=device_bytes / GIB
            )
        )
    candidates = [*(trial for trial in trials.tried if trial is not choice), choice]
    margin_text = f", of which {percent_text(choice.margin)} stay free"
    if not choice.fits:
        margin_text = (
            f": nothing leaves {percent_text(choice.margin)} of it free, and runs may run out of memory"
        )
    return _make_decisions(
        choice.values,
        why=f"auto resolves to {_format_values(choice.values)}: {_describe_trials(candidates)}"
        + f", {memory_text}{margin_text}"
        + (f"; predicted, not measured: {why_not_measured}" if why_not_measured else ""),
        device_bytes=device_bytes,
        margin=choice.margin,
        measured=why_not_measured is None,
        candidates=[trial.as_json() for trial in candidates],
    )


def _make_decisions(values: Values, **fields: Any) -> Decisions:
    return {key: {"asked": "auto", "value": value, **fields} for key, value in values.items()}


def _open_arm_configs(recipe: Recipe | CommandRecipe, values: Values) -> dict[str, OwnRunConfig]:
    """Return configurations of arms on GPUs that use an open value of the recipe."""
    closed, configs = recipe.with_auto_values(values), dict[str, OwnRunConfig]()
    for arm, change in recipe.arms.items():
        config = closed.run_config(arm)
        if isinstance(config, OwnRunConfig) and config.cluster.gpus_per_node:
            recipe_keys = dotted(config.model_dump()).keys() - dotted(change).keys()
            configs |= {arm: config} if recipe_keys.intersection(recipe.auto_keys) else {}
    return configs


def _refuse_unpredictable(request: Reason, keys: Iterable[str], configs: Mapping[str, OwnRunConfig]) -> None:
    for arm, config in configs.items():
        if config.policy.backend.type != "dtensor":
            backend = config.policy.backend.type
            raise LaunchError(
                Code.AUTO_BACKEND_NOT_PREDICTED(
                    asked=request, arm=arm, backend=backend, instead=_format_alternatives(keys)
                )
            )
        problem = triton_refusal(on_gpu=True) if config.policy.logprobs.impl == "triton" else None
        if problem:  # reported before predictions take time
            raise LaunchError(Code.AUTO_NOT_PREDICTED(asked=request, arm=arm, problem=problem))


def _reason_not_to_measure(
    own_bytes: int | None, device_bytes: int, *, is_local: bool, dry_run: bool
) -> str | None:
    """Return why no step is measured, or None if one is."""
    if dry_run:
        return "a dry run measures nothing"
    if not is_local:
        return "the GPUs are a cluster's"
    if own_bytes is None:
        return "this machine has no GPU"
    return None if device_bytes <= own_bytes else "a GPU of this machine has less"


# --- the order of preference ---


def _group_candidates(
    recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig], say: Say
) -> list[list[Values]]:
    """Return the candidates in order of preference; the last one of each group needs the least memory."""
    closed = recipe.with_auto_values()
    arm_configs = (
        closed.run_config(arm) for arm in recipe.arms if CHECKPOINTING not in dotted(recipe.arms[arm])
    )
    compiled = isinstance(recipe, Recipe) and recipe.policy.compile  # on CPU cores, too: it is refused there
    compiled = compiled and all(
        option.policy.compile for option in arm_configs if isinstance(option, OwnRunConfig)
    )
    choices = {key: AUTO_SETTINGS[key].values for key in recipe.auto_keys}
    if CHECKPOINTING in choices and not compiled:
        choices[CHECKPOINTING] = tuple(option for option in choices[CHECKPOINTING] if option != "selective")
    small_budgets: list[int] = []
    if MICRO_BATCH_TOKENS in choices:
        budgets = _list_token_budgets(recipe, configs, say)
        fast_budgets = [
            option for option in budgets if option >= min(choices[MICRO_BATCH_TOKENS])
        ] or budgets[:1]
        choices[MICRO_BATCH_TOKENS], small_budgets = tuple(fast_budgets), budgets[len(fast_budgets) :]
    candidates = [
        dict(zip(choices, combination, strict=True)) for combination in itertools.product(*choices.values())
    ]
    groups = [
        list(group) for _, group in itertools.groupby(candidates, lambda values: values.get(CHECKPOINTING))
    ]
    last_group = [{**candidates[-1], MICRO_BATCH_TOKENS: budget} for budget in small_budgets]
    return [*groups, last_group] if last_group else groups


def _list_token_budgets(
    recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig], say: Say
) -> list[int]:
    """Return micro-batch sizes in tokens, from the fastest downwards by halves.

    The minimum is the longest sequence of all arms, the maximum a rank's share of an update.
    """
    unsplit_configs = {
        arm: config.model_copy(
            update={"policy": config.policy.model_copy(update={"micro_batch_tokens": None})}
        )
        for arm, config in configs.items()
        if MICRO_BATCH_TOKENS not in dotted(recipe.arms[arm])
    }
    size, sizes = AUTO_SETTINGS[MICRO_BATCH_TOKENS].values[0], list[int]()
    if not unsplit_configs:
        return [size]
    say(f"{MICRO_BATCH_TOKENS}: auto: looking for the longest sequence of {', '.join(unsplit_configs)}")
    lengths = find_longest_sequences(unsplit_configs)
    min_tokens = max(microbatch_size(configs[arm]) * length for arm, length in lengths.items())
    max_tokens = max(microbatch_size(unsplit_configs[arm]) * length for arm, length in lengths.items())
    while size >= MIN_TOKENS:
        sizes.append(min(max(size, min_tokens), max_tokens))
        size //= 2
    return list(dict.fromkeys(sizes))


# --- what fits ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Candidate values and what is known about the arms' memory peaks with them."""

    values: Values
    device_bytes: int
    peaks: dict[str, dict[str, Any]]  # predicted, by arm
    error: float  # relative error by which a prediction may be too low
    measured: dict[str, Any] | None = None  # for the arm with the highest prediction

    @property
    def highest_peak(self) -> tuple[str, int]:
        """Arm with the highest predicted peak, and its bytes, including a sleeping engine."""
        total_bytes = {arm: peak["peak_bytes"] + peak["asleep_bytes"] for arm, peak in self.peaks.items()}
        return max(total_bytes.items(), key=lambda item: item[1])

    @property
    def margin(self) -> float:
        """Share of device memory to keep free."""
        return MEASURED_MARGIN if self.measured else self.error

    @property
    def ran_out(self) -> bool:
        return self.measured is not None and self.measured["out_of_memory"] is not None

    @property
    def fits(self) -> bool:
        used_bytes = self.highest_peak[1]
        if self.measured:
            used_bytes = self.measured["peak_bytes"] + self.peaks[self.measured["arm"]]["asleep_bytes"]
        return not self.ran_out and used_bytes <= (1 - self.margin) * self.device_bytes

    @property
    def is_hopeless(self) -> bool:
        """True if memory ran out, or would even if the prediction is too high."""
        return self.ran_out or (
            not self.measured and self.highest_peak[1] * (1 - MAX_ERROR) > self.device_bytes
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "fits": self.fits,
            "highest_bytes": self.highest_peak[1],
            "peaks": self.peaks,
            "measured": self.measured,
        }


class _CandidateSearch:
    """Search for the preferred candidate that fits, with all trials so far."""

    def __init__(
        self, recipe: Recipe | CommandRecipe, request: Reason, device_bytes: int, say: Say, *, measures: bool
    ) -> None:
        self._recipe, self._request, self._say, self._can_measure = recipe, request, say, measures
        self._device_bytes = device_bytes
        self._tried: dict[str, _Trial] = {}  # by formatted values

    @property
    def tried(self) -> list[_Trial]:
        """Trials in order."""
        return list(self._tried.values())

    def choose(self, groups: Sequence[Sequence[Values]]) -> _Trial:
        """Return the first candidate that fits, or else the one with the least memory; measured if possible.

        If the last candidate of a group does not fit, the rest of the group is skipped.
        """
        for group in groups:
            if (preferred := self._try_values(group[0])).fits:
                return preferred
            if len(group) > 1 and self._predict(group[-1]).fits:
                for values in group[1:]:
                    if (trial := self._try_values(values)).fits:
                        return trial
        smallest = self._predict(groups[-1][-1])
        return self._measure(smallest) if self._can_measure and not smallest.is_hopeless else smallest

    def _try_values(self, values: Values) -> _Trial:
        trial = self._predict(values)
        return self._measure(trial) if trial.fits and self._can_measure else trial

    def _predict(self, values: Values) -> _Trial:
        if (name := _format_values(values)) not in self._tried:
            configs = _open_arm_configs(self._recipe, values)
            self._report(f"predicting the peaks of {', '.join(configs)} with {name}")
            predictions = predict_steps(configs, self._device_bytes)
            self._tried[name] = _Trial(
                values=values,
                device_bytes=self._device_bytes,
                peaks=_peaks_as_json(predictions),
                error=max(prediction.max_underestimate for prediction in predictions),
            )
        return self._tried[name]

    def _measure(self, trial: _Trial) -> _Trial:
        """Measure one step of the arm with the highest peak, in separate processes."""
        if trial.measured:
            return trial
        arm, name = trial.highest_peak[0], _format_values(trial.values)
        size = {key: trial.peaks[arm][key] for key in ("length", "num_sequences")}
        job = {**size, "rollouts": False, "budget_bytes": self._device_bytes}
        self._report(f"measuring a step of {arm} with {name}")
        config = _open_arm_configs(self._recipe, trial.values)[arm]
        try:
            with scratch_folder() as folder:
                cell, _ = measure_cell(folder / arm, arm, Point(**size), config, job)
        except LaunchError as error:
            raise LaunchError(
                Code.AUTO_NOT_MEASURED(
                    asked=self._request,
                    arm=arm,
                    values=name,
                    error=error.reason,
                    instead=_format_alternatives(self._recipe.auto_keys),
                )
            ) from None
        measured = {
            "arm": arm,
            "phase": cell.out_of_memory or cell.highest_peak[0],
            "peak_bytes": cell.highest_peak[1],
            "reserved_bytes": cell.reserved_bytes,
            "out_of_memory": cell.out_of_memory,
        }
        self._tried[name] = replace(trial, measured=measured)
        return self._tried[name]

    def _report(self, activity: str) -> None:
        self._say(f"{', '.join(self._recipe.auto_keys)}: auto: {activity}")


def _peaks_as_json(predictions: Iterable[PeakPrediction]) -> dict[str, dict[str, Any]]:
    return {
        prediction.arm: {
            "num_sequences": prediction.point.num_sequences,
            "length": prediction.point.length,
            "phase": prediction.highest_peak[0],
            "peak_bytes": prediction.highest_peak[1],
            "asleep_bytes": prediction.asleep_bytes,
        }
        for prediction in predictions
    }


# --- messages ---


def _format_values(values: Values) -> str:
    """Format values as in a recipe, in the order of its open keys."""
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values.values())


def _format_alternatives(keys: Iterable[str]) -> str:
    return "; ".join(f"{key} {AUTO_SETTINGS[key].instead}" for key in keys)


def _describe_trials(trials: Sequence[_Trial]) -> str:
    """Return the predicted peaks of the last trials.

    For example `predicted peaks 151.2 GiB (baseline), 60.1 GiB (treatment) with none; 95.0 ...`.
    """
    count_text = f" of the last {MAX_LISTED} of {len(trials)} tried:" if len(trials) > MAX_LISTED else ""
    return f"predicted peaks{count_text} " + "; ".join(map(_describe_trial, trials[-MAX_LISTED:]))


def _describe_trial(trial: _Trial) -> str:
    peaks = (f"{peak['peak_bytes'] / GIB:.1f} GiB ({arm})" for arm, peak in trial.peaks.items())
    text = f"{', '.join(peaks)} with {_format_values(trial.values)}"
    if measured := trial.measured:
        ran_out = f"out of memory in {measured['phase']} after " * trial.ran_out
        text += f" (measured: {ran_out}{measured['peak_bytes'] / GIB:.1f} GiB, {measured['arm']})"
    return text


def _read_decided_values(experiment_dir: Path, keys: Sequence[str]) -> Values:
    """Return the values that an experiment was launched with."""
    recipe = open_experiment(experiment_dir).get("recipe", {})
    sections = {section: recipe.get(section) or {} for section in ("policy", "cluster")}
    stored, values = dotted(sections), Values()
    for key in keys:
        value = stored.get(key)
        if value is None or value == "auto":
            raise LaunchError(
                Code.RESUME_VALUE_NOT_AUTO(
                    directory=experiment_dir, field=key, got=value, instead=AUTO_SETTINGS[key].instead
                )
            )
        values[key] = value
    return values
