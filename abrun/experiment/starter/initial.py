"""Starter files of `abrun init`, created from three answers."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import RecipeError
from abrun.experiment.starter.schema import recipe_schema
from abrun.experiment.starter.shipped import PACKAGE, recipe_files, recipes_folder
from abrun.messages.numbers import listed
from abrun.recipe.policy import ARCHITECTURES
from abrun.runs.files import exists, is_file
from abrun.runs.layout import NAME_PATTERN

KINDS = {
    "recipe": "two settings of abrun's own trainer",
    "external": "two settings of another trainer, started by its command",
    "regression": "every pull request with runs that were frozen before it (GitHub Actions)",
}
SCHEMA = "recipe.schema.json"
TEMPLATES = Path(__file__).parent / "templates"
OTHER_TRAINER = "other"  # a trainer without its own template
LAPTOP_VALUES = {
    "task": "{type: arithmetic, max_operand: 3}   # or word_problems; or gsm8k or jsonl, with a path",
    "warm_start": "warm_start: {steps: 45}          # supervised, shared by all arms and seeds\n",
    "learning_rate": "1e-3",
    "max_new_tokens": 6,
    "steps": 60,
    "gpus": 0,
    # Chunks of 32: a single default chunk holds the whole tiny vocabulary, so arms would be bit-identical
    "treatment": "policy.logprobs.impl: chunked, policy.logprobs.chunk_size: 32",
    "margin": 0.05,
}
GPU_VALUES = {
    "task": "{type: gsm8k, path: gsm8k/train.jsonl}   # or jsonl: lines with `prompt` and `answer`",
    "warm_start": "",
    "learning_rate": "1e-6",
    "max_new_tokens": 512,
    "steps": 100,
    "gpus": 1,
    "treatment": "policy.logprobs.impl: triton",
    "margin": 0.03,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Last of the three questions, which depends on the kind."""

    option: str
    text: str
    default: str

    def refuse_other_options(self, kind: str, answers: Mapping[str, str | None]) -> None:
        """Raise RecipeError for an answer to the last question of another kind."""
        for option, value in answers.items():
            if value is not None and option != self.option:
                raise RecipeError(f"{option}: got {value!r}, but --kind {kind} takes {self.option}")


KIND_QUESTIONS = {
    "recipe": Question(
        option="--model",
        text=f"Model (a preset, which needs no GPU: {', '.join(ARCHITECTURES)}; or a folder or hub name)",
        default="qwen2-tiny",
    ),
    "external": Question(
        option="--trainer",
        text="Trainer (trl, verl, nemo-rl, skyrl, torchtitan, fast-llm, other)",
        default=OTHER_TRAINER,
    ),
    "regression": Question(
        option="--recipe",
        text="Recipe to train on every pull request (a file, or the built-in quickstart-regression)",
        default="quickstart-regression",
    ),
}


def kind_question(kind: str) -> Question:
    """Return the last question for a kind. Raises RecipeError for an unknown kind."""
    if kind not in KIND_QUESTIONS:
        raise RecipeError(f"--kind: got {kind!r}; allowed: {listed([*KINDS])}")
    return KIND_QUESTIONS[kind]


def require_options(kind: str | None, name: str | None, answers: Mapping[str, str | None]) -> None:
    """Raise RecipeError that names all missing options at once, for use without a terminal.

    `answers`: by option, the answers to the last questions of all kinds.
    """
    given_kinds = [key for key, question in KIND_QUESTIONS.items() if answers[question.option] is not None]
    likely_kind = kind or next(iter(given_kinds), "recipe")
    question = kind_question(likely_kind)
    question.refuse_other_options(likely_kind, answers)
    values = {"--kind": kind, "--name": name, question.option: answers[question.option]}
    defaults = {"--kind": likely_kind, "--name": default_name(likely_kind), question.option: question.default}
    missing = [option for option, value in values.items() if value is None]
    if missing:
        words = [word for option, value in values.items() for word in (option, value or defaults[option])]
        raise RecipeError(
            f"{listed(missing)}: missing, and there is no terminal to ask on; give all, such as abrun init "
            f"{shlex.join(words)}"
        )


def default_name(kind: str) -> str:
    """Return the name that is offered for a recipe."""
    return "convergence" if kind == "regression" else "mine"


def check_name(name: str) -> str:
    """Return the name. Raises RecipeError if it cannot be a file name."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise RecipeError(f"--name: got {name!r}; allowed: letters, digits, '.', '_' and '-', at most 100")
    return name


def initial_files(kind: str, name: str, answer: str) -> dict[str, str]:
    """Return the contents of the starter files by relative path. Raises RecipeError for a bad answer."""
    check_name(name)
    makers = {"recipe": _recipe_files, "external": _external_files, "regression": _regression_files}
    return {**makers[kind](name, answer), SCHEMA: json.dumps(recipe_schema(), indent=1) + "\n"}


def write_files(files: dict[str, str], into: Path) -> list[Path]:
    """Write the files. Raises RecipeError if one cannot be written.

    If one exists with other content, this is known, and said, before any is written.
    """
    conflicts = [path for path in files if exists(into / path) and (into / path).read_text() != files[path]]
    if conflicts:
        raise RecipeError(f"{into / conflicts[0]}: already exists; choose another --name or --to")
    for path, text in files.items():
        try:
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            (into / path).write_text(text)
        except OSError as error:
            raise RecipeError(
                f"{into / path}: cannot be written: {error.strerror or str(error)}; choose another folder "
                "with --to"
            ) from None
    return [into / path for path in files]


def next_commands(kind: str, name: str) -> list[str]:
    """Return the next commands to run, in order."""
    if kind == "regression":
        return ["git add -A && git commit && git push", f"abrun launch {name}.yaml"]
    return [f"abrun launch {name}.yaml --dry-run", f"abrun launch {name}.yaml"]


def _recipe_files(name: str, model: str) -> dict[str, str]:
    preset = model in ARCHITECTURES
    written = f"{{preset: {model}}}" if preset else f"{{path: {json.dumps(model)}}}"
    values = {"name": name, "model": written, **(LAPTOP_VALUES if preset else GPU_VALUES)}
    return {f"{name}.yaml": _add_schema_line(_read_template("recipe.yaml").format(**values))}


def _external_files(name: str, trainer: str) -> dict[str, str]:
    if trainer == OTHER_TRAINER:
        script = f"{name}_trainer.py"
        recipe = _read_template("external.yaml").format(name=name, script=script)
        return {f"{name}.yaml": _add_schema_line(recipe), script: _read_template("train.py")}
    shipped = {path.stem: path for path in (recipes_folder() / "external").glob("*.yaml")}
    if trainer not in shipped:
        raise RecipeError(f"--trainer: got {trainer!r}; allowed: {listed([*sorted(shipped), OTHER_TRAINER])}")
    text = shipped[trainer].read_text()
    # The files of its own folder that the recipe names
    names = re.findall(r"\{recipe_dir\}/([\w.-]+)", text)
    scripts = {name: (recipes_folder() / "external" / name).read_text() for name in names}
    return {f"{name}.yaml": _add_schema_line(_set_recipe_name(text, name)), **scripts}


def _regression_files(name: str, recipe: str) -> dict[str, str]:
    path = recipe_files().get(recipe, Path(recipe))
    if not is_file(path):
        raise RecipeError(f"--recipe: got {recipe!r}, which is neither a file here nor a built-in recipe")
    text = path.read_text()
    match = re.search(r"^compare: \{reference: (\S+)\}$", text, re.M)
    if match is None or not is_file(reference := path.parent / match[1]):
        raise RecipeError(
            f"--recipe: got {recipe!r}, which has no compare.reference; make one (abrun reference save "
            "EXPERIMENT --output FILE), and add compare: {reference: FILE}"
        )
    text = text.replace(match[0], f"compare: {{reference: {name}.json}}")
    # The composite action is in the installed package, or in the checkout
    action, installed = ".github/actions/regression/action.yml", PACKAGE / "shipped" / "action.yml"
    return {
        f"{name}.yaml": _add_schema_line(_set_recipe_name(text, name)),
        f"{name}.json": reference.read_text(),
        f".github/workflows/{name}.yml": _read_template("workflow.yml").format(name=name),
        action: (installed if is_file(installed) else PACKAGE.parent / action).read_text(),
    }


def _set_recipe_name(text: str, name: str) -> str:
    return re.sub(r"^name: .*$", f"name: {name}", text, count=1, flags=re.M)


def _add_schema_line(text: str) -> str:
    """Return the text with the line that tells editors the schema, once."""
    line = f"# yaml-language-server: $schema={SCHEMA}\n"
    return text if text.startswith(line) else line + text


def _read_template(name: str) -> str:
    return (TEMPLATES / name).read_text()
