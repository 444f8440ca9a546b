"""Shared parts of all manifests: the jobs of a plan, the script of a node, the recipe as a variable."""

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
from abrun.launch.cluster import agent_grace_s
from abrun.launch.slurm.jobs import WARM_START, group_pairs
from abrun.processes import MODULE_OPTIONS
from abrun.reasons import Code
from abrun.recipe.experiment import ExperimentDeclaration, parse_stored_recipe
from abrun.recipe.launcher import ManifestSettings
from abrun.recipe.run import RunConfig
from abrun.redaction import shortened
from abrun.runs.layout import REPORT

RECIPE_VARIABLE = "ABRUN_RECIPE"
# The first node of a run listens here. Runs do not share nodes.
PORT = 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPlan:
    """A plan to be exported for an engine."""

    plan: ExperimentPlan
    name: str  # the experiment's
    settings: Any  # the engine's subclass of Exported

    @property
    def directory(self) -> str:
        """The experiment's directory on the nodes."""
        return str(PurePosixPath(self.settings.runs_dir) / self.name)

    @property
    def recipe(self) -> str:
        """The complete recipe, including what it inherits, as JSON for `parse_recipe`."""
        recipe: Any = self.plan.recipe
        text = json.dumps(recipe.model_dump(mode="json", exclude_unset=True), indent=2, ensure_ascii=False)
        assert parse_recipe(text) == recipe
        return text + "\n"

    def warm_starts(self) -> Iterator[tuple[str, str, RunConfig]]:
        """Yield file, run name and configuration of each warm start."""
        for index, (key, config) in enumerate(self.plan.warm_starts.items()):
            yield f"{WARM_START}-{index}", f"{WARM_START}/{key}", config

    def run_groups(self) -> Iterator[tuple[str, list[tuple[str, str, RunConfig]]]]:
        """Yield each pair and each rerun: its file, and arm, name and configuration of each of its runs."""
        for group in group_pairs(self.plan.runs):
            name = group[0].name
            file = f"rerun-seed-{name.seed}-aa{name.rerun}" if name.rerun else f"pair-seed-{name.seed}"
            yield file, [(run.name.arm, str(run.name), run.config) for run in group]

    def node_script(self, run: str, config: RunConfig, *, node: str, first_host: str) -> str:
        """Return a node's script. `node`, `first_host`: shell expressions for its index and that host."""
        settings: ManifestSettings = self.settings
        address = f'"{first_host}:{PORT}"' if config.cluster.nodes > 1 else f"127.0.0.1:{PORT}"
        grace_s = agent_grace_s(settings.save_s)
        module = [settings.python, *MODULE_OPTIONS, "abrun.launch.export.run_node", self.directory, run]
        return self._script(f"{shlex.join(module)} {node} {address} {grace_s:g}")

    def compare_script(self) -> str:
        sources = [self.directory, "--output", f"{self.directory}/{REPORT}"]
        return self._script(shlex.join([self.settings.python, *MODULE_OPTIONS, "abrun", "compare", *sources]))

    def _script(self, command: str) -> str:
        return "\n".join([*self.settings.setup, f"exec {command}", ""])


def parse_recipe(text: str) -> ExperimentDeclaration:
    """Parse the recipe in a node's environment variable. Raises RecipeError."""
    try:
        content = json.loads(text)
    except ValueError:
        raise RecipeError(Code.EXPORT_RECIPE_INVALID(variable=RECIPE_VARIABLE, got=shortened(text))) from None
    return parse_stored_recipe(content if isinstance(content, dict) else {}, RECIPE_VARIABLE)


def dns_label(text: str, max_length: int) -> str:
    """Return a label that begins with a letter; different texts get different labels (except for collisions
    of a 24-bit hash).
    """
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in text.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"x-{plain}".rstrip("-")
    if plain == text and len(plain) <= max_length:
        return plain
    return f"{plain[: max_length - 7].rstrip('-')}-{sha256(text.encode()).hexdigest()[:6]}"


class BlockTextDumper(yaml.SafeDumper):
    """YAML dumper that writes texts of several lines as blocks, for readability."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: Any, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


BlockTextDumper.add_representer(str, _represent_text)


def dump_yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=BlockTextDumper, sort_keys=False, allow_unicode=True, width=2**20)
