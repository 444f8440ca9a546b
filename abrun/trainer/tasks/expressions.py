"""The final answer of a text, as LaTeX in the form that math-verify reads.

math-verify (0.9) finds LaTeX inside `$...$`, `\\[...\\]` and `\\boxed{}` alone, so `final_answer` takes the
answer out of its text and `to_latex` rewrites the notations that math-verify misreads. Dropping separators,
units and `\\text{}` follows the MATH dataset's grader (hendrycks/math, math_equivalence.py) and Minerva's
(arXiv:2206.14858, appendix D.1).
"""

import re
from fractions import Fraction

from abrun.trainer.tasks.final_answers import DASHES, is_box_open, last_box_span, last_number

MAX_BOXES = 20  # boxes that are joined into one list of answers
MAX_TAIL = 4000  # characters at the end of a text that are searched for an answer without a box
MAX_LINE = 100  # characters of an answer without a mark
MAX_EXPONENT_DIGITS = 3  # including the sign, of powers of ten that are expanded

MARK = re.compile(  # words that announce an answer
    r"(?:####|\banswers?(?:\s*:|[^\n.:=]{0,40}?\b(?:is|are)\b:?)"
    r"|\b(?:option|choice|result|solution)s?\b[^\n.:=]{0,40}?\b(?:is|are)\b:?)[*\s]*",
    re.IGNORECASE,
)
TAG = re.compile(r"</?(?:answer|think)>")
VERB = re.compile(r".*\b(?:is|are|equals?|be|makes?|gives?|gets?|has|have|costs?)\b:?\s+")
SEGMENT = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
CONJUNCTION = re.compile(r"\s*[,;]?\s*(?:\\text *\{ *)?(?:and|or)?\s*\}?[$\s]*")
SENTENCE = re.compile(r".+?(?=[.!?](?:\s|$)|$)")
PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?:,? +[A-Za-z]+){3,}")

SYMBOLS = {
    "\u00d7": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "\u2044": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "\u222a": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\neq ",
    "±": r"\pm ",
    "∅": r"\emptyset ",
    r"\varnothing": r"\emptyset ",
    "°": r"^{\circ}",
    "√": r"\sqrt",
    "θ": r"\theta ",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    "\n": " ",
    "¼": r"\frac{1}{4}",
    "½": r"\frac{1}{2}",
    "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
}
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ"
SUPERSCRIPT = re.compile(f"[{SUPERSCRIPTS}]+")
PLAIN_DIGITS = str.maketrans(SUPERSCRIPTS, "0123456789-+n")
SPELLED = [  # words and command variants, with their LaTeX
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac *(\d) *(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\?sqrt *\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\b(?:minus|negative) +(?=[\d\\(])"), "-"),
    (re.compile(r"^\{(.*)\}$"), r"\\{\1\\}"),  # a set
]
GROUPED = r"(?<![0-9.])[0-9]{1,3}(?:%s[0-9]{3})+(?![0-9])"  # digits with thousands separators
SPACED = re.compile(GROUPED % r"(?:\{,\}|,?\\! ?|\\[,;: ] ?| )")
COMMAS = re.compile(GROUPED % ",")
SCIENTIFIC = re.compile(
    r"(?<![A-Za-z0-9_^.])(?:([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]+)"
    r"|(?:([0-9]+(?:\.[0-9]+)?) *(?:\\times|\\cdot|\*|x) *)?10 *\^ *(?:\{ *([-+]?[0-9]+) *\}|([-+]?[0-9]+)))"
    r"(?![0-9A-Za-z])"
)
SMALL = re.compile(r"(?<![0-9.])0?\.000+[1-9][0-9]*(?![0-9.])")  # math-verify rounds to 6 places
REPEATING = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]*)\\overline *\{([0-9]+)\}")
MIXED = re.compile(
    r"(?<![A-Za-z0-9.^_])([0-9]+)(?: *\\frac *\{([0-9]+)\} *\{([0-9]+)\}| +([0-9]+)/([0-9]+)(?![0-9]))"
)
UNIT = re.compile(r"(?<=[0-9})])\s*(?<![\\A-Za-z])([A-Za-z]+(?:[ /]+[A-Za-z]+)*)(\^\{?[23]\}?)?$")
UNITS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "ml": "mL milliliter millilitre",
    "l": "L liter litre",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "",
    "week": "",
    "month": "",
    "yr": "year",
    "cent": "",
    "dollar": "",
    "degree": "",
    "radian": "rad",
    "mi/h": "mph",
    "km/h": "kph kmh",
}
UNIT_NAMES = {name: unit for unit, names in UNITS.items() for name in (unit, *names.split())}
COUNTED = re.compile("[A-Za-z]{4,}")
NUM_STEM_LETTERS = 3  # of a word, so that plurals and abbreviations are the same unit
NEUTRAL_WORDS = re.compile(  # words after a number that name no unit of their own
    "(?:ahead|altogether|answer|approximately|apart|away|correct|deep|each|element|exactly|fewer|high|integer"
    "|item|left|less|long|more|number|object|older|only|pair|people|percent|person|piece|possible|remaining"
    "|root|solution|tall|thing|time|total|unit|value|wide|year|younger)s?",
    re.IGNORECASE,
)
TEXT = re.compile(r"\\(?:text|mbox|math|op)(?:bf|it|rm|sf|tt|up|normal|eratorname)? *\{([^{}]*)\}")
FONT_UNIT = re.compile(rf"(?<=\w)\s*(?:{TEXT.pattern})(\^\{{?[23]\}}?)?$")
BASE = re.compile(r"^\s*[0-9A-F]+ *_ *\{? *([0-9]+) *\}?\s*$")
WITHOUT_BRACES = str.maketrans("", "", "{}")
LAYOUT = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![A-Za-z])|~|\*\*|\s+")


def final_answer(text: str) -> str:
    """Return the final answer of a text: its last box, announced answer or formula, or its last line.

    Boxes or formulas joined by commas, "and" or "or" form one list. Without any of these, the answer is the
    last line if it is short and not prose, otherwise the last number. A box that is not closed holds no
    answer, because the rest of it is missing.
    """
    text = TAG.sub("\n", text)
    if boxes := _join_boxes(text):
        return boxes
    if is_box_open(text):
        return ""
    end = text[-MAX_TAIL:]
    *_, mark = [None, *MARK.finditer(end)]
    if mark and (rest := end[mark.end() :].strip()):
        sentence = SENTENCE.match(rest)
        length = len(sentence[0]) if sentence else len(rest)
        formulas = [formula for formula in _find_formulas(rest) if formula[0] < length]
        return formulas[0][1] if formulas else VERB.sub("", rest[: min(length, MAX_LINE)])
    if formulas := _find_formulas(end):
        return formulas[-1][1]
    line = (end.strip().splitlines() or [""])[-1].strip(" .*")
    line = VERB.sub("", line[-2 * MAX_LINE :])
    if len(line) <= MAX_LINE and not PROSE.search(line):
        return line
    return str(last_number(text) or "")


def to_latex(answer: str) -> str:
    """Rewrite an answer so that math-verify reads its numbers, constants and sets as a human would."""
    span = last_box_span(answer)
    text = (answer if span is None else answer[slice(*span)]).translate(DASHES)
    for symbol, latex in SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(PLAIN_DIGITS) + "}", text)
    text = re.sub(r"(?<!\\)\$|\\[()\[\]]|\*\*", "", text).strip().rstrip(" .,;")
    for spelled, latex in SPELLED:
        text = spelled.sub(latex, text)
    text = SPACED.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    if not re.search(r"[(\[]|\\\{", text):  # the commas of a tuple separate its elements
        text = COMMAS.sub(lambda match: match[0].replace(",", ""), text)
    text = MIXED.sub(_to_improper, REPEATING.sub(_expand_repeating, SCIENTIFIC.sub(_expand_power, text)))
    text = SMALL.sub(lambda match: _format_fraction(Fraction("0" + match[0].lstrip("0"))), text)
    return UNIT.sub(_mark_unit, text).strip()


def units_differ(latex: str, other_latex: str) -> bool:
    """Return True if two answers end in different units or bases; an answer may omit its unit.

    Known units have one name (`UNITS`); of other words (apples), the first letters count.
    """
    units = _unit_of(latex), _unit_of(other_latex)
    return all(units) and units[0] != units[1]


def opening_bracket(latex: str) -> str:
    """Return the opening bracket of an answer such as (1,2), [0,1) or \\{1,2\\}; "" if it has none."""
    match = re.match(r"[(\[]|\\\{", LAYOUT.sub("", latex))
    return match[0][-1] if match else ""


def as_text(answer: str) -> str:
    """Return an answer without spaces, fonts and other layout, for comparison as text."""
    text = LAYOUT.sub("", TEXT.sub(r"\1", to_latex(answer)))
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", text).replace(r"\%", "%").rstrip(".")


def _join_boxes(text: str) -> str:
    contents: list[str] = []
    for _ in range(MAX_BOXES):
        span = last_box_span(text)
        if span is None:
            break
        start = text.rindex("\\", 0, span[0])
        if contents and not _is_conjunction(text[span[1] + 1 :]):
            break
        content = text[slice(*span)]
        if content not in contents[:1]:
            contents.insert(0, content)
        text = text[:start]
    return ", ".join(contents)


def _find_formulas(text: str) -> list[tuple[int, str]]:
    """Return the start and the LaTeX of each formula; joined formulas are one."""
    formulas: list[tuple[int, str]] = []
    end = 0
    for match in SEGMENT.finditer(text):
        content = next(filter(None, match.groups()))
        if formulas and _is_conjunction(text[end : match.start()]):
            formulas[-1] = formulas[-1][0], f"{formulas[-1][1]}, {content}"
        else:
            formulas.append((match.start(), content))
        end = match.end()
    return formulas


def _is_conjunction(between: str) -> bool:
    return bool(CONJUNCTION.fullmatch(between) and between.strip("$ \n"))


def _format_fraction(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _expand_power(match: re.Match[str]) -> str:
    exponent = match[2] or match[4] or match[5]
    if len(exponent) > MAX_EXPONENT_DIGITS:
        return match[0]
    return _format_fraction(Fraction(match[1] or match[3] or 1) * Fraction(10) ** int(exponent))


def _expand_repeating(match: re.Match[str]) -> str:
    integer_digits, fixed_digits, repeated_digits = match.groups()
    tail = Fraction(int(repeated_digits), (10 ** len(repeated_digits) - 1) * 10 ** len(fixed_digits))
    return _format_fraction(Fraction(f"{integer_digits or 0}.{fixed_digits or 0}") + tail)


def _to_improper(match: re.Match[str]) -> str:
    integer, numerator, denominator = int(match[1]), int(match[2] or match[4]), int(match[3] or match[5])
    return (
        f"\\frac{{{integer * denominator + numerator}}}{{{denominator}}}"
        if numerator < denominator
        else match[0]
    )


def _short_name(words: str) -> str:
    factors = words.replace(" per ", "/").split("/")
    names = [UNIT_NAMES.get(word) or UNIT_NAMES.get(word.lower().removesuffix("s")) for word in factors]
    return "/".join(filter(None, names)) if all(names) else ""


def _unit_of(latex: str) -> str:
    plain = latex.replace(r"^{\circ}", " degree").replace(r"^\circ", " degree")
    if base := BASE.search(plain):
        return "base " + base[1]
    # A unit in a font follows constants too: 8\pi\text{ cm}
    match = FONT_UNIT.search(plain) or UNIT.search(TEXT.sub(r" \1", plain))
    words = match[1].strip() if match else ""
    if match and (name := _short_name(words)):
        return name + (match[2] or "").translate(WITHOUT_BRACES)
    is_counted = COUNTED.fullmatch(words) and not NEUTRAL_WORDS.fullmatch(words)
    is_separate = match and (match.re is FONT_UNIT or match[0][0].isspace())  # 3abcd is a product
    return words[:NUM_STEM_LETTERS].lower() if is_counted and is_separate else ""


def _mark_unit(match: re.Match[str]) -> str:
    """Mark a unit or words after a number as text, which math-verify drops; `3ab` remains a product."""
    words = match[1]
    is_unit = _short_name(words) if len(words) > 1 else False
    is_words = match[0][0].isspace() and max(map(len, words.split())) >= 4
    return rf"\text{{ {words}}}{match[2] or ''}" if is_unit or is_words else match[0]
