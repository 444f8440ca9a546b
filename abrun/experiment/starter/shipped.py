"""The recipes that ship with abrun, by name, wherever it is installed; and what each takes to run."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from abrun.errors import RecipeError
from abrun.experiment.plan import make_draft
from abrun.reasons import Code
from abrun.recipe.experiment import CommandRecipe, load_recipe
from abrun.regular_files import exists, is_directory, is_file

PACKAGE = Path(__file__).parents[2]
WHERE = ("laptop", "GPUs", "another trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One recipe that ships, and what a launch of it takes."""

    name: str
    path: str
    where: Literal["laptop", "GPUs", "another trainer"]
    about: str  # the first sentence of its comment
    arms: int
    runs: int
    steps: int  # of each run
    nodes: int  # of each run
    devices: int  # of each node
    device: Literal["GPU", "CPU core"]
    completions: int | None  # sampled by all runs; None: it samples none, or another trainer does

    @property
    def cost(self) -> str:
        """`9 runs x 60 steps, 1 CPU core each`."""
        devices = f"{self.devices} {self.device}{'s' * (self.devices > 1)}"
        each = devices if self.nodes == 1 else f"{self.nodes} nodes x {devices}"
        return f"{self.runs} run{'s' * (self.runs > 1)} x {self.steps} steps, {each} each"


def folder() -> Path:
    """`recipes/` of the checkout, or its copy inside the installed package."""
    installed = PACKAGE / "shipped"
    return installed if is_directory(installed) else PACKAGE.parent / "recipes"


def recipe_files() -> dict[str, Path]:
    """Every recipe that ships, by the name that it is launched by."""
    return {path.stem: path for path in sorted(folder().rglob("*.yaml"))}


def find_recipe(given: Path) -> Path:
    """The recipe that a command line names: a file, or else one that ships, by its name.

    Raises RecipeError, with the nearest name, where it is neither.
    """
    named, known = str(given), recipe_files()
    if named in known and not is_file(given):
        return known[named]
    if exists(given) or given.is_symlink() or given.suffix in (".yaml", ".yml") or "/" in named:
        return given
    here = [f"{named}.yaml"] * is_file(Path(f"{named}.yaml"))
    close = here or difflib.get_close_matches(named, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "abrun recipes lists those that ship"
    raise RecipeError(Code.NO_SUCH_RECIPE(got=named, hint=hint))


def shipped_recipes() -> list[Shipped]:
    """Those for a laptop first, then those for GPUs, then those of other trainers."""
    found = [_shipped(path) for path in recipe_files().values()]
    return sorted(found, key=lambda one: (WHERE.index(one.where), one.name != "quickstart", one.name))


def _shipped(path: Path) -> Shipped:
    plan = make_draft(load_recipe(path))
    foreign = isinstance(plan.recipe, CommandRecipe)
    config = plan.runs[0].config
    cluster, algorithm = config.cluster, getattr(config, "algorithm", None)
    sampled = getattr(algorithm, "prompts_per_step", None)
    of_a_step = None if sampled is None else sampled * getattr(algorithm, "group_size", 1)
    return Shipped(
        name=path.stem,
        path=str(path),
        where="another trainer" if foreign else "GPUs" if cluster.gpus_per_node else "laptop",
        about=_about(path.read_text()),
        arms=len(plan.recipe.arms),
        runs=len(plan.runs),
        steps=config.steps,
        nodes=cluster.nodes,
        devices=config.devices_per_node,
        device="GPU" if cluster.gpus_per_node else "CPU core",
        completions=None if of_a_step is None else of_a_step * config.steps * len(plan.runs),
    )


def _about(text: str) -> str:
    """The first sentence of the comment that a recipe begins with."""
    comment = re.match(r"(?:#.*\n)+", text)
    said = " ".join(line.lstrip("# ") for line in comment[0].splitlines()) if comment else ""
    return re.split(r"(?<=[.?])\s+(?=[A-Z`])", said)[0].rstrip(".")
