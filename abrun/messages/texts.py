"""Small texts that sentences share: lists, counts, plurals."""

from collections.abc import Iterable, Sequence, Sized

from abrun.messages.numbers import more_text

MAX_NAMES = 5


def listed(names: object) -> str:
    """Return names with commas between them; a text unchanged."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        return str(names)
    return ", ".join(map(str, names))


def names_text(names: Sequence[str], most: int = MAX_NAMES) -> str:
    """Return the first names and the number of the others: `a, b and 3 more`."""
    return ", ".join(names[:most]) + more_text(len(names) - most)


def counted(things: int | Sized, noun: str) -> str:
    """Return a number, or how many things there are, with its noun: `1 pair`, `2 pairs`."""
    number = things if isinstance(things, int) else len(things)
    return f"{number} {plural(number, noun)}"


def plural(things: int | Sized, noun: str) -> str:
    """Return the noun of so many things: `seed` or `seeds`."""
    number = things if isinstance(things, int) else len(things)
    return noun if number == 1 else f"{noun}s"
