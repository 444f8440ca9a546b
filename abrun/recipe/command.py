"""Runs of external trainers: the command line as templates, and where the command writes its metrics."""

import math
import posixpath
import re
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator

from abrun.errors import RecipeError
from abrun.recipe.refusals import shortened
from abrun.recipe.run import RunConfig
from abrun.recipe.section import Env, FieldError, RuleError, Section, rule
from abrun.runs.layout import RUN_FILES
from abrun.runs.redaction import REFERENCE

PLACEHOLDERS = ("seed", "arm", "rerun", "experiment", "steps", "run_dir", "python", "recipe_dir")
# Known only on a run's nodes, where ABRUN_NUM_NODES and so on have the same values. Parameters hide them.
NODE_PLACEHOLDERS = ("num_nodes", "node_rank", "node_list", "head_address", "port", "gpus_per_node")
FRAMEWORKS = (  # the tables of names in abrun.logs.aliases
    *("areal", "fast-llm", "megatron-lm", "nemo-rl", "open-instruct", "openrlhf", "pipelinerl"),
    *("prime-rl", "skyrl", "slime", "torchtitan", "torchtitan-rl", "transformers", "trl", "verl"),
)
SCRIPT_SUFFIXES = (".py", ".sh")
SAMPLE_RUN_DIR = "/RUN_DIR"  # placeholder for a run directory that does not exist yet

Scalar = str | int | float | bool


def _check_scalar(value: Any) -> Any:
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise FieldError(f"got {shortened(value)}; allowed: text, a finite number, true or false")


def _check_aliases(value: Any) -> Any:
    texts = isinstance(value, dict) and all(isinstance(text, str) for text in (*value, *value.values()))
    if texts or value in FRAMEWORKS:
        return value
    presets = ", ".join(repr(preset) for preset in FRAMEWORKS)
    raise FieldError(
        f"got {shortened(value)}; allowed: {presets}, or a mapping from abrun's metric names to the trainer's"
    )


class MetricsLog(Section):
    """Metrics that the command writes: a file, or a folder for formats that consist of several files."""

    format: Literal["tensorboard", "wandb", "csv", "jsonl", "parquet"]
    path: str
    step_column: str | None = None  # None: the format's step, or a column with a common name


class Command(Section):
    """External trainer. `argv`, the values of `env` and `metrics.path` are templates.

    Templates may use `{seed}`, `{arm}`, `{rerun}`, `{experiment}`, `{steps}`, `{run_dir}`, `{recipe_dir}`
    (the folder of the recipe), `{python}` (the `python` field, or abrun's own interpreter), the names in
    `parameters`, in which arms can differ, and `{num_nodes}`, `{node_rank}`, `{node_list}`, `{head_address}`,
    `{port}` and `{gpus_per_node}`. They are stored and compared as written. Write literal braces as `{{` and
    `}}`. In `env`, `${NAME}` is an environment variable, read at every start and never stored.
    """

    type: Literal["command"]
    argv: list[str] = Field(min_length=1)
    # Nodes that run the command: the first (a Ray driver, or a script that calls srun) or all (torchrun)
    start: Literal["once", "every_node"] = "once"
    # The command is a Ray driver: start a Ray cluster of its own on the run's nodes, for RAY_ADDRESS
    ray: bool = False
    env: Env = Field(default={})  # secrets as ${NAME}; what is typed here is stored
    parameters: dict[str, Annotated[Scalar, PlainValidator(_check_scalar)]] = Field(default={})
    metrics: MetricsLog
    # abrun's metric name -> the trainer's, or the name of a preset
    aliases: Annotated[str | dict[str, str], PlainValidator(_check_aliases)] = Field(default={})
    versions_of: list[str] = Field(default=[])  # packages whose installed versions are recorded
    python: str | None = None  # the command's interpreter; None: the first word of argv
    recipe_dir: str = "."  # set when the recipe is read; where it lies is no difference between runs

    @field_validator("parameters")
    @classmethod
    def _check_parameter_names(cls, parameters: dict[str, Scalar]) -> dict[str, Scalar]:
        for name in parameters:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in PLACEHOLDERS:
                raise FieldError(
                    f"got the name {shortened(name)}; allowed: letters, digits and '_', "
                    f"but none of {', '.join(PLACEHOLDERS)}"
                )
        return parameters

    @rule
    def _check_templates(self) -> None:
        used: set[str] = set()
        for field, template in self._templates():
            used |= self._names_in(field, template)
        for name in self.parameters:
            # A misspelt parameter would change nothing, so the arms would match
            if name not in used:
                raise RuleError(
                    f"trainer.parameters.{name}: not used; write {{{name}}} into argv, env or metrics.path, "
                    "or drop it"
                )
        self._refuse_run_files()

    @rule
    def _check_start(self) -> None:
        if self.ray and self.start != "once":
            raise RuleError(
                f"trainer.start: got {self.start!r} with ray: true, but a Ray driver runs once, on the first "
                "node; drop one of the two"
            )

    def _refuse_run_files(self) -> None:
        """Raise RuleError if a template names one of abrun's own files: they record what a run did."""
        values = dict.fromkeys((*PLACEHOLDERS, *NODE_PLACEHOLDERS), "x") | {"run_dir": SAMPLE_RUN_DIR}
        values |= {name: _format_scalar(value) for name, value in self.parameters.items()}
        path = self.metrics.path
        filled = path.format_map(values)
        names = self._names_in("metrics.path", path)
        names_run = "run_dir" in names or names >= {"arm", "seed", "rerun"}
        is_below = posixpath.normpath(filled).startswith(f"{SAMPLE_RUN_DIR}/")
        is_own = (path.startswith("/") and names_run) or (path.startswith("{run_dir}/") and is_below)
        if _is_reserved_path(filled, SAMPLE_RUN_DIR):
            raise RuleError(f"trainer.metrics.path: {_describe_reserved(path, path)}")
        if not is_own:
            raise RuleError(
                f"trainer.metrics.path: got {shortened(path)}, but every run needs a file of its own; write "
                f"inside {{run_dir}}/, such as {_suggest_path(path)}, or use an absolute path that contains "
                "{arm}, {seed} and {rerun}"
            )
        for field, template in self._templates():
            fill = _fill_template if field.startswith("env.") else str.format_map
            if run_file := _mentioned_run_file(fill(template, values), SAMPLE_RUN_DIR):
                problem = _describe_reserved(template, f"{{run_dir}}/{run_file}")
                raise RuleError(f"trainer.{field}: {problem}")

    def _templates(self) -> Iterator[tuple[str, str]]:
        yield from ((f"argv.{index}", word) for index, word in enumerate(self.argv))
        yield from ((f"env.{name}", value) for name, value in self.env.items())
        yield "metrics.path", self.metrics.path

    def _names_in(self, field: str, template: str) -> set[str]:
        template = REFERENCE.sub("", template) if field.startswith("env.") else template
        got = f"trainer.{field}: got {shortened(template)}"
        texts = (template, *(text for text in self.parameters.values() if isinstance(text, str)))
        if any("\0" in text for text in texts):
            raise RuleError(f"{got}; a NUL character cannot be passed to a command: drop it")
        try:
            fields = list(string.Formatter().parse(template))
        except ValueError:
            raise RuleError(
                f"{got}, which has a single brace; write literal braces as {{{{ and }}}}"
            ) from None
        names = set()
        for _, name, format_spec, conversion in fields:
            if name is None:
                continue
            known_names = dict.fromkeys((*PLACEHOLDERS, *NODE_PLACEHOLDERS, *self.parameters))
            if name not in known_names or format_spec or conversion:
                suffix = f"!{conversion}" if conversion else ""
                placeholder = f"{name}{suffix}{format_spec and f':{format_spec}'}"
                allowed = ", ".join(f"{{{known}}}" for known in known_names)
                hint = "add it to trainer.parameters, or write literal braces as {{ and }}"
                if field.startswith("env.") and f"${{{name}" in template:
                    hint = "write ${NAME} with letters, digits and '_'; no default values"
                elif f"${{{name}}}" in template:
                    only = "environment variables are read only in trainer.env"
                    hint = f"{only}; add {name}: ${{{name}}} there"
                raise RuleError(
                    f"trainer.{field}: got the placeholder {{{shortened(placeholder)[1:-1]}}}; allowed: "
                    f"{allowed}; {hint}"
                )
            names.add(name)
        if dollar := re.search(r"\$\{(\w+)\}", template.replace("{{", "\0").replace("}}", "\0")):
            raise RuleError(
                f"{got}, which would leave a $ before the value; write {{{dollar[1]}}} (for a shell "
                "variable: ${{NAME}})"
            )
        return names

    def with_recipe_dir(self) -> Self:
        """Return the command with `{recipe_dir}` filled in, as earlier versions stored it."""
        folder = self.recipe_dir.replace("{", "{{").replace("}", "}}")
        argv = [word.replace("{recipe_dir}", folder) for word in self.argv]
        return self.model_copy(update={"argv": argv})

    @property
    def uses_seed(self) -> bool:
        """Return whether a template of the command line or its environment uses the seed."""
        templates = [(field, text) for field, text in self._templates() if field != "metrics.path"]
        return any("seed" in self._names_in(field, text) or "ABRUN_SEED" in text for field, text in templates)


class CommandRunConfig(RunConfig):
    """Resolved configuration of one run of an external trainer, as stored in its `config.json`."""

    trainer: Command

    @property
    def stalled_s(self) -> float:
        """Return the timeout of RunConfig; only a new step counts as progress of a command."""
        return self.limits.stalled_s or 1800.0

    @property
    def started_nodes(self) -> int:
        """Return the number of nodes on which abrun starts processes; a command may use more by itself."""
        return self.cluster.nodes if self.trainer.ray or self.trainer.start == "every_node" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """Command line of one run with all templates filled in."""

    argv: list[str]
    env: dict[str, str]  # added to the inherited environment
    metrics_path: str
    python: str  # value of the placeholder {python}


def unset_variables(run: CommandRunConfig, environment: Mapping[str, str]) -> list[str]:
    """Return a reason for each variable that a run's `env` refers to and the environment lacks."""
    placeholders, reasons = {*PLACEHOLDERS, *run.trainer.parameters}, list[str]()
    for variable, template in run.trainer.env.items():
        for name in REFERENCE.findall(template):
            if name not in environment:
                hint = f" (the placeholder is {{{name}}}, without $)" if name in placeholders else ""
                reasons.append(
                    f"trainer.env.{variable}: got ${{{name}}}, but {name} is not set here; "
                    f"export {name} first{hint}"
                )
    return reasons


def referenced_values(run: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run's `env` refers to with their values, to redact them from output."""
    env = run.trainer.env if isinstance(run, CommandRunConfig) else {}
    names = [name for template in env.values() for name in REFERENCE.findall(template)]
    return {name: environment[name] for name in names if name in environment}


def build_invocation(
    run: CommandRunConfig,
    *,
    experiment: object,
    arm: object,
    seed: object,
    rerun: object,
    run_dir: object,
    environment: Mapping[str, str] | None = None,
) -> Invocation:
    """Fill in a run's templates; without an `environment`, references stay `${NAME}` (for display).

    An `environment` has the node's ABRUN_ variables; without them, placeholders of nodes become their names.
    Raises RecipeError if the environment lacks a variable or a path names one of abrun's own files.
    """
    unset = [] if environment is None else unset_variables(run, environment)
    if unset:
        raise RecipeError(unset[0])
    trainer = run.trainer
    python = trainer.python or sys.executable
    run_values = {"experiment": experiment, "arm": arm, "seed": seed, "rerun": rerun, "run_dir": run_dir}
    run_values |= {"steps": run.steps, "python": python, "recipe_dir": trainer.recipe_dir}
    variables = environment or {}
    values = {name: variables.get(f"ABRUN_{name.upper()}", name.upper()) for name in NODE_PLACEHOLDERS}
    values |= {name: _format_scalar(value) for name, value in {**trainer.parameters, **run_values}.items()}
    invocation = Invocation(
        argv=[word.format_map(values) for word in trainer.argv],
        env={name: _fill_template(value, values, environment) for name, value in trainer.env.items()},
        metrics_path=posixpath.normpath(trainer.metrics.path.format_map(values)),
        python=python,
    )
    # Values such as an arm's name may produce a reserved path although the templates were checked
    words = (*invocation.argv, *invocation.env.values())
    reserved = [word for word in words if _mentioned_run_file(word, str(run_dir))]
    if _is_reserved_path(invocation.metrics_path, str(run_dir)):
        reserved.insert(0, invocation.metrics_path)
    for path in reserved:
        raise RecipeError(f"trainer: got {shortened(path)}, which is reserved for abrun; choose another name")
    return invocation


def _fill_template(
    template: str, values: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> str:
    """Fill the placeholders of an `env` template, and its `${NAME}` references if there is an environment."""
    segments = REFERENCE.split(template)
    segments[::2] = [segment.format_map(values) for segment in segments[::2]]
    segments[1::2] = [f"${{{name}}}" if environment is None else environment[name] for name in segments[1::2]]
    return "".join(segments)


def _is_reserved_path(path: str, run_dir: str) -> bool:
    """Return whether a path is the run directory or one of abrun's files in it."""
    path = posixpath.normpath(path)
    is_inside = path == run_dir or path.startswith(f"{run_dir}/")
    return is_inside and _path_names(path, run_dir)[0] in (".", *RUN_FILES)


def _describe_reserved(template: str, path: str) -> str:
    """Return the refusal of a template that names a path of abrun's own."""
    got = "" if template == path else f"got {shortened(template)}, but "
    problem = f"{got}{shortened(path)[1:-1]} is reserved for abrun"
    return f"{problem}; write to a folder of your own, such as {_suggest_path(path)}"


def _suggest_path(path: str) -> str:
    """Return a path in a folder of the command's own, with the file name of a refused path."""
    name = posixpath.basename(posixpath.normpath(path.removeprefix("{run_dir}").lstrip("/") or "."))
    return "{run_dir}/out" if name in (".", "..") or not name.isprintable() else f"{{run_dir}}/out/{name}"


def _mentioned_run_file(text: str, run_dir: str) -> str | None:
    """Return the first file of abrun's, in any run, whose path an argument or shell line contains."""
    expanded = re.sub(r"\$\{?ABRUN_RUN_DIR\b\}?", lambda _: run_dir, text)
    expanded = re.sub(r"['\"]", "", expanded)
    for path in re.findall(rf"{re.escape(run_dir)}/[^\s=,:;&|()<>{{}}\[\]`\\]*", expanded):
        names = _path_names(path, run_dir)
        if names[0] in RUN_FILES:
            return names[0]
        if names[0] == ".." and names[-1] in RUN_FILES:
            return names[-1]
    return None


def _path_names(path: str, run_dir: str) -> list[str]:
    """Return a path's components below a run directory, case-folded for case-insensitive file systems."""
    relative = path.removeprefix(run_dir).lstrip("/")
    return posixpath.normpath(relative).casefold().split("/")


def _format_scalar(value: object) -> str:
    """Return a scalar as command-line text; booleans as `true` and `false`, as in YAML and Hydra."""
    return str(value).lower() if isinstance(value, bool) else str(value)
