"""Runs that any command trains: its command line as templates, and where it writes its metrics."""

import math
import re
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from abrun.recipe.reading import shortened
from abrun.recipe.run import Run
from abrun.recipe.section import Section

PLACEHOLDERS = ("seed", "arm", "rerun", "experiment", "steps", "run_dir", "python")
PRESETS = ("nemo-rl", "skyrl", "trl", "verl")  # the files of names in abrun.logs.aliases
OWN_FILES = ("config.json", "meta.json", "metrics.jsonl", "events.jsonl", "stdout.log", "checkpoints")
OURS = "ABRUN_"  # what the environment variables that abrun adds begin with

Scalar = str | int | float | bool


def _scalar(value: Any) -> Any:
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"got {shortened(value)}; allowed: text, a finite number, true or false")


def _aliases(value: Any) -> Any:
    texts = isinstance(value, dict) and all(isinstance(text, str) for text in (*value, *value.values()))
    if texts or value in PRESETS:
        return value
    presets = ", ".join(repr(preset) for preset in PRESETS)
    raise ValueError(
        f"got {shortened(value)}; allowed: {presets}, or a mapping of our names to the trainer's"
    )


class MetricsLog(Section):
    """What a command writes its metrics to: a file, or a folder where the format is one of folders."""

    format: Literal["tensorboard", "wandb", "csv", "jsonl", "parquet"]
    path: str
    step_column: str | None = None  # None: the format's own, or a column with a usual name


class Command(Section):
    """A foreign trainer. `argv`, the values of `env` and `metrics.path` are templates.

    Templates may name PLACEHOLDERS and `parameters`, which exist so that arms can differ in them;
    `{python}` is `python`, or abrun's own interpreter. Literal braces are written `{{` and `}}`.
    """

    type: Literal["command"]
    argv: list[str] = Field(min_length=1)
    env: dict[str, str] = Field(default={})
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
                raise ValueError(
                    f"got the name {shortened(name)}; allowed: letters, digits and '_', "
                    f"but none of {', '.join(PLACEHOLDERS)}"
                )
        return parameters

    @field_validator("env")
    @classmethod
    def _env_is_the_command_s_own(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"got the name {shortened(name)}; allowed: letters, digits and '_'")
            if name.startswith(OURS) or name == "CUDA_VISIBLE_DEVICES":
                raise ValueError(
                    f"got {name}, which the launcher sets itself; drop it (cluster: says how many GPUs)"
                )
        return env

    @model_validator(mode="after")
    def _templates_can_be_filled(self) -> Self:
        used: set[str] = set()
        for field, template in self._templates():
            used |= self._names_in(field, template)
        for name in self.parameters:
            if name not in used:  # a misspelt one would change nothing, and the arms would match
                raise ValueError(
                    f"trainer.parameters.{name}: not used; write {{{name}}} into argv, env or metrics.path, "
                    "or drop it"
                )
        run_dir, _, name = self.metrics.path.partition("/")
        if run_dir != "{run_dir}" or name.strip("/.") in ("", *OWN_FILES):
            raise ValueError(
                f"trainer.metrics.path: got {shortened(self.metrics.path)}; begin it with {{run_dir}}/, so "
                f"that every run has its own, and go on with none of abrun's names: {', '.join(OWN_FILES)}"
            )
        return self

    def _templates(self) -> Iterator[tuple[str, str]]:
        yield from ((f"argv.{index}", word) for index, word in enumerate(self.argv))
        yield from ((f"env.{name}", value) for name, value in self.env.items())
        yield "metrics.path", self.metrics.path

    def _names_in(self, field: str, template: str) -> set[str]:
        got = f"trainer.{field}: got {shortened(template)}"
        texts = (template, *(text for text in self.parameters.values() if isinstance(text, str)))
        if any("\0" in text for text in texts):
            raise ValueError(f"{got}; a NUL character cannot be passed to a command: drop it")
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError:
            raise ValueError(f"{got}; a single brace: write literal ones as {{{{ and }}}}") from None
        names = set()
        for _, name, form, conversion in parts:
            if name is None:
                continue
            if name not in (*PLACEHOLDERS, *self.parameters) or form or conversion:
                whole = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                allowed = ", ".join(f"{{{each}}}" for each in (*PLACEHOLDERS, *self.parameters))
                raise ValueError(
                    f"trainer.{field}: got the placeholder {{{shortened(whole)[1:-1]}}}; allowed: {allowed}; "
                    "add it to trainer.parameters, or write literal braces as {{ and }}"
                )
            names.add(name)
        return names


class CommandRun(Run):
    """Everything one run of a foreign trainer is started with: what its `config.json` holds, resolved."""

    trainer: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line ready to run."""

    argv: list[str]
    env: dict[str, str]  # to be added to the inherited one
    metrics_path: str
    python: str  # what {python} stands for


def invocation(
    run: CommandRun, *, experiment: object, arm: object, seed: object, rerun: object, run_dir: object
) -> Invocation:
    """A run's templates filled in."""
    trainer = run.trainer
    python = trainer.python or sys.executable
    known = {"experiment": experiment, "arm": arm, "seed": seed, "rerun": rerun, "run_dir": run_dir}
    values: Mapping[str, str] = {
        name: _written(value)
        for name, value in {**trainer.parameters, **known, "steps": run.steps, "python": python}.items()
    }
    return Invocation(
        argv=[word.format_map(values) for word in trainer.argv],
        env={name: value.format_map(values) for name, value in trainer.env.items()},
        metrics_path=trainer.metrics.path.format_map(values),
        python=python,
    )


def _written(value: object) -> str:
    """A value as a command line's reader expects it: `true` as YAML and Hydra write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
