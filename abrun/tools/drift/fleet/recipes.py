"""Recipes of a fleet: the folders of runs, each with its frozen reference."""

from dataclasses import dataclass, field
from pathlib import Path

from abrun.errors import AbrunError, ComparisonError
from abrun.logs.recorded.reference import load_reference
from abrun.logs.recorded.sources import ReadingOptions
from abrun.messages.codes import Code, Reason
from abrun.runs.experiment import REFERENCE
from abrun.runs.regular_files import exists, is_directory, is_file

FLEET_FILE = "fleet.json"
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Settings of one fleet comparison."""

    folder: Path
    references: Path | None = (
        None  # folder with NAME.json; None: NAME.json or NAME/reference.json in `folder`
    )
    rerun: Path | None = None  # folder with second runs of some recipes, of the same names
    earlier: Path | None = None  # report folder of an earlier fleet, or its fleet.json
    arm: str | None = None
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    step_one: bool = True
    output: Path | None = None
    command: str = "abrun compare --fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecipe:
    """One recipe: its runs and its reference, or the reason why it has none."""

    name: str
    folder: Path
    reference: Path | None = None
    problem: Reason | None = None


def find_recipes(options: FleetOptions) -> list[FleetRecipe]:
    """Return every recipe of the fleet by name, also those without runs or reference.

    Raises ComparisonError for a folder that is missing or has no recipe.
    """
    for option, folder in (
        ("--fleet", options.folder),
        ("--reference", options.references),
        ("--rerun", options.rerun),
    ):
        if folder is not None and not is_directory(folder):
            problem = "not a folder" if exists(folder) else "no such folder"
            raise ComparisonError(
                f"{option}: got {folder}, {problem}; give a folder with a subfolder for each recipe"
            )
    folders = {path.name: path for path in sorted(options.folder.iterdir()) if _holds_runs(path)}
    names = sorted({*folders, *_names_without_runs(options, folders)})
    if not names:
        raise ComparisonError(
            f"--fleet: {options.folder} has no recipe; give a folder with a subfolder of runs for each recipe"
        )
    return [_find_recipe(options, name, options.folder / name) for name in names]


def _holds_runs(path: Path) -> bool:
    """Return True for a folder that could hold runs: not hidden, and not the report of a fleet."""
    try:
        return not path.name.startswith(".") and is_directory(path) and not exists(path / FLEET_FILE)
    except OSError:  # it may not be entered; its row says so
        return True


def _names_without_runs(options: FleetOptions, folders: dict[str, Path]) -> list[str]:
    """Return the names of references whose recipe has no folder: it has not run."""
    files = sorted((options.references or options.folder).glob(f"*{_SUFFIX}"))
    orphans = [path for path in files if path.name.removesuffix(_SUFFIX) not in folders]
    if options.references is None:  # the folder may hold other JSON files
        orphans = [path for path in orphans if _is_reference(path)]
    return [path.name.removesuffix(_SUFFIX) for path in orphans]


def problem_of_file(error: OSError) -> Reason:
    return Code.FOREIGN_TEXT(text=f"{error.filename}: {error.strerror or error}")


def _is_reference(path: Path) -> bool:
    try:
        load_reference(path)
    except (AbrunError, OSError):
        return False
    return True


def _find_recipe(options: FleetOptions, name: str, folder: Path) -> FleetRecipe:
    paths = [options.folder / f"{name}{_SUFFIX}", folder / REFERENCE]
    if options.references is not None:
        paths = [options.references / f"{name}{_SUFFIX}"]
    try:
        references = [path for path in paths if is_file(path)]
    except OSError as error:
        return FleetRecipe(name=name, folder=folder, problem=problem_of_file(error))
    reference = references[0] if len(references) == 1 else None
    problem = None
    if not references:
        problem = Code.FLEET_WITHOUT_REFERENCE(recipe=name, reference=paths[0])
    elif len(references) > 1:
        problem = Code.FLEET_TWO_REFERENCES(recipe=name, first=references[0], second=references[1])
    elif not is_directory(folder):
        problem = Code.FLEET_WITHOUT_RUNS(recipe=name, folder=folder)
    return FleetRecipe(name=name, folder=folder, reference=reference, problem=problem)
