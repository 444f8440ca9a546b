"""Every code in a recorded verdict.json has a sentence for its values."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from abrun.messages import sentence
from abrun.messages.records import reason_from_json

RECORDED = Path(__file__).parent / "recorded"
FILES = sorted(str(path.relative_to(RECORDED)) for path in RECORDED.rglob("*verdict.json"))


def codes(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the codes with their values, those among the values of others, too."""
    if isinstance(content, list):
        for entry in content:
            yield from codes(entry)
    elif isinstance(content, dict):
        if content.keys() == {"code", "values"}:
            yield content
        for value in content.values():
            yield from codes(value)


@pytest.mark.parametrize("file", FILES)
def test_each_recorded_code_has_a_sentence(file: str) -> None:
    recorded = list(codes(json.loads((RECORDED / file).read_text())))
    assert recorded
    for code in recorded:
        assert sentence(reason_from_json(code))
