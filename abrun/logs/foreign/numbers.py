"""Parsing of numbers and steps that a log holds as text, such as "0.1661", "1,000" or "1/60"."""

import hashlib
import re
from collections.abc import Iterable

COMMA_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?")
DOT_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(\.[0-9]{3})+(,[0-9]+)?")
SPACE = "[ '\u00a0\u2009\u202f\u2019]"  # thousands separators that cannot be decimal marks
SPACE_GROUPED = re.compile(rf"[-+]?[1-9][0-9]{{0,2}}({SPACE}[0-9]{{3}})+(\.[0-9]+)?")
DECIMAL_POINT = re.compile(r"[-+]?[0-9]*\.[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"[-+]?[0-9]*,[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
STEP_OF_TOTAL = re.compile(r"([0-9][0-9,]*)\s*/\s*[0-9][0-9,]*")  # ms-swift: step / number of steps
MINUS = "\u2212"
MAX_TEXT_CHARS = 400  # characters of a cell that are kept


def parse_number(text: str) -> float:
    """Parse a plain number. Raises ValueError, also for Python-only forms such as 1_000."""
    if "_" in text or not text.isascii():
        raise ValueError
    return float(text)


def to_float(value: float) -> float:
    """Return a number as a float; infinity for a whole number of more than 308 digits."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def shorten_cell(text: str) -> str:
    """Return at most MAX_TEXT_CHARS characters; a longer text ends in its hash, as prompts begin alike."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return text[: MAX_TEXT_CHARS - 16] + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def is_number_with_comma(text: str) -> bool:
    """Return True for a text whose comma is a decimal mark, or groups digits."""
    text = text.strip()
    return "," in text and any(
        pattern.fullmatch(text) for pattern in (COMMA_GROUPED, DECIMAL_COMMA, DOT_GROUPED)
    )


class NumberFormat:
    """Number format of a file, inferred from all of its texts.

    "1,234" may be a thousand or a decimal. It is parsed only if another text of the file shows that decimals
    use a point ("0.5", "1,234,567") and none uses a decimal comma ("0,5"). Likewise "1.234" is rejected in a
    file with decimal commas.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        marked = [text.strip() for text in texts if "," in text or "." in text]
        commas = [text for text in marked if "," in text]
        self.decimal_comma = any(
            (DECIMAL_COMMA.fullmatch(text) and not COMMA_GROUPED.fullmatch(text))
            or DOT_GROUPED.fullmatch(text)
            for text in commas
        )
        grouped = [text for text in commas if COMMA_GROUPED.fullmatch(text)]
        self.thousands_comma = (
            bool(grouped)
            and not self.decimal_comma
            and (
                any("." in text or text.count(",") > 1 for text in grouped)
                or any(DECIMAL_POINT.fullmatch(text) and not DOT_GROUPED.fullmatch(text) for text in marked)
            )
        )

    def parse_number(self, text: str) -> float:
        """Parse a number. Raises ValueError if the text is not a number or is ambiguous."""
        text = text.strip().replace(MINUS, "-")
        if self.decimal_comma and DOT_GROUPED.fullmatch(text):
            raise ValueError
        if self.thousands_comma and COMMA_GROUPED.fullmatch(text):
            return float(text.replace(",", ""))
        if SPACE_GROUPED.fullmatch(text):
            return float(re.sub(SPACE, "", text))
        return parse_number(text)

    def parse_step(self, text: str, *, has_plain_steps: bool) -> float:
        """Parse a step. Steps are whole numbers, so "1,000" can only mean a thousand.

        `has_plain_steps`: other steps of the column have no point, so "1.000" among them is ambiguous and
        raises ValueError.
        """
        text = text.strip()
        fraction = STEP_OF_TOTAL.fullmatch(text)
        text = fraction[1] if fraction else text
        if COMMA_GROUPED.fullmatch(text) and not self.decimal_comma:
            return float(text.replace(",", ""))
        if has_plain_steps and DOT_GROUPED.fullmatch(text):
            raise ValueError
        return self.parse_number(text)
