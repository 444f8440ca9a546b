"""What is written into a foreign trainer's run directory, in the form that our own trainer's Recorder has."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun import store
from abrun.errors import StoreError


class FencedError(StoreError):
    """A newer attempt owns the run directory: this process must not write any more."""


class Recorder:
    """The writer of one run directory. Every write first checks that no newer attempt owns it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempt = store.current_attempt(directory)
        self._metrics = store.LineWriter(directory / "metrics.jsonl")
        self._events = store.LineWriter(directory / "events.jsonl")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.check_fence()
        self._metrics.write({"step": step, "attempt": self.attempt, "time_s": time.time(), **values})

    def heartbeat(self, step: int) -> None:
        self.check_fence()
        content = {"time_s": time.time(), "step": step, "pid": os.getpid(), "attempt": self.attempt}
        store.write_json(self.directory / "heartbeat.json", content)

    def event(self, event: str, **details: Any) -> None:
        """Append to events.jsonl, and to stdout.log for whoever reads along."""
        self.check_fence()
        self._events.write({"time_s": time.time(), "attempt": self.attempt, "event": event, **details})
        print(f"{event}: {', '.join(f'{key} {value}' for key, value in details.items())}", flush=True)

    def environment(self, content: Mapping[str, Any]) -> None:
        self.check_fence()
        store.write_json(self.directory / "environment.json", {"attempt": self.attempt, **content})

    def finish(self, step: int, **details: Any) -> None:
        """Write result.json, last of all: from now on the run is finished."""
        self.event("finished", step=step, **details)
        store.write_json(self.directory / "result.json", {"step": step, "attempt": self.attempt})

    def check_fence(self) -> None:
        """Raises FencedError where a newer attempt has been started."""
        owner = store.current_attempt(self.directory)
        if owner != self.attempt:
            raise FencedError(
                f"{self.directory}: attempt {owner} owns this run now; attempt {self.attempt} stops"
            )
