"""What the documents say of the code, held against it, and how long they are."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun import processes
from abrun.cli import app
from abrun.cli.starting import SKILL
from abrun.experiment.plan import make_plan
from abrun.external import run as external_run
from abrun.logs import FORMATS
from abrun.logs.aliases import FRAMEWORKS
from abrun.logs.rows import STEP_COLUMNS
from abrun.processes import progress
from abrun.recipe.command import NODE_PLACEHOLDERS, PLACEHOLDERS
from abrun.recipe.experiment import load_recipe
from abrun.recipe.faults import LIBRARY
from abrun.runs import layout
from abrun.tools.drift import cli as gating
from abrun.verdict.decide import EXIT_CODES
from tests.commands import commands_in, commands_of, has_placeholders, problem_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", SKILL, *sorted((ROOT / "docs").rglob("*.md"))]


REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference.py"))


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text()


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_a_generated_page_is_what_its_script_writes(name: str) -> None:
    assert page(name) == REFERENCE["text_of"](name), "write it again: python docs/reference.py"


def test_reference_pages_have_every_name_that_a_user_may_or_may_not_write() -> None:
    variables = re.findall(r'"(ABRUN_[A-Z_]+)"', Path(external_run.__file__).read_text())
    variables += [processes.RUN_DIR_VARIABLE, *(f"ABRUN_{name.upper()}" for name in NODE_PLACEHOLDERS)]
    variables += [progress.AGENT_PID_VARIABLE, progress.FOLDER_VARIABLE, progress.LISTENING_FD_VARIABLE]
    formats = [*FORMATS, *FRAMEWORKS, *STEP_COLUMNS]
    names = {
        "log-formats.md": formats,
        "run-directory.md": [layout.EXPERIMENT, *layout.RUN_FILES],
        "environment.md": variables,
        "recipes.md": [f"{{{name}}}" for name in (*PLACEHOLDERS, *NODE_PLACEHOLDERS)],
    }
    assert len(variables) == 15
    lacking = [
        (file, name) for file, listed in names.items() for name in listed if f"`{name}`" not in page(file)
    ]
    assert lacking == []
    codes = {int(code) for code in re.findall(r"^- (\d+): ", page("exit-codes.md"), re.M)}
    assert codes == {0, 1, 2, *EXIT_CODES.values(), *gating.EXIT_CODES.values()}


MAX_WORDS = {"README.md": 1000, "docs": 30_500, "docs/reference": 13_000}
RESULTS = "\n## Results\n"  # of docs/evidence.md, which grow with each experiment
EXPERIMENTS = [*(ROOT / "docs" / "evidence").glob("*/README.md")]
CHANGES = "changelog.md"  # grows with each version


@pytest.mark.parametrize(("place", "most"), MAX_WORDS.items())
def test_documents_stay_short(place: str, most: int) -> None:
    files = [ROOT / place] if place.endswith(".md") else (ROOT / place).rglob("*.md")
    counted = [path for path in files if path.name != CHANGES and path not in EXPERIMENTS]
    texts = [path.read_text().partition(RESULTS)[0] for path in counted]
    assert sum(len(text.split()) for text in texts) <= most


def test_every_figure_measured_has_its_command_hardware_and_date() -> None:
    introduction, *sections = re.split(r"^## ", (ROOT / "docs" / "measured.md").read_text(), flags=re.M)
    assert len(sections) > 10 and "CPU" in introduction and "GPU" in introduction
    for section in sections:
        title = section.partition("\n")[0]
        assert re.search(r"^```sh\n|`abrun launch ", section, re.M), title
        assert re.search(r"\b(CPU|GPU|H100|H200)\b", section), title
        assert re.search(r"\b2026-\d\d-\d\d\b", section), title


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


QUICK = ("recipes", "faults", "power", "init", "launch")  # the others take long, or runs
LEFT_OUT = ("--no-compare", "--exit-zero", "--dry-run", "--plan-only", "--resume")


def quick_commands(document: Path) -> list[tuple[list[str], str | None]]:
    """A page's commands that take no runs, with the plan for each launch, and the file of their output."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.M | re.S)
    commands = []
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        target = re.search(r" > (\S+)", line)
        for words in commands_in(line):
            if words and words[0] in QUICK and words[:2] != ["faults", "run"] and not has_placeholders(words):
                if words[0] == "launch":
                    words = [*(word for word in words if word not in LEFT_OUT), "--plan-only"]
                commands.append((words, target and target[1]))
    return commands


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if quick_commands(path)], ids=lambda path: path.stem
)
def test_the_quick_commands_of_a_document_run_in_order_and_launches_dry_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for words, target in quick_commands(document):
        recipe = Path(words[1]) if len(words) > 1 and words[1].endswith(".yaml") else None
        if recipe and not recipe.exists():  # the reader's own, which the page does not make
            recipe.write_text((ROOT / "recipes" / "quickstart.yaml").read_text())
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0 and done.output, (words, done.output)
        if target:
            Path(target).write_text(done.stdout)


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = (ROOT / ".mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r": ([\w./-]+\.md)$", contents, re.M)
    files = {*(ROOT / "docs").rglob("*.md")}.difference(EXPERIMENTS)  # evidence.md refers to these
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in files} | {"index.md", "contributing.md"}
    assert sorted(listed) == sorted(pages)


def test_versions_md_has_the_range_of_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for extra in extras if not extra.startswith("test") for line in extras[extra]]
    found = re.findall(
        r"^([\w-]+)(?:\[\w+\])?([<>=!~][^;\n]*)", "\n".join([*project["dependencies"], *lines]), re.M
    )
    allowed = {("Python", project["requires-python"]), *found}
    assert set(re.findall(r"^- ([\w-]+) `([^`]+)`", page("versions.md"), re.M)) == allowed


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
    documents = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.as_posix() for path in documents} <= pages
    assert "docs/images" not in (tmp_path / "site" / "index.html").read_text()


def test_faults_that_documents_and_helps_name_are_there() -> None:
    texts = [path.read_text() for path in (*DOCUMENTS, *(ROOT / "abrun" / "cli").glob("*.py"))]
    lists = [names for text in texts for names in re.findall(r"--faults ([a-z][a-z_0-9.,:]*)", text)]
    named = {name.partition(":")[0] for names in lists for name in names.strip(".,").split(",")}
    assert len(named) > 1 and named <= LIBRARY.keys()
