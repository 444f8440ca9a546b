"""`fleet.json`: the result of a fleet, for programs and for the next fleet to compare with."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from abrun.diagnose.fleet.classify import STATUSES, EarlierRow, Fleet
from abrun.diagnose.fleet.recipes import FLEET_FILE
from abrun.errors import ComparisonError, StoreError
from abrun.messages import sentence
from abrun.reasons import Code
from abrun.regular_files import is_file
from abrun.runs.files import read_json
from abrun.stats.equivalence import ALPHA

_SCHEMA_VERSION = 1


def fleet_json(fleet: Fleet, summary: str, command: str) -> dict[str, Any]:
    return {
        "schema_version": _SCHEMA_VERSION,
        "command": command,
        "summary": summary,
        "exit_code": fleet.exit_code,
        "false_discovery_rate": ALPHA,
        "num_tested": fleet.num_tested,
        "failure_rate": fleet.failure_rate,
        "counts": {status: fleet.counts[status] for status in STATUSES},
        "recipes": [
            {
                **asdict(row),
                "reason": sentence(row.reason),
                "reason_code": row.reason.code,
                "report": row.report and row.report.as_posix(),
            }
            for row in fleet.rows
        ],
    }


def read_earlier(path: Path) -> dict[str, EarlierRow]:
    """Return the rows of an earlier fleet by recipe. Raises ComparisonError for any other file."""
    path = path if is_file(path) else path / FLEET_FILE
    if not is_file(path):
        raise ComparisonError(Code.FLEET_FILE_REFUSED(path=path, problem="no such file"))
    try:
        content = read_json(path)
        version = content.get("schema_version")
        if version != _SCHEMA_VERSION or "recipes" not in content:
            problem = f"not a fleet.json of schema_version {_SCHEMA_VERSION}"
            raise ComparisonError(Code.FLEET_FILE_REFUSED(path=path, problem=problem))
        return parse_rows(content["recipes"])
    except (StoreError, KeyError, TypeError, ValueError, AttributeError) as error:
        problem = str(error) if isinstance(error, StoreError) else "a row is damaged"
        raise ComparisonError(Code.FLEET_FILE_REFUSED(path=path, problem=problem)) from None


def parse_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, EarlierRow]:
    """Return the rows of `fleet.json` by recipe. Raises an error for a damaged row."""
    return {str(row["name"]): _parse_row(row) for row in rows}


def _parse_row(row: Mapping[str, Any]) -> EarlierRow:
    status, is_red, sha256 = row["status"], row["is_red"], row["reference_sha256"]
    if status not in STATUSES or type(is_red) is not bool:
        raise ValueError(status)
    is_discovery = is_red and row["adjusted_p"] is not None and row["adjusted_p"] <= ALPHA
    return EarlierRow(status=status, is_red=is_discovery or status == "red before", reference_sha256=sha256)
