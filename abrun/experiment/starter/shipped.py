"""Built-in recipes by name, and the cost of running each."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from abrun.errors import RecipeError
from abrun.experiment.plan import make_draft
from abrun.recipe.experiment import CommandRecipe, load_recipe
from abrun.runs.experiment import find_experiment, is_experiment, list_experiments
from abrun.runs.files import exists, is_directory, is_file

PACKAGE = Path(__file__).parents[2]
RECIPE_GROUPS = ("laptop", "GPUs", "another trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedRecipe:
    """Built-in recipe and the cost of launching it."""

    name: str
    path: str
    where: Literal["laptop", "GPUs", "another trainer"]
    about: str  # the first sentence of its comment
    arms: int
    runs: int
    steps: int  # steps of each run
    nodes: int  # nodes of each run
    devices: int  # devices of each node
    device: Literal["GPU", "CPU core"]
    completions: int | None  # sampled by all runs; None: no sampling, or by another trainer

    @property
    def is_evidence(self) -> bool:
        """True for an experiment of docs/evidence.md, which few will repeat."""
        return self.name.startswith("smollm2-")

    @property
    def size(self) -> str:
        """Return runs and steps as text: `9 x 60`."""
        return f"{self.runs} x {self.steps}"

    @property
    def cost(self) -> str:
        """Return the cost as text: `9 runs x 60 steps, 1 CPU core each`."""
        devices = f"{self.devices} {self.device}{'s' * (self.devices > 1)}"
        devices_of_run = devices if self.nodes == 1 else f"{self.nodes} nodes x {devices}"
        return f"{self.runs} run{'s' * (self.runs > 1)} x {self.steps} steps, {devices_of_run} each"


def recipes_folder() -> Path:
    """Return `recipes/` in the checkout, or its copy in the installed package."""
    installed = PACKAGE / "shipped"
    return installed if is_directory(installed) else PACKAGE.parent / "recipes"


def recipe_files() -> dict[str, Path]:
    """Return the files of all built-in recipes by name."""
    return {path.stem: path for path in sorted(recipes_folder().rglob("*.yaml"))}


def find_recipe(path: Path, runs_dir: Path = Path("runs")) -> Path:
    """Return the path of a recipe: a file, a built-in recipe by name, or an experiment by path or name.

    Raises RecipeError, with the closest name, if it is none of them. A missing file is left to its reader.
    """
    name, shipped = str(path), recipe_files()
    if is_file(path):
        return path
    if name in shipped:
        return shipped[name]
    experiment_dir = find_experiment(name, runs_dir)
    if is_experiment(experiment_dir):
        return experiment_dir
    if exists(path) or path.is_symlink() or path.suffix in (".yaml", ".yml") or "/" in name:
        return path
    names = {name: name for name in shipped}
    names |= {directory.name: str(directory) for directory in list_experiments(runs_dir)}
    names |= {file.stem: file.name for file in sorted(Path().glob("*.yaml"))}
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {names[close[0]]!r}?" if close else "run abrun recipes for the built-in ones"
    raise RecipeError(f"{name}: no such recipe, neither a file here nor built in; {hint}")


def list_shipped_recipes() -> list[ShippedRecipe]:
    """Return built-in recipes: for a laptop first, then for GPUs, then for other trainers."""
    recipes = [_load_shipped_recipe(path) for path in recipe_files().values()]
    return sorted(
        recipes,
        key=lambda recipe: (RECIPE_GROUPS.index(recipe.where), recipe.name != "quickstart", recipe.name),
    )


def _load_shipped_recipe(path: Path) -> ShippedRecipe:
    plan = make_draft(load_recipe(path))
    foreign = isinstance(plan.recipe, CommandRecipe)
    config = plan.runs[0].config
    cluster, algorithm = config.cluster, getattr(config, "algorithm", None)
    sampled = getattr(algorithm, "prompts_per_step", None)
    # The first sentence of the leading comment
    comment = re.match(r"(?:#.*\n)+", path.read_text())
    prose = " ".join(line.lstrip("# ") for line in comment[0].splitlines()) if comment else ""
    completions_per_step = None if sampled is None else sampled * getattr(algorithm, "group_size", 1)
    return ShippedRecipe(
        name=path.stem,
        path=str(path),
        where="another trainer" if foreign else "GPUs" if cluster.gpus_per_node else "laptop",
        about=re.split(r"(?<=[.?])\s+(?=[A-Z`])", prose)[0].rstrip("."),
        arms=len(plan.recipe.arms),
        runs=len(plan.runs),
        steps=config.steps,
        nodes=cluster.nodes,
        devices=config.devices_per_node,
        device="GPU" if cluster.gpus_per_node else "CPU core",
        completions=completions_per_step and completions_per_step * config.steps * len(plan.runs),
    )
