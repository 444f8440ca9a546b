"""The final answer of a text as written, without any evaluation.

A number is digits with an optional sign, decimal part and exponent (`-5`, `.5`, `1,234.50`, `3.2e5`). It
excludes thousands separators, a currency sign before it, and a full stop, percent sign or unit after it: 20%
is 20, not 0.2. Numbers are compared by value: `1,234.50` equals `1234.5`.

Expressions are not evaluated. A fraction (`3/4`, `\\frac{3}{4}`) equals only a fraction of the same two
numbers, neither 0.75 nor 6/8; a power equals no plain number. A text has no final number if its last number
is part of a longer expression: an operand (`23 + 45`, `10-5`), an alternative or a range (`71 or 72`, `71 to
72`), a coefficient (`5x`, `5\\sqrt{2}`), an argument (`\\log 4`), a tuple (`(1, 2)`), a mixed number (`2
1/2`), a time or ratio (`12:30`) or a version (`1.5.2`). Otherwise repeating the question could count as an
answer.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from unicodedata import normalize

DECIMAL = (
    r"(?>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,4}(?![0-9A-Za-z])|(?![eE][-+]?[0-9]))"
)
NUMBER = re.compile(
    # A sign that is not between two operands or in an exponent; then the currency.
    r"(?P<sign>(?<![A-Za-z0-9_)\]}^])(?<!\^\{)[-+])?(?:\\?[$€£¥])?"
    # Not the digits of a name (`m2`), of an exponent (`m^2`), or after a second decimal point.
    r"(?<![A-Za-z0-9_^])(?<!\^\{)(?<!\^[-+])(?<!\^\{[-+])(?<![0-9]\.)"
    rf"(?P<first>{DECIMAL})(?: ?(?P<joined>/|\^) ?\{{?(?P<second>[-+]?{DECIMAL})\}}?)?"
)
FRACTION = re.compile(rf"\\[dt]?frac *(?:\{{([-+]?{DECIMAL})\}}|([0-9])) *(?:\{{({DECIMAL})\}}|([0-9]))")
VULGAR_FRACTION = re.compile(
    "[\N{VULGAR FRACTION ONE QUARTER}-\N{VULGAR FRACTION THREE QUARTERS}\u2150-\u215e\u2189]"
)
SUPERSCRIPT = re.compile("(?<=[0-9])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
DASHES = dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}"), "-")
MINUS = re.compile(  # separated from its number by a space, or written as a word
    r"(^\s*|[=({:$]\s*|\b(?:is|are|be|equals)\s+)-[ \t]+(?=[0-9.])|\b(?:minus|negative)[ \t]+(?=[0-9.])"
)
SEPARATOR = re.compile(  # thousands separators in LaTeX, and spaces
    "(?<=[0-9])(?:\\{,\\}|,?\\\\! ?|\\\\[,;: ]|[ \u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"
)
BOX = re.compile(r"\\[bf]?box(?:ed)? *\{")
BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox) *\{|\\.|[{}]")
DEGREES = re.compile(r"\^ *(?:\\circ|\{ *\\circ *\})")
WORDS = re.compile(r"\\(?:text|mathrm|mbox) *\{[^{}]*\}(?: *\^ *\{?[0-9]\}?)?")

# Contexts that make a number part of a longer expression. Markup is removed before the search.
MARKUP = re.compile(r"\\(?:boxed|text) *\{|\\[()\[\]]|\*\*|\$|(?<!\\)[{}]")
CONTEXT = 60  # characters searched on either side of a number
OPERATION = "(?:[-+*/^÷\u00d7·<>≤≥≠]|" r"\\(?:times|cdot|div|pm|leq?|geq?|neq?|lt|gt)\b)"
LONGER_BEFORE = re.compile(
    rf"(?:[0-9)\]%!]|(?<![A-Za-z])[A-Za-z]|[0-9] ?[A-Za-z]+) *{OPERATION}[ (]*$"  # 23 + 45, x - 5
    r"|[0-9)] ?x ?$|[0-9] ?:$"  # 4 x 17, 12:30
    r"|(?:[0-9)%]|[0-9] ?[A-Za-z]+),? +(?:or|to|and) +(?:[a-z]+ +)?(?:[A-Za-z] *= *)?$"  # 71 or 72
    r"|(?<![A-Za-z])(?:log|ln|exp|a?r?c?(?:sin|cos|tan)|sqrt|f|g|h)(?:\( *| +)$"  # log 4
    r"|(?:[(\[]|\\\{)[^()\[\]]*[0-9][^()\[\]]*[,;] *$"  # (1, 2)
)
ARGUMENT = re.compile(r"(?:\\(?!text|math|mbox|boxed|fbox)[A-Za-z]+(?:\{[^{}]*\})?|[_^]) *\{ *$")  # \sqrt{2}
SIGN_AFTER_OPERAND = re.compile(r"(?:[0-9)\]]|(?<![A-Za-z])[b-z]) +$")  # 10 -5
WHOLE_PART = re.compile(r"(?<![0-9.,/A-Za-z^_])[0-9]+ +$")  # 2 1/2
LONGER_AFTER = re.compile(
    r"[.:][0-9]| ?[xyz]{1,3}(?![A-Za-z])|[abefijknoqruvw](?![A-Za-z0-9])"  # 1.5.2, 5x; 5m has a unit
    r"| ?(?:[π√]|\\(?:pi|sqrt|times|cdot|div|pm|[dt]?frac|binom|ln|log|sin|cos|tan)(?![A-Za-z]))|\([a-z0-9]"
    r"| ?[-+*/^÷\u00d7·] ?(?:[0-9(]|[b-z](?![A-Za-z])|\\[a-z])"  # 5 - x
)


@dataclass(frozen=True, slots=True)
class Number:
    value: Decimal
    joined: str = ""  # "/" or "^": the operator before `second`; it is not evaluated
    second: Decimal | None = None

    def __str__(self) -> str:
        return f"{self.value:f}{self.joined}{'' if self.second is None else f'{self.second:f}'}"


def last_number(text: str) -> Number | None:
    """Return the last number of the text; None if it is part of a longer expression."""
    plain = _normalize(text)
    matches = list(NUMBER.finditer(plain))
    return _to_number(matches[-1]) if matches and not _is_in_longer_expression(matches[-1]) else None


def number(text: str) -> Number | None:
    """Parse a text that is one number, apart from currency, percent sign, unit in \\text{} and full stop."""
    match = NUMBER.fullmatch(WORDS.sub("", _normalize(text)).strip().rstrip(" .%$\\°€£¥"))
    return _to_number(match) if match else None


def last_box(text: str) -> str | None:
    """Return the content of the last closed \\boxed{...} of the text."""
    span = last_box_span(text)
    return None if span is None else text[slice(*span)]


def is_box_open(text: str) -> bool:
    """Return True if a text has a \\boxed{, but none that is closed: its answer is not complete."""
    return BOX.search(text) is not None and last_box_span(text) is None


def last_box_span(text: str) -> tuple[int, int] | None:
    """Return start and end of the content of the last closed \\boxed{...}."""
    opened: list[int] = []  # start of the content of each open brace; -1 for a brace that is no box
    span = None
    for token in BOX_OR_BRACE.finditer(text):
        if token[0] == "}" and opened:
            start = opened.pop()
            if start >= 0 and (span is None or start > span[0]):
                span = start, token.start()
        elif token[0] == "{":
            opened.append(-1)
        elif token[0][-1] == "{" and len(token[0]) > 2:
            opened.append(token.end())
    return span


def _is_in_longer_expression(match: re.Match[str]) -> bool:
    text_before = match.string[max(0, match.start() - CONTEXT) : match.start()]
    if ARGUMENT.search(text_before):
        return True
    text_before = MARKUP.sub("", text_before)
    text_after = MARKUP.sub("", match.string[match.end() : match.end() + CONTEXT])
    return bool(
        LONGER_BEFORE.search(text_before)
        or (match["sign"] and SIGN_AFTER_OPERAND.search(text_before))
        or (match["joined"] == "/" and not match["sign"] and WHOLE_PART.search(text_before))
        or LONGER_AFTER.match(text_after)
    )


def _normalize(text: str) -> str:
    """Rewrite minus signs, thousands, degrees, powers and fractions in plain ASCII."""

    def rewrite_fraction(match: re.Match[str]) -> str:
        numerator, denominator = (braced or bare for braced, bare in (match.group(1, 2), match.group(3, 4)))
        follows_a_digit = match.string[: match.start()][-1:].isdigit()  # 1\frac{1}{2} is not 11/2
        return f"{' ' * follows_a_digit}{numerator}/{denominator}"

    def rewrite_vulgar_fraction(match: re.Match[str]) -> str:  # 2½ is not 21/2
        return " " + normalize("NFKC", match[0]).replace("\N{FRACTION SLASH}", "/")

    text = SEPARATOR.sub(",", MINUS.sub(r"\1-", text.translate(DASHES)))
    text = SUPERSCRIPT.sub(
        lambda digits: "^" + normalize("NFKC", digits[0]), VULGAR_FRACTION.sub(rewrite_vulgar_fraction, text)
    )
    return FRACTION.sub(rewrite_fraction, DEGREES.sub("", text))


def _to_number(match: re.Match[str]) -> Number:
    value = Decimal((match["sign"] or "") + match["first"].replace(",", ""))
    if not match["joined"]:
        return Number(value)
    return Number(value, match["joined"], Decimal(match["second"].replace(",", "")))
