"""Writes abrun/verdict/verdict.schema.json, the JSON schema of verdict.json: python docs/verdict_schema.py"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from abrun.messages import records
from abrun.messages.codes import Reason
from abrun.verdict.verdict_file import PARTS, VerdictFile

SCHEMA = Path(__file__).parents[1] / "abrun/verdict/verdict.schema.json"
_REASON = "#/$defs/Reason"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of `verdict.json`."""
    schema = _add_code_fields(TypeAdapter(VerdictFile).json_schema(mode="serialization"))
    schema = _replace(schema, "type", "number", {"$ref": "#/$defs/Number"})  # JSON has no NaN and Inf
    _flatten_claim_schema(schema["$defs"])
    schema["$defs"]["Number"] = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "abrun verdict"}


def _flatten_claim_schema(definitions: dict[str, Any]) -> None:
    """Change the schema of a claim's result to that of its row."""
    result = definitions["ClaimResult"]
    for record_name, record in PARTS.items():
        properties = definitions.pop(record.__name__)
        del result["properties"][record_name]
        result["properties"] |= properties["properties"]
        result["required"] = [*result["required"], *properties.get("required", ())]
    del result["properties"]["warnings"]
    result["properties"]["warning"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    result["required"].remove("claim")


def _add_code_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of `records.as_json`: a sentence for each reason, with its code next to it."""
    for record in (schema, *schema.get("$defs", {}).values()):
        properties = record.get("properties", {})
        for name, content in list(properties.items()):
            if _REASON in repr(content):
                is_list = content.get("type") == "array"
                codes_field = records.codes_key(name, list[Reason] if is_list else Reason)
                properties |= {
                    name: _replace(content, "$ref", _REASON, {"type": "string"}),
                    codes_field: content,
                }
                if name in record.get("required", ()):
                    record["required"].append(codes_field)
    if "Code" in schema.get("$defs", {}):
        schema["$defs"]["Code"] = {"type": "string", "description": "one of docs/reference/codes.md"}
        schema["$defs"]["Reason"]["required"] = ["code", "values"]
    return schema


def _replace(schema: Any, key: str, value: str, new: dict[str, str]) -> Any:
    """Return the schema with `new` in place of every part whose `key` is `value`."""
    if isinstance(schema, list):
        return [_replace(entry, key, value, new) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get(key) == value:
        return dict(new)
    return {name: _replace(entry, key, value, new) for name, entry in schema.items()}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n")
