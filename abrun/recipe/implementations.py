"""Registry of backends, rollout engines and launchers by their names in recipes and on the command line.

One line here adds an implementation. A value is `module:object` and is imported on demand, so this module
and the control plane depend on none of them. A launcher starts processes; a scheduler queues jobs.

Other packages add a command, a scheduler or a reader of logs by an entry point of a group below, and so do
abrun's own tools (docs/how-to/extend.md).
"""

import importlib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.errors import AbrunError
from abrun.runs.redaction import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS = {
    "dtensor": "abrun.trainer.backends.dtensor:DtensorBackend",
    "megatron": "abrun.trainer.backends.megatron:make_backend",
}
ENGINES = {
    "torch": "abrun.trainer.rollout.torch_engine:make_engine",
    "vllm": "abrun.trainer.rollout.vllm.engines:make_engine",
    "recorded": "abrun.trainer.rollout:RecordedEngine",
}
TASK_CHECK = "abrun.trainer.tasks.checks:find_bad_files"  # of a plan, before its runs start
LOCAL_LAUNCHERS = {"local": "abrun.launch.local:LocalEngine"}
SCHEDULERS = {"slurm": "abrun.launch.slurm.launcher:SlurmCluster"}

# Groups of entry points
COMMANDS = "abrun.commands"  # a Typer application, whose commands abrun gets
LAUNCHERS = "abrun.launchers"  # a scheduler: a class like SlurmCluster
READERS = "abrun.readers"  # a Reader of abrun.logs.readers
TOOLS = "abrun.tools"  # a module that commands of the core ask: `predict`, `fleet` and `ledger`


def load_implementation(implementation: str) -> Any:
    """Import and return the object named by `module:object`."""
    module, _, name = implementation.partition(":")
    return getattr(importlib.import_module(module), name)


def installed(group: str) -> "dict[str, EntryPoint]":
    """Return the entry points of a group by name, abrun's own first; reading them takes 20 ms.

    No package takes a name of abrun's. From a checkout, abrun's own are read from its pyproject.toml.
    """
    from importlib.metadata import EntryPoint, entry_points

    entries = sorted(entry_points(group=group), key=lambda entry: (_owner(entry) == "abrun", entry.name))
    entry_points_by_name = {entry.name: entry for entry in entries}
    project = Path(__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        values = declared["entry-points"].get(group, {}) if declared.get("name") == "abrun" else {}
        entry_points_by_name |= {name: EntryPoint(name, value, group) for name, value in values.items()}
    return dict(sorted(entry_points_by_name.items(), key=lambda item: (_owner(item[1]) != "abrun", item[0])))


def load_installed(entry: "EntryPoint") -> Any:
    """Import and return what an entry point names. Raises AbrunError if its package is broken."""
    try:
        return entry.load()
    except (Exception, SystemExit, GeneratorExit) as error:  # another package's code
        owner, problem = _owner(entry), printable(f"{type(error).__name__}: {error}")
        raise AbrunError(
            f"{entry.group}: {entry.name} of {owner} cannot be loaded: {problem}; "
            + ("reinstall abrun" if owner == "abrun" else f"repair it, or: pip uninstall {owner}")
        ) from error


def _owner(entry: "EntryPoint") -> str:
    """Return the package of an entry point; those of a checkout have none."""
    return (entry.dist.name if entry.dist else "abrun") or "a package without a name"


def load_tool(name: str, needed_by: str) -> Any:
    """Return the module of a tool. Raises AbrunError if it is not installed; `needed_by` names the option."""
    entry = installed(TOOLS).get(name)
    if entry is None:
        raise AbrunError(f"{needed_by}: the tool {name} is not installed; reinstall abrun")
    return load_installed(entry)


def find_scheduler(name: str) -> Any:
    """Return a scheduler's class by its name in `launcher.type`; None for any other launcher."""
    if name in SCHEDULERS:
        return load_implementation(SCHEDULERS[name])
    entry = installed(LAUNCHERS).get(name)
    return entry and load_installed(entry)


def scheduler_names() -> list[str]:
    """Return the names of all schedulers, abrun's and other packages'."""
    return [*SCHEDULERS, *installed(LAUNCHERS)]
