"""Reasons that node agents record for a run's launcher when their part ends: one file each in `nodes/`.

A node that cannot see the run directory prints the reason as a line of JSON instead. In both cases the agent
also prints the sentence for people.
"""

import contextlib
from pathlib import Path

from abrun.errors import StoreError
from abrun.messages.codes import Reason
from abrun.messages.records import encode_reasons, print_reason, printed_reason, stored_reason
from abrun.runs import layout
from abrun.runs.files import read_json, write_json
from abrun.runs.redaction import one_line
from abrun.runs.rundir import RunDir

ENDING_PREFIX = "ending-"


def write_ending(run: RunDir, writer: str, previous_attempt: int, reason: Reason) -> None:
    """Record why a node's part of a launch ended. `previous_attempt`: the last attempt before the launch.

    The reason is printed if there is no run directory (in a probe, or on a node that cannot see it) or if
    the file cannot be written.
    """
    reason = reason.map_texts(one_line)
    if run.exists:
        with contextlib.suppress(StoreError):  # for example on a full disk
            content = {"after": previous_attempt, "reason": encode_reasons(reason)}
            return write_json(_endings_folder(run) / f"{ENDING_PREFIX}{writer}.json", content, durable=False)
    print_reason(reason)


def read_endings(run: RunDir, previous_attempt: int, output: str) -> list[Reason]:
    """Return the reasons that agents printed or recorded in launches after `previous_attempt`."""
    reasons = list(filter(None, map(printed_reason, output.splitlines())))
    for path in sorted(_endings_folder(run).glob(f"{ENDING_PREFIX}*.json")):
        with contextlib.suppress(StoreError):  # damaged, for example by a power loss
            content = read_json(path)
            reason = stored_reason(content.get("reason"), None)
            if reason and type(content.get("after")) is int and content["after"] >= previous_attempt:
                reasons.append(reason)
    return reasons


def _endings_folder(run: RunDir) -> Path:
    return run.path / layout.NODES
