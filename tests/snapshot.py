"""Sentences that tests check by snapshot: `snapshot(text)` compares with what was recorded for that test.

`pytest --update-snapshots FILES -n 0` records again. `tests/snapshots/` has one file of sentences a module.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
FOLDER = TESTS / "snapshots"
VOLATILE = {
    r"/tmp/[\w./-]*": "<tmp>",
    r"\b\d+\.\d+\.\d+[\w.+]*": "<version>",  # of an installed package
    r"\b\d+:\d\d:\d\d\b": "<time>",
    r"events\.out\.tfevents\.[\w.-]+": "<events>",  # with the time, the host and the process
    r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b": "<commit>",
}


@dataclass
class Snapshot:
    """The sentences of one test, in the order in which it checks them."""

    module: Path  # the test file
    test: str  # its name, with its parameters
    replaced: dict[str, str]  # text that differs from run to run -> what is recorded instead
    update: bool = False
    count: int = field(default=0, init=False)

    @property
    def path(self) -> Path:
        return (FOLDER / self.module.relative_to(TESTS)).with_suffix(".json")

    def __call__(self, text: Any) -> None:
        """Compare text, or an error's, with the recorded one. Paths of the test are replaced first."""
        seen = str(text)
        for volatile, stable in sorted(self.replaced.items(), key=lambda item: -len(item[0])):
            seen = seen.replace(volatile, stable)
        for pattern, stable in VOLATILE.items():
            seen = re.sub(pattern, stable, seen)
        lines = seen.splitlines() if "\n" in seen else seen
        recorded = json.loads(self.path.read_text()) if self.path.exists() else {}
        key = self.test if self.count == 0 else f"{self.test} {self.count + 1}"
        self.count += 1
        if self.update:
            recorded[key] = lines
            self.path.parent.mkdir(parents=True, exist_ok=True)
            ordered = dict(sorted(recorded.items()))
            self.path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
            return
        place = self.path.relative_to(TESTS)
        assert lines == recorded.get(key), f"pytest --update-snapshots records it anew ({place})"

    @contextmanager
    def refused(self, kind: type[Exception]) -> Iterator[None]:
        """Check the sentence with which the block is refused."""
        with pytest.raises(kind) as refusal:
            yield
        self(refusal.value)
