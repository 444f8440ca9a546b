"""A launch in stages: the interim analyses at which it may stop, declared before its first run.

A pair is the unit: all arms of a seed run in one stage. Every pair has the same arms, so that none is cheaper
than another, and seeds go in their order.
"""

from pathlib import Path

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import compare_hash
from abrun.reasons import Code
from abrun.recipe.experiment import (
    MAX_SEEDS,
    CommandRecipe,
    ExperimentDeclaration,
    Recipe,
    parse_stored_recipe,
)
from abrun.runs.experiment import open_experiment

STAGED_SEEDS = 12  # unless --max-seeds or declared interim analyses say otherwise
FEWEST_PAIRS = (
    3  # of a first interim analysis by the recipe's own number of seeds: fewer decide next to nothing
)
FIRST_ANALYSIS = 4


def until_decided(recipe: Recipe | CommandRecipe, max_seeds: int | None) -> Recipe | CommandRecipe:
    """The recipe with interim analyses declared, and with as many seeds as the last of them takes.

    Its own interim analyses; or three, evenly spaced, from its number of seeds (4, where that is below 3) on.
    Its seeds are continued by the smallest numbers that it does not use. Raises RecipeError where nothing
    could be decided, or where both declare the last analysis.
    """
    name, interim = recipe.name, recipe.compare.interim
    if not recipe.compare.claims:
        raise RecipeError(Code.STAGES_NEED_CLAIM(recipe=name))
    if len(recipe.arms) < 2:
        raise RecipeError(Code.STAGES_NEED_TREATMENT(recipe=name))
    if interim and max_seeds not in (None, interim[-1]):
        raise RecipeError(Code.MAX_SEEDS_WITH_INTERIM(max_seeds=max_seeds, interim=interim))
    if interim:
        return recipe
    most = STAGED_SEEDS if max_seeds is None else max_seeds
    own = len(recipe.seeds)
    first = own if own >= FEWEST_PAIRS else min(FIRST_ANALYSIS, most - 1)
    if not 2 <= first < most:
        raise RecipeError(Code.MAX_SEEDS_TOO_FEW(got=most, seeds=own, first_count=max(first, 2)))
    return parse_stored_recipe(
        {
            **recipe.model_dump(mode="json"),
            "seeds": _continued(recipe.seeds, min(most, MAX_SEEDS + 1)),  # a recipe refuses more
            "compare": {
                **recipe.compare.model_dump(mode="json"),
                "interim": sorted({first, round((first + most) / 2), most}),
            },
        },
        f"{name} with --max-seeds {most}",
    )


def refuse_other_interim(recipe: ExperimentDeclaration, experiment_dir: Path) -> None:
    """Raise LaunchError if the experiment was launched with other interim analyses."""
    content = open_experiment(experiment_dir)
    launched = (content.get("recipe", {}).get("compare") or {}).get("interim") or []
    first = content.get("compare_sha256")  # the recipe is that of the last --resume
    if launched != recipe.compare.interim and first != compare_hash(recipe.compare):
        had = f"with interim analyses at {launched} pairs" if launched else "without interim analyses"
        raise LaunchError(
            Code.RESUME_OTHER_INTERIM(directory=experiment_dir, interim=recipe.compare.interim, before=had)
        )


def _continued(seeds: list[int], num_seeds: int) -> list[int]:
    unused = (seed for seed in range(num_seeds + len(seeds)) if seed not in seeds)
    return [*seeds, *(next(unused) for _ in range(num_seeds - len(seeds)))]
