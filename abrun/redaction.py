"""Secrets and control characters, which no text of ours may show: on a terminal, in a report or in a record.

Values that this process was told of (`hide_values`) are masked wherever they stand, and so are tokens of a
known shape. Other values are recognised only by a name that says what they are (`HF_TOKEN`,
`--db-password`), and never where they are truth values or paths.
"""

import base64
import bisect
import contextlib
import functools
import hashlib
import json
import os
import re
import reprlib
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
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
    # A token as the user of a URL
    r"(?<=://)(?=[^\s/@]{0,80}\d)(?=[\d.~%+-]{0,80}[A-Za-z])[\w.~%+-]{16,200}(?=@)",
    r"(?i:(?<=[?&]token=)|(?<=[?&]access_token=)|(?<=[?&]sig=)|(?<=-signature=))[\w%.~+/-]{16,}",
    # 40 hexadecimal digits are a key of wandb, or a commit: what stands before says which
    r"(?i:(?<=wandb login )|(?<=wandb login --relogin )|(?<=api_key[=:])|(?<=api-key[=:])|(?<=api_key[=:] ))"
    r"\b[0-9a-f]{40}\b",
)
# A reference (`${NAME}`) or a placeholder is no password.
_IN_A_URL = r"(?<=:/)(?P<user>/?[^\s/:@'\"]{0,200}):(?P<password>(?!\$?\{|<secret)[^\s/@'\"]{1,200})(?=@)"
_TOKEN = re.compile("|".join((*_SHAPES, _IN_A_URL)))

# Within a word of a name: names are often written without separators (`PGPASSWORD`, `AWSSECRETKEY`)
_SECRET = re.compile(r"passw(?:or)?d|passphrase|passcode|secret(?!ar|ion|ly)|credential|apikey")
_SECRET_AT_THE_END = re.compile(r".*(?:pwd|token)|pw|psw|creds|auth|authorization|cookies?|dsn|pat")
_PASSWORD_AT_THE_END = re.compile(r".*(?:passw(?:or)?d|passphrase|passcode|pwd)")
_ABOUT_A_SECRET = ("file", "path", "dir", "name", "mode", "type", "policy", "length", "version", "enabled")
_KINDS_OF_KEY = (
    *("api", "access", "secret", "private", "auth", "signing", "encryption", "ssh", "deploy", "master"),
    *("service", "storage", "account", "jwt", "hmac", "fernet", "openai", "anthropic", "wandb", "hf", "aws"),
)
# What a token of a language model is called after: `eos_token: END` is no secret, nor is `per_token: mean`
_OF_A_MODEL = re.compile(
    r"(?:eos|bos|pad|unk|sep|cls|mask|stop|start|end|begin|first|last|next|new|special|image|video|audio|think"
    r"|tool|user|assistant|system|prompt|response|added|extra|by|per|sub|each|every|single|multi)(?:token)?"
)
_OF_A_PROGRAM = re.compile(  # passes over data or code: `forward_pass: eager`
    r"by|com|encom|tres|sur|under|over|multi|single|forward|backward|first|second|last|final|one|two|per|each"
    r"|num|max|min|grad|fusion|custom|compiler|graph|opt|pre|post|warmup|train|eval|test|all|low|high|band"
)
_DOUBTFUL = {"key", "keys", "auth", "token", "tokens", "cookie", "dsn", "private", "session"}
_NO_SECRET = re.compile(
    r"[-+.\d_]{0,8}(?:e[-+]?\d+)?[kKmMgGbBs]{0,2}|true|false|yes|no|on|off|none|null|auto|never|always"
    r"|[~.]{0,2}/.*|~|file://.*|<[^<>]*>|\[[^\[\]]*\]|os\.(?:environ|getenv)\b.*",
    re.IGNORECASE | re.DOTALL,
)
MAX_QUOTED = 10_000  # characters searched for secrets, of which 60 are shown
MAX_MESSAGE = 2000  # characters
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")  # to a variable of the launcher's environment
_FILLED_IN_LATER = re.compile(r"\$?\{+[^{}]*\}+|\$[A-Z_][A-Z0-9_]*|\$\([\s\S]*|`[^`]*`")
MIN_MASKED_CHARACTERS = (
    6  # characters of a value that is masked wherever it stands: names of metrics hold shorter ones
)
MIN_LINE = 8  # of one line of a value
MIN_WORD = 8  # letters of a word that is masked: shorter ones (`train`, `test`) stand in names of metrics
MAX_FORM_CHARACTERS = 4096  # characters of one text that is looked for


class Mask:
    """Mask that replaces the values of variables in any text by references, `${NAME}`.

    It also finds values encoded in URLs, in base64, in quoted text, and line by line. Values likely to
    occur by chance are not masked: fewer than 6 characters, lower-case words of fewer than 8, booleans, and
    existing paths.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        for name, value in values.items():
            for form in _secret_forms(value):
                self._names.setdefault(form, name)
        forms = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms))) if forms else None
        in_bytes = [form.encode("utf-8", "surrogateescape") for form in forms]
        self._bytes_pattern = re.compile(b"|".join(map(re.escape, in_bytes))) if forms else None
        self._sorted_forms = sorted(in_bytes)
        self._longest = max(map(len, in_bytes), default=0)

    def hide(self, text: str) -> str:
        """Return `text` with each value replaced by its reference."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: f"${{{self._names[match[0]]}}}", text)

    def hide_bytes(self, content: bytes, *, more: bool) -> tuple[bytes, bytes]:
        """Return `content` masked and, with `more` to come, the end that may be the start of a value."""
        if self._bytes_pattern is None:
            return content, b""
        end = self._start_of_partial(content, 0) if more else len(content)
        for match in self._bytes_pattern.finditer(content):
            if match.start() < end < match.end():
                end = self._start_of_partial(content, match.end())
        return self._bytes_pattern.sub(self._reference, content[:end]), content[end:]

    def _reference(self, match: re.Match[bytes]) -> bytes:
        return f"${{{self._names[match[0].decode('utf-8', 'surrogateescape')]}}}".encode()

    def _start_of_partial(self, content: bytes, start: int) -> int:
        """Return where the longest end of `content` that a value begins with starts."""
        for begin in range(max(start, len(content) - self._longest + 1), len(content)):
            end = content[begin:]
            following = bisect.bisect_right(self._sorted_forms, end)  # longer forms that begin with it
            if any(form.startswith(end) for form in self._sorted_forms[following : following + 1]):
                return begin
        return len(content)


def _secret_forms(value: str) -> Iterator[str]:
    """Yield all texts that would reveal a value."""
    value = value.strip()
    if _is_common(value):
        return
    lines = [line.strip() for line in value.splitlines()]
    whole = {value, repr(value)[1:-1], json.dumps(value)[1:-1]}
    whole |= {urllib.parse.quote(value, safe=safe, errors="replace") for safe in ("", "/")}
    whole |= {urllib.parse.quote_plus(value, errors="replace"), *_base64_forms(value)}
    whole |= {line for line in lines if len(line) >= MIN_LINE} if len(lines) > 1 else set()
    for text in whole:
        pieces = (
            text[begin : begin + MAX_FORM_CHARACTERS] for begin in range(0, len(text), MAX_FORM_CHARACTERS)
        )
        yield from (piece for piece in pieces if len(piece) >= MIN_MASKED_CHARACTERS)


def _base64_forms(value: str) -> Iterator[str]:
    """Yield the base64 fragments by which an encoded text reveals the value, as in `Authorization: Basic`."""
    content = value.encode("utf-8", "surrogateescape")
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + content)
        whole = encoded[(0, 2, 3)[before] : 4 * ((before + len(content)) // 3)].decode()
        if len(whole) >= MIN_LINE:
            yield from (whole, whole.replace("+", "-").replace("/", "_"))


def _is_common(value: str) -> bool:
    """Return whether a value is likely to occur in texts by chance."""
    if len(value) < MIN_MASKED_CHARACTERS:
        return True
    if len(value) < MIN_WORD and value.isalpha() and value.islower():
        return True
    with contextlib.suppress(OSError, RuntimeError):
        if value in os.getcwd() or value in str(Path.home()):
            return True
    is_path = value.startswith(("/", "~")) and "\n" not in value and os.path.exists(os.path.expanduser(value))
    return is_path or (not value.isdecimal() and len(value) < 7 and bool(_NO_SECRET.fullmatch(value)))


_hidden_values: dict[str, str] = {}
_current_mask = Mask({})


def hide_values(values: Mapping[str, str]) -> None:
    """Mask these variables' values in every text that this process stores or shows from now on."""
    global _current_mask
    new = {name: value for name, value in values.items() if _hidden_values.get(name) != value}
    if new:
        _hidden_values.update(new)
        _current_mask = Mask(_hidden_values)
        _replace_secret.cache_clear()


def hide_secrets_of(environment: Mapping[str, str]) -> None:
    """Mask the values of an environment's variables that look like secrets."""
    hide_values({name: value for name, value in environment.items() if is_secret(name, value)})


def forget_hidden_values() -> None:
    """Forget all values passed to `hide_values`."""
    global _current_mask
    _hidden_values.clear()
    _current_mask = Mask({})
    _replace_secret.cache_clear()


def current_mask() -> Mask:
    """Return the mask of all values that this process hides."""
    return _current_mask


def redacted(text: str) -> str:
    """Return `text` with known token formats and passwords in URLs replaced by `<secret ...>`.

    Values that this process hides are replaced by `${NAME}`.
    """
    return _TOKEN.sub(_hidden_match, _current_mask.hide(text))


def printable(text: str) -> str:
    """Return `text` with control characters (line breaks, terminal codes) escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def display_safe(text: str) -> str:
    """Return a text (of a file, a log, an exception) without secrets and control characters."""
    return printable(redacted(text))


def display_safe_tree(tree: Any) -> Any:
    """Return a tree of mappings and lists with every key and text made safe by `display_safe`."""
    return _printable_tree(without_secrets(tree))


def _printable_tree(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {printable(str(key)): _printable_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_printable_tree(value) for value in tree]
    return printable(tree) if isinstance(tree, str) else tree


def holds_token(text: str) -> bool:
    """Return whether a text contains a known token format or a URL with a password."""
    return _TOKEN.search(text) is not None


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of a name (variable, option, key) is a secret."""
    if holds_token(value):
        return True
    rest = _FILLED_IN_LATER.sub("", value).strip()
    words = re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]+", name)
    words = [word.lower() for word in words]
    if not words:
        return False
    last = words[-1]
    if _NO_SECRET.fullmatch(rest):
        return len(rest) >= 4 and rest.isdecimal() and bool(_PASSWORD_AT_THE_END.fullmatch(last))
    if _names_a_secret(words) or (_names_a_pass(words) and name.lower().endswith("pass")):
        return True
    doubtful = bool(_DOUBTFUL & set(words)) or any(map(_SECRET.search, words))
    return doubtful and is_dense(rest)


def _names_a_secret(words: list[str]) -> bool:
    last = words[-1]
    if last in ("key", "keys") and set(_KINDS_OF_KEY) & set(words):
        return True
    if last.endswith("key") and last[:-3].endswith(_KINDS_OF_KEY):  # `SSHKEY`
        return True
    if _SECRET_AT_THE_END.fullmatch(last):
        return not (last.endswith("token") and any(map(_OF_A_MODEL.fullmatch, words)))
    return any(map(_SECRET.search, words)) and not last.endswith(_ABOUT_A_SECRET)


def _names_a_pass(words: list[str]) -> bool:
    """Return whether a name that ends with `pass` means a password: `SMTP_PASS`, `SSHPASS`, not `bypass`."""
    before = [*words[:-1], words[-1].removesuffix("pass")]
    return not any(map(_OF_A_PROGRAM.fullmatch, before))


def without_secrets(tree: Any, name: str = "") -> Any:
    """Return a tree of mappings and lists with every secret replaced by `<secret ...>`."""
    if isinstance(tree, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value, name) for value in tree]
    if not isinstance(tree, str):
        return tree
    known = _replace_secret if len(tree) < 200 else _replace_secret.__wrapped__
    return known(name.rpartition(".")[2], tree)


@functools.lru_cache(maxsize=4096)  # the settings of many runs are mostly the same
def _replace_secret(name: str, value: str) -> str:
    redacted_value = redacted(value)
    return secret_placeholder(value) if redacted_value == value and is_secret(name, value) else redacted_value


def secret_placeholder(secret: str) -> str:
    """Return the placeholder of a secret; a long one shows the start of its hash, to distinguish secrets.

    A short secret could be guessed from its hash.
    """
    if len(secret) < 20:
        return "<secret>"
    return f"<secret sha256:{hashlib.sha256(secret.encode('utf-8', 'replace')).hexdigest()[:8]}>"


def _hidden_match(match: re.Match[str]) -> str:
    if match["password"] is not None:
        return f"{match['user']}:{secret_placeholder(match['password'])}"
    return secret_placeholder(match[0])


def is_dense(value: str) -> bool:
    """Return whether a value looks generated: long, one word, letters and digits mixed.

    `a-name-2024-06-01` does not: in names written by people, letters and digits are grouped.
    """
    if not re.fullmatch(r"(?=.*[A-Za-z])(?=.*\d)\S{16,}", value):
        return False
    changes = len(re.findall(r"[a-z](?=[A-Z\d])|[A-Z](?=\d)|\d(?=[A-Za-z])", value))
    return changes >= 0.25 * len(value) or bool(
        re.search(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-", value)
    )


def one_line(message: str, max_characters: int = MAX_MESSAGE) -> str:
    """Return a message as one line of bounded length without secrets, for storage."""
    line = " ".join(
        _current_mask.hide(message).split()
    )  # before truncation, since half a value is not recognised
    line = redacted(line[:MAX_QUOTED])
    return line if len(line) <= max_characters else f"{line[:max_characters]}..."


def in_yaml(value: Any) -> str:
    """Return a value as in a recipe: null, true, false, text without quotes; not shortened."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value) or "''"


class _BoundedRepr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        # Redact before truncation, since half a token is not recognised
        return super().repr_str(redacted(_current_mask.hide(x)[:MAX_QUOTED]), level)

    def repr_bool(self, x: bool, level: int) -> str:
        return in_yaml(x)

    repr_NoneType = repr_bool


def shortened(value: Any) -> str:
    """Return a value as in a recipe, as one line of at most 60 characters without secrets."""
    bounded = _BoundedRepr()
    bounded.maxlevel, bounded.maxstring, bounded.maxother = 3, 60, 60
    text = bounded.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
