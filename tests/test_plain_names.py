"""Names say what a thing is, and docstrings begin with a verb or a noun: the share of others stays small.

A pointing name (`found`, `one`, `said`) sends the reader back to the line that bound it. A docstring that
begins with "What" or "Whether" has no subject. Both are right now and then, so the limits are not zero.
"""

import ast
import re
from collections.abc import Iterator

from tests.source import trees

POINTING = re.compile(
    r"_?(said|told|asked|found|of_\w+|each|ones?|wanted|given|known|before|besides?|more|most|least|here|there|own"
    r"|whole|others?|left|kept|whose|together|apart|again|many|few|first|last|every\w*|parts?|pieces?|alike|seen"
    r"|shown|taken|meant|so_far|in_all|at_once|lacking)"
)
OPENERS = {
    "what",
    "of",
    "whether",
    "where",
    "why",
    "which",
    "those",
    "that",
    "whose",
    "who",
    "whoever",
    "how",
}
MAX_POINTING, MAX_OPENERS = 0.005, 0.005  # shares


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every variable, parameter and function that a module binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def first_words(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the first word of every docstring, in lower case, with the line of its owner."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring.split()[0].strip(",.:;").lower(), getattr(node, "lineno", 1)


def share(words: Iterator[tuple[str, str]], is_bad) -> tuple[float, list[str]]:
    """Return the share of bad words, and each of them with its place."""
    total, bad = 0, []
    for word, place in words:
        total += 1
        if is_bad(word):
            bad.append(f"{place} {word}")
    return len(bad) / total, bad


def placed(read) -> Iterator[tuple[str, str]]:
    """Yield what `read` yields for each module of the package, with its place."""
    for place, tree in trees().items():
        yield from ((word, f"{place}:{line}") for word, line in read(tree))


def test_names_say_what_things_are():
    pointing, places = share(placed(bound_names), POINTING.fullmatch)
    assert pointing < MAX_POINTING, places


def test_docstrings_begin_with_a_verb_or_a_noun():
    relative, places = share(placed(first_words), OPENERS.__contains__)
    assert relative < MAX_OPENERS, places


def test_the_checks_see_what_they_are_for():
    tree = ast.parse(
        'def said(found, seed):\n    """What a run printed."""\n    return [one for one in found]\n'
    )
    assert [name for name, _ in bound_names(tree) if POINTING.fullmatch(name)] == ["said", "found", "one"]
    assert [word for word, _ in first_words(tree)] == ["what"] and "what" in OPENERS
