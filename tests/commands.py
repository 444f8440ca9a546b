"""Command lines as documents and help texts give them, parsed by the real command line, and not run."""

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

from typer.exceptions import TyperException
from typer.main import get_group

from abrun.cli import app
from abrun.cli.app import print_notes
from abrun.errors import AbrunError

GROUP: Any = get_group(app)
GROUP.list_commands(None)  # adds the commands of entry points
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{3,}")  # such as RECIPE, or what is left out


def commands_of(document: str) -> list[list[str]]:
    """Every command in the blocks of shell of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines for words in commands_in(line)]


def commands_in(line: str) -> list[list[str]]:
    """The words of every `abrun ...` in a line of shell, behind `&&` too, without what is piped."""
    words = shlex.split(line, comments=True)
    found: list[list[str]] = []
    inside = False
    for word in words:
        if word in ("&&", "||", ";", "|", ">", ">>", "2>", "<", "&"):
            inside = False
        elif inside:
            found[-1].append(word)
        elif word == "abrun":
            inside = True
            found.append([])
    return found


def problem_of(words: list[str], *, whole: bool = True) -> str | None:
    """Why the command line would refuse `words` as bad usage; None: it takes them. Nothing runs.

    Not `whole`: arguments may be left out, as where a sentence speaks of a command.
    """
    if not words or words[0].startswith("-"):
        return None
    name, command = "abrun", GROUP
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"{name} has no command {words[0]!r}"
        name, command, words = f"{name} {words[0]}", command.commands[words[0]], words[1:]
    if whole and not getattr(command, "invoke_without_command", True):
        return f"{name} lacks a command"
    if not whole or has_placeholders(words):
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {
            "--help",
            "-h",
        }
        unknown = [word for word in words if re.match(r"--?[a-z]", word) and word not in known]
        return f"{name} has no option {unknown[0]}" if unknown else None
    try:
        command.make_context(name, words)
    except (AbrunError, TyperException) as error:
        return str(error) or "bad usage"
    finally:  # its notes would stand before the output of the next command
        with redirect_stderr(io.StringIO()):
            print_notes()
    return None


def all_commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, such as `faults run`; a group comes before its commands."""
    for name in GROUP.list_commands(None):
        command = GROUP.commands[name]
        yield name, command
        yield from ((f"{name} {inner}", each) for inner, each in getattr(command, "commands", {}).items())


def has_placeholders(words: list[str]) -> bool:
    """Whether a reader is to put something in the place of a word, such as RECIPE."""
    return any(PLACEHOLDER.search(word) for word in words if not word.startswith("-"))
