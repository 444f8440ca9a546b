"""What agents note for the launcher of a run about its end: a file for each of them in `nodes/`.

A node that does not see the run directory prints the reason into its output, as a line of JSON. Beside
either an agent prints the sentence, for people.
"""

import contextlib
from pathlib import Path

from abrun.errors import StoreError
from abrun.messages.records import coded, print_reason, printed_reason, stored_reason
from abrun.reasons import Reason
from abrun.redaction import told
from abrun.runs import layout
from abrun.runs.files import read_json, write_json
from abrun.runs.rundir import RunDir

ENDING_PREFIX = "ending-"


def write_ending(run: RunDir, writer: str, previous_attempt: int, reason: Reason) -> None:
    """Note how a node's part of a start ended. `after`: the last attempt before that start.

    Printed where no run is here, as in a probe or on a node that does not see it, or it takes no note.
    """
    reason = reason.map_texts(told)
    if run.exists:
        with contextlib.suppress(StoreError):  # such as a full disk
            content = {"after": previous_attempt, "reason": coded(reason)}
            return write_json(_endings_folder(run) / f"{ENDING_PREFIX}{writer}.json", content, durable=False)
    print_reason(reason)


def read_endings(run: RunDir, previous_attempt: int, output: str) -> list[Reason]:
    """Return what agents noted of the start that followed this attempt, or of a later one, or printed."""
    reasons = list(filter(None, map(printed_reason, output.splitlines())))
    for path in sorted(_endings_folder(run).glob(f"{ENDING_PREFIX}*.json")):
        with contextlib.suppress(StoreError):  # damaged, as after a loss of power
            content = read_json(path)
            reason = stored_reason(content.get("reason"), None)
            if reason and type(content.get("after")) is int and content["after"] >= previous_attempt:
                reasons.append(reason)
    return reasons


def _endings_folder(run: RunDir) -> Path:
    return run.path / layout.NODES
