"""Every recorded verdict.json fits the schema, and each of its sentences is that of the code beside it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from abrun.messages import sentence
from abrun.messages.records import reason_from_json
from abrun.verdict import verdict_file

RECORDED = Path(__file__).parent / "recorded"
SCHEMA = json.loads(Path(verdict_file.__file__).with_name("verdict.schema.json").read_text())
FILES = sorted(str(path.relative_to(RECORDED)) for path in RECORDED.rglob("*verdict.json"))
LONG_NUMBER = re.compile(r"\d+\.\d{7,}")  # the recording shortens the numbers among the values


def pairs(content: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield each sentence with its code and values; the warnings of a claim are one text."""
    if isinstance(content, list):
        for entry in content:
            yield from pairs(entry)
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        stem, _, kind = name.rpartition("_")
        if name == "warning_codes":
            told = [sentence(reason_from_json(code)) for code in value]
            assert "; ".join(told) == (content["warning"] or "")
        elif kind == "codes":
            yield from zip(content[f"{stem}s" if stem not in content else stem], value, strict=True)
        elif kind == "code" and stem in content:
            yield content[stem], value
        else:
            yield from pairs(value)


def shortened(text: str) -> str:
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.6g}", text)


@pytest.mark.parametrize("file", FILES)
def test_each_recorded_sentence_is_that_of_the_code_beside_it(file: str) -> None:
    content = json.loads((RECORDED / file).read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(content)
    recorded = list(pairs(content))
    assert recorded
    for told, code in recorded:
        assert (told is None) == (code is None)
        if told is not None:
            assert shortened(sentence(reason_from_json(code))) == shortened(told)
