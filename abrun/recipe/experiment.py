"""Recipes: what an experiment is, as strict models, and how a YAML file becomes one.

A recipe is a run (what one training run sees: an `OwnRunConfig` of our own trainer, or a `CommandRunConfig`
of any other) plus the experiment around it: arms as dotted differences, seeds, controls, and the comparison
declared before the runs. `load_recipe` resolves `defaults:` inheritance and `--set` overrides; every refusal
is one `RecipeError` line.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.recipe.claims import (
    Compare,
    Controls,
)
from abrun.recipe.command import (
    CommandRunConfig,
)
from abrun.recipe.faults import LIBRARY, ONE_ULP, InjectedFault, lacking
from abrun.recipe.launcher import LauncherSettings
from abrun.recipe.merging import (
    merge,
    overridden,
    read_with_defaults,
    refuse_shadowed,
    type_lacks,
    without_nulls,
)
from abrun.recipe.policy import (
    OpenPolicy,
)
from abrun.recipe.reading import dotted, nested, read_launched
from abrun.recipe.refusals import shortened, unknown, validated
from abrun.recipe.run import (
    OwnRunConfig,
)
from abrun.recipe.secrets import refuse_secrets
from abrun.recipe.section import FieldError, Section
from abrun.regular_files import is_directory
from abrun.runs.layout import NAME_PATTERN

BASELINE = "baseline"
MOST_ARMS = 1000
MOST_SEEDS = 1000
CHECKPOINTING = "policy.activation_checkpointing"
KEEP_GATHERED = "policy.backend.keep_gathered"
MICRO_BATCH_TOKENS = "policy.micro_batch_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A value that a recipe may leave to its launch, by `auto`."""

    values: tuple[Any, ...]  # from what takes the least time, and the most memory, to the other end
    instead: str  # what a recipe may say, in words


# By dotted key; what costs the most time to give up first. Why: docs/training.md
OPEN = {
    CHECKPOINTING: Open(values=("none", "selective", "full"), instead="none, selective or full"),
    KEEP_GATHERED: Open(values=(True, False), instead="true or false"),
    MICRO_BATCH_TOKENS: Open(values=(32_768, 16_384, 8_192), instead="a number such as 16384"),
}


class Declared(Section):
    """What an experiment declares around a base run: arms as dotted differences, seeds, the comparison."""

    name: str
    arms: dict[str, dict[str, Any]]  # one is named baseline; each has its differences, as dotted keys
    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=MOST_SEEDS)
    controls: Controls = Controls()
    compare: Compare = Compare()
    launcher: Annotated[LauncherSettings, Field(discriminator="type")] | None = None  # default: local
    record_diff: bool = False  # keep the uncommitted changes of the checkout, passwords too, in git-*.diff

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not re.fullmatch(NAME_PATTERN, name):
            raise FieldError(
                f"got {shortened(name)}; allowed: letters, digits, '.', '_' and '-', at most 100"
            )
        return name

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds_are_listed(cls, seeds: Any) -> Any:
        if isinstance(seeds, int) and not isinstance(seeds, bool) and 0 <= seeds <= MOST_SEEDS:
            count = f"; for {seeds} seeds write 0-{seeds - 1} to --seeds, or list them here" * (seeds > 1)
            raise FieldError(
                f"got {seeds}, which is one seed, number {seeds}{count}; for that seed alone write [{seeds}]"
            )
        return seeds

    @field_validator("arms")
    @classmethod
    def _arms_have_a_baseline(cls, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if len(arms) > MOST_ARMS:
            raise FieldError(f"got {len(arms)} arms; allowed: at most {MOST_ARMS}")
        bad = [arm for arm in arms if not re.fullmatch(NAME_PATTERN, arm)]
        if bad:
            raise FieldError(
                f"got an arm named {shortened(bad[0])}; allowed: letters, digits, '.', '_' and '-'"
            )
        if BASELINE not in arms:
            named = shortened(list(arms)) if arms else "none"
            raise FieldError(f"got {named}; an experiment needs an arm named 'baseline'")
        return arms

    def run_config(self, arm: str) -> OwnRunConfig | CommandRunConfig:
        """The resolved configuration of one arm.

        Raises RecipeError where its differences do not fit, or where something is left to a launch.
        """
        source = f"{self.name}: arms.{arm}"
        if self.open_keys:
            key = self.open_keys[0]
            raise RecipeError(Code.AUTO_NEEDS_LAUNCH(recipe=self.name, field=key, instead=OPEN[key].instead))
        base, change = self.model_dump(exclude=set(Declared.model_fields)), nested(self.arms[arm])
        model = RUN_CONFIGS[_trainer_type(change, source) or base["trainer"]["type"]]
        if not isinstance(self, model):  # an arm of another trainer: drop what only the base's trainer knows
            base = {key: value for key, value in base.items() if key in model.model_fields}
        return validated(model, without_nulls(merge(base, change)), source)

    @property
    def open_keys(self) -> tuple[str, ...]:
        """Those of OPEN that it leaves to a launch."""
        return ()

    def closed(self, values: Mapping[str, Any] | None = None) -> Self:
        """The recipe with these values for what it leaves open; without any with those of the least time."""
        if not self.open_keys:
            return self
        chosen = {key: OPEN[key].values[0] for key in self.open_keys} | dict(values or {})
        tree = merge(self.model_dump(), nested(chosen))
        for arm, change in self.arms.items():  # a backend without the key has nothing to decide
            tree["arms"][arm] = {key: None for key in chosen if type_lacks(change, key)} | change
        return validated(type(self), tree, self.name)

    @property
    def control_arms(self) -> dict[str, InjectedFault]:
        """What is injected in each arm that is there as a control."""
        return self.controls.arms(len(self.seeds))

    def control_config(self, arm: str) -> OwnRunConfig:
        """The baseline's configuration with what a control injects. Raises RecipeError where it cannot."""
        injected, baseline = self.control_arms[arm], self.run_config(BASELINE)
        field = "ulp_reruns" if injected.name == ONE_ULP else "faults"
        source = f"{self.name}: controls.{field}"
        if not isinstance(baseline, OwnRunConfig):
            raise RecipeError(Code.CONTROL_NEEDS_ABRUN_TRAINER(source=source, fault=injected.name))
        if baseline.injected_fault is not None:
            raise RecipeError(Code.CONTROL_OF_FAULTY_BASELINE(source=source, fault=injected.name))
        lacks = lacking(LIBRARY[injected.name], baseline)
        if lacks:
            raise RecipeError(Code.CONTROL_NEEDS(source=source, fault=injected.name, needs=lacks))
        content = {**baseline.model_dump(), "injected_fault": injected.model_dump()}
        return validated(OwnRunConfig, content, source)


class Recipe(Declared, OwnRunConfig):
    """An experiment whose base is a run of our own trainer."""

    policy: OpenPolicy = OpenPolicy()

    @property
    def open_keys(self) -> tuple[str, ...]:
        given = dotted({"policy": self.policy.model_dump()})
        return tuple(key for key in OPEN if given.get(key) == "auto")

    @model_validator(mode="after")
    def _arms_leave_nothing_open(self) -> Self:
        for arm, change in self.arms.items():
            for key in (key for key in OPEN if dotted(change).get(key) == "auto"):
                raise FieldError(
                    "got 'auto', which is decided for all arms alike; say it outside of arms, or give "
                    f"{OPEN[key].instead}",
                    f"arms.{arm}.{key}",
                )
            own = {MICRO_BATCH_TOKENS: self.policy.micro_batch_tokens, **dotted(change)}
            padded, size = own.get("policy.packing") is False, own.get("policy.micro_batch_size")
            if own[MICRO_BATCH_TOKENS] == "auto" and (padded or size):
                raise FieldError(
                    f"got {'false' if padded else size} with {MICRO_BATCH_TOKENS} 'auto'; give this arm "
                    f"{MICRO_BATCH_TOKENS}: null, too",
                    f"arms.{arm}.policy.{'packing' if padded else 'micro_batch_size'}",
                )
        return self


class CommandRecipe(Declared, CommandRunConfig):
    """An experiment whose base is a run of a foreign trainer."""


RUN_CONFIGS: dict[str, type[OwnRunConfig] | type[CommandRunConfig]] = {
    "abrun": OwnRunConfig,
    "command": CommandRunConfig,
}


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe | CommandRecipe:
    """The recipe in a YAML file, with its `defaults:` below it and `key=value` overrides on top.

    Of an experiment's folder it is what that was launched with, under the folder's name. Raises RecipeError:
    one line with field, value received, what is allowed, what to do.
    """
    try:
        read = read_launched(path) if is_directory(path) else _beside(read_with_defaults(path), path)
        raw = _with_arms(read, lambda change: nested(dotted(change)))
        overrides = list(overrides)
        for override in overrides:
            raw = overridden(raw, override)
        raw = without_nulls(_with_arms(raw, dotted))
        refuse_shadowed(raw, overrides)
        refuse_secrets(raw, str(path))
    except RecursionError:
        raise RecipeError(Code.RECIPE_TOO_DEEP(source=path)) from None
    recipe = stored_recipe(raw, str(path))
    closed = recipe.closed()
    for arm, change in recipe.arms.items():
        model = RUN_CONFIGS[_trainer_type(nested(change), f"{path}: arms.{arm}") or recipe.trainer.type]
        for key in change:
            if key.split(".")[0] not in model.model_fields:
                field, section_key = f"arms.{arm}.{key}", key.split(".")[0]
                raise RecipeError(unknown(field, section_key, model, source=str(path), others=()))
        closed.run_config(arm)
    return recipe


def _beside(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """A recipe with the paths of what lies in its own folder, from wherever it is launched."""
    trainer, compare, folder = raw.get("trainer"), raw.get("compare"), path.parent
    if isinstance(trainer, dict) and isinstance(trainer.get("argv"), list):
        where = str(folder.resolve()).replace("{", "{{").replace("}", "}}")
        argv = [
            word.replace("{recipe_dir}", where) if isinstance(word, str) else word for word in trainer["argv"]
        ]
        raw = raw | {"trainer": trainer | {"argv": argv}}
    reference = compare.get("reference") if isinstance(compare, dict) else None
    if isinstance(reference, str) and not os.path.isfile(os.path.expanduser(reference)):
        beside = str(folder / reference)
        raw = raw | {"compare": {**raw["compare"], "reference": beside}} if os.path.isfile(beside) else raw
    return raw


def _with_arms(raw: dict[str, Any], form: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A recipe with the differences of its arms in another form; what is no mapping stays to be refused."""
    arms = raw.get("arms")
    if not isinstance(arms, dict):
        return raw
    return raw | {
        "arms": {arm: form(change) if isinstance(change, dict) else change for arm, change in arms.items()}
    }


def stored_recipe(content: Mapping[str, Any], source: str = "recipe") -> Recipe | CommandRecipe:
    """A recipe from what its `model_dump` gave, as experiment.json keeps it. Raises RecipeError, one line."""
    if _trainer_type(content, source) == "command":
        return validated(CommandRecipe, content, source)
    return validated(Recipe, content, source)


def stored_run(content: Any, source: str = "config") -> OwnRunConfig | CommandRunConfig:
    """A run's resolved configuration, as its config.json keeps it. Raises RecipeError, one line."""
    kind = _trainer_type(content, source) if isinstance(content, Mapping) else None
    return validated(RUN_CONFIGS[kind or "abrun"], content, source)


def _trainer_type(raw: Mapping[str, Any], source: str) -> str | None:
    """Which trainer a mapping asks for; None where it leaves that open, or is no section at all."""
    trainer = raw.get("trainer")
    if not isinstance(trainer, Mapping) or "type" not in trainer:
        return None
    kind = trainer["type"]
    if not isinstance(kind, str) or kind not in RUN_CONFIGS:
        expected = ", ".join(repr(each) for each in RUN_CONFIGS)
        raise RecipeError(
            Code.TYPE_UNKNOWN(
                source=source, field="trainer.type", got=shortened(kind), expected=expected, others=()
            )
        )
    return kind
