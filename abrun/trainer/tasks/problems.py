"""Tasks from JSON-lines files.

Problems are judged by their final answers or by a user's verifier. Completions and preferences have no
verifier: they are training data.
"""

import importlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

from abrun.errors import RecipeError
from abrun.messages.codes import Code
from abrun.messages.numbers import counted
from abrun.recipe.tasks import CompletionsTask, Gsm8k, Jsonl, PreferencesTask
from abrun.runs.files import open_regular
from abrun.trainer.tasks import Example
from abrun.trainer.tasks.expressions import (
    TEXT,
    as_text,
    final_answer,
    opening_bracket,
    to_latex,
    units_differ,
)
from abrun.trainer.tasks.final_answers import BOX, is_box_open, last_box, last_box_span, last_number, number

# Compare a final answer with a reference: as texts, or by their values with math-verify.

MAX_LENGTH = 400  # characters of an answer; math-verify's parser takes seconds for longer ones
TIME_LIMIT_S = 5  # to parse an answer, and again to compare it

CHOICE = re.compile(r"\(?([A-J])\)?")
CHOSEN = re.compile(r"\(?([A-Ja-j])\)?(?:(?<=\))(?!and|or)[\w\\$-].*|[.:](?!and|or)[\w\\$-].*)?")
WORDS = re.compile(r"(?=.*(?:[A-Z][a-z]|[A-Za-z]{4}))[A-Za-z][A-Za-z '.-]*")
RATIO = re.compile(r"[0-9]+(?::[0-9]+)+")
# A version, a time, a ratio, a congruence: math-verify would take a number out of them
NO_VALUE = re.compile(r"[0-9]\.[0-9]+\.[0-9]|[0-9] *: *[0-9]|\\equiv|\\[pb]?mod")
NAME_OR_DIGIT = re.compile(r"[0-9]|(?<![\\A-Za-z])[A-Za-z]|\\(?!text|mbox|math|boxed|left|right)[A-Za-z]")
LABEL = re.compile(r"\(?\w\)?")
PAIRS = (r"\\left(?![a-z])", r"\\right(?![a-z])"), (r"\\begin\{", r"\\end\{")
UNFINISHED = re.compile(r"[=^_\\]\s*$|\\[dtc]?frac\s*(?:\{[^{}]*\}|[0-9])?\s*$")
# x = 5, f(2) = 5, 2 + 3 = 5
EQUATION = re.compile(
    r"^(?:(?:[^A-Za-z=\\]|\\(?:times|cdot|div|d?frac)(?![A-Za-z]))*"
    r"|\s*[A-Za-z](?:_\{?\w+\}?|\([a-z0-9]\))?\s*)=(?!.*=)"
)
LIST = re.compile(r"\\?\{?[-+0-9./]+(?:, +[-+0-9./]+)+\\?\}?")
OPERATION = re.compile(r"[\w)}]\s*(?:[-+*]|\\(?:times|cdot)(?![A-Za-z]))\s*[\w(\\]")


def is_number(reference: str, completion: str) -> bool:
    """Return True if the final answer is a number equal to the reference, with nothing left to compute.

    The final answer is the content of the last box, the last number of the text, or the result of
    `final_answer`. Integers must be written as such: `136/2` is not 68. But 1/2, 0.5 and 50% are equal.
    """
    value = number(reference)
    answer = EQUATION.sub("", final_answer(completion))
    latex = to_latex(answer)
    is_marked = last_box_span(completion) is not None or LIST.fullmatch(answer)
    final_value = None if is_marked else last_number(completion)
    if value is None or is_box_open(completion) or units_differ(latex, to_latex(reference)):
        return False
    if (final_value or number(latex)) == value:
        return True
    is_whole = not value.joined and value.value == value.value.to_integral_value()
    if (is_whole and "%" not in reference) or OPERATION.search(latex):
        return False
    return is_equal(reference, answer)


def is_equal(reference: str, answer: str) -> bool:
    """Return True if two answers have the same text or value.

    Choices (`A`), words (`Evelyn`), ratios and congruences have no value and are compared as texts.
    """
    reference_text, text = as_text(reference), as_text(answer)
    if reference_text == text:
        return bool(text)
    if choice := CHOICE.fullmatch(reference_text):
        chosen = CHOSEN.fullmatch(text)
        return bool(chosen and chosen[1].upper() == choice[1])
    if is_words(reference) or RATIO.fullmatch(reference_text):
        return reference_text.casefold() == text.casefold()
    latex, reference_latex = to_latex(answer), to_latex(reference)
    if (
        not text
        or len(latex) > MAX_LENGTH
        or is_words(answer)
        or NO_VALUE.search(latex + " " + reference_latex)
    ):
        return False
    is_set = {
        bracket == "{" for bracket in (opening_bracket(latex), opening_bracket(reference_latex)) if bracket
    }
    return (
        len(is_set) < 2
        and not units_differ(latex, reference_latex)
        and _is_same_value(reference_latex, latex)
    )


def check_reference(reference: str) -> None:
    """Raise ValueError for a reference that no answer could equal, not even its own text in a box.

    Checks the text only, in 5 microseconds. Parsing with math-verify takes 9 ms and happens when the
    reference is first used. A reference that math-verify cannot parse is compared as text.
    """
    if not (NAME_OR_DIGIT.search(reference) or NAME_OR_DIGIT.search(as_text(reference))):
        raise ValueError(
            f"the answer {reference[:60]!r} has no number or name to compare with; give its value"
        )
    content = BOX.sub("{", reference)
    is_closed = last_box_span(f"\\boxed{{{content}}}") == (len("\\boxed{"), len("\\boxed{" + content))
    pairs = PAIRS if "[" in content or "]" in content else (*PAIRS, (r"\(", r"\)"))
    is_paired = all(
        len(re.findall(opens, content)) == len(re.findall(closes, content)) for opens, closes in pairs
    )
    if not ((is_closed and is_paired) or LABEL.fullmatch(content)) or UNFINISHED.search(content):
        raise ValueError(
            f"the answer {reference[:60]!r} lacks a brace, bracket, argument or side; no completion could "
            "equal it"
        )


def is_words(answer: str) -> bool:
    """Return True if an answer is words (`Evelyn`, `\\text{June 20}`) rather than variables (`xy`)."""
    stripped = answer.strip(" $.")
    text = TEXT.fullmatch(stripped)
    return bool(re.search("[A-Za-z]{2}", text[1]) if text else WORDS.fullmatch(stripped))


def _is_same_value(reference: str, answer: str) -> bool:
    """Compare with math-verify. Its time limits use SIGALRM, so it must run in the main thread."""
    from math_verify import verify  # imported late: it takes a second, and file checks do not need it

    expected, values = _parse(reference), _parse(answer)
    # Allow 0 <= x < 1 for [0,1)
    is_close = verify(expected, values, allow_set_relation_comp=True, timeout_seconds=TIME_LIMIT_S)
    return is_close and not (expected and values and _is_rounded(values[0], expected[0]))


def _is_rounded(answer: Any, reference: Any) -> bool:
    """Return True if an answer has a rounded decimal for a number of the reference that is not rational.

    math-verify compares 6 places: it takes 1.41421356 for the root of 2.
    """
    from sympy import Float, nsimplify

    decimals = [nsimplify(value, rational=True) for value in _find_numbers(answer) if value.has(Float)]
    exact_values = [value for value in _find_numbers(reference) if decimals and not value.is_rational]
    distances = (abs((exact - decimal).n(40)) for exact in exact_values for decimal in decimals)
    return any(distance.is_comparable and 1e-20 < distance < 1e-5 for distance in distances)


def _find_numbers(expression: Any) -> Iterator[Any]:
    """Yield the numbers of a sympy expression that are not part of a larger number."""
    if getattr(expression, "is_number", False):
        yield expression
        return
    for operand in getattr(expression, "args", ()):
        yield from _find_numbers(operand)


@lru_cache(maxsize=4096)
def _parse(latex: str) -> list[Any]:
    from math_verify import parse

    # No fallback: math-verify would compare texts that it cannot parse, cut at a comma or colon.
    settings: Any = {"fallback_mode": "no_fallback", "parsing_timeout": TIME_LIMIT_S}
    return parse(f"\\boxed{{{latex}}}", **settings) or parse(latex, **settings)


MAX_CHECKED_BYTES = 1 << 20  # bytes of a file that `check_problems` reads

GOLDEN_RATIO = (5**0.5 - 1) / 2


# Verifiers of completions: by the text of the final answer, by its value, or by a user's function.

MAX_REWARD = 3.4028234663852886e38  # rewards are float32


def final_number(example: Example, completion: str) -> float:
    """Return 1 if the last number of the completion equals the reference, else 0."""
    reference = number(example.answer)
    return float(reference is not None and last_number(completion) == reference)


def boxed(example: Example, completion: str) -> float:
    """Return 1 if the last \\boxed{} contains exactly the reference, else 0.

    A numeric reference is compared as a number, any other as text without spaces.
    """
    content, reference = last_box(completion), number(example.answer)
    if content is None:
        return 0.0
    if reference is not None:
        return float(number(content) == reference)
    return float("".join(content.split()) == "".join(example.answer.strip().strip("$").split()))


def judge_by_reference(example: Example, completion: str) -> float:
    """Return 1 if the final answer equals the reference, else 0.

    A numeric reference requires a number of the same value, without evaluation of expressions. Any other
    reference is judged by `judge_by_value`.
    """
    if number(example.answer) is None:
        return judge_by_value(example, completion)
    return float(is_number(example.answer, completion))


def judge_by_value(example: Example, completion: str) -> float:
    """Return 1 if the final answers have the same value (math-verify), otherwise 0.

    Expressions are evaluated, so repeating the question can count as an answer.
    """
    return float(is_equal(example.answer, final_answer(completion)))


def load_verifier(name: str) -> Callable[[Example, str], float]:
    """Load a user's verifier, given as `module:function`; it takes prompt, completion and answer.

    The working directory is appended to sys.path for the import. Raises RecipeError if there is no such
    function. The verifier raises RecipeError if the user's function raises or returns anything but a finite
    number, because training on a reward of 0 instead would hide the bug.
    """
    function = _import_function(name)

    def judge(example: Example, completion: str) -> float:
        try:
            reward = function(example.prompt, completion, example.answer)
        except Exception as error:  # a user's code may raise anything
            raise RecipeError(
                f"task.verifier: {name!r} raised {_one_line(error)} for the prompt at {example.source}; it "
                "must return a number for every completion"
            ) from error
        # NaN compares false, and a huge int is compared without conversion to float
        if not isinstance(reward, Real) or not bool(-MAX_REWARD <= reward <= MAX_REWARD):  # pyright: ignore
            raise RecipeError(
                f"task.verifier: {name!r} returned {repr(reward)[:60]} for the prompt at {example.source}; "
                "it must return a finite number"
            )
        return float(reward)

    return judge


def _import_function(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's code may raise anything
        raise RecipeError(
            f"task.verifier: got {name!r}, but importing {module_name} raised {_one_line(error)}; name an "
            "installed module, or one in the directory where abrun is started"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = (
            f"{function_name} of {module_name} is not a function"
            if function
            else (f"{module_name} has no {function_name}")
        )
        raise RecipeError(
            f"task.verifier: got {name!r}; {problem}; name a function (prompt, completion, answer) -> number"
        )
    return function


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


JUDGES = {"final_number": final_number, "boxed": boxed, "math_verify": judge_by_value}

FileConfig = Gsm8k | Jsonl | CompletionsTask | PreferencesTask


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFile:
    """A finite set of examples, reshuffled in every epoch; see abrun.trainer.tasks.TrainingTask."""

    path: str
    field: str  # the recipe field that names the file
    problems: list[Example]  # in the order of the file
    judge: Callable[[Example, str], float] | None = None

    def examples(self, seed: int, start: int, count: int, redraw: int = 0) -> list[Example]:
        """See TrainingTask. A redraw reads the order of the epoch from a distant place.

        Multiples of the golden ratio keep the places of all redraws of an example far apart.
        """
        size = len(self.problems)
        distance = int(redraw * GOLDEN_RATIO * size)
        orders = {
            epoch: _shuffle_order(seed, epoch, size)
            for epoch in range(start // size, (start + count - 1) // size + 1)
        }
        return [self.problems[orders[i // size][(i + distance) % size]] for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        assert self.judge is not None, "recipe validation allows no rewards for a task without a verifier"
        return self.judge(example, completion)

    def held_out(self, count: int) -> list[Example]:
        """Return the last `count` problems of the file."""
        if count > len(self.problems):
            raise RecipeError(
                f"validation.num_prompts: got {count}, but {self.field} ({self.path}) has only "
                f"{counted(len(self.problems), 'problem')}; use at most that many"
            )
        return self.problems[-count:]

    def without(self, prompts: frozenset[str]) -> "ProblemFile":
        remaining_problems = [problem for problem in self.problems if problem.prompt not in prompts]
        if not remaining_problems:
            raise RecipeError(
                f"validation: holds out every problem of {self.field} ({self.path}); use a smaller "
                "num_prompts, or another file for validation.path"
            )
        return replace(self, problems=remaining_problems)


def make_problem_file(config: FileConfig) -> ProblemFile:
    """Return the task of a file. Raises RecipeError if the file or the verifier is invalid."""
    problems = read_problems(config, config.path, "task.path")
    if isinstance(config, CompletionsTask | PreferencesTask):
        return problems
    if config.verifier:
        return replace(problems, judge=load_verifier(config.verifier))
    return replace(problems, judge=JUDGES[config.judged_by] if config.judged_by else judge_by_reference)


def read_problems(config: FileConfig, path: str, field: str) -> ProblemFile:
    """Read a file in the format of `config`; `field` is the recipe field that names it, for messages."""
    problems = _parse_problems(config, _read_bytes(path, field, None), path, field)
    return ProblemFile(path=path, field=field, problems=problems)


def check_problems(config: FileConfig, path: str, field: str) -> ProblemFile | None:
    """Check a file, raising the errors of `read_problems`; return its problems, or None if it is long.

    Only the first lines of a file longer than MAX_CHECKED_BYTES are checked.
    """
    content = _read_bytes(path, field, MAX_CHECKED_BYTES)
    if len(content) < MAX_CHECKED_BYTES:
        return ProblemFile(path=path, field=field, problems=_parse_problems(config, content, path, field))
    lines = content[: content.rfind(b"\n") + 1]
    if lines.strip():
        _parse_problems(config, lines, path, field)
    return None


def _parse_problems(config: FileConfig, content: bytes, path: str, field: str) -> list[Example]:
    match config:
        case Gsm8k():
            fields, read = ("question", "answer"), partial(_gsm8k_example, _reference_check(config))
        case Jsonl():
            fields, read = (
                (config.prompt_field, config.answer_field),
                partial(_answer_example, _reference_check(config)),
            )
        case CompletionsTask():
            fields, read = (config.prompt_field, config.completion_field), _completion_example
        case PreferencesTask():
            fields, read = (
                (config.prompt_field, config.chosen_field, config.rejected_field),
                _preference_example,
            )
    return _parse_lines(content, path, field, fields, read)


def _reference_check(config: Gsm8k | Jsonl) -> Callable[[str], None]:
    """Return a function that raises ValueError for references that the judge of the task cannot use."""
    if config.verifier or config.judged_by == "boxed":
        return lambda answer: None
    return _check_number if config.judged_by == "final_number" else check_reference


def _check_number(answer: str) -> None:
    if number(answer) is None:
        raise ValueError(
            f"the answer {answer[:60]!r} is not a number, which task.answer: final_number requires; "
            "use task.answer: boxed or math_verify, or a verifier"
        )


def _gsm8k_example(check: Callable[[str], None], question: str, answer: str) -> Example:
    """Parse the GSM8K format: the last line of an answer is `#### <number>`."""
    reasoning, mark, final = answer.rpartition("####")
    if not mark:
        raise ValueError("answer without a line '#### <number>'")
    final = final.strip().replace(",", "")
    solved = _answer_example(check, question, final)
    return replace(solved, completion=f"{reasoning.strip()}\n#### {final}")


def _answer_example(check: Callable[[str], None], prompt: str, answer: str) -> Example:
    check(answer)
    return Example(prompt=prompt, completion=answer, answer=answer)


def _completion_example(prompt: str, completion: str) -> Example:
    return Example(prompt=prompt, completion=completion)


def _preference_example(prompt: str, chosen: str, rejected: str) -> Example:
    if chosen == rejected:
        raise ValueError("the chosen and the rejected completion are the same text")
    return Example(prompt=prompt, completion=chosen, rejected=rejected)


def _read_bytes(path: str, field: str, max_bytes: int | None) -> bytes:
    try:
        with open_regular(Path(path).expanduser()) as file:
            return file.read() if max_bytes is None else file.read(max_bytes)
    except (OSError, ValueError) as error:
        raise _unreadable(path, field, error) from None


def _unreadable(path: str, field: str, error: Exception) -> RecipeError:
    reason = getattr(error, "strerror", None) or error
    return RecipeError(Code.PROBLEMS_UNREADABLE(field=field, path=path, problem=str(reason)))


def _parse_lines(
    content: bytes,
    path: str,
    field: str,
    fields: tuple[str, ...],
    read: Callable[..., Example],  # called with the texts of `fields`
) -> list[Example]:
    try:
        # Not splitlines(), because a text may contain U+2028
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise _unreadable(path, field, error) from None
    problems = []
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in fields):
                raise ValueError(f"expected text fields {' and '.join(map(repr, fields))}")
            texts = [row[key] for key in fields]
            "".join(texts).encode()  # raises for an unpaired surrogate, which JSON can contain
            example = read(*texts)
            if not example.prompt:
                raise ValueError("the prompt is empty; a completion needs at least one token before it")
        except RecursionError:
            raise RecipeError(f"{field}: {path}, line {line_number}: nested too deeply") from None
        except ValueError as error:
            raise RecipeError(
                f"{field}: {path}, line {line_number}: {error}; correct or remove the line"
            ) from None
        problems.append(replace(example, source=f"{path}, line {line_number}"))
    if not problems:
        raise RecipeError(
            f"{field}: got {path!r}, which has no problems; give a JSON-lines file with problems"
        )
    return problems


def _shuffle_order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"order-{seed}-{epoch}").shuffle(order)
    return order
