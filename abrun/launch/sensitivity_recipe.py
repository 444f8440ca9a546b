"""Recipe of a sensitivity analysis: a recipe's baseline with injected faults, and no treatments."""

from abrun.errors import RecipeError
from abrun.recipe.claims import Controls
from abrun.recipe.experiment import CommandRecipe, Recipe, parse_stored_recipe
from abrun.recipe.faults import FAULTS, LIBRARY, InjectedFault, unmet_need
from abrun.recipe.refusals import validated
from abrun.recipe.run import OwnRunConfig


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
            needs = unmet_need(LIBRARY[fault.name], baseline)
            if needs:
                raise RecipeError(
                    f"--faults: got {fault.name!r}, which {needs}; change that with --set, or drop the fault"
                )
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
        raise RecipeError(
            f"--faults: got {text!r}; allowed: NAME or NAME:SIZE, such as misgrouped:2"
        ) from None
    return validated(InjectedFault, {"name": name, "size": amount}, "--faults")
