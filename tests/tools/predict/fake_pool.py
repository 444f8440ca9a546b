"""A pool of probes without processes: it answers one probe after the other, in order or at random."""

import random
from collections.abc import Callable
from typing import Any

from abrun.tools.predict.facts import Answer
from abrun.tools.predict.probes import Probe, ProbePool

Respond = Callable[[Probe], Answer | Exception]


class FakePool(ProbePool):
    """Answers probes by `respond`; `asked` grows by each. Without `order` it does so as they were started."""

    def __init__(
        self,
        respond: Respond,
        asked: list[Probe],
        on_start: Callable[[], object] = lambda: None,
        order: random.Random | None = None,
    ) -> None:
        super().__init__(on_start)
        self._respond, self.asked, self._order = respond, asked, order

    def _launch(self, running: Any) -> None:
        pass

    def _next_ended(self) -> tuple[str, Answer | BaseException]:
        assert self._running, "nothing runs for which the search waits"
        assert sum(running.probe.kind == "measured" for running in self._running.values()) <= 1
        keys = [*self._running]
        probe = self._running[self._order.choice(keys) if self._order else keys[0]].probe
        if not self._running[probe.key].is_cancelled.is_set():
            self.asked.append(probe)
        return probe.key, self._respond(probe)


class ForgetfulPool(FakePool):
    """Neither keeps answers nor finds those of earlier launches."""

    def _is_answered(self, key: str) -> bool:
        return key in self._answers
