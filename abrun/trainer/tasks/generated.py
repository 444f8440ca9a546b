"""Generated tasks: each example is drawn from its own random generator."""

import inspect
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from abrun.errors import RecipeError
from abrun.messages.numbers import listed
from abrun.recipe.tasks import Arithmetic, ReasoningGym, WordProblems
from abrun.runs.redaction import shortened
from abrun.trainer.tasks import Example
from abrun.trainer.tasks.final_answers import last_number

# With 40 draws per prompt, a task of 2n equally likely prompts misses some of them once in 10^8 cases.
DRAWS_A_PROMPT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An endless stream of examples; see abrun.trainer.tasks.TrainingTask."""

    name: str  # of the stream
    draw: Callable[[random.Random], Example]
    judge: Callable[[Example, str], float]
    reject: Callable[[Example, random.Random], str] | None = None  # draws a rejected completion
    excluded: frozenset[str] = frozenset()  # prompts that are redrawn

    def examples(self, seed: int, start: int, count: int, redraw: int = 0) -> list[Example]:
        stream = f"{seed}-redraw-{redraw}" if redraw else seed
        return [self._example(f"{stream}-{i}") for i in range(start, start + count)]

    def reward(self, example: Example, completion: str) -> float:
        return self.judge(example, completion)

    def held_out(self, count: int) -> list[Example]:
        """Return the first `count` distinct prompts of the validation stream.

        Raises RecipeError unless the task has at least as many other prompts.
        """
        examples, last_new_draw = dict[str, Example](), 0
        for i in range(DRAWS_A_PROMPT * count):
            example = self._example(f"validation-{i}")
            if example.prompt not in examples:
                examples[example.prompt], last_new_draw = example, i
            if len(examples) == 2 * count:
                return list(examples.values())[:count]
            if i - last_new_draw > DRAWS_A_PROMPT * len(examples):
                break
        raise RecipeError(
            f"validation.num_prompts: got {count}, but the task has about {len(examples)} different prompts "
            f"and at most half can be held out; use {max(1, len(examples) // 2)}, or a larger task"
        )

    def without(self, prompts: frozenset[str]) -> "Generated":
        return replace(self, excluded=self.excluded | prompts)

    def _example(self, place: str) -> Example:
        generator = random.Random(f"{self.name}-{place}")
        while (example := self.draw(generator)).prompt in self.excluded:
            pass
        # Drawn last, so that the prompts do not depend on whether completions are rejected.
        return replace(example, rejected=self.reject(example, generator)) if self.reject else example


# Generated calculations such as `37+58=`, verified exactly.

SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*"}


def arithmetic(config: Arithmetic) -> Generated:
    """Return the task of calculations with uniformly drawn operands and operations."""
    return Generated(name="arithmetic", draw=partial(_draw, config), judge=_judge, reject=_reject)


def value(operands: Sequence[int], operations: Sequence[str]) -> int:
    """Return the value of a chain of operations, with products before sums."""
    terms = [operands[0]]
    for operation, operand in zip(operations, operands[1:], strict=True):
        if operation == "multiply":
            terms[-1] *= operand
        else:
            terms.append(operand if operation == "add" else -operand)
    return sum(terms)


def _draw(config: Arithmetic, draw: random.Random) -> Example:
    # Operands first: this keeps the stream of additions from versions without other operations.
    operands = [draw.randint(0, config.max_operand) for _ in range(config.num_operands)]
    operations = [draw.choice(config.operations) for _ in operands[1:]]
    signs = [SYMBOLS[operation] for operation in operations]
    prompt = "".join(f"{operand}{sign}" for operand, sign in zip(operands, [*signs, "="], strict=True))
    answer = str(value(operands, operations))
    return Example(prompt=prompt, completion=answer, answer=answer)


def _reject(example: Example, draw: random.Random) -> str:
    """Return an answer that is off by 1, 2 or 10; negative only if the correct answer is."""
    answer, distance = int(example.answer), draw.choice((1, 2, 10))
    return str(answer + distance if answer < distance or draw.random() < 0.5 else answer - distance)


def _judge(example: Example, completion: str) -> float:
    return float(completion.strip() == example.answer)


# Word problems from templates: completions of a sentence or two, verified by their final answer.
#
# A template draws names and integers from 2 to `n`, and returns the problem, a worked solution and the
# answer.

FORM = "The answer is"
CLAIM = re.compile(r"answer is \$?(-?[\d.,]*)")
NAMES = ("Ada", "Ben", "Chen", "Dana", "Emil", "Fatma", "Goran", "Hana", "Ivan", "Jade", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "pens", "marbles", "stickers", "shells", "tickets")
VEHICLES = ("bus", "train", "truck", "boat", "cyclist", "van")

Problem = tuple[str, str, int]  # problem, worked solution, answer
Template = Callable[[random.Random, int], Problem]


def word_problems(config: WordProblems) -> Generated:
    """Return the task of word problems: a topic is drawn uniformly, then one of its templates."""
    return Generated(name="word-problems", draw=partial(_draw_problem, config), judge=_judge_claim)


def _draw_problem(config: WordProblems, draw: random.Random) -> Example:
    template = draw.choice(TOPICS[draw.choice(config.topics)])
    problem, solution, answer = template(draw, config.max_number)
    return Example(
        prompt=f'{problem} End with "{FORM}" and the number.\n',
        completion=f"{solution} {FORM} {answer}.",
        answer=str(answer),
    )


def _judge_claim(example: Example, completion: str) -> float:
    """Return 1 if the number after the last `answer is` equals the answer, else 0.

    Any text may follow the number, such as a unit, a full stop, or the output of a policy that has not
    learned to stop. It is ignored: `12 or 13` claims 12.
    """
    claims = CLAIM.findall(completion)
    return float(bool(claims) and claims[-1].rstrip(".,").replace(",", "") == example.answer)


def _price(draw: random.Random, n: int) -> Problem:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    count, price = _numbers(draw, n, 2)
    return (
        f"{name} buys {count} {things} at {price} dollars each. How many dollars does {name} pay?",
        f"{count} {things} at {price} dollars cost {count} * {price} = {count * price} dollars.",
        count * price,
    )


def _change(draw: random.Random, n: int) -> Problem:
    name = draw.choice(NAMES)
    price, change = _numbers(draw, n, 2)
    return (
        f"{name} buys a lamp for {price} dollars and pays with {price + change} dollars. "
        f"How many dollars does {name} get back?",
        f"{name} gets back what is left of {price + change} dollars: "
        f"{price + change} - {price} = {change} dollars.",
        change,
    )


def _older(draw: random.Random, n: int) -> Problem:
    younger, older = draw.sample(NAMES, 2)
    age, difference = _numbers(draw, n, 2)
    return (
        f"{younger} is {age} years old. {older} is {difference} years older than {younger}. "
        f"How old is {older}?",
        f"{older} is {age} + {difference} = {age + difference} years old.",
        age + difference,
    )


def _some_day(draw: random.Random, n: int) -> Problem:
    name = draw.choice(NAMES)
    age, years = _numbers(draw, n, 2)
    return (
        f"In {years} years, {name} will be {age + years} years old. How old is {name} now?",
        f"That is {years} years from now, so {name} is {age + years} - {years} = {age} years old.",
        age,
    )


def _distance(draw: random.Random, n: int) -> Problem:
    vehicle = draw.choice(VEHICLES)
    speed, hours = _numbers(draw, n, 2)
    return (
        f"A {vehicle} goes {speed} miles an hour. How many miles does it go in {hours} hours?",
        f"In {hours} hours the {vehicle} goes {hours} * {speed} = {hours * speed} miles.",
        hours * speed,
    )


def _speed(draw: random.Random, n: int) -> Problem:
    vehicle = draw.choice(VEHICLES)
    speed, hours = _numbers(draw, n, 2)
    distance = speed * hours
    return (
        f"At a steady speed, a {vehicle} goes {distance} miles in {hours} hours. "
        "How many miles does it go in one hour?",
        f"In one hour the {vehicle} goes {distance} / {hours} = {speed} miles.",
        speed,
    )


def _shares(draw: random.Random, n: int) -> Problem:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    friends, share = _numbers(draw, n, 2)
    total = friends * share
    return (
        f"{name} shares {total} {things} equally among {friends} friends. "
        f"How many {things} does each friend get?",
        f"Each friend gets {total} / {friends} = {share} {things}.",
        share,
    )


def _left_over(draw: random.Random, n: int) -> Problem:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    size, bags = _numbers(draw, n, 2)
    rest = draw.randint(0, size - 1)
    packed = bags * size
    return (
        f"{name} packs {packed + rest} {things} into bags of {size}, as many full bags as there can be. "
        f"How many {things} are left over?",
        f"{bags} bags hold {bags} * {size} = {packed} {things}, "
        f"with {packed + rest} - {packed} = {rest} left over.",
        rest,
    )


def _more_bags(draw: random.Random, n: int) -> Problem:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    had, bags, size = _numbers(draw, n, 3)
    bought = bags * size
    return (
        f"{name} has {had} {things} and buys {bags} bags of {size} {things} each. "
        f"How many {things} does {name} have now?",
        f"The bags hold {bags} * {size} = {bought} {things}. "
        f"With those from before, {name} has {had} + {bought} = {had + bought}.",
        had + bought,
    )


def _two_sales(draw: random.Random, n: int) -> Problem:
    things = draw.choice(THINGS)
    morning, afternoon, num_left = _numbers(draw, n, 3)
    sold = morning + afternoon
    return (
        f"A shop has {sold + num_left} {things}. It sells {morning} in the morning and {afternoon} in the "
        f"afternoon. How many {things} are left?",
        f"The shop sells {morning} + {afternoon} = {sold} {things}. "
        f"Then {sold + num_left} - {sold} = {num_left} are left.",
        num_left,
    )


def _wages(draw: random.Random, n: int) -> Problem:
    name = draw.choice(NAMES)
    wage, hours = _numbers(draw, n, 2)
    earned = wage * hours
    spent = draw.randint(1, earned)
    return (
        f"{name} works {hours} hours for {wage} dollars an hour and spends {spent} dollars. "
        f"How many dollars does {name} keep?",
        f"{name} earns {hours} * {wage} = {earned} dollars and keeps {earned} - {spent} = {earned - spent}.",
        earned - spent,
    )


TOPICS: dict[str, tuple[Template, ...]] = {
    "shopping": (_price, _change),
    "ages": (_older, _some_day),
    "travel": (_distance, _speed),
    "sharing": (_shares, _left_over),
    "two_step": (_more_bags, _two_sales, _wages),
}


def _numbers(draw: random.Random, n: int, count: int) -> list[int]:
    return [draw.randint(2, n) for _ in range(count)]


# Tasks of the package reasoning-gym: problems from its generators, rewards from its scorers.

# Calls by which a scorer would evaluate a completion as Python; sympy's parse_expr uses eval, too.
EVALUATES_ANSWER = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(answer\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(Example):
    """A problem with the entry that its scorer needs."""

    entry: dict[str, Any] = field(compare=False, repr=False)


def reasoning_gym(config: ReasoningGym) -> Generated:
    """Return the task that a recipe names; rewards come from its scorer, from 0 to 1.

    Raises RecipeError if the package is missing or has no such task or parameters, if problems have no
    reference answer (the target of supervised steps) or are not reproducible from a seed, and if the scorer
    would run completions as Python code, which could end or hang the run, or change files.
    """
    try:
        import reasoning_gym as package  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RecipeError(
            "task.type: got 'reasoning_gym', but the package reasoning-gym is missing; pip install "
            "'abrun[reasoning]'"
        ) from error
    if config.name not in DATASETS:
        raise RecipeError(
            f"task.name: got {config.name!r}; reasoning-gym {package.__version__} has "
            f"{listed(sorted(DATASETS))}"
        )

    def draw_problem(seed: int) -> tuple[Any, dict[str, Any]]:
        """Return a data set of one problem, which is also its scorer, and the problem."""
        try:
            problems = package.create_dataset(config.name, seed=seed, size=1, **config.parameters)
            return problems, problems[0]
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RecipeError(
                f"task.parameters: got {shortened(config.parameters)} with task.name {config.name!r}, which "
                f"refuses them: {' '.join(str(error).split()) or type(error).__name__}"
            ) from error

    def draw(generator: random.Random) -> Example:
        _, entry = draw_problem(generator.getrandbits(31))
        answer = str(entry["answer"])
        return Reasoning(prompt=entry["question"], completion=answer, answer=answer, entry=entry)

    scorer, _ = draw_problem(0)
    if config.answer == "text" and EVALUATES_ANSWER.search(inspect.getsource(type(scorer).score_answer)):
        raise RecipeError(
            f"task.name: got {config.name!r}, whose scorer runs completions as Python; use another task, or "
            "answer: final_number"
        )
    _check_reproducible(config.name, draw, scorer)

    def judge(example: Example, completion: str) -> float:
        assert isinstance(example, Reasoning)
        number = None if config.answer == "text" else last_number(completion)
        answer = completion.strip() if config.answer == "text" else str(number or "")
        try:
            return float(scorer.score_answer(answer, example.entry))
        except Exception:  # some scorers raise for completions that they cannot parse
            return 0.0

    return Generated(name=f"reasoning_gym-{config.name}", draw=draw, judge=judge)


def _check_reproducible(name: str, draw: Callable[[random.Random], Example], scorer: Any) -> None:
    for seed in range(2):
        example, repeated_example = draw(random.Random(seed)), draw(random.Random(seed))
        if example != repeated_example:
            raise RecipeError(
                f"task.name: got {name!r}, which does not repeat its problems with the same seed; use "
                "another task"
            )
        assert isinstance(example, Reasoning)
        if example.entry["answer"] is None or scorer.score_answer(example.answer, example.entry) < 1:
            raise RecipeError(
                f"task.name: got {name!r}, whose problems have no answer that its scorer accepts; use "
                "another task"
            )
