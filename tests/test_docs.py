"""What the documents say of the code, held against it."""

import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun import processes
from abrun.cli import app
from abrun.experiment.plan import make_plan
from abrun.external import run as external_run
from abrun.logs import FORMATS
from abrun.logs.aliases import FRAMEWORKS
from abrun.logs.naming import DEFAULT_PATTERNS
from abrun.logs.rows import STEP_COLUMNS
from abrun.recipe.command import PLACEHOLDERS
from abrun.recipe.experiment import load_recipe
from abrun.recipe.faults import LIBRARY
from abrun.recipe.section import Section
from abrun.runs import layout
from tests.commands import commands_in, commands_of, has_placeholders, problem_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sections(model: type[Section]) -> Iterator[type[Section]]:
    yield model
    for each in model.__subclasses__():
        yield from sections(each)


def test_recipes_md_is_what_its_script_prints() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "recipes.py"))["page"]()
    written = (ROOT / "docs" / "recipes.md").read_text()
    assert written == page, "print it again: python docs/recipes.py > docs/recipes.md"


def test_foreign_runs_md_has_every_name_that_a_user_may_or_may_not_write() -> None:
    text = (ROOT / "docs" / "foreign-runs.md").read_text()
    variables = re.findall(r'"(ABRUN_[A-Z_]+)"', Path(external_run.__file__).read_text())
    variables.append(processes.RUN_DIR_VARIABLE)
    assert len(variables) == 4
    names = [*FORMATS, *FRAMEWORKS, *DEFAULT_PATTERNS, *STEP_COLUMNS, *layout.RUN_FILES, *variables]
    names += [f"{{{name}}}" for name in PLACEHOLDERS]
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_refers_to_is_there(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    paths = [document.parent / link for link in links]
    named = re.findall(r"`((?:abrun|tests|recipes|docs)/[\w./-]*)(?::\w+)?`", text)
    paths += [ROOT / name for name in named]
    assert [str(path) for path in paths if not path.exists()] == []


def test_every_name_of_the_code_in_contributing_is_there() -> None:
    code = "".join(
        path.read_text() for folder in ("abrun", "tests") for path in (ROOT / folder).rglob("*.py")
    )
    names = re.findall(r"`([A-Z]\w+|\w*_\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 20 and [name for name in names if not re.search(rf"\b{name}\b", code)] == []


def test_contributing_s_table_has_every_room() -> None:
    listed = re.findall(r"^\| `abrun/(\w+)(?:/|\.py)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    there = {
        path.stem
        for path in (ROOT / "abrun").iterdir()
        if path.name[0] not in "_." and path.name != "py.typed"
    }
    assert sorted(listed) == sorted(there)


def test_the_readme_s_headline_figures_are_measured() -> None:
    text = (ROOT / "README.md").read_text()
    headlines, _, _ = text.partition("## Measured")[2].partition("\n## ")
    figures = set(re.findall(r"\d[\d,.]*\d", headlines)) - {"1.5"}
    measured = set(re.findall(r"\d[\d,.]*\d", (ROOT / "docs" / "measured.md").read_text()))
    assert figures and figures <= measured


RECIPES = [
    pytest.param(block, id=f"{document.name}-{index}")
    for document in DOCUMENTS
    for index, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", document.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("text", RECIPES)
def test_a_recipe_in_a_document_can_be_planned(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    assert len(make_plan(load_recipe(tmp_path / "recipe.yaml")).runs) >= 8


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_a_document_is_taken(document: Path) -> None:
    text = document.read_text()
    wrong = [(words, problem_of(words)) for words in commands_of(text)]
    spoken_of = [words for span in re.findall(r"`(abrun [a-z][^`]*)`", text) for words in commands_in(span)]
    wrong += [(words, problem_of(words, whole=False)) for words in spoken_of]
    assert [one for one in wrong if one[1]] == []
    recipes = [word for words in commands_of(text) for word in words if word.startswith("recipes/")]
    assert [name for name in recipes if not (ROOT / name).is_file()] == []


QUICK = ("recipes", "faults", "power", "init")  # the others take long, or runs
RUN = {
    " ".join(words): words
    for document in DOCUMENTS
    for words in commands_of(document.read_text())
    if words and words[0] in (*QUICK, "launch") and "run" not in words and not has_placeholders(words)
}


@pytest.mark.parametrize("words", RUN.values(), ids=RUN.keys())
def test_a_quick_command_in_a_document_runs_and_a_launch_dry_runs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "mine.yaml").write_text((ROOT / "recipes" / "quickstart.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    if words[0] == "launch":
        left_out = ("--no-compare", "--exit-zero", "--dry-run")
        words = [*(word for word in words if word not in left_out), "--dry-run"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and done.output


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = (ROOT / ".mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r": ([\w./-]+\.md)$", contents, re.M)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {"index.md", "contributing.md"}
    assert sorted(listed) == sorted(pages)


def test_versions_md_has_the_range_of_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for extra in extras if not extra.startswith("test") for line in extras[extra]]
    found = re.findall(
        r"^([\w-]+)(?:\[\w+\])?([<>=!~][^;\n]*)", "\n".join([*project["dependencies"], *lines]), re.M
    )
    allowed = {("Python", project["requires-python"]), *found}
    text = (ROOT / "docs" / "versions.md").read_text()
    assert set(re.findall(r"^\| ([\w-]+) \| `([^`]+)` \| .+ \|.*\|$", text, re.M)) == allowed


@pytest.mark.slow
def test_the_documentation_is_a_site_without_a_broken_link(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "-f",
        ".mkdocs.yml",
        "--strict",
        "-d",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {
        path.parent.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")
    }
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= pages
    start = (tmp_path / "site" / "index.html").read_text()
    assert "images/live.png" in start and "docs/images" not in start


def test_faults_md_is_what_its_script_prints() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "faults.py"))["page"]()
    written = (ROOT / "docs" / "faults.md").read_text()
    assert written == page + "\n", "print it again: python docs/faults.py > docs/faults.md"


SOME_FAMILIES = [
    ("llama", None),
    ("mistral", 4096),
    ("gemma3", None),
    ("deepseek_v3", None),
    ("mamba2", None),
]


@pytest.mark.megatron
def test_models_md_is_what_some_families_can_do() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "models.py"))
    some = tuple(
        family
        for family in script["FAMILIES"]
        if (family.kind, family.settings.get("sliding_window")) in SOME_FAMILIES
    )
    assert len(some) == len(SOME_FAMILIES)
    written = (ROOT / "docs" / "models.md").read_text()
    lines = script["rows"](some)
    assert not set(lines) - set(written.splitlines()), (
        "print it again: python docs/models.py > docs/models.md"
    )
    assert all(f"`{family.kind}`" in written for family in script["FAMILIES"])
    assert written.endswith("\n".join(script["refused"]()) + "\n")


@pytest.mark.slow
@pytest.mark.megatron
def test_models_md_is_what_its_script_prints() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "models.py"))["page"]()
    written = (ROOT / "docs" / "models.md").read_text()
    assert written == page + "\n", "print it again: python docs/models.py > docs/models.md"


def test_faults_that_documents_and_helps_name_are_there() -> None:
    texts = [path.read_text() for path in (*DOCUMENTS, *(ROOT / "abrun" / "cli").glob("*.py"))]
    lists = [names for text in texts for names in re.findall(r"--faults ([a-z][a-z_0-9.,:]*)", text)]
    named = {name.partition(":")[0] for names in lists for name in names.strip(".,").split(",")}
    assert len(named) > 3 and named <= LIBRARY.keys()
