"""What a recipe leaves open by `auto`: the values that take the least time with which every arm fits.

Decided once and together, before anything is stored, and the same for all arms that do not state values of
their own: by predicted peaks, and where the launch's GPUs are this machine's, by one step that is measured.
What a launch hands on, a plan and what is stored of it, has the values in their places. docs/training.md has
the order of preference.
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
from abrun.launch.prepare import experiment_dir_of, refuse_existing, refuse_impossible
from abrun.memory.cells import GIB, Point
from abrun.memory.predict import (
    ERROR,
    Predicted,
    device_memory,
    longest_sequences,
    predict_steps,
    scratch,
)
from abrun.memory.profile import measured_cell
from abrun.memory.sweep import microbatch_size
from abrun.reasons import Code, Reason
from abrun.recipe.experiment import AUTO_SETTINGS, CHECKPOINTING, MICRO_BATCH_TOKENS, CommandRecipe, Recipe
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig
from abrun.runs.experiment import open_experiment

ASLEEP_BYTES = GIB // 4  # of vLLM on the same device, while the trainer works (docs/measured.md)
LEAST_TOKENS = 1024  # of a microbatch: below, weights and their optimizer take what there is
# Of a device: what a measured peak leaves free, to fragmentation and to what is not torch's.
MEASURED_MARGIN = 0.05
MOST_TOLD = 3  # candidates of a line

Say = Callable[[str], object]
Values = dict[str, Any]  # by dotted key
Decisions = dict[str, dict[str, Any]]  # by dotted key, as experiment.json keeps them


def closed_plan(
    recipe: Recipe | CommandRecipe,
    draft: ExperimentPlan,
    options: LaunchOptions,
    refusals: Callable[[ExperimentPlan], list[Reason]],
    *,
    here: bool,
    dry_run: bool = False,
    say: Say = lambda line: None,
) -> ExperimentPlan:
    """Return a recipe's plan with what it leaves open decided: its `draft`, if that is nothing.

    `here`: it runs on this machine.

    To resume, it is what the first launch decided. Raises RecipeError or LaunchError where nothing can be
    decided or fits; but for a dry run also, before that takes minutes, by `refusals` and for what is in the
    experiment's place, which a launch asks of the plan in any case.
    """
    asked_memory = options.device_memory
    if asked_memory is not None:
        device_memory(asked_memory)  # refused at once, also where it decides nothing
    if not recipe.auto_keys:
        if asked_memory is not None and not dry_run:
            raise RecipeError(Code.DEVICE_MEMORY_WITHOUT_USE(keys=[*AUTO_SETTINGS]))
        return draft
    experiment_dir = experiment_dir_of(recipe.name, options)
    if options.resume:
        return make_plan(recipe.with_auto_values(_decided_before(experiment_dir, recipe.auto_keys)))
    if not dry_run:
        refuse_impossible(draft, refusals(draft))
        refuse_existing(experiment_dir)
    decided = decide(recipe, asked_memory, here=here, dry_run=dry_run, say=say)
    plan = make_plan(recipe.with_auto_values({key: one["value"] for key, one in decided.items()}))
    return replace(plan, decided=decided)


def decide(
    recipe: Recipe | CommandRecipe,
    asked_memory: str | None,
    *,
    here: bool,
    dry_run: bool = False,
    say: Say = lambda line: None,
) -> Decisions:
    """What an open recipe's values become, and why; `here`: its devices are this machine's."""
    keys, configs = recipe.auto_keys, _open_configs(recipe, {})
    asked = Code.AUTO_ASKED(recipe=recipe.name, fields=[*keys])
    if not configs:
        values = {key: AUTO_SETTINGS[key].values[0] for key in keys}
        why = (
            f"auto is {_shown(values)}: no arm that leaves it open trains on GPUs, whose memory could run out"
        )
        return _decisions(values, why=why, device_bytes=None, measured=False, candidates=[])
    _refuse_unpredictable(asked, keys, configs)
    own_bytes = device_memory(None) if here else None
    device_bytes = own_bytes if asked_memory is None else device_memory(asked_memory)
    if device_bytes is None:
        raise LaunchError(Code.AUTO_NEEDS_DEVICE_MEMORY(asked=asked, here=here, instead=_instead(keys)))
    not_measured = _not_measured(own_bytes, device_bytes, here=here, dry_run=dry_run)
    trials = _Trials(recipe, asked, device_bytes, say, measures=not_measured is None)
    last = trials.chosen(_groups(recipe, configs, say))
    has = f"and a device has {device_bytes / GIB:.1f} GiB"
    if last.is_hopeless:
        raise LaunchError(
            Code.AUTO_FITS_NOWHERE(asked=asked, tried=_told([last]), device_gib=device_bytes / GIB)
        )
    candidates = [*(one for one in trials.tried if one is not last), last]
    left = f", of which {last.margin:.0%} stay free"
    if not last.fits:
        left = f": nothing leaves {last.margin:.0%} of it free, and runs may run out of memory"
    return _decisions(
        last.values,
        why=f"auto is {_shown(last.values)}: {_told(candidates)}, {has}{left}"
        + (f"; predicted alone: {not_measured}" if not_measured else ""),
        device_bytes=device_bytes,
        margin=last.margin,
        measured=not_measured is None,
        candidates=[one.as_json() for one in candidates],
    )


def _decisions(values: Values, **alike: Any) -> Decisions:
    return {key: {"asked": "auto", "value": value, **alike} for key, value in values.items()}


def _open_configs(recipe: Recipe | CommandRecipe, values: Values) -> dict[str, OwnRunConfig]:
    """Of the arms on GPUs that have a value of the recipe's, and not all of their own."""
    closed, configs = recipe.with_auto_values(values), dict[str, OwnRunConfig]()
    for arm, change in recipe.arms.items():
        config = closed.run_config(arm)
        if isinstance(config, OwnRunConfig) and config.cluster.gpus_per_node:
            has = dotted(config.model_dump()).keys() - dotted(change).keys()
            configs |= {arm: config} if has.intersection(recipe.auto_keys) else {}
    return configs


def _refuse_unpredictable(asked: Reason, keys: Iterable[str], configs: Mapping[str, OwnRunConfig]) -> None:
    for arm, config in configs.items():
        if config.policy.backend.type != "dtensor":
            backend = config.policy.backend.type
            raise LaunchError(
                Code.AUTO_BACKEND_NOT_PREDICTED(asked=asked, arm=arm, backend=backend, instead=_instead(keys))
            )
        wrong = triton_refusal(on_gpu=True) if config.policy.logprobs.impl == "triton" else None
        if wrong:  # said here, before another arm has been predicted
            raise LaunchError(Code.AUTO_NOT_PREDICTED(asked=asked, arm=arm, problem=wrong))


def _not_measured(own_bytes: int | None, device_bytes: int, *, here: bool, dry_run: bool) -> str | None:
    """Why no step is measured; None: one is."""
    if dry_run:
        return "a dry run measures nothing"
    if not here:
        return "the GPUs are a cluster's"
    if own_bytes is None:
        return "this machine has no GPU"
    return None if device_bytes <= own_bytes else "a GPU of this machine has less"


# --- the order of preference ---


def _groups(
    recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig], say: Say
) -> list[list[Values]]:
    """The candidates, the preferred first; in a group the last one takes the least memory."""
    closed = recipe.with_auto_values()
    of_arms = (closed.run_config(arm) for arm in recipe.arms if CHECKPOINTING not in dotted(recipe.arms[arm]))
    compiled = isinstance(recipe, Recipe) and recipe.policy.compile  # on CPU cores, too: it is refused there
    compiled = compiled and all(one.policy.compile for one in of_arms if isinstance(one, OwnRunConfig))
    choices = {key: AUTO_SETTINGS[key].values for key in recipe.auto_keys}
    if CHECKPOINTING in choices and not compiled:
        choices[CHECKPOINTING] = tuple(one for one in choices[CHECKPOINTING] if one != "selective")
    fewer: list[int] = []
    if MICRO_BATCH_TOKENS in choices:
        budgets = _budgets(recipe, configs, say)
        fast = [one for one in budgets if one >= min(choices[MICRO_BATCH_TOKENS])] or budgets[:1]
        choices[MICRO_BATCH_TOKENS], fewer = tuple(fast), budgets[len(fast) :]
    every = [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]
    groups = [list(of) for _, of in itertools.groupby(every, lambda values: values.get(CHECKPOINTING))]
    last = [{**every[-1], MICRO_BATCH_TOKENS: budget} for budget in fewer]
    return [*groups, last] if last else groups


def _budgets(recipe: Recipe | CommandRecipe, configs: Mapping[str, OwnRunConfig], say: Say) -> list[int]:
    """Tokens of a microbatch, from what is fast downwards by halves: the longest sequence of all arms at the
    least, and at most a rank's share of an update."""
    whole = {
        arm: config.model_copy(
            update={"policy": config.policy.model_copy(update={"micro_batch_tokens": None})}
        )
        for arm, config in configs.items()
        if MICRO_BATCH_TOKENS not in dotted(recipe.arms[arm])
    }
    size, sizes = AUTO_SETTINGS[MICRO_BATCH_TOKENS].values[0], list[int]()
    if not whole:
        return [size]
    say(f"{MICRO_BATCH_TOKENS}: auto: looking for the longest sequence of {', '.join(whole)}")
    lengths = longest_sequences(whole)
    least = max(microbatch_size(configs[arm]) * length for arm, length in lengths.items())
    most = max(microbatch_size(whole[arm]) * length for arm, length in lengths.items())
    while size >= LEAST_TOKENS:
        sizes.append(min(max(size, least), most))
        size //= 2
    return list(dict.fromkeys(sizes))


# --- what fits ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Values, and what is known of the arms' peaks with them."""

    values: Values
    device_bytes: int
    peaks: dict[str, dict[str, Any]]  # predicted, by arm
    error: float  # of these: by how much they may be too low
    measured: dict[str, Any] | None = None  # of the arm with the highest

    @property
    def highest(self) -> tuple[str, int]:
        """The arm with the highest peak predicted, and bytes, those of an engine that sleeps included."""
        each = {arm: one["peak_bytes"] + one["asleep_bytes"] for arm, one in self.peaks.items()}
        return max(each.items(), key=lambda item: item[1])

    @property
    def margin(self) -> float:
        """What of a device is to be left free."""
        return MEASURED_MARGIN if self.measured else self.error

    @property
    def ran_out(self) -> bool:
        return self.measured is not None and self.measured["out_of_memory"] is not None

    @property
    def fits(self) -> bool:
        taken = self.highest[1]
        if self.measured:
            taken = self.measured["peak_bytes"] + self.peaks[self.measured["arm"]]["asleep_bytes"]
        return not self.ran_out and taken <= (1 - self.margin) * self.device_bytes

    @property
    def is_hopeless(self) -> bool:
        """Whether memory ran out, or would even if the prediction is too high."""
        return self.ran_out or (not self.measured and self.highest[1] * (1 - ERROR) > self.device_bytes)

    def as_json(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "fits": self.fits,
            "highest_bytes": self.highest[1],
            "peaks": self.peaks,
            "measured": self.measured,
        }


class _Trials:
    """What was tried of a recipe's candidates."""

    def __init__(
        self, recipe: Recipe | CommandRecipe, asked: Reason, device_bytes: int, say: Say, *, measures: bool
    ) -> None:
        self._recipe, self._asked, self._say, self._measures = recipe, asked, say, measures
        self._device_bytes = device_bytes
        self._tried: dict[str, _Trial] = {}  # by the values, as they are shown

    @property
    def tried(self) -> list[_Trial]:
        """In their order."""
        return list(self._tried.values())

    def chosen(self, groups: Sequence[Sequence[Values]]) -> _Trial:
        """The first that fits, measured where that is possible; where none does, the one of the least memory.

        Where a group's least does not fit, the others of it are not asked.
        """
        for group in groups:
            if (first := self._confirmed(group[0])).fits:
                return first
            if len(group) > 1 and self._predicted(group[-1]).fits:
                for values in group[1:]:
                    if (trial := self._confirmed(values)).fits:
                        return trial
        last = self._predicted(groups[-1][-1])
        return self._measured(last) if self._measures and not last.is_hopeless else last

    def _confirmed(self, values: Values) -> _Trial:
        trial = self._predicted(values)
        return self._measured(trial) if trial.fits and self._measures else trial

    def _predicted(self, values: Values) -> _Trial:
        if (name := _shown(values)) not in self._tried:
            configs = _open_configs(self._recipe, values)
            self._tell(f"predicting the peaks of {', '.join(configs)} with {name}")
            found = predict_steps(configs, self._device_bytes)
            self._tried[name] = _Trial(
                values=values,
                device_bytes=self._device_bytes,
                peaks=_peaks(found),
                error=max(one.error_below for one in found),
            )
        return self._tried[name]

    def _measured(self, trial: _Trial) -> _Trial:
        """With one step of the arm with the highest peak, in processes of its own."""
        if trial.measured:
            return trial
        arm, name = trial.highest[0], _shown(trial.values)
        size = {key: trial.peaks[arm][key] for key in ("length", "num_sequences")}
        job = {**size, "rollouts": False, "budget_bytes": self._device_bytes}
        self._tell(f"measuring a step of {arm} with {name}")
        config = _open_configs(self._recipe, trial.values)[arm]
        try:
            with scratch() as folder:
                cell, _ = measured_cell(folder / arm, arm, Point(**size), config, job)
        except LaunchError as error:
            raise LaunchError(
                Code.AUTO_NOT_MEASURED(
                    asked=self._asked,
                    arm=arm,
                    values=name,
                    error=error.reason,
                    instead=_instead(self._recipe.auto_keys),
                )
            ) from None
        found = {
            "arm": arm,
            "phase": cell.out_of_memory or cell.reached[0],
            "peak_bytes": cell.reached[1],
            "reserved_bytes": cell.reserved_bytes,
            "out_of_memory": cell.out_of_memory,
        }
        self._tried[name] = replace(trial, measured=found)
        return self._tried[name]

    def _tell(self, doing: str) -> None:
        self._say(f"{', '.join(self._recipe.auto_keys)}: auto: {doing}")


def _peaks(found: Iterable[Predicted]) -> dict[str, dict[str, Any]]:
    return {
        one.arm: {
            "num_sequences": one.point.num_sequences,
            "length": one.point.length,
            "phase": one.highest[0],
            "peak_bytes": one.highest[1],
            "asleep_bytes": 0 if one.engine_bytes is None else ASLEEP_BYTES,
        }
        for one in found
    }


# --- in words ---


def _shown(values: Values) -> str:
    """As a recipe would have them, in the order of its open keys."""
    return ", ".join(one if isinstance(one, str) else json.dumps(one) for one in values.values())


def _instead(keys: Iterable[str]) -> str:
    return "; ".join(f"{key} {AUTO_SETTINGS[key].instead}" for key in keys)


def _told(trials: Sequence[_Trial]) -> str:
    """`predicted peaks 151.2 GiB (baseline), 60.1 GiB (treatment) with none; 95.0 ...`, of the last ones."""
    of = f" of the last {MOST_TOLD} of {len(trials)} tried:" if len(trials) > MOST_TOLD else ""
    return f"predicted peaks{of} " + "; ".join(map(_told_of_one, trials[-MOST_TOLD:]))


def _told_of_one(trial: _Trial) -> str:
    each = (f"{peak['peak_bytes'] / GIB:.1f} GiB ({arm})" for arm, peak in trial.peaks.items())
    said = f"{', '.join(each)} with {_shown(trial.values)}"
    if found := trial.measured:
        ran_out = f"out of memory in {found['phase']} after " * trial.ran_out
        said += f" (measured: {ran_out}{found['peak_bytes'] / GIB:.1f} GiB, {found['arm']})"
    return said


def _decided_before(experiment_dir: Path, keys: Sequence[str]) -> Values:
    """What an experiment was launched with."""
    recipe = open_experiment(experiment_dir).get("recipe", {})
    stored, values = dotted({"policy": recipe.get("policy") or {}}), Values()
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
