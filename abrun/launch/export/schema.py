"""The offline check of a manifest: the engine's own schema, closed to keys that it does not name."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from abrun.errors import LaunchError
from abrun.reasons import Code
from abrun.redaction import printable

MOST = 300  # characters: a message may hold the whole manifest
METADATA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "namespace": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def refuse_invalid(document: Any, engine: str, file: str) -> None:
    """Raises LaunchError, one line, where a manifest for `engine` (jobset, skypilot) breaks its schema."""
    wrong = best_match(_validator(engine).iter_errors(document))
    if wrong is not None:
        place = ".".join(map(str, wrong.absolute_path))
        raise LaunchError(
            Code.MANIFEST_INVALID(
                file=file,
                place=place or "the manifest",
                problem=printable(wrong.message[:MOST]),
                engine=engine,
            )
        )


@cache
def _validator(engine: str) -> Draft202012Validator:
    schema = json.loads(Path(__file__).with_name(f"{engine}.schema.json").read_text())
    if engine == "jobset":
        schema["properties"]["metadata"] = METADATA  # of any kind of object: a CRD leaves it open
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        schema["properties"]["apiVersion"] = {"const": "jobset.x-k8s.io/v1alpha2"}
        schema["properties"]["kind"] = {"const": "JobSet"}
    return Draft202012Validator(_closed(schema))


def _closed(schema: Any) -> Any:
    """A server drops the keys that a schema does not name, and with them what a typo was to say."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {"additionalProperties": False, **closed} if named else closed
