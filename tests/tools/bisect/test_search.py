"""The search: it halves, passes over what stays undecided, ends in a range, and errs as rarely as it says."""

import math
from itertools import product

import pytest

from abrun.tools.bisect.search import Answer, Design, pair_counts, search
from tests.bench.bench_bisect import wrong_and_named


def design(num_candidates: int, spare: int = 0) -> Design:
    return Design(num_candidates=num_candidates, alpha=0.05, spare=spare, counts=(4,))


@pytest.mark.parametrize("num_candidates", [1, 2, 3, 4, 7, 12, 16, 33, 100])
def test_every_first_bad_candidate_is_found_within_the_declared_tests(num_candidates: int) -> None:
    one = design(num_candidates)
    assert one.tests <= 1 + math.ceil(math.log2(num_candidates)) and one.level * one.tests <= 0.05 + 1e-12
    for first_bad in range(1, num_candidates + 1):
        found = search(one, lambda index, bad=first_bad: "bad" if index >= bad else "good")
        assert list(found.suspects) == [first_bad] and found.tests <= one.tests


def test_no_answer_excludes_the_truth_unless_one_was_wrong() -> None:
    """Every pattern of undecided and skipped candidates, at every place of the first bad one."""
    for kinds in product(("told", "undecided", "skipped"), repeat=4):
        for first_bad, spare in product(range(1, 6), (0, 2)):

            def test(index: int, bad: int = first_bad, kinds: tuple = kinds) -> Answer:
                kind = "told" if index == 5 else kinds[index - 1]
                return kind if kind != "told" else "bad" if index >= bad else "good"

            one = design(5, spare)
            found = search(one, test)
            assert first_bad in found.suspects and found.tests <= one.tests
            if set(kinds) == {"told"}:
                assert len(found.suspects) == 1


def test_a_last_candidate_that_is_not_bad_ends_it() -> None:
    for answer in ("good", "undecided", "skipped"):
        found = search(design(8), lambda index, answer=answer: answer)
        assert found.endpoint == answer and found.tests == (answer != "skipped")


def test_looks_are_the_first_the_middle_and_the_last() -> None:
    assert (pair_counts(4, 8), pair_counts(4, 4), pair_counts(4, 5)) == ((4, 6, 8), (4,), (4, 5))


@pytest.mark.parametrize(
    ("law", "searches"),
    [
        ("at the margin", 50),
        *(pytest.param(law, 250, marks=pytest.mark.slow) for law in ("at the margin", "twice the margin")),
    ],
)
def test_the_truth_is_excluded_no_more_often_than_declared(law: str, searches: int) -> None:
    wrong, named = wrong_and_named(law, num_candidates=12, searches=searches, seed=1)
    assert wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / searches)
    assert named >= 0.9 or law == "at the margin"


@pytest.mark.slow
def test_without_the_correction_the_simulation_sees_it() -> None:
    wrong, _ = wrong_and_named("at the margin", num_candidates=12, searches=250, seed=1, alpha=0.6)
    assert wrong > 0.05
