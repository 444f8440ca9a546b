"""Recipes that a launch derives from another: in stages, or a baseline alone with injected faults.

Stages are interim analyses, declared before the first run, at which a launch may stop. Their unit is a pair:
all arms of a seed run in one stage. All pairs have the same arms and so the same cost. Seeds are run in their
order.
"""

import itertools
from pathlib import Path

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import compare_hash, launched_compare_hash
from abrun.recipe.claims import Controls
from abrun.recipe.experiment import (
    MAX_SEEDS,
    CommandRecipe,
    ExperimentDeclaration,
    Recipe,
    parse_stored_recipe,
)
from abrun.recipe.faults import FAULTS, LIBRARY, InjectedFault, unmet_need
from abrun.recipe.refusals import validated
from abrun.recipe.run import OwnRunConfig
from abrun.runs.experiment import open_experiment

DEFAULT_MAX_SEEDS = 12  # unless --max-seeds or declared interim analyses say otherwise
DEFAULT_FIRST_PAIRS = 4


def add_interim_analyses(recipe: Recipe | CommandRecipe, max_seeds: int | None) -> Recipe | CommandRecipe:
    """Return the recipe with interim analyses, and with as many seeds as the last of them needs.

    Uses the recipe's own interim analyses, or else three, evenly spaced, the first at its number of seeds (4,
    if that is below 3). New seeds are the smallest unused numbers. Raises RecipeError if nothing could be
    decided, or if recipe and `max_seeds` name different last analyses.
    """
    from abrun.experiment.power import interim_counts, min_first_pairs  # scipy

    name, interim = recipe.name, recipe.compare.interim
    if not recipe.compare.claims:
        raise RecipeError(
            f"{name}: compare.claims: empty, but --until-decided needs a claim to decide; declare one, or "
            "drop --until-decided"
        )
    if len(recipe.arms) < 2:
        raise RecipeError(
            f"{name}: arms: only a baseline, but --until-decided compares arms; add a treatment, or drop "
            "--until-decided"
        )
    if interim and max_seeds not in (None, interim[-1]):
        raise RecipeError(
            f"--max-seeds: got {max_seeds}, but compare.interim is {interim} and ends with all pairs; drop "
            "one of them"
        )
    if interim:
        return recipe
    max_count = DEFAULT_MAX_SEEDS if max_seeds is None else max_seeds
    num_seeds = len(recipe.seeds)
    first_pairs = min(DEFAULT_FIRST_PAIRS, max_count - 1)
    if num_seeds >= min_first_pairs(recipe.compare):
        first_pairs = num_seeds
    if not 2 <= first_pairs < max_count:
        raise RecipeError(
            f"--max-seeds: got {max_count} with {num_seeds} seeds in the recipe; allowed: more than the "
            f"first interim analysis takes, {max(first_pairs, 2)}"
        )
    num_new = min(max_count, MAX_SEEDS + 1) - num_seeds  # a recipe refuses more
    unused = (seed for seed in itertools.count() if seed not in recipe.seeds)
    content = recipe.model_dump(mode="json")
    content["seeds"] += itertools.islice(unused, num_new)
    content["compare"]["interim"] = interim_counts(first_pairs, max_count)
    return parse_stored_recipe(content, f"{name} with --max-seeds {max_count}")


def refuse_other_interim(recipe: ExperimentDeclaration, experiment_dir: Path) -> None:
    """Raise LaunchError if the experiment was launched with other interim analyses."""
    content = open_experiment(experiment_dir)
    launched_interim = (content.get("recipe", {}).get("compare") or {}).get("interim") or []
    # The stored recipe is that of the last --resume; the hash is that of the first launch.
    launched_hash = launched_compare_hash(content.get("compare_sha256", ""), recipe.compare)
    if launched_interim != recipe.compare.interim and launched_hash != compare_hash(recipe.compare):
        description = "without interim analyses"
        if launched_interim:
            description = f"with interim analyses at {launched_interim} pairs"
        raise LaunchError(
            f"{experiment_dir}: --until-decided: got interim analyses at {recipe.compare.interim} pairs, but "
            f"it was launched {description}, on which its error rate depends; resume it as it was launched, "
            "or choose another --name"
        )


def make_sensitivity_recipe(
    recipe: Recipe | CommandRecipe, names: str | None
) -> tuple[Recipe | CommandRecipe, dict[str, str]]:
    """Return the recipe without treatments, and for each fault that it cannot inject, what it lacks.

    `names`: NAME or NAME:SIZE, separated by commas. None: the recipe's `controls.faults`, or else all faults
    that it can inject. Raises RecipeError if a named fault cannot be injected.
    """
    baseline = recipe.with_auto_values().run_config(recipe.baseline)
    if not isinstance(baseline, OwnRunConfig):
        raise RecipeError(
            f"{recipe.name}: arms.{recipe.baseline}: runs a foreign trainer, but faults can only be injected "
            "into abrun's own"
        )
    not_injected: dict[str, str] = {}
    faults = recipe.controls.faults
    if names is not None:
        faults = [_parse_fault(text) for text in names.split(",")]
        for fault in faults:
            if needs := unmet_need(LIBRARY[fault.name], baseline):
                got = f"--faults: got {fault.name!r}, which {needs}"
                raise RecipeError(f"{got}; change that with --set, or drop the fault")
    elif not faults:
        needs_by_fault = {fault.name: unmet_need(fault, baseline) for fault in FAULTS}
        not_injected = {name: needs for name, needs in needs_by_fault.items() if needs}
        faults = [InjectedFault(name=name) for name in needs_by_fault if name not in not_injected]
    if not faults:
        raise RecipeError(f"{recipe.name}: no fault can be injected into it; see: abrun faults")
    controls = {"aa_reruns": recipe.controls.aa_reruns, "faults": [fault.model_dump() for fault in faults]}
    content = recipe.model_dump(mode="json")
    content |= {
        "name": f"{recipe.name[:88]}-sensitivity",
        "arms": {recipe.baseline: recipe.arms[recipe.baseline]},
        "controls": validated(Controls, controls, "--faults").model_dump(mode="json"),
    }
    content["compare"]["interim"] = []
    return parse_stored_recipe(content, recipe.name), not_injected


def _parse_fault(text: str) -> InjectedFault:
    name, colon, size = text.strip().partition(":")
    try:
        amount = float(size) if colon else None
    except ValueError:
        allowed = "NAME or NAME:SIZE, such as misgrouped:2"
        raise RecipeError(f"--faults: got {text!r}; allowed: {allowed}") from None
    return validated(InjectedFault, {"name": name, "size": amount}, "--faults")
