"""Files of launchers in a run directory, and what node agents leave there for them.

A launcher writes `config.json`, and `launch.json` with every start and how it saw it end.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from abrun.errors import StoreError
from abrun.messages.codes import Reason
from abrun.messages.records import encode_reasons, print_reason, printed_reason, stored_reason
from abrun.runs import layout
from abrun.runs.files import read_as, read_json, sync_folder, wrap_write_errors, write_json
from abrun.runs.lines import LineWriter
from abrun.runs.owner import Owner, process_fields, this_machine_fields, this_process_fields
from abrun.runs.records import SCHEMA_VERSION, FirstNode, Launch, Launches, Status, message_fields
from abrun.runs.redaction import one_line
from abrun.runs.rundir import RunDir


def write_config(
    run: RunDir,
    experiment: str,
    name: layout.RunName,
    config: Mapping[str, Any],
    initial_weights: str | None = None,
) -> None:
    """Write config.json, which tells the job what to run; see RunRecord."""
    identity = {"schema_version": SCHEMA_VERSION, "experiment": experiment, **asdict(name)}
    content = {"initial_weights": initial_weights, "config": config}
    write_json(run.path / layout.CONFIG, identity | content)


def begin_launch(
    run: RunDir, devices: Sequence[str], git: Mapping[str, Any] | None, runs_per_gpu: int = 1
) -> None:
    """Record a launch before its process is started."""
    launch = Launch(
        launcher=Owner(**this_process_fields()),
        started_s=time.time(),
        devices=tuple(devices),
        runs_per_gpu=runs_per_gpu,
        attempts=run.last_attempt,
        **this_machine_fields(),
    )
    launches = [*map(asdict, _read_launches(run).launches), {**asdict(launch), "git": git}]
    write_json(run.path / layout.LAUNCH, {"git": git, "launches": launches})


def update_launch(run: RunDir, **values: Any) -> None:
    """Replace fields of the last launch."""
    if "pid" in values:
        values |= process_fields(values["pid"])
    recorded = _read_launches(run)
    unrecorded = Launch(started_s=time.time(), **this_machine_fields())
    last_launch = (recorded.launches or (unrecorded,))[-1]
    launches = [*map(asdict, recorded.launches[:-1]), {**asdict(last_launch), **values}]
    write_json(run.path / layout.LAUNCH, {**asdict(recorded), "launches": launches})


def end_launch(run: RunDir, status: Status, reason: Reason | None, **exit_fields: Any) -> None:
    """Record how the job ended, as its launcher observed it: `exit_fields` are exit_code and signal."""
    # Only the job's own attempt ended: a newer one that fenced it may be running.
    attempts = run.last_attempt
    for launch in _read_launches(run).launches[-1:]:
        attempts = min(attempts, launch.attempts + 1)
    ending = {"status": status, **message_fields(reason), "ended_s": time.time()}
    update_launch(run, **ending, attempts=attempts, **exit_fields)


def _read_launches(run: RunDir) -> Launches:
    """Return the recorded launches; empty if the file is damaged, which must not stop a launch."""
    try:
        return read_as(Launches, run.path / layout.LAUNCH)
    except StoreError:
        return Launches()


def reopen(run: RunDir, reason: str) -> None:
    """Mark a finished run as unfinished because files of it are gone. No job may be running here."""
    with contextlib.closing(LineWriter(run.path / layout.EVENTS)) as events:
        row = {"time_s": time.time(), "attempt": run.last_attempt, "event": "repair", "message": reason}
        events.write(row)
        events.sync()
    with wrap_write_errors(run.path / layout.RESULT):
        (run.path / layout.RESULT).unlink(missing_ok=True)
        sync_folder(run.path)


def write_wandb_location(run: RunDir, location: Mapping[str, str]) -> None:
    """Record the run's mirror in wandb: id, project, entity and url, as far as known."""
    write_json(run.path / layout.WANDB, location)


def write_ending(run: RunDir, writer: str, previous_attempt: int, reason: Reason) -> None:
    """Record why a node's part of a launch ended. `previous_attempt`: the last attempt before the launch.

    The reason is printed as a line of JSON if there is no run directory (in a probe, or on a node that cannot
    see it) or if the file cannot be written. The agent also prints the sentence for people.
    """
    reason = reason.map_texts(one_line)
    if run.exists:
        with contextlib.suppress(StoreError):  # for example on a full disk
            path = run.path / layout.NODES / f"ending-{writer}.json"
            content = {"after": previous_attempt, "reason": encode_reasons(reason)}
            return write_json(path, content, durable=False)
    print_reason(reason)


def write_first_node(run: RunDir, node: FirstNode) -> None:
    write_json(run.path / layout.NODES / "first.json", asdict(node), durable=False)


def read_first_node(run: RunDir) -> FirstNode:
    """Return what the first node of a run wrote at its last start; empty before the first."""
    with contextlib.suppress(StoreError, OSError):
        os.listdir(run.path / layout.NODES)  # a network client may cache the absence of single names
        return read_as(FirstNode, run.path / layout.NODES / "first.json")
    return FirstNode()


def measure_clock(run: RunDir, node: int) -> float:
    """Return the least seconds by which this machine's clock is ahead of the one that stamps files."""
    path, before_s = run.path / layout.NODES / f"clock-{node:04d}.json", time.time()
    write_json(path, {}, durable=False)
    stamp_s = path.stat().st_mtime
    return max(before_s - stamp_s, 0.0) + min(time.time() - stamp_s, 0.0)


def read_endings(run: RunDir, previous_attempt: int, output: str) -> list[Reason]:
    """Return the reasons that agents printed or recorded in launches after `previous_attempt`."""
    reasons = list(filter(None, map(printed_reason, output.splitlines())))
    for path in sorted((run.path / layout.NODES).glob("ending-*.json")):
        with contextlib.suppress(StoreError):  # damaged, for example by a power loss
            content = read_json(path)
            reason = stored_reason(content.get("reason"), None)
            if reason and type(content.get("after")) is int and content["after"] >= previous_attempt:
                reasons.append(reason)
    return reasons
