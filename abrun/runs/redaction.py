"""Redaction of secrets and control characters in texts that abrun shows or stores.

Two kinds of secrets are replaced in any text: values registered with `hide_values`, and tokens of a known
format. Nothing else is guessed: a secret that somebody typed into a recipe is stored.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.messages.numbers import more_text

# Tokens whose vendors gave them a prefix for scanners: Hugging Face, GitHub, GitLab, OpenAI, Anthropic,
# Stripe, NVIDIA, Groq, xAI, Replicate, Docker, AWS, Slack, Google, npm, PyPI, Weights & Biases, JSON Web
# Tokens, PEM, DER in base64, netrc. Each has the texts with which it begins, which are searched for first,
# and a pattern, whose group `secret` is replaced (else all of it). Lookaheads are bounded, because one line
# of a diff can have a megabyte.
_TOKENS = tuple(
    (beginning, re.compile(pattern))
    for beginnings, pattern in (
        (("hf_", "api_org_"), r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}"),
        (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
        (("github_pat_",), r"\bgithub_pat_\w{20,}"),
        (("glpat-",), r"\bglpat-[\w-]{16,}"),
        # Not `sk-a-name-of-words`
        (("sk-",), r"\bsk-(?=[\w-]{0,40}?[A-Za-z0-9]{16})(?=[\w-]{0,80}?\d)[\w-]{20,}"),
        (("sk_live_", "sk_test_", "rk_live_", "rk_test_"), r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"),
        (("nvapi-",), r"\bnvapi-[\w-]{20,}"),
        (("gsk_", "xai-", "r8_"), r"\b(?:gsk_|xai-|r8_)[A-Za-z0-9]{30,}"),
        (("dckr_pat_",), r"\bdckr_pat_[\w-]{20,}"),
        (("Bearer ",), r"\bBearer (?P<secret>(?=[\w.~+/-]{0,80}?\d)[\w.~+/-]{16,}=*)"),
        (("AKIA", "ASIA"), r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
        (("xox",), r"\bxox[a-z]-[\w-]{10,}"),
        (("AIza",), r"\bAIza[\w-]{30,}"),
        (("ya29.",), r"\bya29\.[\w-]{20,}"),
        (("npm_",), r"\bnpm_[A-Za-z0-9]{30,}"),
        (("pypi-",), r"\bpypi-[\w-]{30,}"),
        (("wandb_v",), r"\bwandb_v\d+_\w{20,}"),
        (("local-",), r"\blocal-[0-9a-f]{40}\b"),
        (("eyJ",), r"\beyJ[\w-]{8,500}\.[\w-]{8,}(?:\.[\w-]*)?"),
        (
            ("-----BEGIN ",),
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[\s\S]*?-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|[\s\S]*)",
        ),
        (
            ("MII",),
            r"\bMII[A-Za-z0-9+/]{57,}(?:(?:\s|\\n){0,2}[A-Za-z0-9+/]{8,}){0,400}[A-Za-z0-9+/]*={0,2}",
        ),
        (("hooks.slack",), r"\bhooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[\w/-]{16,}"),
        (
            ("machine",),
            r"\bmachine\s{1,9}\S{1,200}\s{1,9}(?:login\s{1,9}\S{1,200}\s{1,9})?"
            r"password\s{1,9}(?!\$\{|<secret)\S{1,200}",
        ),
        # Password in a URL, but not a reference (`${NAME}`) or a placeholder (`<secret ...>`)
        ((":/",), r":/{1,2}[^\s/:@'\"]{0,200}:(?P<secret>(?!\$?\{|<secret)[^\s/@'\"]{1,200})(?=@)"),
        # Token in place of the user name in a URL
        (
            ("://",),
            r"://(?P<secret>(?=[^\s/@]{0,80}\d)(?=[\d.~%+-]{0,80}[A-Za-z])[\w.~%+-]{16,200}(?=@))",
        ),
        (
            ("=",),
            r"=(?i:(?<=[?&]token=)|(?<=[?&]access_token=)|(?<=[?&]sig=)|(?<=-signature=))"
            r"(?P<secret>[\w%.~+/-]{16,})",
        ),
        # 40 hexadecimal digits are a wandb key or a commit; only the text before them tells which
        (("wandb login ",), r"wandb login (?:--relogin )?(?P<secret>\b[0-9a-f]{40}\b)"),
        (
            ("api_key", "api-key", "API_KEY", "API-KEY"),
            r"(?i:api[_-]key)[\"']?[=:] ?[\"']?(?P<secret>\b[0-9a-f]{40}\b)",
        ),
    )
    for beginning in beginnings
)
# Ends of the names of environment variables whose values are secrets
_SECRET_VARIABLE = re.compile(
    r"(?:API_?KEY|ACCESS_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|_PASS|_PWD)$", re.IGNORECASE
)
# Values that are never secrets: numbers of a few digits, words for true and false, paths, placeholders
_PLAIN_VALUE = re.compile(
    r"[-+.\d_]{0,8}(?:e[-+]?\d+)?[kKmMgGbBs]{0,2}|true|false|yes|no|on|off|none|null|auto|never|always"
    r"|[~.]{0,2}/.*|~|<[^<>]*>",
    re.IGNORECASE | re.DOTALL,
)
MAX_SEARCHED_CHARACTERS = 10_000  # characters of a text searched for secrets before it is shortened
MAX_MESSAGE_CHARACTERS = 2000
# Reference to a variable of the launcher's environment
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Parts of a value that are filled in when it is used: `${NAME}`, `{name}`, `$(command)`
_TEMPLATE_PART = re.compile(r"\$?\{+[^{}]*\}+|\$[A-Z_][A-Z0-9_]*|\$\([\s\S]*|`[^`]*`")
# Lengths from which values are masked; names of metrics contain shorter texts by chance
MIN_MASKED_CHARACTERS = 6  # any value
MIN_WORD_CHARACTERS = 8  # a value of lower-case letters only, because `train` or `test` are no secrets
MIN_LINE_CHARACTERS = 8  # one line, or one base64 fragment, of a value
MAX_FORM_CHARACTERS = 4096  # longer texts are searched for in pieces of this length


class Mask:
    """Mask that replaces the values of variables in any text by references, `${NAME}`.

    It also finds values that are encoded for URLs or in base64, escaped in quotes, or split into lines. It
    ignores values that are likely to occur by chance: fewer than 6 characters, lower-case words of fewer
    than 8, booleans, and existing paths.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        for name, value in values.items():
            for form in _secret_forms(value):
                self._names.setdefault(form, name)
        forms = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms))) if forms else None
        encoded_forms = [form.encode("utf-8", "surrogateescape") for form in forms]
        self._bytes_pattern = re.compile(b"|".join(map(re.escape, encoded_forms))) if forms else None
        self._sorted_forms = sorted(encoded_forms)
        self._longest = max(map(len, encoded_forms), default=0)

    def hide(self, text: str) -> str:
        """Return `text` with each value replaced by its reference."""
        # Searching for one form after the other is faster than for all of them at once
        if self._pattern is None or not any(form in text for form in self._names):
            return text
        return self._pattern.sub(lambda match: f"${{{self._names[match[0]]}}}", text)

    def hide_bytes(self, content: bytes, *, more: bool) -> tuple[bytes, bytes]:
        """Return the masked content, and a tail to put before the next content.

        The tail may be the start of a value that continues there. It is empty without `more` content to come.
        """
        if self._bytes_pattern is None:
            return content, b""
        end = self._find_partial_value(content, 0) if more else len(content)
        for match in self._bytes_pattern.finditer(content):
            if match.start() < end < match.end():
                end = self._find_partial_value(content, match.end())

        def reference(match: re.Match[bytes]) -> bytes:
            return f"${{{self._names[match[0].decode('utf-8', 'surrogateescape')]}}}".encode()

        return self._bytes_pattern.sub(reference, content[:end]), content[end:]

    def _find_partial_value(self, content: bytes, start: int) -> int:
        """Return the start of the longest tail of `content` with which a value may begin; its length if none.

        Only tails from `start` on count.
        """
        for tail_start in range(max(start, len(content) - self._longest + 1), len(content)):
            tail = content[tail_start:]
            # The forms that begin with the tail follow it in sorted order
            next_index = bisect.bisect_right(self._sorted_forms, tail)
            if any(form.startswith(tail) for form in self._sorted_forms[next_index : next_index + 1]):
                return tail_start
        return len(content)


def _secret_forms(value: str) -> Iterator[str]:
    """Yield the texts by which the value may appear: itself, escaped, encoded, and its lines."""
    value = value.strip()
    if _is_common(value):
        return
    lines = [line.strip() for line in value.splitlines()]
    forms = {value, repr(value)[1:-1], json.dumps(value)[1:-1]}
    forms |= {urllib.parse.quote(value, safe=safe, errors="replace") for safe in ("", "/")}
    forms |= {urllib.parse.quote_plus(value, errors="replace"), *_base64_forms(value)}
    forms |= {line for line in lines if len(line) >= MIN_LINE_CHARACTERS} if len(lines) > 1 else set()
    for form in forms:
        searched_texts = (
            form[start : start + MAX_FORM_CHARACTERS] for start in range(0, len(form), MAX_FORM_CHARACTERS)
        )
        yield from (text for text in searched_texts if len(text) >= MIN_MASKED_CHARACTERS)


def _base64_forms(value: str) -> Iterator[str]:
    """Yield the value's base64 fragments inside a longer encoded text, as in `Authorization: Basic`.

    They depend on the value's offset in its group of three bytes.
    """
    content = value.encode("utf-8", "surrogateescape")
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + content)
        fragment = encoded[(0, 2, 3)[offset] : 4 * ((offset + len(content)) // 3)].decode()
        if len(fragment) >= MIN_LINE_CHARACTERS:
            yield from (fragment, fragment.replace("+", "-").replace("/", "_"))


def _is_common(value: str) -> bool:
    """Return whether a value is likely to occur in texts by chance."""
    if len(value) < MIN_MASKED_CHARACTERS:
        return True
    if len(value) < MIN_WORD_CHARACTERS and value.isalpha() and value.islower():
        return True
    with contextlib.suppress(OSError, RuntimeError):
        if value in os.getcwd() or value in str(Path.home()):
            return True
    is_path = value.startswith(("/", "~")) and "\n" not in value and os.path.exists(os.path.expanduser(value))
    return is_path or (not value.isdecimal() and len(value) < 7 and bool(_PLAIN_VALUE.fullmatch(value)))


_hidden_values: dict[str, str] = {}
_current_mask = Mask({})


def hide_values(values: Mapping[str, str]) -> None:
    """Mask these variables' values in every text that this process stores or shows from now on."""
    global _current_mask
    new_values = {name: value for name, value in values.items() if _hidden_values.get(name) != value}
    if new_values:
        _hidden_values.update(new_values)
        _current_mask = Mask(_hidden_values)
        _redacted.cache_clear()


def hide_secrets_of(environment: Mapping[str, str]) -> None:
    """Hide the values of those variables of an environment that are secrets, as `hide_values` does."""
    hide_values({name: value for name, value in environment.items() if is_secret_variable(name, value)})


def forget_hidden_values() -> None:
    """Forget all values passed to `hide_values`."""
    global _current_mask
    _hidden_values.clear()
    _current_mask = Mask({})
    _redacted.cache_clear()


def current_mask() -> Mask:
    """Return the mask of all values that this process hides."""
    return _current_mask


def redacted(text: str) -> str:
    """Return `text` with known token formats and passwords in URLs replaced by `<secret ...>`.

    Values that this process hides are replaced by `${NAME}`.
    """
    # Long texts are not cached
    return _redacted(text) if len(text) < 200 else _redacted.__wrapped__(text)


@functools.lru_cache(maxsize=4096)  # many runs share most of their settings
def _redacted(text: str) -> str:
    text = _current_mask.hide(text)
    spans = list[tuple[int, int]]()
    for start, end in sorted(_find_tokens(text)):
        if spans and start < spans[-1][1]:  # tokens that overlap are one
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    for start, end in reversed(spans):
        text = text[:start] + secret_placeholder(text[start:end]) + text[end:]
    return text


def _find_tokens(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of every token of a known format in a text."""
    for beginning, pattern in _TOKENS:
        if beginning not in text:
            continue
        start = text.find(beginning)
        while start >= 0:
            match = pattern.match(text, start)
            if match:
                yield match.span("secret" if "secret" in pattern.groupindex else 0)
            start = text.find(beginning, match.end() if match else start + 1)


def printable(text: str) -> str:
    """Return `text` with control characters (line breaks, terminal codes) escaped."""
    if text.isprintable():
        return text
    escapes = {char: char.encode("unicode_escape", "surrogatepass").decode() for char in set(text)}
    return "".join(char if char.isprintable() else escapes[char] for char in text)


def list_names(names: list[str], max_names: int = 5) -> str:
    """Return at most `max_names` names for a message, quoted and on one line."""
    text = ", ".join(f"'{printable(name[:80])}'" for name in names[:max_names])
    return text + more_text(len(names) - max_names)


def display_safe(text: str) -> str:
    """Return a text from a file, a log or an exception without secrets and control characters."""
    return printable(redacted(text))


def display_safe_tree(tree: Any) -> Any:
    """Return a tree of mappings and lists with texts made safe by `display_safe`, and printable keys."""
    return _map_texts(tree, display_safe, lambda key: printable(str(key)))


def has_token(text: str) -> bool:
    """Return whether a text contains a known token format or a URL with a password."""
    return any(True for _ in _find_tokens(text))


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether the value of an environment variable is a secret: by its name's end or its format."""
    if has_token(value):
        return True
    written = _TEMPLATE_PART.sub("", value).strip()
    if len(written) < MIN_MASKED_CHARACTERS or _PLAIN_VALUE.fullmatch(written):
        return False
    return bool(_SECRET_VARIABLE.search(name))


def without_secrets(tree: Any) -> Any:
    """Return a tree of mappings and lists with the secrets in its texts replaced, as `redacted` does."""
    return _map_texts(tree, redacted, lambda key: key)


def _map_texts(tree: Any, convert: Callable[[str], str], convert_key: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {convert_key(key): _map_texts(value, convert, convert_key) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map_texts(value, convert, convert_key) for value in tree]
    return convert(tree) if isinstance(tree, str) else tree


def secret_placeholder(secret: str) -> str:
    """Return `<secret>`, with the start of the hash of a long secret, so that readers can tell secrets apart.

    A short secret has no hash, from which it could be guessed.
    """
    if len(secret) < 20:
        return "<secret>"
    return f"<secret sha256:{hashlib.sha256(secret.encode('utf-8', 'replace')).hexdigest()[:8]}>"


def one_line(message: str, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return a message as one line of bounded length without secrets, for storage."""
    # Mask before truncating, because half a value is not recognised
    line = " ".join(_current_mask.hide(message).split())
    line = redacted(line[:MAX_SEARCHED_CHARACTERS])
    return line if len(line) <= max_characters else f"{line[:max_characters]}..."


def yaml_text(value: Any) -> str:
    """Return a value as a recipe writes it: null, true, false, or text without quotes; of any length."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value) or "''"


class _BoundedRepr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        # Redact before truncating, because half a token is not recognised
        return super().repr_str(redacted(_current_mask.hide(x)[:MAX_SEARCHED_CHARACTERS]), level)

    def repr_bool(self, x: bool, level: int) -> str:
        return yaml_text(x)

    repr_NoneType = repr_bool


def shortened(value: Any) -> str:
    """Return a value as a recipe writes it, in one line of at most 60 characters, without secrets."""
    bounded = _BoundedRepr()
    bounded.maxlevel, bounded.maxstring, bounded.maxother = 3, 60, 60
    text = bounded.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
