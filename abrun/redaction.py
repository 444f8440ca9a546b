"""Secrets and control characters, which no text of ours may show: on a terminal, in a report or in a record.

Known tokens are recognised by their shape wherever they stand; other values only beside a name that
says what they are (`HF_TOKEN`, `--db-password`), and never where they are numbers, truth values or paths.
"""

import functools
import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

# The prefixes by which their makers let scanners find them: Hugging Face, GitHub, GitLab, OpenAI, Anthropic,
# Stripe, NVIDIA, Groq, xAI, Replicate, Docker, AWS, Slack, Google, npm, PyPI, Weights & Biases, JSON Web
# Tokens, PEM. No pattern may look far: a line of a diff can have a megabyte.
_SHAPES = (
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_\w{20,}",
    r"\bglpat-[\w-]{16,}",
    r"\bsk-(?=[\w-]{0,40}?[A-Za-z0-9]{16})(?=[\w-]{0,80}?\d)[\w-]{20,}",  # `sk-a-name-of-words` is none
    r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}",
    r"\bnvapi-[\w-]{20,}",
    r"\b(?:gsk_|xai-|r8_)[A-Za-z0-9]{30,}",
    r"\bdckr_pat_[\w-]{20,}",
    r"(?<=\bBearer )(?=[\w.~+/-]{0,80}?\d)[\w.~+/-]{16,}=*",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bxox[a-z]-[\w-]{10,}",
    r"\bAIza[\w-]{30,}",
    r"\bya29\.[\w-]{20,}",
    r"\bnpm_[A-Za-z0-9]{30,}",
    r"\bpypi-[\w-]{30,}",
    r"\bwandb_v\d+_\w{20,}",
    r"\blocal-[0-9a-f]{40}\b",
    r"\beyJ[\w-]{8,500}\.[\w-]{8,}(?:\.[\w-]*)?",
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]{0,30}PRIVATE KEY-----|[\s\S]*)",
    r"(?i:(?<=[?&]token=)|(?<=[?&]access_token=)|(?<=[?&]sig=)|(?<=-signature=))[\w%.~+/-]{16,}",
    # 40 hexadecimal digits are a key of wandb, or a commit: what stands before says which
    r"(?i:(?<=wandb login )|(?<=wandb login --relogin )|(?<=api_key[=:])|(?<=api-key[=:])|(?<=api_key[=:] ))"
    r"\b[0-9a-f]{40}\b",
)
# A reference (`${NAME}`) or a placeholder is no password.
_IN_A_URL = r"(?<=:/)(?P<user>/?[^\s/:@'\"]{0,200}):(?P<password>(?!\$?\{|<secret)[^\s/@'\"]{1,200})(?=@)"
_TOKEN = re.compile("|".join((*_SHAPES, _IN_A_URL)))

_SECRET = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
_SECRET_AT_THE_END = {"token", "auth", "authorization", "cookie", "cookies", "dsn", "pat"}
_KINDS_OF_KEY = {"api", "access", "secret", "private", "auth", "signing", "encryption"}
# What a token of a language model is called after: `eos_token: END` is no secret, nor is `per_token: mean`
_OF_A_MODEL = re.compile(
    r"eos|bos|pad|unk|sep|cls|mask|stop|start|end|begin|first|last|next|new|special|image|video|audio|think"
    r"|tool|user|assistant|system|prompt|response|added|extra|by|per"
)
_DOUBTFUL = {"key", "keys", "auth", "token", "tokens", "cookie", "dsn", "private", "session"}
_NO_SECRET = re.compile(
    r"[-+.\d_]{0,8}(?:e[-+]?\d+)?[kKmMgGbBs]{0,2}|true|false|yes|no|on|off|none|null|auto|never|always"
    r"|[~.]{0,2}/.*|~|file://.*|<[^<>]*>|\[[^\[\]]*\]|os\.(?:environ|getenv)\b.*",
    re.IGNORECASE | re.DOTALL,
)
MOST_QUOTED = 10_000  # characters that are looked at, of which 60 are shown
MOST_TOLD = 2000  # characters of a message
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")  # to a variable of the launcher's environment
_ASSIGNMENT = re.compile(
    r"(?P<name>(?<!\w)[A-Za-z_][\w.-]{0,99})(?P<between>[\"'\]]{0,2}\s{0,3}[:=]\s{0,3}(?P<quote>[\"']?))(?P<value>(?!\w{1,99}=[^=\s])[^\s\"',;()]{4,})"
)
_FILLED_IN_LATER = re.compile(r"\$?\{[^{}]*\}|\$[A-Z_][A-Z0-9_]*|\$\([\s\S]*")


def redacted(text: str, known: Iterable[str] = ()) -> str:
    """`text` with every token of a known shape, and every password in a URL, replaced by `<secret ...>`.

    So is every text in `known`.
    """
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, hidden(secret))
    return _TOKEN.sub(_hidden_match, text)


def redacted_code(text: str) -> str:
    """`redacted`, and without what code or settings assign to names that call it a secret."""
    return _ASSIGNMENT.sub(_hidden_assignment, redacted(text))


def printable(text: str) -> str:
    """`text` with every character that could break a line or move a terminal's cursor as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def shown(text: str) -> str:
    """What may be shown of any text (of a file, a log, an exception): neither secrets nor controls."""
    return printable(redacted(text))


def shown_tree(tree: Any) -> Any:
    """A tree of mappings and lists without secrets, every text and key in it as `shown`."""
    return _printable_tree(without_secrets(tree))


def _printable_tree(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {printable(str(key)): _printable_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_printable_tree(value) for value in tree]
    return printable(tree) if isinstance(tree, str) else tree


def holds_token(text: str) -> bool:
    """Whether a token of a known shape, or a URL with a password, stands in a text."""
    return _TOKEN.search(text) is not None


def is_secret(name: str, value: str) -> bool:
    """Whether the value under a name (of a variable, an option, a key) is one that must not be kept."""
    if holds_token(value):
        return True
    rest = _FILLED_IN_LATER.sub("", value).strip()
    words = re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]+", name)
    words = [word.lower() for word in words]
    if not words or _NO_SECRET.fullmatch(rest):
        return False
    key = words[-1] in ("key", "keys") and bool(_KINDS_OF_KEY & set(words))
    of_a_model = words[-1] == "token" and any(map(_OF_A_MODEL.fullmatch, words))
    at_the_end = words[-1] in _SECRET_AT_THE_END and not of_a_model
    names_it = bool(_SECRET & set(words)) and words[-1] not in ("file", "path", "dir")
    if key or names_it or at_the_end:
        return True
    return bool((_DOUBTFUL | _SECRET) & set(words)) and _is_dense(rest)


def without_secrets(tree: Any, name: str = "") -> Any:
    """A tree of mappings and lists with every secret in it replaced by `<secret ...>`."""
    if isinstance(tree, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value, name) for value in tree]
    if not isinstance(tree, str):
        return tree
    known = _without_secret if len(tree) < 200 else _without_secret.__wrapped__
    return known(name.rpartition(".")[2], tree)


@functools.lru_cache(maxsize=4096)  # the settings of many runs are mostly the same
def _without_secret(name: str, value: str) -> str:
    without = redacted(value)
    return hidden(value) if without == value and is_secret(name, value) else without


def hidden(secret: str) -> str:
    """What stands for a secret: of a long one the start of its hash, so that two can be told apart.

    A short one could be guessed from its hash.
    """
    if len(secret) < 20:
        return "<secret>"
    return f"<secret sha256:{hashlib.sha256(secret.encode('utf-8', 'replace')).hexdigest()[:8]}>"


def _hidden_match(match: re.Match[str]) -> str:
    if match["password"] is not None:
        return f"{match['user']}:{hidden(match['password'])}"
    return hidden(match[0])


def _hidden_assignment(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    # Unquoted, in small letters, it is more often a piece of code: `token = next_token`
    literal = bool(match["quote"]) or name.isupper() or _is_dense(value)
    if not (literal and is_secret(name, value)) or value.startswith("<secret"):
        return match[0]
    return f"{name}{match['between']}{hidden(value)}"


def _is_dense(value: str) -> bool:
    """Whether it looks like something generated: long, one word, letters and digits mixed.

    `a-name-2024-06-01` is not: in what people write, letters go with letters.
    """
    if not re.fullmatch(r"(?=.*[A-Za-z])(?=.*\d)\S{16,}", value):
        return False
    changes = len(re.findall(r"[a-z](?=[A-Z\d])|[A-Z](?=\d)|\d(?=[A-Za-z])", value))
    return changes >= 0.25 * len(value) or bool(
        re.search(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-", value)
    )


def told(message: str, most: int = MOST_TOLD) -> str:
    """A message as one line of bounded length without secrets, to be kept."""
    line = " ".join(redacted(message[:MOST_QUOTED]).split())
    return line if len(line) <= most else f"{line[:most]}..."


def in_yaml(value: Any) -> str:
    """A value in a recipe's words, as long as it is: null, true and false, and text without quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value) or "''"


class _Bounded(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redacted(x[:MOST_QUOTED]), level)  # first: half a token is not recognised

    def repr_bool(self, x: bool, level: int) -> str:
        return in_yaml(x)

    repr_NoneType = repr_bool


def shortened(value: Any) -> str:
    """A value in a recipe's words as one bounded line without secrets, however long or deep it is."""
    bounded = _Bounded()
    bounded.maxlevel, bounded.maxstring, bounded.maxother = 3, 60, 60
    text = bounded.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
