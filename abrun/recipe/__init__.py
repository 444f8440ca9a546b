"""Recipes: what an experiment is, as strict models, and how a YAML file becomes one.

A recipe is a `RunConfig` (what one training run sees) plus the experiment around it: arms as dotted
differences, seeds, controls, and the comparison declared before the runs. `load_recipe` resolves `defaults:`
inheritance and `--set` overrides; every refusal is one `RecipeError` line.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from abrun.errors import RecipeError
from abrun.recipe.claims import Compare, Controls, Guards, Primary, parse_primary
from abrun.recipe.models import (
    Arithmetic,
    Checkpoint,
    Cluster,
    Dtensor,
    Grpo,
    Gsm8k,
    Jsonl,
    Logprobs,
    Model,
    Optimizer,
    Policy,
    Rollout,
    RunConfig,
    Section,
    Sft,
    Wandb,
    WarmStart,
)
from abrun.recipe.reading import (
    dotted,
    merge,
    nested,
    parse_override,
    read_with_defaults,
    shortened,
    unknown,
    validated,
)

__all__ = [
    "BASELINE",
    "NAME",
    "Arithmetic",
    "Checkpoint",
    "Cluster",
    "Compare",
    "Controls",
    "Dtensor",
    "Grpo",
    "Gsm8k",
    "Guards",
    "Jsonl",
    "Logprobs",
    "Model",
    "Optimizer",
    "Policy",
    "Primary",
    "Recipe",
    "Rollout",
    "RunConfig",
    "Section",
    "Sft",
    "Wandb",
    "WarmStart",
    "dotted",
    "load_recipe",
    "merge",
    "nested",
    "parse_primary",
]

BASELINE = "baseline"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


class Recipe(RunConfig):
    """An experiment: a base run, arms as dotted differences from it, seeds, controls and the comparison."""

    name: str
    arms: dict[str, dict[str, Any]]
    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=1000)
    controls: Controls = Controls()
    compare: Compare = Compare()

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not re.fullmatch(NAME, name):
            raise ValueError(f"got {name!r}; allowed: letters, digits, '.', '_' and '-', at most 100")
        return name

    @field_validator("arms")
    @classmethod
    def _arms_have_a_baseline(cls, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        bad = [arm for arm in arms if not re.fullmatch(NAME, arm)]
        if bad:
            raise ValueError(f"got an arm named {bad[0]!r}; allowed: letters, digits, '.', '_' and '-'")
        if BASELINE not in arms or len(arms) < 2:
            raise ValueError(
                f"got {shortened(list(arms))}; an experiment needs an arm named 'baseline' "
                "and at least one more"
            )
        return arms

    @model_validator(mode="after")
    def _seeds_can_carry_the_claim(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: got {shortened(self.seeds)} with a seed twice; every seed once")
        if self.compare.primary and len(self.seeds) == 1:
            raise ValueError(
                "seeds: got one seed with an equivalence margin (compare.primary), which needs the spread "
                "over seeds; give two or more, or compare.primary: [] for the step-one check alone"
            )
        return self

    def run_config(self, arm: str) -> RunConfig:
        """The resolved configuration of one arm. Raises RecipeError where its differences do not fit."""
        base = self.model_dump(include=set(RunConfig.model_fields))
        return validated(RunConfig, merge(base, nested(self.arms[arm])), f"{self.name}: arms.{arm}")


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a YAML file, with its `defaults:` below it and `key=value` overrides on top.

    Raises RecipeError: one line with field, value received, what is allowed, what to do.
    """
    try:
        raw = read_with_defaults(path, ())
        for override in overrides:
            raw = merge(raw, parse_override(override))
        arms = raw.get("arms")
        if isinstance(arms, dict):
            raw["arms"] = {
                arm: dotted(change) if isinstance(change, dict) else change for arm, change in arms.items()
            }
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply to be a recipe; a few levels are enough") from None
    recipe = validated(Recipe, raw, str(path))
    for arm, change in recipe.arms.items():
        for key in change:
            if key.split(".")[0] not in RunConfig.model_fields:
                raise RecipeError(f"{path}: arms.{arm}.{key}: {unknown(key.split('.')[0], RunConfig)}")
        recipe.run_config(arm)
    return recipe
