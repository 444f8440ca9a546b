"""From a recipe to the runs it asks for: which, in which order, and what exactly differs between the arms."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from abrun.errors import RecipeError
from abrun.recipe import BASELINE, CommandRun, Compare, Declared, Run, RunConfig, Sft, dotted


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RunName:
    """Which run of an experiment: `rerun` 0 is the run itself, j > 0 its j-th same-seed repetition (A/A)."""

    arm: str
    seed: int
    rerun: int = 0

    def __str__(self) -> str:
        return f"{self.arm}/seed-{self.seed}" + (f"-aa{self.rerun}" if self.rerun else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run to launch."""

    name: RunName
    config: RunConfig | CommandRun
    warm_start: str | None  # key into Plan.warm_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The runs of an experiment in launch order: by pair, so that the first pair finishes first."""

    recipe: Declared
    runs: tuple[RunSpec, ...]
    warm_starts: dict[str, RunConfig]  # hash -> the supervised run that makes the shared initial weights
    # arm -> dotted key -> (baseline's value, the arm's)
    treatment_diff: dict[str, dict[str, tuple[Any, Any]]]


def make_plan(recipe: Declared) -> Plan:
    """The plan of a recipe. Raises RecipeError where an arm does not differ from the baseline."""
    configs = {arm: recipe.run_config(arm) for arm in recipe.arms}
    treatments = [arm for arm in configs if arm != BASELINE]
    treatment_diff = {arm: config_diff(configs[BASELINE], configs[arm]) for arm in treatments}
    for arm, diff in treatment_diff.items():
        if not diff:
            raise RecipeError(
                f"{recipe.name}: arms.{arm}: got {recipe.arms[arm]}, which resolves to the baseline's "
                "configuration; change at least one value (controls.aa_reruns repeats the baseline)"
            )
        if any(key.split(".")[0] == "validation" for key in diff):
            raise RecipeError(
                f"{recipe.name}: arms.{arm}.validation: not the baseline's; all arms are validated alike: "
                "set validation outside of arms"
            )
    warm_starts: dict[str, RunConfig] = {}
    warm_start_of: dict[str, str | None] = {}
    for arm, config in configs.items():
        warm_start_of[arm] = None
        if isinstance(config, RunConfig) and config.warm_start:
            shared = _warm_start_run(configs[BASELINE], config)
            key = _sha256(shared.model_dump(mode="json"))[:16]
            warm_starts[key] = shared
            warm_start_of[arm] = key
    names = [
        RunName(arm=arm, seed=seed, rerun=rerun)
        for index, seed in enumerate(recipe.seeds)
        for arm, rerun in [
            *((arm, 0) for arm in (BASELINE, *treatments)),
            *((BASELINE, 1 + j) for j in range(_reruns_of(index, recipe))),
        ]
    ]
    return Plan(
        recipe=recipe,
        runs=tuple(
            RunSpec(name=name, config=configs[name.arm], warm_start=warm_start_of[name.arm]) for name in names
        ),
        warm_starts=warm_starts,
        treatment_diff=treatment_diff,
    )


def config_diff(base: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Every dotted key whose resolved value differs, with both values."""
    left, right = dotted(base.model_dump(mode="json")), dotted(other.model_dump(mode="json"))
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def compare_hash(compare: Compare) -> str:
    """Identifies the declared comparison, so that a later change can be called post hoc.

    Defaults are left out: a field that abrun gains does not change what was declared before.
    """
    return _sha256(compare.model_dump(mode="json", exclude_defaults=True))


def _reruns_of(index: int, recipe: Declared) -> int:
    """How many of `controls.aa_reruns` fall to the seed at `index`: they go round the seeds in order."""
    rounds, rest = divmod(recipe.controls.aa_reruns, len(recipe.seeds))
    return rounds + (index < rest)


def _warm_start_run(baseline: Run, config: RunConfig) -> RunConfig:
    """The supervised run behind an arm's initial weights: the baseline's stack, so that arms share it."""
    warm_start, validation = config.warm_start, config.validation
    assert warm_start is not None
    if not isinstance(baseline, RunConfig):  # a foreign trainer's, which has none to share
        baseline = config
    optimizer = baseline.policy.optimizer.model_copy(update={"learning_rate": warm_start.learning_rate})
    return baseline.model_copy(
        update={
            "algorithm": Sft(type="sft", batch_size=warm_start.batch_size),
            "model": config.model,
            "policy": baseline.policy.model_copy(update={"optimizer": optimizer}),
            "task": config.task,
            # At its start and its end alone: how often the runs validate does not make another warm start.
            "validation": validation and validation.model_copy(update={"every": warm_start.steps}),
            "warm_start": None,
            "checkpoint": baseline.checkpoint.model_copy(update={"final_weights": True}),
            "steps": warm_start.steps,
            "wandb": None,
            "planted_fault": None,
        }
    )


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
