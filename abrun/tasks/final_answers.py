"""The final answer in a text, read as it is written: nothing is computed.

A number is digits with an optional sign, decimal part and exponent (`-5`, `.5`, `1,234.50`, `3.2e5`). Commas
between groups of three digits, a currency sign before, and whatever stands behind (a full stop, a percent
sign, a unit) are no part of it, so 20% is 20 and not 0.2. Two numbers are equal where their values are:
`1,234.50` is `1234.5`.

What two numbers make is not its result. A fraction (`3/4`, `\\frac{3}{4}`) equals one with the same two
numbers, and neither 0.75 nor 6/8; a power equals no plain number; of `23 + 45` the last number is 45, and of
`3 * 10^2` it is 10^2. Otherwise an echo of the question would be its answer.
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
    # A sign, where it is not between two operands or in an exponent; then the currency.
    r"(?P<sign>(?<![A-Za-z0-9_)\]}^])(?<!\^\{)[-+])?(?:\\?[$€£¥])?"
    # No digits of a name (`m2`), of an exponent (`m^2`), or behind a second point.
    r"(?<![A-Za-z0-9_^])(?<!\^\{)(?<!\^[-+])(?<!\^\{[-+])(?<![0-9]\.)"
    rf"(?P<first>{DECIMAL})(?: ?(?P<joined>/|\^) ?\{{?(?P<second>[-+]?{DECIMAL})\}}?)?"
)
FRACTION = re.compile(rf"\\[dt]?frac *(?:\{{([-+]?{DECIMAL})\}}|([0-9])) *(?:\{{({DECIMAL})\}}|([0-9]))")
VULGAR_FRACTION = re.compile(
    "[\N{VULGAR FRACTION ONE QUARTER}-\N{VULGAR FRACTION THREE QUARTERS}\u2150-\u215e\u2189]"
)
SUPERSCRIPT = re.compile("(?<=[0-9])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
DASHES = dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}"), "-")
SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\!,|,\\!)(?=[0-9]{3})")  # of thousands, in LaTeX
DEGREES = re.compile(r"\^ *(?:\\circ|\{ *\\circ *\})")
WORDS = re.compile(r"\\(?:text|mathrm) *\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Number:
    value: Decimal
    joined: str = ""  # "/" or "^": with the second number, and not computed
    second: Decimal | None = None

    def __str__(self) -> str:
        return f"{self.value:f}{self.joined}{'' if self.second is None else f'{self.second:f}'}"


def last_number(text: str) -> Number | None:
    """The last number that is written in the text."""
    found = list(NUMBER.finditer(_plain(text)))
    return _number(found[-1]) if found else None


def number(text: str) -> Number | None:
    """The number that the text is, but for currency, percent sign, unit in \\text{} and a full stop."""
    found = NUMBER.fullmatch(WORDS.sub("", _plain(text)).strip().rstrip(" .%$\\°€£¥"))
    return _number(found) if found else None


def last_box(text: str) -> str | None:
    """What stands in the last \\boxed{...} of the text that is closed."""
    for part in reversed(text.split("\\boxed{")[1:]):
        depth = 1
        for place, character in enumerate(part):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return part[:place]
    return None


def _plain(text: str) -> str:
    """Minus signs, thousands, degrees, powers and fractions as a keyboard writes them."""

    def fraction(found: re.Match[str]) -> str:
        over, under = (one or other for one, other in (found.group(1, 2), found.group(3, 4)))
        follows_a_digit = found.string[: found.start()][-1:].isdigit()  # 1\frac{1}{2} is not 11/2
        return f"{' ' * follows_a_digit}{over}/{under}"

    def vulgar(found: re.Match[str]) -> str:  # 2½ is not 21/2
        return " " + normalize("NFKC", found[0]).replace("\N{FRACTION SLASH}", "/")

    text = SEPARATOR.sub(",", text.translate(DASHES))
    text = SUPERSCRIPT.sub(lambda found: "^" + normalize("NFKC", found[0]), VULGAR_FRACTION.sub(vulgar, text))
    return FRACTION.sub(fraction, DEGREES.sub("", text))


def _number(found: re.Match[str]) -> Number:
    value = Decimal((found["sign"] or "") + found["first"].replace(",", ""))
    if not found["joined"]:
        return Number(value)
    return Number(value, found["joined"], Decimal(found["second"].replace(",", "")))
