"""Resolves `auto` values of a recipe to the fastest values with which every arm fits into memory.

They are decided once, before anything is stored, and are the same for all arms without own values. The
decision uses predicted peaks, and one measured step if the launch uses this machine's GPUs. The plan and
what is stored hold the decided values. docs/explanation/memory-prediction.md has their order.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.experiment.preflight.machine import usable_cores
from abrun.experiment.preflight.settings import triton_refusal
from abrun.launch.memory.profile import GIB
from abrun.launch.prepare import refuse_existing, refuse_impossible, resolve_experiment_dir
from abrun.messages.numbers import count_text, listed, percent_text
from abrun.recipe.experiment import (
    AUTO_SETTINGS,
    CHECKPOINTING,
    MICRO_BATCH_TOKENS,
    CommandRecipe,
    Recipe,
)
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig, microbatch_size, share_of_device
from abrun.runs.experiment import open_experiment
from abrun.tools.predict.facts import Answer
from abrun.tools.predict.peaks import (
    MAX_ERROR,
    PeakPrediction,
    ask_step,
    make_prediction,
    query_gpus,
    resolve_device_memory,
)
from abrun.tools.predict.probes import Probe, ProbePool, ask_longest, ask_measured

# Smallest micro-batch: below it, weights and optimizer state take nearly all memory.
MIN_TOKENS = 1024
MAX_LISTED = 3  # candidates in a message

# Rough seconds of a decision's parts on a GPU's host, for its announcement
IMPORTS_S, PREDICTION_S, MEASUREMENT_S = 6, 12, 15

Say = Callable[[str], object]
Decisions = dict[str, dict[str, Any]]  # by dotted key, as experiment.json keeps them


def resolve_auto(
    recipe: Recipe | CommandRecipe,
    draft: ExperimentPlan,
    options: LaunchOptions,
    find_problems: Callable[[ExperimentPlan], list[str]],
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
            raise RecipeError(
                f"--device-memory: requires --dry-run, or auto for one of {listed([*AUTO_SETTINGS])}; add "
                "one of them, or drop it"
            )
        return draft
    experiment_dir = resolve_experiment_dir(recipe.name, options)
    if options.resume:
        return make_plan(recipe.with_auto_values(_read_decided_values(experiment_dir, recipe.auto_keys)))
    if not dry_run:
        refuse_impossible(draft, find_problems(draft))
        refuse_existing(experiment_dir)
    decided = decide_values(recipe, requested_memory, is_local=is_local, dry_run=dry_run, say=say)
    values = {key: decision["value"] for key, decision in decided.items()}
    return replace(make_plan(recipe.with_auto_values(values)), decided=decided)


def decide_values(
    recipe: Recipe | CommandRecipe,
    requested_memory: str | None,
    *,
    is_local: bool,
    dry_run: bool = False,
    say: Say = lambda line: None,
) -> Decisions:
    """Return the decided value of each open key, and why. `is_local`: the plan runs on this machine."""
    keys, configs = recipe.auto_keys, _open_arm_configs(recipe, {})
    request = f"{recipe.name}: {', '.join(keys)}: got 'auto'"
    if not configs:
        values = {key: AUTO_SETTINGS[key].values[0] for key in keys}
        explanation = f"auto resolves to {format_values(values)}: no arm with an open value trains on GPUs"
        return _make_decisions(values, why=explanation, device_bytes=None, measured=False, candidates=[])
    _refuse_unpredictable(request, keys, configs)
    own_bytes = resolve_device_memory(None) if is_local else None
    device_bytes = own_bytes if requested_memory is None else resolve_device_memory(requested_memory)
    if device_bytes is not None:
        device_bytes = share_of_device(device_bytes, recipe.cluster.runs_per_gpu)
    if device_bytes is None:
        is_local_text = "this machine has no GPU" if is_local else "the cluster's GPUs are unknown here"
        raise LaunchError(
            f"{request}, but {is_local_text}; add --device-memory with the memory of one, such as 80GiB or "
            f"h200, or give values: {_format_alternatives(keys)}"
        )
    why_not_measured = _reason_not_to_measure(own_bytes, device_bytes, is_local=is_local, dry_run=dry_run)
    candidates = _search(recipe, request, configs, device_bytes, measures=why_not_measured is None, say=say)
    choice = candidates[-1]
    memory_text = f"and a device has {device_bytes / GIB:.1f} GiB"
    if choice.is_hopeless:
        raise LaunchError(
            f"{request}, but nothing fits: {_describe_trials([choice])}, and a device has "
            f"{device_bytes / GIB:.1f} GiB; use smaller micro-batches (policy.micro_batch_tokens or "
            "micro_batch_size), more ranks, more of policy.backend's parallelism or a fused "
            "policy.logprobs.impl"
        )
    free = percent_text(choice.margin)
    margin_text = f": nothing leaves {free} of it free, and runs may run out of memory"
    if choice.fits:
        margin_text = f", of which {free} stay free"
    return _make_decisions(
        choice.values,
        why=f"auto resolves to {format_values(choice.values)}: {_describe_trials(candidates)}"
        + f", {memory_text}{margin_text}"
        + (f"; predicted, not measured: {why_not_measured}" if why_not_measured else ""),
        device_bytes=device_bytes,
        margin=choice.margin,
        measured=why_not_measured is None,
        candidates=[trial.as_json() for trial in candidates],
    )


# Search for the preferred candidate of `auto` values that fits into memory.
#
# The rule asks one question after the other; the predictions of all candidates run side by side meanwhile. A
# step is measured alone, because it compiles on all cores.

# Share of device memory kept free above a measured peak, for fragmentation and memory outside of torch.
MEASURED_MARGIN = 0.05

Values = dict[str, Any]  # by dotted key


class NotMeasured(Exception):
    """Error of a measured step."""

    def __init__(self, arm: str, values: Values, error: LaunchError) -> None:
        super().__init__()
        self.arm, self.values, self.error = arm, values, error


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
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


class CandidateSearch:
    """Search over groups of candidates. `measured_gpus`: descriptions of the GPUs that measure a step, or
    None if no step is measured. `longest`: answers about the longest sequence, by arm.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Values]],
        make_configs: Callable[[Values], Mapping[str, OwnRunConfig]],
        longest: Mapping[str, Answer],
        device_bytes: int,
        measured_gpus: Sequence[str] | None,
        pool: ProbePool,
    ) -> None:
        self._groups, self._device_bytes, self._pool = groups, device_bytes, pool
        self._gpus, self._make_configs, self._longest = measured_gpus, make_configs, longest
        self._probes: dict[str, list[Probe]] = {}  # predictions by formatted values
        self._tried: dict[str, Trial] = {}

    def run(self) -> list[Trial]:
        """Return the trials that led to the decision, in order; the last one is the choice.

        Without a candidate that fits this is the one with the least memory, measured if possible. Raises
        LaunchError or NotMeasured.
        """
        choice = self._decide()
        return [*(trial for trial in self._tried.values() if trial is not choice), choice]

    def _decide(self) -> Trial:
        """Return the first candidate that fits, in order of preference, or the one with the least memory."""
        for first, *others in self._groups:
            if (trial := self._try(first)).fits:
                return trial
            # A group's last candidate needs the least memory: if it does not fit, no other does.
            for values in others if others and self._predict(others[-1]).fits else ():
                if (trial := self._try(values)).fits:
                    return trial
        smallest = self._predict(self._groups[-1][-1])
        return smallest if self._gpus is None or smallest.is_hopeless else self._measure(smallest)

    def _try(self, values: Values) -> Trial:
        """Return a candidate's trial, measured if it is predicted to fit and can be."""
        trial = self._predict(values)
        return self._measure(trial) if trial.fits and self._gpus is not None else trial

    def _predict(self, values: Values) -> Trial:
        if (name := format_values(values)) not in self._tried:
            probes = self._ask_predicted(values)
            futures = [self._pool.ask(probe) for probe in probes]
            if not all(future.done() for future in futures):
                self._start_others()
            predictions = [
                make_prediction(probe.arm, probe.config, future.result(), self._device_bytes)
                for probe, future in zip(probes, futures, strict=True)
            ]
            self._tried[name] = Trial(
                values=values,
                device_bytes=self._device_bytes,
                peaks=_peaks_as_json(predictions),
                error=max(prediction.max_underestimate for prediction in predictions),
            )
        return self._tried[name]

    def _ask_predicted(self, values: Values) -> list[Probe]:
        if (name := format_values(values)) not in self._probes:
            configs = self._make_configs(values)
            self._probes[name] = [ask_step(arm, configs[arm], self._longest[arm]) for arm in configs]
        return self._probes[name]

    def _start_others(self) -> None:
        """Start the predictions of the candidates that are not tried yet, in the order of the rule."""
        for group in self._groups:
            for values in (group[0], group[-1], *group[1:-1]):
                for probe in () if format_values(values) in self._tried else self._ask_predicted(values):
                    self._pool.ask(probe)

    def _measure(self, trial: Trial) -> Trial:
        """Return the trial with one measured step of the arm with the highest peak."""
        if trial.measured:
            return trial
        name, arm = format_values(trial.values), trial.highest_peak[0]
        predicted = next(probe for probe in self._ask_predicted(trial.values) if probe.arm == arm)
        (length,), num_sequences = predicted.job["lengths"], predicted.job["num_sequences"]
        measured = ask_measured(
            arm, predicted.config, length, num_sequences, self._device_bytes, gpus=self._gpus or ()
        )
        self._pool.cancel()
        try:
            answer = self._pool.ask(measured).result()
        except LaunchError as error:
            raise NotMeasured(arm, trial.values, error) from None
        self._tried[name] = trial = replace(trial, measured={"arm": arm, **answer})
        return trial


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


def format_values(values: Values) -> str:
    """Format values as in a recipe, in the order of its open keys."""
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in values.values())


def _search(
    recipe: Recipe | CommandRecipe,
    request: str,
    configs: Mapping[str, OwnRunConfig],
    device_bytes: int,
    *,
    measures: bool,
    say: Say,
) -> list[Trial]:
    """Return the trials of the search, the choice last; say what it costs, and what came of it."""
    started_s = time.monotonic()

    def begin() -> None:
        say(_announce(recipe, configs, measures=measures))

    with ProbePool(on_start=begin) as pool:
        answers = pool.answer_all([ask_longest(arm, config) for arm, config in configs.items()])
        longest = dict(zip(configs, answers, strict=True))
        search = CandidateSearch(
            _group_candidates(recipe, configs, longest),
            partial(_open_arm_configs, recipe),
            longest,
            device_bytes,
            query_gpus("name,memory.total,driver_version") if measures else None,
            pool,
        )
        try:
            trials = search.run()
        except NotMeasured as failure:
            raise LaunchError(
                f"{request}, but a step of arms.{failure.arm} with {format_values(failure.values)} could not "
                f"be measured: {failure.error}; or give values: {_format_alternatives(recipe.auto_keys)}"
            ) from None
        when = f"in {time.monotonic() - started_s:.0f} s"
        if not pool.has_started:
            when = f"by answers of {max(pool.days.values())}"
    basis = "measured" if trials[-1].measured else "predicted"
    values = ", ".join(f"{key}={json.dumps(value)}" for key, value in trials[-1].values.items())
    say(f"auto: {values}: {basis}, {when}")
    return trials


def _announce(recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig], *, measures: bool) -> str:
    """Return what is decided, and at most how many predictions it takes."""
    choices = {key: len(AUTO_SETTINGS[key].values) for key in recipe.auto_keys}
    num_groups = choices.pop(CHECKPOINTING, 1)
    num_candidates = 2 * (num_groups - 1) + math.prod(choices.values())
    num_predictions = num_candidates * len(configs)
    cost_s = IMPORTS_S + PREDICTION_S * math.ceil(num_predictions / usable_cores()) + MEASUREMENT_S * measures
    return (
        f"auto: deciding {', '.join(recipe.auto_keys)}: up to {count_text(num_predictions, 'prediction')}"
        f"{' and a measured step' * measures}, about {cost_s} s"
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


def _refuse_unpredictable(request: str, keys: Iterable[str], configs: Mapping[str, OwnRunConfig]) -> None:
    for arm, config in configs.items():
        if config.policy.backend.type != "dtensor":
            backend = config.policy.backend.type
            raise LaunchError(
                f"{request}, but the memory of arms.{arm} cannot be predicted with policy.backend.type "
                f"{backend!r}; give values: {_format_alternatives(keys)}"
            )
        problem = triton_refusal(on_gpu=True) if config.policy.logprobs.impl == "triton" else None
        if problem:  # reported before predictions take time
            raise LaunchError(f"{request}, but the memory of arms.{arm} cannot be predicted here: {problem}")


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
    recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig], longest: Mapping[str, Answer]
) -> list[list[Values]]:
    """Return the candidates in order of preference; the last one of each group needs the least memory."""
    closed = recipe.with_auto_values()
    arm_configs = [
        closed.run_config(arm) for arm in recipe.arms if CHECKPOINTING not in dotted(recipe.arms[arm])
    ]
    own_configs = [config for config in arm_configs if isinstance(config, OwnRunConfig)]
    compiled = isinstance(recipe, Recipe) and recipe.policy.compile  # on CPU cores, too: it is refused there
    compiled = compiled and all(config.policy.compile for config in own_configs)
    choices = {key: AUTO_SETTINGS[key].values for key in recipe.auto_keys}
    if CHECKPOINTING in choices and not compiled:
        choices[CHECKPOINTING] = tuple(option for option in choices[CHECKPOINTING] if option != "selective")
    small_budgets: list[int] = []
    if MICRO_BATCH_TOKENS in choices:
        budgets = _list_token_budgets(recipe, configs, longest)
        num_fast = sum(budget >= min(choices[MICRO_BATCH_TOKENS]) for budget in budgets) or 1
        choices[MICRO_BATCH_TOKENS], small_budgets = tuple(budgets[:num_fast]), budgets[num_fast:]
    candidates = [
        dict(zip(choices, combination, strict=True)) for combination in itertools.product(*choices.values())
    ]
    groups = [
        list(group) for _, group in itertools.groupby(candidates, lambda values: values.get(CHECKPOINTING))
    ]
    last_group = [{**candidates[-1], MICRO_BATCH_TOKENS: budget} for budget in small_budgets]
    return [*groups, last_group] if last_group else groups


def _list_token_budgets(
    recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig], longest: Mapping[str, Answer]
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
    lengths = {arm: longest[arm]["longest"] for arm in unsplit_configs}
    min_tokens = max(microbatch_size(configs[arm]) * length for arm, length in lengths.items())
    max_tokens = max(microbatch_size(unsplit_configs[arm]) * length for arm, length in lengths.items())
    while size >= MIN_TOKENS:
        sizes.append(min(max(size, min_tokens), max_tokens))
        size //= 2
    return list(dict.fromkeys(sizes))


# --- messages ---


def _format_alternatives(keys: Iterable[str]) -> str:
    return "; ".join(f"{key} {AUTO_SETTINGS[key].instead}" for key in keys)


def _describe_trials(trials: Sequence[Trial]) -> str:
    """Return the predicted peaks of the last trials.

    For example `predicted peaks 151.2 GiB (baseline), 60.1 GiB (treatment) with none; 95.0 ...`.
    """
    listed = f" of the last {MAX_LISTED} of {len(trials)} tried:" if len(trials) > MAX_LISTED else ""
    return f"predicted peaks{listed} " + "; ".join(map(_describe_trial, trials[-MAX_LISTED:]))


def _describe_trial(trial: Trial) -> str:
    peaks = (f"{peak['peak_bytes'] / GIB:.1f} GiB ({arm})" for arm, peak in trial.peaks.items())
    text = f"{', '.join(peaks)} with {format_values(trial.values)}"
    if measured := trial.measured:
        ran_out = f"out of memory in {measured['phase']} after " * trial.ran_out
        text += f" (measured: {ran_out}{measured['peak_bytes'] / GIB:.1f} GiB, {measured['arm']})"
    return text


def _read_decided_values(experiment_dir: Path, keys: Sequence[str]) -> Values:
    """Return the values that an experiment was launched with."""
    policy = open_experiment(experiment_dir).get("recipe", {}).get("policy") or {}
    stored, values = dotted({"policy": policy}), Values()
    for key in keys:
        value = stored.get(key)
        if value is None or value == "auto":
            raise LaunchError(
                f"{experiment_dir}: --resume: it was launched without {key} (got {value!r}), but this recipe "
                f"says auto; give the value that it was launched with: {AUTO_SETTINGS[key].instead}"
            )
        values[key] = value
    return values
