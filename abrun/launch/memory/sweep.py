"""Plan of a memory profile: the arms of a recipe at every combination of sizes."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.probe import require_devices
from abrun.messages.codes import Code
from abrun.recipe.algorithms import Dpo
from abrun.recipe.experiment import BASELINE, ExperimentDeclaration, load_recipe
from abrun.recipe.reading import parse_yaml
from abrun.recipe.run import OwnRunConfig, unsupported_settings

COMMAND = "abrun memory-profile"
MASTER_DTYPE = "float32"  # weights, gradients and AdamW moments in abrun's trainer
SHARED_PROMPTS_NOTE = (
    "policy.share_prompts: has no effect here, because the random sequences share no prompt; in a run, "
    "micro-batches fill the same token budget, but there are fewer of them"
)
DEFAULT_LENGTHS = (128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A recipe with one value for each swept key."""

    recipe: ExperimentDeclaration
    swept: tuple[tuple[str, Any], ...] = ()

    def configs(self, *, on_this_machine: bool = True) -> dict[str, OwnRunConfig]:
        """Return the run configuration of each arm, the baseline first.

        Raises LaunchError if an arm cannot be measured; with `on_this_machine`, also if this machine cannot
        run it.
        """
        configs: dict[str, OwnRunConfig] = {}
        for arm in sorted(self.recipe.arms, key=lambda arm: arm != BASELINE):
            config = self.recipe.run_config(arm)
            if not isinstance(config, OwnRunConfig):
                raise LaunchError(Code.MEASURES_ABRUN_TRAINER(recipe=self.recipe.name, arm=arm))
            for problem in unsupported_settings(config):
                raise LaunchError(Code.OF_SUBJECT(subject=f"{self.recipe.name}: arms.{arm}", problem=problem))
            configs[arm] = config
        for config in configs.values() if on_this_machine else ():
            require_devices(config)
        return configs


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Cells to measure or predict, and options."""

    name: str
    variants: Sequence[Variant]
    lengths: Sequence[int] = DEFAULT_LENGTHS  # ascending; tokens of prompt and completion
    sequences: Sequence[int] = ()  # ascending, per micro-batch; default: the baseline's, or 1 (dpo: 2)
    rollouts: bool = True  # sample once if the recipe has rollouts
    budget_bytes: int | None = None  # limit of device memory
    searched_size: Literal["length", "num_sequences"] | None = None  # search its maximum
    master_dtype: str = MASTER_DTYPE  # only for predictions

    def batches(self, *, on_this_machine: bool = True) -> list[tuple[Variant, int, dict[str, OwnRunConfig]]]:
        """Return (variant, sequences per micro-batch, configuration by arm) for each combination.

        Raises LaunchError if an arm cannot be measured or a micro-batch would split a preference pair; with
        `on_this_machine`, also for a search on CPU cores without a memory budget.
        """
        batches = []
        for variant in self.variants:
            configs = variant.configs(on_this_machine=on_this_machine)
            has_no_limit = self.searched_size and self.budget_bytes is None
            if on_this_machine and has_no_limit and not configs[BASELINE].cluster.gpus_per_node:
                raise LaunchError(Code.SEARCH_NEEDS_BUDGET())
            divisor = 2 if any(isinstance(config.algorithm, Dpo) for config in configs.values()) else 1
            for num_sequences in self.sequences or (configs[BASELINE].policy.micro_batch_size or divisor,):
                if num_sequences % divisor:
                    raise LaunchError(Code.SEQUENCES_ODD(got=num_sequences))
                batches.append((variant, num_sequences, configs))
        return batches

    def note(self) -> str:
        """Return a note if the recipe shares prompts, which random sequences do not show; else empty."""
        configs = (
            config for variant in self.variants for config in variant.configs(on_this_machine=False).values()
        )
        return SHARED_PROMPTS_NOTE if any(config.policy.share_prompts for config in configs) else ""


def expand_sweep(path: Path, overrides: Sequence[str], sweeps: Sequence[str]) -> list[Variant]:
    """Return a variant for every combination of the `KEY=V1,V2,...` sweeps. Raises RecipeError."""
    base = load_recipe(path, overrides)
    values_by_key: dict[str, list[Any]] = {}
    for key, values in map(_parse_sweep, sweeps):
        if key in values_by_key:
            raise RecipeError(Code.SWEEP_KEY_TWICE(key=key))
        for arm, arm_settings in base.arms.items():
            for arm_key in arm_settings:
                if f"{key}.".startswith(f"{arm_key}.") or f"{arm_key}.".startswith(f"{key}."):
                    raise RecipeError(Code.SWEEP_KEY_OF_ARM(key=key, arm=arm, arm_key=arm_key))
        values_by_key[key] = values
    variants = []
    for values in itertools.product(*values_by_key.values()):
        swept = tuple(zip(values_by_key, values, strict=True))
        recipe = load_recipe(path, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in swept)])
        variants.append(Variant(recipe=recipe, swept=swept))
    return variants


def _parse_sweep(option: str) -> tuple[str, list[Any]]:
    key, equals, values = option.partition("=")
    parsed = parse_yaml(f"[{values}]", f"--sweep {key}") if equals and values.strip() else []
    if not (key and isinstance(parsed, list) and parsed):
        raise RecipeError(Code.SETTING_REFUSED(field="--sweep", got=repr(option)))
    return key, list(parsed)
