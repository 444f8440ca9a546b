"""Launches in stages: interim analyses, declared before the first run, at which a launch may stop.

The unit is a pair: all arms of a seed run in one stage. All pairs have the same arms and so the same cost.
Seeds are run in their order.
"""

from pathlib import Path

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import compare_hash, launched_compare_hash
from abrun.messages.codes import Code
from abrun.recipe.experiment import (
    MAX_SEEDS,
    CommandRecipe,
    ExperimentDeclaration,
    Recipe,
    parse_stored_recipe,
)
from abrun.runs.experiment import open_experiment

DEFAULT_MAX_SEEDS = 12  # unless --max-seeds or declared interim analyses say otherwise
DEFAULT_FIRST_PAIRS = 4


def add_interim_analyses(recipe: Recipe | CommandRecipe, max_seeds: int | None) -> Recipe | CommandRecipe:
    """Return the recipe with interim analyses, and with as many seeds as the last of them needs.

    Uses the recipe's own interim analyses, or else three, evenly spaced, the first at its number of seeds (4,
    if that is below 3). New seeds are the smallest unused numbers. Raises RecipeError if nothing could be
    decided, or if recipe and `max_seeds` name different last analyses.
    """
    from abrun.experiment.power import MIN_FIRST_PAIRS, interim_counts  # scipy

    name, interim = recipe.name, recipe.compare.interim
    if not recipe.compare.claims:
        raise RecipeError(Code.STAGES_NEED_CLAIM(recipe=name))
    if len(recipe.arms) < 2:
        raise RecipeError(Code.STAGES_NEED_TREATMENT(recipe=name))
    if interim and max_seeds not in (None, interim[-1]):
        raise RecipeError(Code.MAX_SEEDS_WITH_INTERIM(max_seeds=max_seeds, interim=interim))
    if interim:
        return recipe
    max_count = DEFAULT_MAX_SEEDS if max_seeds is None else max_seeds
    num_seeds = len(recipe.seeds)
    first_pairs = num_seeds if num_seeds >= MIN_FIRST_PAIRS else min(DEFAULT_FIRST_PAIRS, max_count - 1)
    if not 2 <= first_pairs < max_count:
        raise RecipeError(
            Code.MAX_SEEDS_TOO_FEW(got=max_count, seeds=num_seeds, first_count=max(first_pairs, 2))
        )
    return parse_stored_recipe(
        {
            **recipe.model_dump(mode="json"),
            "seeds": _extend_seeds(recipe.seeds, min(max_count, MAX_SEEDS + 1)),  # a recipe refuses more
            "compare": {
                **recipe.compare.model_dump(mode="json"),
                "interim": interim_counts(first_pairs, max_count),
            },
        },
        f"{name} with --max-seeds {max_count}",
    )


def refuse_other_interim(recipe: ExperimentDeclaration, experiment_dir: Path) -> None:
    """Raise LaunchError if the experiment was launched with other interim analyses."""
    content = open_experiment(experiment_dir)
    launched_interim = (content.get("recipe", {}).get("compare") or {}).get("interim") or []
    # The stored recipe is that of the last --resume; the hash is that of the first launch.
    launched_hash = launched_compare_hash(content.get("compare_sha256", ""), recipe.compare)
    if launched_interim != recipe.compare.interim and launched_hash != compare_hash(recipe.compare):
        description = (
            f"with interim analyses at {launched_interim} pairs"
            if launched_interim
            else "without interim analyses"
        )
        raise LaunchError(
            Code.RESUME_OTHER_INTERIM(
                directory=experiment_dir, interim=recipe.compare.interim, before=description
            )
        )


def _extend_seeds(seeds: list[int], num_seeds: int) -> list[int]:
    unused = (seed for seed in range(num_seeds + len(seeds)) if seed not in seeds)
    return [*seeds, *(next(unused) for _ in range(num_seeds - len(seeds)))]
