"""Earlier comparisons of the same runs, from the stamp files that reports leave in their folders.

Anyone may have written or deleted a stamp, so an unreadable one counts as no comparison.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.recipe.claims import Claim
from abrun.runs.files import is_directory, read_json

STAMP_FILE = ".report.json"  # in a report's folder: the claim tests behind the report
MAX_FOLDERS = 2000  # of a folder's subfolders, searched for stamps
MAX_TESTS = 500
MAX_STAMP_BYTES = 4_000_000
HASH_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTest:
    """One test of a treatment's claims."""

    question: str  # hash of the claims and of the test design
    pairs: frozenset[str]  # hashes of each pair's values; for unpaired runs, of each treated run's values

    def as_json(self) -> dict[str, Any]:
        return {"question": self.question, "pairs": sorted(self.pairs)}


def find_earlier_claim_tests(folders: Iterable[Path]) -> set[ClaimTest]:
    """Return the tests in the stamp files of the reports directly inside these folders."""
    claim_tests = set[ClaimTest]()
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in islice(entries, MAX_FOLDERS):
                if len(claim_tests) < MAX_TESTS and is_directory(entry):
                    claim_tests |= set(read_claim_tests(Path(entry.path)))
    return claim_tests


def read_claim_tests(folder: Path) -> Iterator[ClaimTest]:
    """Yield the tests in a folder's stamp; none if it is missing or invalid."""
    content: Mapping[str, Any] = {}
    with suppress(StoreError, OSError):
        content = read_json(folder / STAMP_FILE, MAX_STAMP_BYTES)
    entries = content.get("readings")
    for entry in entries[:MAX_TESTS] if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        question, pairs = entry.get("question"), entry.get("pairs")
        if isinstance(question, str) and isinstance(pairs, list) and all(isinstance(p, str) for p in pairs):
            yield ClaimTest(question=question, pairs=frozenset(pairs))


def make_claim_test(experiment: RecordedExperiment, arm: str) -> ClaimTest:
    """Return the test of a treatment's claims on the experiment's current runs."""
    compare = experiment.compare
    claims = sorted(repr(_hashed_values(claim)) for claim in compare.claims)
    level = compare.model_dump(include={"alpha", "require"}, exclude_defaults=True)
    design = [str(compare.paired), str(compare.interim), *([repr(level)] if level else [])]
    question = _hash(*claims, *design)
    return ClaimTest(question=question, pairs=frozenset(_hash_pairs(experiment, arm).values()))


def in_reported_order(experiment: RecordedExperiment, earlier: Collection[ClaimTest]) -> RecordedExperiment:
    """Return the experiment with the pairs of earlier reports on the same question first, the smallest first.

    An interim analysis stands as it was reported, whatever the seeds of the pairs that were added.
    """
    sizes: dict[int, int] = {}
    for arm in experiment.treatments:
        question = make_claim_test(experiment, arm).question
        for seed, pair in _hash_pairs(experiment, arm).items():
            reported = [
                len(test.pairs) for test in earlier if test.question == question and pair in test.pairs
            ]
            sizes[seed] = min([*reported, sizes.get(seed, len(experiment.runs))])
    first = sorted(experiment.runs, key=lambda run: sizes.get(run.seed, len(experiment.runs)))
    return replace(experiment, runs={run: experiment.runs[run] for run in first})


def _hash_pairs(experiment: RecordedExperiment, arm: str) -> dict[int, str]:
    """Return a hash of each finished pair's values by seed; for unpaired runs, of each treated run's."""
    sides = experiment.sides(arm).finished
    hashes = {run.name.seed: _hash_values(run) for run in sides.treatments}
    if not sides.paired:
        return hashes
    baselines = {run.name.seed: _hash_values(run) for run in sides.baselines}
    return {seed: _hash(baselines[seed], treated) for seed, treated in hashes.items()}


def _hashed_values(claim: Claim) -> dict[str, Any]:
    """Return the values of a claim that its question depends on; those of later versions only if given."""
    values = claim.model_dump(exclude={"climbs", "improvement"})
    added = ("not_worse", "better", "higher_is_better")
    return {key: value for key, value in values.items() if key not in added or value is not None}


def _hash_values(run: RecordedRun) -> str:
    """Return a hash of a run's recorded values, independent of metric names and location."""
    return _hash(
        *sorted(hashlib.sha256(series.values.tobytes()).hexdigest() for series in run.metrics.values())
    )


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:HASH_LENGTH]
