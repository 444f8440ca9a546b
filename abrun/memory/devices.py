"""This machine's GPUs, on which cells are measured side by side, each alone on GPUs of its own."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from abrun.experiment.probe import Place
from abrun.recipe.run import OwnRunConfig

AHEAD = 2  # cells whose processes start while one is measured: imports take longer than a step


class Devices:
    """Gives cells their places. On CPU cores there is one cell at a time."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._locks = {gpu: threading.Lock() for gpu in gpus}
        self._asked = Counter[str]()  # cells that have, or wait for, a GPU
        self._choosing = threading.Lock()
        self._stopped: str | None = None  # why all that measures is to end

    @contextlib.contextmanager
    def place(self, config: OwnRunConfig) -> Iterator[Place | None]:
        """The GPUs that fewest others wait for; None on CPU cores."""
        if not config.cluster.gpus_per_node:
            yield None
            return
        with self._choosing:
            mine = min(self._groups(config), key=lambda gpus: sum(self._asked[gpu] for gpu in gpus))
            self._asked.update(mine)
        try:
            yield Place(gpus=mine, turn=self._turn(mine), stopped=lambda: self._stopped)
        finally:
            with self._choosing:
                self._asked.subtract(mine)

    def each(self, configs: Sequence[OwnRunConfig], jobs: Sequence[Callable[[], Any]]) -> None:
        """Do `jobs`, which measure `configs`, in their order, as many at once as there are places.

        Where one fails, or somebody interrupts, the others are ended, and its error is raised.
        """
        groups = [len(self._groups(config)) for config in configs if config.cluster.gpus_per_node]
        if not groups:
            for job in jobs:
                job()
            return
        with ThreadPoolExecutor(max_workers=max(groups) * (1 + AHEAD)) as several:
            doing = [several.submit(job) for job in jobs]
            try:
                for done in as_completed(doing):
                    done.result()
            except BaseException as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                self._stopped = "somebody interrupted" if interrupted else "another could not be measured"
                several.shutdown(wait=False, cancel_futures=True)
                raise

    def _groups(self, config: OwnRunConfig) -> list[Sequence[str]]:
        size = config.devices_per_node
        return [self._gpus[at : at + size] for at in range(0, len(self._gpus) - size + 1, size)]

    @contextlib.contextmanager
    def _turn(self, gpus: Sequence[str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for gpu in sorted(gpus):  # all take them in one order, so that nobody waits in a circle
                stack.enter_context(self._locks[gpu])
            yield
