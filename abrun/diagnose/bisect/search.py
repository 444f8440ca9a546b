"""Which of a row of candidates is the first that breaks a claim, by tests that may err or stay undecided.

Binary search over candidates 1 to N after a good one (0), of which the last is bad. It is assumed that what
one candidate breaks stays broken in those after it. Every test takes an equal share of `alpha` (Bonferroni):
a wrong candidate is named only where some test of at most `tests` has erred.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Answer = Literal["good", "bad", "undecided", "skipped"]  # skipped: no test was made of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What is declared before the first run."""

    num_candidates: int  # after the good one
    alpha: float  # P(a wrong candidate is named), at most
    spare: int  # tests beyond those that a search without undecided ones needs
    counts: tuple[
        int, ...
    ]  # pairs at each interim analysis of a candidate; the last: then it stays undecided

    @property
    def tests(self) -> int:
        """The most candidates that are tested, the last one (bad) among them."""
        halvings = math.ceil(math.log2(self.num_candidates)) if self.num_candidates > 1 else 0
        return min(self.num_candidates, 1 + halvings + self.spare)

    @property
    def level(self) -> float:
        """What one test of a candidate may err, in either direction, over all its interim analyses."""
        return self.alpha / self.tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How a search ended; where the last candidate is bad, the first that is so is one of `suspects`."""

    endpoint: Answer  # of the last candidate
    good: int  # the last that matched; 0: the good one itself
    bad: int  # the first that did not
    tests: int

    @property
    def suspects(self) -> range:
        return range(self.good + 1, self.bad + 1)


def search(design: Design, test: Callable[[int], Answer]) -> Found:
    """Ask for the last candidate, then for the middle of what is left, until one is left or no test is."""
    good, bad, passed_over = 0, design.num_candidates, set[int]()
    endpoint = test(bad)
    num_tests = int(endpoint != "skipped")
    while endpoint == "bad" and num_tests < design.tests:
        left = [index for index in range(good + 1, bad) if index not in passed_over]
        if not left:
            break
        index = min(left, key=lambda each: abs(2 * each - good - bad))
        answer = test(index)
        num_tests += answer != "skipped"
        if answer == "good":
            good = index
        elif answer == "bad":
            bad = index
        else:
            passed_over.add(index)
    return Found(endpoint=endpoint, good=good, bad=bad, tests=num_tests)


def pair_counts(first: int, last: int) -> tuple[int, ...]:
    """Numbers of pairs at which a candidate is looked at: the first, the middle and the last."""
    return tuple(sorted({first, (first + last + 1) // 2, last}))
