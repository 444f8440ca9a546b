"""How the page looks: `python -m tests.page` prints, for each wing, what a reader sees at a glance.

Comments are whole lines, as a share of all lines; blank lines are those between the statements of functions,
as a share of the functions' lines; long lines have more than 90 characters.
"""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "abrun"
WINGS = ("trainer", "tools")
LONG = 90


def measure(path: Path) -> Counter[str]:
    """Count the lines of a file by kind: all, comments, long, in functions, blank in functions."""
    text = path.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    in_functions: set[int] = set()
    in_texts: set[int] = set()  # line numbers of texts that span several lines, such as docstrings
    for node in ast.walk(tree):
        span = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_functions.update(span)
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            in_texts.update(span)
    return Counter(
        all=len(lines),
        comments=sum(line.lstrip().startswith("#") for line in lines),
        long=sum(len(line) > LONG for line in lines),
        functions=len(in_functions),
        blank=sum(not lines[number - 1].strip() for number in in_functions - in_texts),
    )


def main() -> None:
    wings: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        first = path.relative_to(PACKAGE).parts[0]
        counts = measure(path)
        for wing in (first if first in WINGS else "core", "all"):
            wings.setdefault(wing, Counter()).update(counts)
    print(f"{'':8} {'lines':>7} {'comments':>9} {'blank in functions':>19} {'over 90':>8}")
    for wing, seen in sorted(wings.items(), key=lambda entry: entry[1]["all"]):
        print(
            f"{wing:8} {seen['all']:7,} {seen['comments'] / seen['all']:9.1%} "
            f"{seen['blank'] / seen['functions']:19.1%} {seen['long'] / seen['all']:8.1%}"
        )


if __name__ == "__main__":
    main()
