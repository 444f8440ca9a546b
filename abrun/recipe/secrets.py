"""Detection of secrets in recipes: a recipe is copied into every run and shown in every report."""

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.redaction import has_token, is_random_looking, is_secret, redacted

PROGRAM_SECTIONS = ("argv", "env", "parameters", "setup", "sbatch")
OPTION = re.compile(r"([-+]{0,2})([A-Za-z][\w.-]*)(?:=([\s\S]*))?")  # --name=value, ++section.name=value
HEADER = re.compile(r"([a-z][\w-]*)(?::\s+|(?<=-key):|(?<=-token):)(?:(?:bearer|basic|token)\s+)?(.+)", re.I)
# Assignments in code or settings: `token="..."`, `"password": "..."`
ASSIGNMENT = re.compile(
    r"(?P<name>(?<!\w)[A-Za-z_][\w.-]{0,99})[\"'\]]{0,2}\s{0,3}[:=]\s{0,3}(?P<quote>[\"']?)"
    r"(?P<value>(?!\w{1,99}=[^=\s])[^\s\"',;()]{4,})"
)
LOGIN = re.compile(r"[^\s:/@]+:([^\s/@]{2,})")  # user:password
PROXY = re.compile(r"[\w.%+-]+:([^\s/@]{2,})@[A-Za-z][\w-]*(?:(?:\.[\w-]+)+(?::\d+)?|:\d+)(?:/.*)?")
SHELL_SUBSTITUTION = re.compile(r"\$\(+([^()]*)\)+|`([^`]*)`|\$[a-z_]\w*")
# Options whose value may be user:password (not for programs where it is only a user), and short options whose
# value is a password
LOGINS = ("-u", "-U", "--user", "--proxy-user")
NOT_LOGINS = ("docker", "podman", "chown", "srun", "sudo", "su")
SHORT_OPTIONS = {"sshpass": "-p", "mysql": "-p", "mysqldump": "-p", "mariadb": "-p", "redis-cli": "-a"}
MAX_DEPTH = 3  # levels of nested shell text


def refuse_secrets(raw: Mapping[str, Any], source: str) -> None:
    """Raise RecipeError for the first value of a recipe that looks like a secret, without quoting it."""
    parameters = {
        names[-1]: value
        for names, value in _iter_texts(raw, ())
        if len(names) > 1 and names[-2] == "parameters"
    }
    for names, words in _iter_lists(raw, ()):
        filled = [_fill_parameters(word, parameters) for word in words if isinstance(word, str)]
        filled = [word for word in filled if not has_token(word)]  # refused below with their own field
        if names[-1] == "argv" and (where := find_secret_in_words(filled)):
            raise RecipeError(Code.SECRET_IN_COMMAND(source=source, field=".".join(names), word=where))
    for names, value in _iter_texts(raw, ()):
        field, name = redacted(".".join(names)), names[-1]
        in_launcher = names[0] in ("launcher", "env", "setup")  # a profile has the launcher's keys at the top
        section = names[-2] if len(names) > 1 else ""
        if section == "env" and is_secret(name, value) and not in_launcher:
            raise RecipeError(Code.SECRET_IN_ENV(source=source, field=field, variable=name))
        named = (in_launcher or section in PROGRAM_SECTIONS) and is_secret(name, value)
        inside = section in PROGRAM_SECTIONS and has_secret_in_text(_fill_parameters(value, parameters))
        if named or inside or has_token(value) or any(map(has_token, names)):
            raise RecipeError(Code.SECRET_IN_RECIPE(source=source, field=field, of_launcher=in_launcher))


def has_secret_in_text(text: str, depth: int = MAX_DEPTH) -> bool:
    """Return whether a text for a program (perhaps shell lines or code) passes a secret to something."""
    for match in ASSIGNMENT.finditer(text):
        name, value = match["name"], match["value"]
        # Unquoted lower-case names are usually code: `token = next_token`
        literal = bool(match["quote"]) or name.isupper() or is_random_looking(value)
        if literal and is_secret(name, value):
            return True
    substituted = [
        parenthesised or backticked for parenthesised, backticked in SHELL_SUBSTITUTION.findall(text)
    ]
    words = _split_shell_words(SHELL_SUBSTITUTION.sub("${_}", text))
    if find_secret_in_words(words):
        return True
    inner = [word for word in (*words, *substituted) if word != text and re.search(r"\s", word)]
    code = [word for option, word in pairwise(words) if option == "-c" and re.match(r"python", words[0])]
    return depth > 0 and any(has_secret_in_text(word, depth - 1) for word in inner if word not in code)


def find_secret_in_words(words: list[str]) -> str | None:
    """Return the option, variable or header to which a command line passes a secret; None if it has none."""
    programs = {word.rpartition("/")[2] for word in words}
    short = {option for program, option in SHORT_OPTIONS.items() if program in programs}
    logins = () if programs & set(NOT_LOGINS) else LOGINS
    for previous, word, following in zip(["", *words], words, [*words[1:], ""], strict=False):
        in_code = previous.endswith((",", "(")) or following[:1] in ("(", ")") or word.endswith(",")
        if (where := _find_secret_assignment(word)) and not (in_code and not word.startswith(("-", "+"))):
            return where
        option = OPTION.fullmatch(previous)
        if word.startswith("-"):
            login = word[2:] if word[:2] in ("-u", "-U") and word[:2] in logins else ""
            if any(word.startswith(flag) and len(word) > 3 for flag in short) or _is_login(login):
                return word[:2]
        elif option and option[1] and option[3] is None and is_secret(option[2], word):
            return option[2]
        elif (previous in short and is_secret("password", word)) or (previous in logins and _is_login(word)):
            return previous
    return None


def _find_secret_assignment(word: str, depth: int = 1) -> str | None:
    """Return the name in `--name=value` or `Name: value` if the value is a secret, else None.

    For a proxy URL with a password, return "a URL".
    """
    if (proxy := PROXY.fullmatch(word)) and is_secret("password", proxy[1]):
        return "a URL"
    option, header = OPTION.fullmatch(word), HEADER.fullmatch(word)
    if header and is_secret(header[1], header[2]):
        return header[1]
    if not option or not option[3] or option[3].startswith("="):
        return None
    if is_secret(option[2], option[3].split(" ")[0]):
        return option[2]
    if option[1] + option[2] in LOGINS and _is_login(option[3]):
        return option[2]
    return _find_secret_assignment(option[3], depth - 1) if depth else None  # as in `--env=NAME=value`


def _is_login(word: str) -> bool:
    login = LOGIN.fullmatch(word)
    return login is not None and is_secret("password", login[1])


def _fill_parameters(text: str, parameters: Mapping[str, str]) -> str:
    """Return a template with the recipe's parameters filled in, since they may contain an option's value."""
    return re.sub(r"(?<![{$])\{(\w+)\}(?!\})", lambda match: parameters.get(match[1], match[0]), text)


def _split_shell_words(text: str) -> list[str]:
    """Return the words of a shell line; with an unclosed quote, split at blanks."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        return text.split()


def _iter_texts(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text and integer of a tree (as text) with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _iter_texts(value, (*names, *str(key).split(".")))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _iter_texts(value, (*names, str(index)))
    elif isinstance(tree, str | int) and names:
        yield names, str(tree)


def _iter_lists(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _iter_lists(value, (*names, *str(key).split(".")))
    elif isinstance(tree, list) and names:
        yield names, tree
