"""The final answer in a text, read as it is written: nothing is computed.

A number is digits with an optional sign, decimal part and exponent (`-5`, `.5`, `1,234.50`, `3.2e5`). Commas
or spaces between groups of three digits, a currency sign before, and a full stop, a percent sign or a unit
after it do not belong to it, so 20% is 20 and not 0.2. Two numbers are equal if their values are: `1,234.50`
is `1234.5`.

What two numbers make is not its result. A fraction (`3/4`, `\\frac{3}{4}`) equals one with the same two
numbers, and neither 0.75 nor 6/8; a power equals no plain number. A text has no final number if its last
number belongs to something longer: an operand (`23 + 45`, `10-5`), an alternative or a range (`71 or 72`,
`71 to 72`), a coefficient (`5x`, `5\\sqrt{2}`), an argument (`\\log 4`), a tuple (`(1, 2)`), a mixed number
(`2 1/2`), a time or ratio (`12:30`) or a version (`1.5.2`). Otherwise an echo of the question would be its
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
MINUS = re.compile(  # apart from its number, or as a word
    r"(^\s*|[=({:$]\s*|\b(?:is|are|be|equals)\s+)-[ \t]+(?=[0-9.])|\b(?:minus|negative)[ \t]+(?=[0-9.])"
)
SEPARATOR = re.compile(  # of thousands, in LaTeX and as a space
    "(?<=[0-9])(?:\\{,\\}|,?\\\\! ?|\\\\[,;: ]|[ \u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"
)
BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox) *\{|\\.|[{}]")
DEGREES = re.compile(r"\^ *(?:\\circ|\{ *\\circ *\})")
WORDS = re.compile(r"\\(?:text|mathrm|mbox) *\{[^{}]*\}(?: *\^ *\{?[0-9]\}?)?")

# What makes a number a part of something longer. Markup is left out before these are looked for.
MARKUP = re.compile(r"\\(?:boxed|text) *\{|\\[()\[\]]|\*\*|\$|(?<!\\)[{}]")
CONTEXT = 60  # characters around a number that are looked at
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
    joined: str = ""  # "/" or "^": with the second number, and not computed
    second: Decimal | None = None

    def __str__(self) -> str:
        return f"{self.value:f}{self.joined}{'' if self.second is None else f'{self.second:f}'}"


def last_number(text: str) -> Number | None:
    """Return the last number that is written in the text; None if it belongs to something longer."""
    plain = _plain(text)
    matches = list(NUMBER.finditer(plain))
    return _number(matches[-1]) if matches and not _is_in_longer_expression(matches[-1]) else None


def number(text: str) -> Number | None:
    """The number that the text is, but for currency, percent sign, unit in \\text{} and a full stop."""
    match = NUMBER.fullmatch(WORDS.sub("", _plain(text)).strip().rstrip(" .%$\\°€£¥"))
    return _number(match) if match else None


def last_box(text: str) -> str | None:
    """Return the content of the last \\boxed{...} of the text that is closed."""
    span = last_box_span(text)
    return None if span is None else text[slice(*span)]


def last_box_span(text: str) -> tuple[int, int] | None:
    """Return where the content of the last closed \\boxed{...} begins and ends."""
    opened: list[int] = []  # where the content of each open brace begins; -1: not of a box
    last = None
    for token in BOX_OR_BRACE.finditer(text):
        if token[0] == "}" and opened:
            start = opened.pop()
            if start >= 0 and (last is None or start > last[0]):
                last = start, token.start()
        elif token[0] == "{":
            opened.append(-1)
        elif token[0][-1] == "{" and len(token[0]) > 2:
            opened.append(token.end())
    return last


def _is_in_longer_expression(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - CONTEXT) : match.start()]
    if ARGUMENT.search(before):
        return True
    before = MARKUP.sub("", before)
    after = MARKUP.sub("", match.string[match.end() : match.end() + CONTEXT])
    return bool(
        LONGER_BEFORE.search(before)
        or (match["sign"] and SIGN_AFTER_OPERAND.search(before))
        or (match["joined"] == "/" and not match["sign"] and WHOLE_PART.search(before))
        or LONGER_AFTER.match(after)
    )


def _plain(text: str) -> str:
    """Minus signs, thousands, degrees, powers and fractions as a keyboard writes them."""

    def fraction(match: re.Match[str]) -> str:
        over, under = (braced or bare for braced, bare in (match.group(1, 2), match.group(3, 4)))
        follows_a_digit = match.string[: match.start()][-1:].isdigit()  # 1\frac{1}{2} is not 11/2
        return f"{' ' * follows_a_digit}{over}/{under}"

    def vulgar(match: re.Match[str]) -> str:  # 2½ is not 21/2
        return " " + normalize("NFKC", match[0]).replace("\N{FRACTION SLASH}", "/")

    text = SEPARATOR.sub(",", MINUS.sub(r"\1-", text.translate(DASHES)))
    text = SUPERSCRIPT.sub(lambda found: "^" + normalize("NFKC", found[0]), VULGAR_FRACTION.sub(vulgar, text))
    return FRACTION.sub(fraction, DEGREES.sub("", text))


def _number(match: re.Match[str]) -> Number:
    value = Decimal((match["sign"] or "") + match["first"].replace(",", ""))
    if not match["joined"]:
        return Number(value)
    return Number(value, match["joined"], Decimal(match["second"].replace(",", "")))
