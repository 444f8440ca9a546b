"""An experiment of a recipe's baseline and injected faults alone: what its comparison would have caught."""

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.recipe.claims import Controls
from abrun.recipe.experiment import BASELINE, CommandRecipe, Recipe, parse_stored_recipe
from abrun.recipe.faults import FAULTS, LIBRARY, InjectedFault, unmet_need
from abrun.recipe.refusals import validated
from abrun.recipe.run import OwnRunConfig


def with_faults_alone(
    recipe: Recipe | CommandRecipe, names: str | None
) -> tuple[Recipe | CommandRecipe, dict[str, str]]:
    """The recipe without its treatments; and what it lacks for the faults that it cannot inject.

    `names`: NAME or NAME:SIZE, by commas; None: its own `controls.faults`, or all that it can inject. Raises
    RecipeError for one that was asked for and cannot be injected.
    """
    baseline = recipe.with_auto_values().run_config(BASELINE)
    if not isinstance(baseline, OwnRunConfig):
        raise RecipeError(Code.FAULTS_NEED_ABRUN_TRAINER(recipe=recipe.name))
    not_injected: dict[str, str] = {}
    wanted = recipe.controls.faults
    if names is not None:
        wanted = [_parsed(text) for text in names.split(",")]
        for one in wanted:
            lacks = unmet_need(LIBRARY[one.name], baseline)
            if lacks:
                raise RecipeError(Code.FAULT_NEEDS(fault=one.name, needs=lacks))
    elif not wanted:
        found = {fault.name: unmet_need(fault, baseline) for fault in FAULTS}
        not_injected = {name: lacks for name, lacks in found.items() if lacks}
        wanted = [InjectedFault(name=name) for name in found if name not in not_injected]
    if not wanted:
        raise RecipeError(Code.NO_FAULT_FITS(recipe=recipe.name))
    controls = validated(
        Controls,
        {
            "aa_reruns": recipe.controls.aa_reruns,
            "faults": [one.model_dump() for one in wanted],
        },
        "--faults",
    )
    compare = recipe.compare.model_copy(update={"interim": []})
    content = {
        **recipe.model_dump(mode="json"),
        "name": f"{recipe.name[:88]}-sensitivity",
        "arms": {BASELINE: recipe.arms[BASELINE]},
        "controls": controls.model_dump(mode="json"),
        "compare": compare.model_dump(mode="json"),
    }
    return parse_stored_recipe(content, recipe.name), not_injected


def _parsed(text: str) -> InjectedFault:
    name, colon, size = text.strip().partition(":")
    try:
        amount = float(size) if colon else None
    except ValueError:
        raise RecipeError(Code.SETTING_REFUSED(field="--faults", got=repr(text))) from None
    return validated(InjectedFault, {"name": name, "size": amount}, "--faults")
