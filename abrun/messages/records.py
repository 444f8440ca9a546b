"""JSON of records with reasons: each reason as a sentence, with its code and values next to it."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

from abrun.messages import MESSAGES, sentence
from abrun.messages.codes import Code, Reason
from abrun.messages.message import value_names

# Stored JSON has non-finite numbers as these texts
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_CODES = frozenset(code.value for code in Code)


def as_json(record: Any) -> Any:
    """Return a dataclass as JSON.

    A field `problem` with one reason becomes a sentence, and `problem_code` has its code and values. A field
    `reasons` with several becomes a list of sentences, and `reason_codes` has the code and values of each.
    """
    if isinstance(record, Reason):
        return sentence(record)
    if isinstance(record, Mapping):
        return {key: as_json(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [as_json(entry) for entry in record]
    if not is_dataclass(record):
        return record
    content: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        name = field.metadata.get("alias", field.name)  # the name that pydantic uses
        content[name] = as_json(value)
        codes_name = codes_key(name, field.type)
        if codes_name:
            content[codes_name] = encode_reasons(value)
    return content


def restore_reasons(content: Any) -> Any:
    """Return JSON that `as_json` wrote, with its sentences and codes replaced by reasons.

    A reason of a code that this version lacks is its sentence. Raises ValueError for codes without sentences.
    """
    if isinstance(content, list):
        return [restore_reasons(entry) for entry in content]
    if not isinstance(content, Mapping):
        return content
    restored = {name: restore_reasons(value) for name, value in content.items()}
    for codes_name in content:
        name, _, kind = codes_name.rpartition("_")
        name = f"{name}s" if kind == "codes" and name not in content else name
        if kind in ("code", "codes") and name in content:
            restored[name] = _restored_reasons(restored.pop(codes_name), content[name])
    return restored


def _restored_reasons(codes: Any, text: Any) -> Any:
    """Return the reason of each code, or the text beside it where this version lacks the code."""
    if isinstance(codes, list):
        lines = text if isinstance(text, list) else [text] * len(codes)  # a claim's warnings are one text
        return [_restored_reasons(code, line) for code, line in zip(codes, lines, strict=True)]
    is_known = codes is None or codes["code"] in _CODES
    return decode_reasons(codes) if is_known else Code.FOREIGN_TEXT(text=text)


def reason_from_json(content: Mapping[str, Any]) -> Reason:
    """Return the reason with this code and values; the inverse of `encode_reasons`."""
    return Reason(
        Code(content["code"]), {name: decode_reasons(value) for name, value in content["values"].items()}
    )


def stored_reason(content: Mapping[str, Any] | None, text: str | None) -> Reason | None:
    """Return a stored reason by its code; if this version does not know it, return its text as a reason."""
    try:
        reason = reason_from_json(content or {})
        sentence(reason)
        if set(reason.values) <= set(value_names(MESSAGES[reason.code])):  # older records have fewer
            return reason
    except Exception:  # the values of another version or a damaged file can be anything
        pass
    return None if text is None else Code.FOREIGN_TEXT(text=text)


def print_reason(reason: Reason) -> None:
    """Print a reason as one line of JSON, for the process that reads this one's output."""
    print(f"{json.dumps(encode_reasons(reason))}\n", end="", flush=True)


def printed_reason(line: str) -> Reason | None:
    """Return the reason that `print_reason` wrote as this line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        return stored_reason(json.loads(line), None)
    except (ValueError, RecursionError):
        return None


def codes_key(name: str, annotation: Any) -> str | None:
    """Return the JSON key for the codes of a field; None for a field without reasons."""
    arguments = get_args(annotation)
    if annotation is Reason or (Reason in arguments and get_origin(annotation) not in (list, tuple)):
        return f"{name}_code"
    return f"{name.removesuffix('s')}_codes" if Reason in arguments else None


def encode_reasons(value: Any) -> Any:
    """Return a reason as code and values, also inside lists and mappings; anything else unchanged."""
    if isinstance(value, Reason):
        return {"code": value.code.value, "values": encode_reasons(value.values)}
    if isinstance(value, Mapping):
        return {key: encode_reasons(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encode_reasons(entry) for entry in value]
    return value


def decode_reasons(value: Any) -> Any:
    """Return a value that `encode_reasons` made, with its reasons and non-finite numbers."""
    if isinstance(value, Mapping):
        if value.keys() == {"code", "values"}:
            return reason_from_json(value)
        return {key: decode_reasons(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [decode_reasons(entry) for entry in value]
    return float(value) if value in _NOT_FINITE else value
