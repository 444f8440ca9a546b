"""Runs that any command trains: its command line as templates, and where it writes its metrics."""

import math
import posixpath
import re
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from abrun.errors import RecipeError
from abrun.reasons import Code, Reason
from abrun.recipe.refusals import shortened
from abrun.recipe.run import RunConfig
from abrun.recipe.section import Env, FieldError, Section
from abrun.redaction import REFERENCE
from abrun.runs.layout import RUN_FILES

PLACEHOLDERS = ("seed", "arm", "rerun", "experiment", "steps", "run_dir", "python")
FRAMEWORKS = (  # the tables of names in abrun.logs.aliases
    *("fast-llm", "megatron-lm", "nemo-rl", "open-instruct", "openrlhf", "pipelinerl", "prime-rl", "skyrl"),
    *("slime", "torchtitan", "torchtitan-rl", "transformers", "trl", "verl"),
)
A_RUN_DIR = "/RUN_DIR"  # stands in for a run's directory before there is one

Scalar = str | int | float | bool


def _scalar(value: Any) -> Any:
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise FieldError(f"got {shortened(value)}; allowed: text, a finite number, true or false")


def _aliases(value: Any) -> Any:
    texts = isinstance(value, dict) and all(isinstance(text, str) for text in (*value, *value.values()))
    if texts or value in FRAMEWORKS:
        return value
    presets = ", ".join(repr(preset) for preset in FRAMEWORKS)
    raise FieldError(
        f"got {shortened(value)}; allowed: {presets}, or a mapping of our names to the trainer's"
    )


class MetricsLog(Section):
    """What a command writes its metrics to: a file, or a folder where the format is one of folders."""

    format: Literal["tensorboard", "wandb", "csv", "jsonl", "parquet"]
    path: str
    step_column: str | None = None  # None: the format's own, or a column with a usual name


class Command(Section):
    """A foreign trainer. `argv`, the values of `env` and `metrics.path` are templates.

    Templates may name `{seed}`, `{arm}`, `{rerun}`, `{experiment}`, `{steps}`, `{run_dir}`, `{python}` (which
    is `python`, or abrun's own interpreter), and `parameters`, which exist so that arms can differ in them.
    In `argv`, `{recipe_dir}` is the folder of the recipe. Literal braces are written `{{` and `}}`. In `env`,
    `${NAME}` is a variable of the environment that a run is started in: looked up at every start, and stored
    nowhere.
    """

    type: Literal["command"]
    argv: list[str] = Field(min_length=1)
    env: Env = Field(default={})  # secrets as ${NAME}
    parameters: dict[str, Annotated[Scalar, PlainValidator(_scalar)]] = Field(default={})
    metrics: MetricsLog
    aliases: Annotated[str | dict[str, str], PlainValidator(_aliases)] = Field(default={})  # ours -> its name
    versions_of: list[str] = Field(default=[])  # packages to record, as the command's interpreter has them
    python: str | None = None  # that interpreter, where it is not argv's first word

    @field_validator("parameters")
    @classmethod
    def _parameters_can_be_named(cls, parameters: dict[str, Scalar]) -> dict[str, Scalar]:
        for name in parameters:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in PLACEHOLDERS:
                raise FieldError(
                    f"got the name {shortened(name)}; allowed: letters, digits and '_', "
                    f"but none of {', '.join(PLACEHOLDERS)}"
                )
        return parameters

    @model_validator(mode="after")
    def _templates_can_be_filled(self) -> Self:
        used: set[str] = set()
        for field, template in self._templates():
            used |= self._names_in(field, template)
        for name in self.parameters:
            if name not in used:  # a misspelt one would change nothing, and the arms would match
                raise FieldError(
                    f"not used; write {{{name}}} into argv, env or metrics.path, or drop it",
                    f"trainer.parameters.{name}",
                )
        self._refuse_files_of_abrun()
        return self

    def _refuse_files_of_abrun(self) -> None:
        """The files of the store say what a run did, and that it finished: no command may name one."""
        values = dict.fromkeys(PLACEHOLDERS, "x") | {"run_dir": A_RUN_DIR}
        values |= {name: _written(value) for name, value in self.parameters.items()}
        path = self.metrics.path
        filled = path.format_map(values)
        names = self._names_in("metrics.path", path)
        elsewhere = path.startswith("/") and ("run_dir" in names or names >= {"arm", "seed", "rerun"})
        inside = path.startswith("{run_dir}/") and posixpath.normpath(filled).startswith(f"{A_RUN_DIR}/")
        if not (inside or elsewhere) or _is_taken(filled, A_RUN_DIR):
            raise FieldError(
                f"got {shortened(path)}; begin it with {{run_dir}}/, so that every run has its own, stay in "
                f"there, and go on with none of abrun's names: {', '.join(RUN_FILES)}; or give an absolute "
                "path with {arm}, {seed} and {rerun} in it",
                "trainer.metrics.path",
            )
        for field, template in self._templates():
            filled = _filled(template, values) if field.startswith("env.") else template.format_map(values)
            if _names_files_of_abrun(filled, A_RUN_DIR):
                raise FieldError(
                    f"got {shortened(template)}; a command's files in {{run_dir}} may have none of abrun's "
                    f"names: {', '.join(RUN_FILES)}",
                    f"trainer.{field}",
                )

    def _templates(self) -> Iterator[tuple[str, str]]:
        yield from ((f"argv.{index}", word) for index, word in enumerate(self.argv))
        yield from ((f"env.{name}", value) for name, value in self.env.items())
        yield "metrics.path", self.metrics.path

    def _names_in(self, field: str, template: str) -> set[str]:
        template = REFERENCE.sub("", template) if field.startswith("env.") else template
        got, place = f"got {shortened(template)}", f"trainer.{field}"
        texts = (template, *(text for text in self.parameters.values() if isinstance(text, str)))
        if any("\0" in text for text in texts):
            raise FieldError(f"{got}; a NUL character cannot be passed to a command: drop it", place)
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError:
            raise FieldError(f"{got}; a single brace: write literal ones as {{{{ and }}}}", place) from None
        names = set()
        for _, name, form, conversion in parts:
            if name is None:
                continue
            if name not in (*PLACEHOLDERS, *self.parameters) or form or conversion:
                whole = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                allowed = ", ".join(f"{{{each}}}" for each in (*PLACEHOLDERS, *self.parameters))
                hint = "add it to trainer.parameters, or write literal braces as {{ and }}"
                if field.startswith("env.") and f"${{{name}" in template:
                    hint = "a reference is ${NAME}, of letters, digits and '_', without a default or another"
                elif f"${{{name}}}" in template:
                    hint = f"a variable of the environment is read in trainer.env alone: {name}: ${{{name}}}"
                raise FieldError(
                    f"got the placeholder {{{shortened(whole)[1:-1]}}}; allowed: {allowed}; {hint}", place
                )
            names.add(name)
        if dollar := re.search(r"\$\{(\w+)\}", template.replace("{{", "\0").replace("}}", "\0")):
            raise FieldError(
                f"{got}, whose $ would stay before the value; write {{{dollar[1]}}} (a shell's variable is "
                "written ${{NAME}})",
                place,
            )
        return names

    @property
    def names_seed(self) -> bool:
        """Return whether the command line or its environment depends on the seed, as far as templates say."""
        templates = [(field, text) for field, text in self._templates() if field != "metrics.path"]
        return any("seed" in self._names_in(field, text) or "ABRUN_SEED" in text for field, text in templates)


class CommandRunConfig(RunConfig):
    """Everything one run of a foreign trainer is started with: what its `config.json` holds, resolved."""

    trainer: Command

    @property
    def stalled_s(self) -> float:
        """See RunConfig; a command gives a sign with each new step alone."""
        return self.limits.stalled_s or 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line ready to run."""

    argv: list[str]
    env: dict[str, str]  # to be added to the inherited one
    metrics_path: str
    python: str  # what {python} stands for


def unset_variables(run: CommandRunConfig, environment: Mapping[str, str]) -> list[Reason]:
    """Return the variables that a run's `env` refers to and an environment does not have."""
    placeholders = {*PLACEHOLDERS, *run.trainer.parameters}
    return [
        Code.VARIABLE_UNSET(
            field=f"trainer.env.{variable}", variable=name, is_placeholder=name in placeholders
        )
        for variable, template in run.trainer.env.items()
        for name in REFERENCE.findall(template)
        if name not in environment
    ]


def values_of(run: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run's `env` refers to, with their values: a command may print those."""
    env = run.trainer.env if isinstance(run, CommandRunConfig) else {}
    names = [name for template in env.values() for name in REFERENCE.findall(template)]
    return {name: environment[name] for name in names if name in environment}


def invocation(
    run: CommandRunConfig,
    *,
    experiment: object,
    arm: object,
    seed: object,
    rerun: object,
    run_dir: object,
    environment: Mapping[str, str] | None = None,
) -> Invocation:
    """A run's templates filled in; without an `environment` its variables stay `${NAME}`, to be shown.

    Raises RecipeError where the environment lacks one.
    """
    lacking = [] if environment is None else unset_variables(run, environment)
    if lacking:
        raise RecipeError(lacking[0])
    trainer = run.trainer
    python = trainer.python or sys.executable
    known = {"experiment": experiment, "arm": arm, "seed": seed, "rerun": rerun, "run_dir": run_dir}
    values: Mapping[str, str] = {
        name: _written(value)
        for name, value in {**trainer.parameters, **known, "steps": run.steps, "python": python}.items()
    }
    filled = Invocation(
        argv=[word.format_map(values) for word in trainer.argv],
        env={name: _filled(value, values, environment) for name, value in trainer.env.items()},
        metrics_path=posixpath.normpath(trainer.metrics.path.format_map(values)),
        python=python,
    )
    # By the name of an arm, for one; the recipe's templates have been looked at
    taken = [filled.metrics_path] if _is_taken(filled.metrics_path, str(run_dir)) else []
    taken += [
        word for word in (*filled.argv, *filled.env.values()) if _names_files_of_abrun(word, str(run_dir))
    ]
    if taken:
        raise RecipeError(Code.SETTING_REFUSED(field="trainer", got=shortened(taken[0])))
    return filled


def _filled(template: str, values: Mapping[str, str], environment: Mapping[str, str] | None = None) -> str:
    """A template of `env` with its placeholders filled in, and what it refers to, where that is known."""
    parts = REFERENCE.split(template)
    parts[::2] = [part.format_map(values) for part in parts[::2]]
    parts[1::2] = [f"${{{name}}}" if environment is None else environment[name] for name in parts[1::2]]
    return "".join(parts)


def _is_taken(path: str, run_dir: str) -> bool:
    """Whether a path is a run directory, or one of abrun's files in it."""
    path = posixpath.normpath(path)
    inside = path == run_dir or path.startswith(f"{run_dir}/")
    return inside and _names(path, run_dir)[0] in (".", *RUN_FILES)


def _names_files_of_abrun(text: str, run_dir: str) -> bool:
    """Whether an argument, or a line of shell, says where a file of abrun's lies, in this run or another."""
    said = re.sub(r"\$\{?ABRUN_RUN_DIR\b\}?", lambda _: run_dir, text)
    said = re.sub(r"['\"]", "", said)
    for path in re.findall(rf"{re.escape(run_dir)}/[^\s=,:;&|()<>{{}}\[\]`\\]*", said):
        names = _names(path, run_dir)
        if names[0] in RUN_FILES or (names[0] == ".." and names[-1] in RUN_FILES):
            return True
    return False


def _names(path: str, run_dir: str) -> list[str]:
    """The parts of a path below a run directory, as a file system that ignores case would say them."""
    below = path.removeprefix(run_dir).lstrip("/")
    return posixpath.normpath(below).casefold().split("/")


def _written(value: object) -> str:
    """A value as a command line's reader expects it: `true` as YAML and Hydra write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
