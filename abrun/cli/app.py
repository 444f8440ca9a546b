"""Application with which commands register, and their output helpers."""

import functools
import inspect
import json
import shlex
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_group

from abrun.errors import AbrunError
from abrun.processes.output import ignore_output_errors
from abrun.runs.redaction import display_safe

if TYPE_CHECKING:
    from abrun.report.present.terminal import Terminal

# Headings of `abrun --help` with the core's commands, in the order in which a new user needs them. Those of
# tools and of other packages follow under the heading that they name as `rich_help_panel`
HEADINGS = {
    "Getting started": ("demo", "init", "recipes", "doctor", "skill"),
    "Experiments": ("launch", "watch", "status", "logs", "completions", "stop", "wandb-sync"),
    "Verdicts": ("compare", "reference", "power", "faults"),
    "Diagnostics": ("memory-profile",),
}
OTHER_HEADING = "Other packages"

_notes: list[str] = []  # printed before the first output; not before an error, which is one line

P = ParamSpec("P")
R = TypeVar("R")


class CommandGroup(TyperGroup):
    """Group of all commands, listed under their headings.

    Commands of tools and other packages are added when one that the core lacks is asked for.
    """

    has_all = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_installed()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in self._by_heading().values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        by_heading = self._by_heading()
        width = max(map(len, self.commands))
        for heading, names in by_heading.items():
            helps = {name: self.commands[name].get_short_help_str(formatter.width) for name in names}
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in helps.items()])

    def _by_heading(self) -> dict[str, list[str]]:
        self._add_installed()
        by_heading = {heading: [*names] for heading, names in HEADINGS.items()}
        listed = {name for names in by_heading.values() for name in names}
        for name, command in self.commands.items():
            if name not in listed and not command.hidden:
                heading = getattr(command, "rich_help_panel", None)
                by_heading.setdefault(heading if isinstance(heading, str) else OTHER_HEADING, []).append(name)
        return by_heading

    def _add_installed(self) -> None:
        """Add the commands of entry points. One that cannot be loaded is named on stderr."""
        from abrun.recipe.implementations import COMMANDS, installed, load_installed

        if self.has_all:
            return
        self.has_all = True
        for entry in installed(COMMANDS).values():
            try:
                application = load_installed(entry)
                if not isinstance(application, typer.Typer):
                    raise AbrunError(f"{COMMANDS}: {entry.name}: {entry.value} is no Typer application")
                finish_help(application)
                commands = get_group(application).commands
            except AbrunError as error:
                note(str(error))
                continue
            for name, command in commands.items():
                self.commands.setdefault(name, command)


class Subcommands(TyperGroup):
    """Group of one command's subcommands, which are named where something else is typed in their place."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_option = args[0].startswith("-")
        if not (is_option or ctx.resilient_parsing or get_close_matches(args[0], self.commands)):
            example = f"{ctx.command_path} show {shlex.quote(args[0])}"
            ctx.fail(f"No such command {args[0]!r}; allowed: {', '.join(self.commands)}, as in {example}")
        return super().resolve_command(ctx, args)


def make_group(**settings: Any) -> typer.Typer:
    """Return a group of commands whose help is plain text, which takes no time to import."""
    return typer.Typer(
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        **settings,
    )


app = make_group(
    cls=CommandGroup,
    help="Run paired A/B experiments in RL post-training and judge whether the arms converge the same way.",
)


def add_group(name: str, **settings: Any) -> typer.Typer:
    """Register a command with subcommands."""
    group = make_group(cls=Subcommands, **settings)
    app.add_typer(group, name=name)
    return group


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"abrun {version('abrun')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def finish_help(application: typer.Typer) -> None:
    """Set every command's help to its docstring, wrapped to the terminal, with the examples at the end."""
    for command in application.registered_commands:
        _set_help(command, command.callback)
    for info in application.registered_groups:
        assert info.typer_instance
        described = info.typer_instance.registered_callback
        _set_help(info, described and described.callback)
        for command in info.typer_instance.registered_commands:
            _set_help(command, command.callback)


def _set_help(command: Any, callback: Callable[..., Any] | None) -> None:
    text, _, examples = inspect.cleandoc((callback and callback.__doc__) or "").partition("\n\nExamples:\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    lines = ["\b", "Examples:", *(f"  {line.strip()}" for line in examples.splitlines())]
    command.epilog = "\n".join(lines) if examples else None


def print_json(content: Any) -> None:
    """Print JSON to stdout; NaN and Inf become text, as in all of abrun's files."""
    from abrun.runs.files import encode_non_finite

    print_notes()
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(encode_non_finite(content), indent=1, ensure_ascii=not is_utf, allow_nan=False))


def note(line: str) -> None:
    """Print a line to stderr before the command's first output, unless an error comes first."""
    _notes.append(line)


def print_notes() -> None:
    for line in _notes:
        print(f"abrun: {line}", file=sys.stderr)
    _notes.clear()


def print_error(message: str) -> int:
    """Print one line to stderr and return the exit code for bad input."""
    _notes.clear()
    print(f"abrun: {display_safe(' '.join(message.split()))}", file=sys.stderr)
    return 2


def survive_output_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command that does more than print, so that output errors do not stop it or change its code.

    A dry run or JSON output only prints, so there output errors still count.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        if not any(map(options.get, ("dry_run", "plan_only", "as_json"))):
            ignore_output_errors()
        return command(*args, **options)

    return wrapped


def console() -> "Terminal":
    from abrun.report.present.terminal import terminal

    screen = terminal()
    screen.before_print = print_notes
    return screen
