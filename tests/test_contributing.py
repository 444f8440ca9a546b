"""CONTRIBUTING's picture of the layers and its house rules, held against the code."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from abrun.runs.layout import RUN_FILES
from tests.source import sources, trees

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CONTRACTS: list[dict[str, Any]] = PYPROJECT["tool"]["importlinter"]["contracts"]


WIDTH = 76  # of the picture: no line is longer than a screen


def picture(contract: dict[str, Any], starred: Sequence[str]) -> str:
    """A contract's layers as boxes on top of each other; `starred` modules have a * behind them."""
    package = contract["containers"][0]
    boxes = []
    for layer in contract["layers"]:
        lines = [""]
        for name in layer.split(" | "):
            word = name + "*" * (f"{package}.{name}" in starred)
            if len(lines[-1]) + len(word) + 3 > WIDTH:
                lines.append("")
            lines[-1] += f"{'   ' if lines[-1] else ''}{word}"
        boxes.append("\n".join(f"│ {line:<{WIDTH}} │" for line in lines))
    between = f"\n├─{'─' * WIDTH}─┤\n".join(boxes)
    return f"┌─{'─' * WIDTH}─┐\n{between}\n└─{'─' * WIDTH}─┘"


def test_the_picture_of_the_layers_is_that_of_the_contracts() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    layers, circles, wings, _, forbidden = CONTRACTS
    drawn = picture(layers, forbidden["source_modules"])
    assert drawn in text, f"draw it so:\n{drawn}"
    rooms = {f"abrun.{name}" for layer in layers["layers"] for name in layer.split(" | ")}
    assert {*wings["source_modules"]} == rooms - {"abrun.__main__", "abrun.tools", "abrun.trainer"}
    assert {*wings["source_modules"]} <= {*forbidden["source_modules"]}
    assert circles["type"] == "acyclic_siblings" and circles["ancestors"] == ["abrun"]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to its end, without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def test_no_file_has_more_than_700_lines_and_no_function_but_kernels_more_than_60() -> None:
    long = [name for name, source in sources().items() if source.count("\n") > 700]
    long += [
        f"{name}: {function.name}"
        for name, tree in trees().items()
        for function in functions(tree)
        if num_lines(function) > 60
        and "triton.jit" not in [ast.unparse(one) for one in function.decorator_list]
    ]
    assert long == []


def test_no_module_is_called_after_nothing() -> None:
    names = {"utils", "util", "helpers", "common", "misc"}
    assert [name for name in sources() if names & set(name.removesuffix(".py").split("/"))] == []


def test_the_files_of_a_run_are_named_in_one_place() -> None:
    spelled = {
        (name, node.value)
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in RUN_FILES and "." in str(node.value)
    }
    spelled.discard(("abrun/experiment/preflight/hub.py", "config.json"))  # a Hugging Face checkpoint's
    assert {name for name, _ in spelled} == {"abrun/runs/layout.py"}


def test_nothing_asks_who_stands_behind_a_seam_and_ranks_alone_count_themselves() -> None:
    asked = {
        name
        for name, source in sources().items()
        if re.search(r"isinstance\([^()]*\b\w*(Backend|Engine|Launcher)\b", source)
    }
    counting = {name for name, source in sources().items() if "get_world_size()" in source}
    assert asked == set()
    assert counting == {"abrun/trainer/backends/ranks.py"}


def test_what_has_a_type_is_packaged_as_such() -> None:
    assert (ROOT / "abrun" / "py.typed").is_file()


def test_pytest_collects_nothing_that_a_test_imports_from_abrun() -> None:
    for path, tree in trees().items():
        for item in tree.body:
            names = [item.name] if isinstance(item, ast.FunctionDef | ast.ClassDef) else []
            assert not [name for name in names if name.lower().startswith("test")], path


def test_actions_are_pinned_and_publish_no_report_that_lay_in_the_repository() -> None:
    files = [*(ROOT / ".github").rglob("*.yml")]
    used = [line for file in files for line in file.read_text().splitlines() if "uses: " in line]
    pinned = re.compile(r".*uses: (\./.*|[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+)")
    assert len(used) >= 7 and not [line for line in used if not pinned.fullmatch(line)]
    steps = (ROOT / ".github/actions/regression/action.yml").read_text()
    assert 0 < steps.index("rm -rf report summary.md") < steps.index("abrun launch ")


def test_the_hooks_and_the_workflow_run_what_the_gate_runs() -> None:
    gate = (ROOT / ".ci" / "run").read_text()
    checks = re.findall(r"^step ((?:ruff|lint-imports|pyright).*)$", gate, re.M)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    at = [hooks.index(f"entry: {check}\n") for check in checks]
    assert len(checks) == 4 and all(a < b for a, b in pairwise(at))
    supported = [name.rpartition(" ")[2] for name in PROJECT["classifiers"]]
    weekly = (ROOT / ".github" / "workflows" / "weekly.yml").read_text()
    for text in (workflow, weekly):
        assert "run: .ci/run" in text and f"python: {json.dumps(supported)}\n" in text
    suites = re.findall(r"^    (core|trainer|tools|trainer \| tools)\) command=", gate, re.M)
    assert suites == ["core", "trainer | tools"] and 'suite: ["core", "trainer", "tools"]\n' in workflow
    assert f"Python {supported[0]} to {supported[-1]}" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_lock_names_releases_that_pyproject_allows_and_that_any_index_has() -> None:
    lines = (ROOT / ".ci" / "lock-3.11.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    versions = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    pending, extras = list(PROJECT["dependencies"]), ["test"]
    for extra in extras:  # which grows by those that it includes
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            included = requirement.name == "abrun"
            extras.extend(requirement.extras) if included else pending.append(str(requirement))
    for requirement in map(Requirement, pending):
        if requirement.name != "triton":  # of which torch on PyPI requires one version
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement
