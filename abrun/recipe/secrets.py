"""No recipe may hold a secret: what it says is written into every run, and shown in every report."""

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.redaction import holds_token, is_dense, is_secret, redacted

GIVEN_TO_PROGRAMS = ("argv", "env", "parameters", "setup", "sbatch")
OPTION = re.compile(r"([-+]{0,2})([A-Za-z][\w.-]*)(?:=([\s\S]*))?")  # --name=value, ++section.name=value
HEADER = re.compile(r"([a-z][\w-]*)(?::\s+|(?<=-key):|(?<=-token):)(?:(?:bearer|basic|token)\s+)?(.+)", re.I)
# Assignments in code or settings: `token="..."`, `"password": "..."`
ASSIGNMENT = re.compile(
    r"(?P<name>(?<!\w)[A-Za-z_][\w.-]{0,99})[\"'\]]{0,2}\s{0,3}[:=]\s{0,3}(?P<quote>[\"']?)"
    r"(?P<value>(?!\w{1,99}=[^=\s])[^\s\"',;()]{4,})"
)
LOGIN = re.compile(r"[^\s:/@]+:([^\s/@]{2,})")  # user:password
PROXY = re.compile(r"[\w.%+-]+:([^\s/@]{2,})@[A-Za-z][\w-]*(?:(?:\.[\w-]+)+(?::\d+)?|:\d+)(?:/.*)?")
FILLED_BY_SHELL = re.compile(r"\$\(+([^()]*)\)+|`([^`]*)`|\$[a-z_]\w*")
# Short options whose value is a secret: of any program but those that know users alone, and of some programs
LOGINS = ("-u", "-U", "--user", "--proxy-user")
NOT_LOGINS = ("docker", "podman", "chown", "srun", "sudo", "su")
SHORT_OPTIONS = {"sshpass": "-p", "mysql": "-p", "mysqldump": "-p", "mariadb": "-p", "redis-cli": "-a"}
MAX_DEPTH = 3  # of shell text in shell text


def refuse_secrets(raw: Mapping[str, Any], source: str) -> None:
    """Raise RecipeError for the first value of a recipe that looks like a secret, without quoting it."""
    parameters = {
        names[-1]: value for names, value in _texts(raw, ()) if len(names) > 1 and names[-2] == "parameters"
    }
    for names, words in _lists(raw, ()):
        filled = [_filled(word, parameters) for word in words if isinstance(word, str)]
        filled = [word for word in filled if not holds_token(word)]  # whose own field is named below
        if names[-1] == "argv" and (where := secret_in_words(filled)):
            raise RecipeError(Code.SECRET_IN_COMMAND(source=source, field=".".join(names), word=where))
    for names, value in _texts(raw, ()):
        field, name = redacted(".".join(names)), names[-1]
        of_launcher = names[0] in ("launcher", "env", "setup")  # of a profile it is all there is
        section = names[-2] if len(names) > 1 else ""
        if section == "env" and is_secret(name, value) and not of_launcher:
            raise RecipeError(Code.SECRET_IN_ENV(source=source, field=field, variable=name))
        named = (of_launcher or section in GIVEN_TO_PROGRAMS) and is_secret(name, value)
        inside = section in GIVEN_TO_PROGRAMS and secret_in_text(_filled(value, parameters))
        if named or inside or holds_token(value) or any(map(holds_token, names)):
            raise RecipeError(Code.SECRET_IN_RECIPE(source=source, field=field, of_launcher=of_launcher))


def secret_in_text(text: str, depth: int = MAX_DEPTH) -> bool:
    """Return whether a text that a program gets, perhaps lines of shell or code, gives something a secret."""
    for match in ASSIGNMENT.finditer(text):
        name, value = match["name"], match["value"]
        # Unquoted, in small letters, it is more often a piece of code: `token = next_token`
        literal = bool(match["quote"]) or name.isupper() or is_dense(value)
        if literal and is_secret(name, value):
            return True
    substituted = [one or other for one, other in FILLED_BY_SHELL.findall(text)]
    words = _shell_words(FILLED_BY_SHELL.sub("${_}", text))
    if secret_in_words(words):
        return True
    inner = [word for word in (*words, *substituted) if word != text and re.search(r"\s", word)]
    code = [word for option, word in pairwise(words) if option == "-c" and re.match(r"python", words[0])]
    return depth > 0 and any(secret_in_text(word, depth - 1) for word in inner if word not in code)


def secret_in_words(words: list[str]) -> str | None:
    """Return what a word of a command line gives a secret to: an option, a variable, a header, a login."""
    programs = {word.rpartition("/")[2] for word in words}
    short = {option for program, option in SHORT_OPTIONS.items() if program in programs}
    logins = () if programs & set(NOT_LOGINS) else LOGINS
    for previous, word, following in zip(["", *words], words, [*words[1:], ""], strict=False):
        in_code = previous.endswith((",", "(")) or following[:1] in ("(", ")") or word.endswith(",")
        if (where := _assigned_in(word)) and not (in_code and not word.startswith(("-", "+"))):
            return where
        option = OPTION.fullmatch(previous)
        if word.startswith("-"):
            login = word[2:] if word[:2] in ("-u", "-U") and word[:2] in logins else ""
            if any(word.startswith(each) and len(word) > 3 for each in short) or _is_login(login):
                return word[:2]
        elif option and option[1] and option[3] is None and is_secret(option[2], word):
            return option[2]
        elif (previous in short and is_secret("password", word)) or (previous in logins and _is_login(word)):
            return previous
    return None


def _assigned_in(word: str, depth: int = 1) -> str | None:
    """Return the name in `--name=value` or `Name: value` where the value is a secret."""
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
    return _assigned_in(option[3], depth - 1) if depth else None  # as in `--env=NAME=value`


def _is_login(word: str) -> bool:
    login = LOGIN.fullmatch(word)
    return login is not None and is_secret("password", login[1])


def _filled(text: str, parameters: Mapping[str, str]) -> str:
    """Return a template with the recipe's parameters filled in: one may hold what an option is given."""
    return re.sub(r"(?<![{$])\{(\w+)\}(?!\})", lambda match: parameters.get(match[1], match[0]), text)


def _shell_words(text: str) -> list[str]:
    """Return the words of a line of shell; what has no end of a quotation is split at blanks."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        return text.split()


def _texts(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text of a tree, and every whole number, with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, (*names, *str(key).split(".")))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _texts(value, (*names, str(index)))
    elif isinstance(tree, str | int) and names:
        yield names, str(tree)


def _lists(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _lists(value, (*names, *str(key).split(".")))
    elif isinstance(tree, list) and names:
        yield names, tree
