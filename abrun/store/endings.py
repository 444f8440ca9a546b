"""What agents note for the launcher of a run about its end: a file for each of them in `nodes/`.

An agent prints the same sentence into the run's log. The log alone gets there from a node that does not see
the run directory; what has no note is foreign text.
"""

import contextlib
from pathlib import Path

from abrun import layout
from abrun.errors import StoreError
from abrun.messages.records import coded, stored_reason
from abrun.reasons import Reason
from abrun.redaction import told
from abrun.store.files import read_json, write_json
from abrun.store.rundir import RunDir

PREFIX = "ending-"


def write_ending(run: RunDir, writer: str, after: int, reason: Reason) -> None:
    """Note how a node's part of a start ended. `after`: the last attempt before that start.

    Nothing where the run directory is gone.
    """
    if run.exists:
        content = {"after": after, "reason": coded(reason.map_texts(told))}
        write_json(_folder(run) / f"{PREFIX}{writer}.json", content, durable=False)


def endings(run: RunDir, after: int) -> list[Reason]:
    """Return what agents noted of the start that followed this attempt, or of a later one."""
    reasons = []
    for path in sorted(_folder(run).glob(f"{PREFIX}*.json")):
        with contextlib.suppress(StoreError):  # damaged, as after a loss of power
            content = read_json(path)
            reason = stored_reason(content.get("reason"), None)
            if reason and type(content.get("after")) is int and content["after"] >= after:
                reasons.append(reason)
    return reasons


def _folder(run: RunDir) -> Path:
    return run.path / layout.NODES
