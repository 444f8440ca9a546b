"""Word problems from templates: completions of a sentence or two, verified by their final answer.

A template draws names and integers from 2 to `n`, and returns the problem, a worked solution and the answer.
"""

import random
import re
from collections.abc import Callable
from functools import partial

from abrun.recipe.tasks import WordProblems
from abrun.trainer.tasks import Example
from abrun.trainer.tasks.generated import Generated

FORM = "The answer is"
CLAIM = re.compile(r"answer is \$?(-?[\d.,]*)")
NAMES = ("Ada", "Ben", "Chen", "Dana", "Emil", "Fatma", "Goran", "Hana", "Ivan", "Jade", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "pens", "marbles", "stickers", "shells", "tickets")
VEHICLES = ("bus", "train", "truck", "boat", "cyclist", "van")

Problem = tuple[str, str, int]  # problem, worked solution, answer
Template = Callable[[random.Random, int], Problem]


def word_problems(config: WordProblems) -> Generated:
    """Return the task of word problems: a topic is drawn uniformly, then one of its templates."""
    return Generated(name="word-problems", draw=partial(_draw, config), judge=_judge)


def _draw(config: WordProblems, draw: random.Random) -> Example:
    template = draw.choice(TOPICS[draw.choice(config.topics)])
    problem, solution, answer = template(draw, config.max_number)
    return Example(
        prompt=f'{problem} End with "{FORM}" and the number.\n',
        completion=f"{solution} {FORM} {answer}.",
        answer=str(answer),
    )


def _judge(example: Example, completion: str) -> float:
    """Return 1 if the number after the last `answer is` equals the answer, else 0.

    Any text may follow the number, such as a unit, a full stop, or the output of a policy that has not
    learned to stop. It is ignored: `12 or 13` claims 12.
    """
    claims = CLAIM.findall(completion)
    return float(bool(claims) and claims[-1].rstrip(".,").replace(",", "") == example.answer)


# --- templates ---


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
