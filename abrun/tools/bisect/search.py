"""Binary search for the first candidate that breaks a claim, by tests that may err or stay undecided.

Candidate 0 is good; of candidates 1 to N, the last is bad. The search assumes that a break persists in later
candidates. Every test has an equal share of `alpha` (Bonferroni): a wrong candidate is named only if one of
at most `tests` tests has erred.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Answer = Literal["good", "bad", "undecided", "skipped"]  # skipped: could not be tested


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The design of a search, declared before the first run."""

    num_candidates: int  # after the good one
    alpha: float  # upper bound on P(a wrong candidate is named)
    spare: int  # extra tests allowed for undecided or skipped candidates
    # Pairs at each interim analysis of a candidate; after the last one it stays undecided.
    counts: tuple[int, ...]

    @property
    def tests(self) -> int:
        """Return the maximum number of candidates to test, including the last (bad) one."""
        halvings = math.ceil(math.log2(self.num_candidates)) if self.num_candidates > 1 else 0
        return min(self.num_candidates, 1 + halvings + self.spare)

    @property
    def level(self) -> float:
        """Return the error rate of one candidate's test, in either direction, over all interim analyses."""
        return self.alpha / self.tests


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search; if the last candidate is bad, `suspects` hold the first bad one."""

    endpoint: Answer  # for the last candidate
    good: int  # index of the last match; 0: the good candidate
    bad: int  # index of the first mismatch
    tests: int

    @property
    def suspects(self) -> range:
        return range(self.good + 1, self.bad + 1)


def search(design: Design, test: Callable[[int], Answer]) -> SearchResult:
    """Test the last candidate, then bisect until one suspect or no test is left."""
    good, bad, unanswered = 0, design.num_candidates, set[int]()
    endpoint = test(bad)
    num_tests = int(endpoint != "skipped")
    while endpoint == "bad" and num_tests < design.tests:
        untested = [index for index in range(good + 1, bad) if index not in unanswered]
        if not untested:
            break
        index = min(untested, key=lambda candidate: abs(2 * candidate - good - bad))
        answer = test(index)
        num_tests += answer != "skipped"
        if answer == "good":
            good = index
        elif answer == "bad":
            bad = index
        else:
            unanswered.add(index)
    return SearchResult(endpoint=endpoint, good=good, bad=bad, tests=num_tests)


def pair_counts(minimum: int, maximum: int) -> tuple[int, ...]:
    """Return the numbers of pairs of a candidate's interim analyses: the first, the middle, the last."""
    return tuple(sorted({minimum, (minimum + maximum + 1) // 2, maximum}))
