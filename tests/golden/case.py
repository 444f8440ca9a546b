"""Cases of the corpus: functions that build files in an empty folder and yield the command lines to run."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Build = Callable[[Path], Iterator[Sequence[str]]]
MODULES = (
    "verdicts",
    "claims",
    "controls",
    "broken",
    "references",
    "interim",
    "foreign",
    "launches",
    "evidence",
)
CASES: dict[str, Build] = {}


def case(build: Build) -> Build:
    """Register a function as the case of its name. What it yields is run before it goes on."""
    return add_case(build.__name__, build)


def add_case(name: str, build: Build) -> Build:
    name = name.replace("_", "-")
    assert name not in CASES, name
    CASES[name] = build
    return build


def compare_command(*words: str) -> list[str]:
    """A command line that compares and writes a report, without figures: they take a second each."""
    return ["compare", *words, "--output", "report"]


def compare_in_short(*words: str) -> list[str]:
    """A command line that compares, of whose report the page is not recorded."""
    return ["compare", *words, "--output", "short"]


def all_cases() -> dict[str, Build]:
    for module in MODULES:
        importlib.import_module(f"tests.golden.cases.{module}")
    return CASES
