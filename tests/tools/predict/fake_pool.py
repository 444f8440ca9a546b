"""A pool of probes without processes."""

from collections.abc import Callable
from concurrent.futures import Future

from abrun.tools.predict.facts import Answer
from abrun.tools.predict.probes import Probe, ProbePool

Respond = Callable[[Probe], Answer | Exception]


class FakePool(ProbePool):
    """Answers probes by `respond`, once somebody waits for them; `asked` grows by each."""

    def __init__(
        self, respond: Respond, asked: list[Probe], on_start: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(on_start)
        self._respond, self._asked = respond, asked

    def _start(self, probe: Probe) -> Future[Answer]:
        if not self.has_started:
            self.has_started = True
            self._on_start()
        return _Waiting(self._respond, self._asked, probe)


class _Waiting(Future[Answer]):
    def __init__(self, respond: Respond, asked: list[Probe], probe: Probe) -> None:
        super().__init__()
        self._respond, self._asked, self._probe = respond, asked, probe

    def result(self, timeout: float | None = None) -> Answer:
        if not self.done():
            self._asked.append(self._probe)
            answer = self._respond(self._probe)
            if isinstance(answer, Exception):
                self.set_exception(answer)
            else:
                self.set_result(answer)
        return super().result()
