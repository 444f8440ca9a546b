"""How large each room of abrun/ may be. Whoever adds lines to a full room takes as many out."""

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "abrun"
WINGS = ("trainer", "tools")  # whose folders are rooms of their own, named "trainer/rl"
MODULES = "*.py"  # the files beside rooms are one room
MAX_ENTRIES = 22  # of abrun/
BUDGETS = {  # room -> lines
    "*.py": 170,
    "api": 825,
    "cli": 1_995,
    "experiment": 2_290,
    "external": 685,
    "launch": 5_255,
    "logs": 9_505,
    "messages": 2_155,
    "processes": 980,
    "recipe": 4_285,
    "report": 4_815,
    "runs": 4_750,
    "stats": 2_500,
    "tools/*.py": 10,
    "tools/audit": 1_210,
    "tools/bisect": 945,
    "tools/drift": 2_540,
    "tools/logprob_diff": 1_165,
    "tools/predict": 2_100,
    "tools/trace": 1_400,
    "trainer/*.py": 400,
    "trainer/backends": 5_530,
    "trainer/faults": 790,
    "trainer/kernels": 1_750,
    "trainer/loop": 2_880,
    "trainer/memory": 430,
    "trainer/models": 1_460,
    "trainer/rl": 1_220,
    "trainer/rollout": 2_280,
    "trainer/tasks": 1_410,
    "verdict": 6_340,
    "wandb_sync": 450,
    "watch": 1_075,
}


def room_of(path: Path) -> str:
    """Return the room of a module, given its path in abrun/."""
    first, *rest = path.parts
    if not rest:
        return MODULES
    return f"{first}/{rest[0] if len(rest) > 1 else MODULES}" if first in WINGS else first


def count_lines(package: Path) -> Counter[str]:
    """Return the number of lines of Python in each room."""
    lines: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        lines[room_of(path.relative_to(package))] += len(path.read_text().splitlines())
    return lines


def excesses(lines: Counter[str], budgets: dict[str, int]) -> list[str]:
    """Return a line for each room that is too large, has no budget, or is gone."""
    only = "only a commit that says what left may raise BUDGETS of tests/test_size.py"
    found = [
        f"abrun/{room}: {count:,} lines, and its budget is {budgets.get(room, 0):,}; {only}"
        for room, count in sorted(lines.items())
        if count > budgets.get(room, 0)
    ]
    gone = sorted(budgets.keys() - lines.keys())
    return [*found, *(f"abrun/{room}: is gone; take it out of tests/test_size.py" for room in gone)]


def test_no_room_is_larger_than_its_budget() -> None:
    assert excesses(count_lines(PACKAGE), BUDGETS) == []


def test_the_top_level_is_taken_in_at_a_glance() -> None:
    entries = sorted(path.name for path in PACKAGE.iterdir() if path.name != "__pycache__")
    assert len(entries) <= MAX_ENTRIES, f"abrun/ has {len(entries)} entries: put {entries} into rooms"


def test_a_full_room_a_new_one_and_one_that_went_are_named(tmp_path: Path) -> None:
    for name, length in (("a.py", 2), ("b/c.py", 3), ("b/d/e.py", 4), ("tools/f/g.py", 5), ("tools/h.py", 6)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * length)
    lines = count_lines(tmp_path)
    assert lines == {MODULES: 2, "b": 7, "tools/f": 5, "tools/*.py": 6}
    assert excesses(lines, dict(lines)) == []
    named = excesses(lines, {MODULES: 2, "b": 6, "tools/f": 5, "old": 9})
    assert [line.partition(":")[0] for line in named] == ["abrun/b", "abrun/tools/*.py", "abrun/old"]
    assert "7 lines, and its budget is 6; only a commit that says what left" in named[0]
