"""Recipes: strict models of experiments, and how a YAML file becomes one.

A recipe is the configuration of a training run (an `OwnRunConfig` for abrun's trainer, a `CommandRunConfig`
for any other) plus the experiment around it: arms as dotted differences, seeds, controls, and the comparison
declared before the runs. `load_recipe` resolves `defaults:` inheritance and `--set` overrides; every error
is a one-line `RecipeError`.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator

from abrun.errors import RecipeError
from abrun.recipe import merging
from abrun.recipe.claims import Compare, Controls
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.faults import LIBRARY, ONE_ULP, InjectedFault, unmet_need
from abrun.recipe.launcher import LauncherSettings
from abrun.recipe.policy import RecipePolicy
from abrun.recipe.reading import dotted, nested, read_launched_recipe, refuse_secrets
from abrun.recipe.refusals import describe_unknown_key, shortened, validated
from abrun.recipe.run import ClusterConfig, OwnRunConfig, can_change_numbers, recorded_source
from abrun.recipe.section import FieldError, RuleError, Section, matching, rule
from abrun.runs.files import is_directory
from abrun.runs.layout import NAME_PATTERN
from abrun.runs.migrations import REMOVED, drop_removed, migrate
from abrun.runs.redaction import yaml_text

BASELINE = "baseline"
MAX_ARMS = 1000
MAX_SEEDS = 1000
CHECKPOINTING = "policy.activation_checkpointing"
KEEP_GATHERED = "policy.backend.keep_gathered"
MICRO_BATCH_TOKENS = "policy.micro_batch_tokens"
RUNS_PER_GPU = "cluster.runs_per_gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSetting:
    """Setting that a recipe may leave to the launch by `auto`."""

    values: tuple[Any, ...]  # from fastest (most memory) to slowest (least memory)
    instead: str  # explicit values, for messages


# By dotted key, the costliest in time to give up first
AUTO_SETTINGS = {
    CHECKPOINTING: AutoSetting(values=("none", "selective", "full"), instead="none, selective or full"),
    KEEP_GATHERED: AutoSetting(values=(True, False), instead="true or false"),
    MICRO_BATCH_TOKENS: AutoSetting(values=(32_768, 16_384, 8_192), instead="a number such as 16384"),
}


class ExperimentDeclaration(Section):
    """Declaration of an experiment around a base run: arms as dotted differences, seeds, the comparison."""

    name: Annotated[str, matching(NAME_PATTERN, "letters, digits, '.', '_' and '-', at most 100")]
    # arm -> its differences as dotted keys; one arm is named baseline, unless compare.reference replaces it
    arms: dict[str, dict[str, Any]]
    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=MAX_SEEDS)
    controls: Controls = Controls()
    compare: Compare = Compare()
    launcher: Annotated[LauncherSettings, Field(discriminator="type")] | None = None  # default: local
    record_diff: bool = False  # save uncommitted changes, including any passwords in them, to git-*.diff

    @rule
    def _check_experiment(self) -> None:
        arms, seeds, compare = self.arms, self.seeds, self.compare
        has_pair = BASELINE in arms and (len(arms) > 1 or self.controls.faults)
        if not has_pair and (compare.reference is None or len(arms) != 1):
            raise RuleError(
                f"arms: got {shortened([*arms])}; an experiment needs an arm named 'baseline' and at least "
                "one other, or one arm of any name and a frozen reference (compare.reference)"
            )
        if reserved := arms.keys() & self.control_arms.keys():
            name = shortened(min(reserved))
            raise RuleError(f"arms: got {name}, which is the name of a control arm; choose another name")
        if compare.interim and compare.interim[-1] != len(seeds):
            raise RuleError(
                f"compare.interim: got {compare.interim} with {len(seeds)} seeds; the last analysis uses all "
                f"pairs: end with {len(seeds)}"
            )
        if len(set(seeds)) < len(seeds):
            raise RuleError(f"seeds: got {shortened(seeds)} with a duplicate seed; list each seed once")
        bounds = [claim.bound for claim in compare.claims if not claim.exact]
        if bounds and len(seeds) == 1:
            raise RuleError(
                f"seeds: got one seed with {bounds[0]} (compare.claims), which needs the spread over seeds; "
                "use two or more, or compare.claims: [] for the step-one check alone"
            )

    @field_validator("seeds", mode="before")
    @classmethod
    def _check_seeds(cls, seeds: Any) -> Any:
        if isinstance(seeds, int) and not isinstance(seeds, bool) and 0 <= seeds <= MAX_SEEDS:
            count = f"; for {seeds} seeds use --seeds 0-{seeds - 1} or list them here" * (seeds > 1)
            single = f"for the single seed {seeds} write [{seeds}]"
            raise FieldError(f"got {seeds}, which is not a list{count}; {single}")
        return seeds

    @field_validator("arms")
    @classmethod
    def _check_arms(cls, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if len(arms) > MAX_ARMS:
            raise FieldError(f"got {len(arms)} arms; allowed: at most {MAX_ARMS}")
        invalid = [arm for arm in arms if not re.fullmatch(NAME_PATTERN, arm)]
        if invalid:
            raise FieldError(
                f"got an arm named {shortened(invalid[0])}; allowed: letters, digits, '.', '_' and '-'"
            )
        for arm, change in arms.items():
            if RUNS_PER_GPU in (flat := dotted(change)):
                got = f"arms.{arm}.{RUNS_PER_GPU}: got {shortened(flat[RUNS_PER_GPU])} in an arm"
                why = "all runs of an experiment share GPUs alike"
                raise RuleError(f"{got}, but {why}; set it outside arms")
        return arms

    @property
    def baseline(self) -> str:
        """Return the arm that others, reruns and controls are compared with: `baseline`, or the only arm."""
        return BASELINE if BASELINE in self.arms else next(iter(self.arms))

    def run_config(self, arm: str) -> OwnRunConfig | CommandRunConfig:
        """Return the resolved configuration of one arm.

        Raises RecipeError if its differences are invalid or a setting that changes the run is still `auto`.
        """
        source = f"{self.name}: arms.{arm}"
        if open_keys := self.auto_keys:
            key = open_keys[0]
            raise RecipeError(
                f"{self.name}: {key}: got 'auto', which only abrun launch resolves; give "
                f"{AUTO_SETTINGS[key].instead} (to see which fit: abrun launch RECIPE --dry-run "
                "--device-memory 80GiB)"
            )
        base = self.model_dump(exclude=set(ExperimentDeclaration.model_fields))
        change = nested(self.arms[arm])
        model = RUN_CONFIGS[_trainer_type(change, source) or base["trainer"]["type"]]
        if not isinstance(self, model):  # the arm has another trainer: drop keys of the base's trainer
            base = {key: value for key, value in base.items() if key in model.model_fields}
        return validated(model, merging.drop_foreign_nulls(merging.merge(base, change)), source)

    @property
    def auto_keys(self) -> tuple[str, ...]:
        values = dotted(self.model_dump(include={key.partition(".")[0] for key in AUTO_SETTINGS}))
        return tuple(key for key in AUTO_SETTINGS if values.get(key) == "auto")

    def with_auto_values(self, values: Mapping[str, Any] | None = None) -> Self:
        """Return the recipe with `auto` replaced by these values; by default by the fastest ones."""
        if not self.auto_keys:
            return self
        chosen = {key: AUTO_SETTINGS[key].values[0] for key in self.auto_keys} | dict(values or {})
        tree = merging.merge(self.model_dump(), nested(chosen))
        for arm, change in self.arms.items():  # an arm whose backend lacks the key gets no value
            tree["arms"][arm] = {key: None for key in chosen if merging.type_lacks_key(change, key)} | change
        return validated(type(self), tree, self.name)

    @property
    def control_arms(self) -> dict[str, InjectedFault]:
        """Return the injected fault of each control arm by the arm's name."""
        return self.controls.arms(len(self.seeds))

    def control_config(self, arm: str) -> OwnRunConfig:
        """Return the baseline's configuration with a control's fault; RecipeError if it cannot have it."""
        injected, baseline = self.control_arms[arm], self.run_config(self.baseline)
        if any(recorded_source(self.run_config(treatment)) == BASELINE for treatment in self.arms):
            # Controls train on the baseline's rollouts, as the treatments do
            change = {"rollout": {"engine": "recorded", "from": BASELINE}}
            baseline = validated(OwnRunConfig, merging.merge(baseline.model_dump(), change), self.name)
        field = "ulp_reruns" if injected.name == ONE_ULP else "faults"
        source = f"{self.name}: controls.{field}"
        got = f"{source}: got {injected.name!r}"
        if not isinstance(baseline, OwnRunConfig):
            why = "with a foreign trainer, but faults can only be injected into abrun's own"
            raise RecipeError(f"{got} {why}; drop it")
        if baseline.injected_fault is not None:
            raise RecipeError(f"{got}, but the baseline already has an injected fault; drop one of them")
        if lacks := unmet_need(LIBRARY[injected.name], baseline):
            raise RecipeError(f"{got}, which {lacks}, or drop the fault")
        content = {**baseline.model_dump(), "injected_fault": injected.model_dump()}
        return validated(OwnRunConfig, content, source)


class Recipe(ExperimentDeclaration, OwnRunConfig):
    """Experiment whose base is a run of abrun's own trainer."""

    cluster: ClusterConfig = ClusterConfig()
    policy: RecipePolicy = RecipePolicy()

    @rule
    def _refuse_auto_in_arms(self) -> None:
        for arm, change in self.arms.items():
            for key in (key for key in AUTO_SETTINGS if dotted(change).get(key) == "auto"):
                got = f"arms.{arm}.{key}: got 'auto', which is decided for all arms together"
                raise RuleError(f"{got}; set it outside arms, or use {AUTO_SETTINGS[key].instead}")
            settings = {MICRO_BATCH_TOKENS: self.policy.micro_batch_tokens, **dotted(change)}
            padded, size = settings.get("policy.packing") is False, settings.get("policy.micro_batch_size")
            if settings[MICRO_BATCH_TOKENS] == "auto" and (padded or size):
                name, value = ("packing", "false") if padded else ("micro_batch_size", size)
                got = f"arms.{arm}.policy.{name}: got {value} with {MICRO_BATCH_TOKENS} 'auto'"
                raise RuleError(f"{got}; in this arm set {MICRO_BATCH_TOKENS}: null, too")


class CommandRecipe(ExperimentDeclaration, CommandRunConfig):
    """Experiment whose base is a run of an external trainer."""

    cluster: ClusterConfig = ClusterConfig()


RUN_CONFIGS: dict[str, type[OwnRunConfig] | type[CommandRunConfig]] = {
    "abrun": OwnRunConfig,
    "command": CommandRunConfig,
}


def load_recipe(
    path: Path, overrides: Iterable[str] = (), *, is_launched: bool = False
) -> Recipe | CommandRecipe:
    """Load a recipe from a YAML file, merged over its `defaults:`, with `key=value` overrides on top.

    For an experiment's folder, load the recipe it was launched with, under the folder's name. A recipe that
    `is_launched` may have keys of an earlier version. Raises RecipeError, one line: field, value received,
    what is allowed, what to do.
    """
    is_folder, overrides = is_directory(path), list(overrides)
    try:
        tree = read_launched_recipe(path) if is_folder else merging.read_with_defaults(path)
        tree = tree if is_folder else _find_reference(tree, path.parent)
        raw = _convert_arms(tree, lambda change: nested(dotted(change)))
        for override in overrides:
            raw = merging.apply_override(raw, override)
        raw = merging.drop_foreign_nulls(_convert_arms(raw, dotted))
        raw = drop_removed(migrate(raw)) if is_launched else raw
        merging.refuse_shadowed(raw, overrides)
        refuse_secrets(raw, str(path))
        raw = raw if is_folder else _with_recipe_dir(raw, str(path.parent.resolve()))
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply; a recipe needs only a few levels") from None
    recipe = _parse_recipe(raw, str(path))
    resolved = recipe.with_auto_values()
    for arm, change in recipe.arms.items():
        model = RUN_CONFIGS[_trainer_type(nested(change), f"{path}: arms.{arm}") or recipe.trainer.type]
        for key in change:
            section = key.split(".")[0]
            if section not in model.model_fields:
                raise RecipeError(f"{path}: arms.{arm}.{key}: {describe_unknown_key(section, model)}")
        config = resolved.run_config(arm)
        if isinstance(config, OwnRunConfig) and not is_launched and (problem := config.find_new_problem()):
            raise RecipeError(f"{path}: {problem}")
    return recipe


def _find_reference(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's tree with `compare.reference` resolved against its folder."""
    compare = raw.get("compare")
    reference = compare.get("reference") if isinstance(compare, dict) else None
    if isinstance(reference, str) and not os.path.isfile(os.path.expanduser(reference)):
        local_path = str(folder / reference)
        if os.path.isfile(local_path):
            return raw | {"compare": {**raw["compare"], "reference": local_path}}
    return raw


def _with_recipe_dir(tree: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return a recipe's tree, whose arms have dotted keys, with its folder beside each command."""
    trainer = tree.get("trainer")
    if isinstance(trainer, dict) and trainer.get("type") == "command":
        tree = tree | {"trainer": {"recipe_dir": folder, **trainer}}
    added = {"trainer.recipe_dir": folder}
    return _convert_arms(tree, lambda arm: (added if arm.get("trainer.type") == "command" else {}) | {**arm})


def _convert_arms(
    raw: dict[str, Any], convert: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return a recipe's tree with each arm's mapping converted; invalid arms are left to validation."""
    arms = raw.get("arms")
    if not isinstance(arms, dict):
        return raw
    return raw | {
        "arms": {arm: convert(change) if isinstance(change, dict) else change for arm, change in arms.items()}
    }


def parse_stored_recipe(content: Mapping[str, Any], source: str = "recipe") -> Recipe | CommandRecipe:
    """Parse a recipe stored by `model_dump`, of any version. Raises RecipeError, one line."""
    return _parse_recipe(drop_removed(migrate(content)), source)


def _parse_recipe(content: Mapping[str, Any], source: str) -> Recipe | CommandRecipe:
    if _trainer_type(content, source) == "command":
        return validated(CommandRecipe, content, source)
    return validated(Recipe, content, source)


def parse_stored_run(content: Any, source: str = "config") -> OwnRunConfig | CommandRunConfig:
    """Parse a run's resolved configuration from config.json, of any version. Raises RecipeError, one line."""
    content = drop_removed(migrate(content))
    kind = _trainer_type(content, source) if isinstance(content, Mapping) else None
    return validated(RUN_CONFIGS[kind or "abrun"], content, source)


def refuse_removed_settings(content: Mapping[str, Any], source: str) -> None:
    """Raise RecipeError if a stored run has a setting that this version lacks and would train without."""
    for key, value in dotted(content).items():
        if key in REMOVED and value != REMOVED[key] and can_change_numbers(key):
            raise RecipeError(
                f"{source}: the run was launched with {key}: {yaml_text(value)}, a setting that was removed "
                "since; resume with the version of abrun that launched it, or choose another --name"
            )


def parse_stored_own_run(content: Any) -> OwnRunConfig:
    """Parse the stored configuration of a run of abrun's own trainer, of any version. Raises RecipeError."""
    return validated(OwnRunConfig, drop_removed(migrate(content)), "config")


def _trainer_type(raw: Mapping[str, Any], source: str) -> str | None:
    """Return the `trainer.type` of a mapping; None if it has none. Raises RecipeError if unknown."""
    trainer = raw.get("trainer")
    if not isinstance(trainer, Mapping) or "type" not in trainer:
        return None
    kind = trainer["type"]
    if not isinstance(kind, str) or kind not in RUN_CONFIGS:
        raise RecipeError(
            f"{source}: trainer.type: got {shortened(kind)}; allowed: {', '.join(map(repr, RUN_CONFIGS))}"
        )
    return kind
