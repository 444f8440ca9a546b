"""What manifests of any engine have: the jobs of a plan in order, the line of shell of a node, the recipe."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

import yaml

from abrun.errors import RecipeError
from abrun.experiment.plan import ExperimentPlan
from abrun.launch.cluster import agents_grace_s
from abrun.launch.slurm.jobs import WARM_START, pairs
from abrun.processes import MODULE_OPTIONS
from abrun.reasons import Code
from abrun.recipe.experiment import ExperimentDeclaration, parse_stored_recipe
from abrun.recipe.launcher import ManifestSettings
from abrun.recipe.run import RunConfig
from abrun.redaction import shortened

RECIPE = "ABRUN_RECIPE"  # the environment variable that holds it
PORT = 29400  # where the first node of a run listens: every run has nodes of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan on its way to an engine."""

    plan: ExperimentPlan
    name: str  # of the experiment
    settings: Any  # the Exported of the engine

    @property
    def directory(self) -> str:
        """The experiment's, as the nodes see it."""
        return str(PurePosixPath(self.settings.runs_dir) / self.name)

    @property
    def recipe(self) -> str:
        """What the recipe says, with what it inherits: JSON, for `recipe_in`."""
        recipe: Any = self.plan.recipe
        text = json.dumps(recipe.model_dump(mode="json", exclude_unset=True), indent=2, ensure_ascii=False)
        assert recipe_in(text) == recipe
        return text + "\n"

    def warm_starts(self) -> Iterator[tuple[str, str, RunConfig]]:
        """File, name of the member's run and configuration of each."""
        for index, (key, config) in enumerate(self.plan.warm_starts.items()):
            yield f"{WARM_START}-{index}", f"{WARM_START}/{key}", config

    def groups(self) -> Iterator[tuple[str, list[tuple[str, str, RunConfig]]]]:
        """For every pair, and every rerun, its file and of each of its runs arm, name and configuration."""
        for group in pairs(self.plan.runs):
            name = group[0].name
            file = f"rerun-seed-{name.seed}-aa{name.rerun}" if name.rerun else f"pair-seed-{name.seed}"
            yield file, [(run.name.arm, str(run.name), run.config) for run in group]

    def member(self, run: str, config: RunConfig, *, node: str, first: str) -> str:
        """The script of a node: `node` and `first` are how its shell finds its number and the first one."""
        settings: ManifestSettings = self.settings
        where = f'"{first}:{PORT}"' if config.cluster.nodes > 1 else f"127.0.0.1:{PORT}"
        grace_s = agents_grace_s(settings.save_s)
        module = [settings.python, *MODULE_OPTIONS, "abrun.launch.export.member", self.directory, run]
        return self._script(f"{shlex.join(module)} {node} {where} {grace_s:g}")

    def compare(self) -> str:
        """The script that judges what there is by then."""
        return self._script(
            shlex.join([self.settings.python, *MODULE_OPTIONS, "abrun", "compare", self.directory])
        )

    def _script(self, command: str) -> str:
        return "\n".join([*self.settings.setup, f"exec {command}", ""])


def recipe_in(text: str) -> ExperimentDeclaration:
    """The recipe that a node was given. Raises RecipeError."""
    try:
        content = json.loads(text)
    except ValueError:
        raise RecipeError(Code.EXPORT_RECIPE_INVALID(variable=RECIPE, got=shortened(text))) from None
    return parse_stored_recipe(content if isinstance(content, dict) else {}, RECIPE)


def dns_label(text: str, most: int) -> str:
    """A label that begins with a letter; two texts that differ have two (but for a hash of 24 bits)."""
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in text.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"x-{plain}".rstrip("-")
    if plain == text and len(plain) <= most:
        return plain
    return f"{plain[: most - 7].rstrip('-')}-{sha256(text.encode()).hexdigest()[:6]}"


class Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, so that people can read them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def as_yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**20)
