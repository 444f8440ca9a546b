"""What a rank says of itself, and how long it may be silent."""

import math
from pathlib import Path

import pytest

from abrun.processes import progress


@pytest.mark.parametrize(
    ("steps_s", "expected"),
    [
        ([], math.inf),
        ([30.0, 2.0], math.inf),
        ([30.0, 2.0, 2.0], 60.0),
        ([90.0, 20.0, 20.0, 95.0, 20.0], 200.0),
    ],
)
def test_patience_is_ten_usual_steps_once_there_are_three(steps_s: list[float], expected: float) -> None:
    assert progress.hang_timeout_s(steps_s) == expected


def test_what_is_no_part_of_every_step_may_take_as_long_as_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = progress._StatusLine()
    monkeypatch.setattr(progress, "_status_line", line)
    file = (tmp_path / "rank-0").open("w+b")
    line.file = file.fileno()

    def status() -> progress.RankStatus:
        return progress.read_statuses({0: file.fileno()})[0]

    def patience_s() -> float:
        return status().hang_timeout_s

    progress.report("model set-up", in_every_step=False)
    assert status().activity == "model set-up"
    progress.report_step()
    progress.report("logprobs")
    assert status().activity == "logprobs of the first step"
    for _ in range(4):
        progress.report_step()
    assert status().activity == "logprobs"
    progress.report("logprobs")
    assert patience_s() == progress.MIN_PATIENCE_S
    progress.report("checkpointing", in_every_step=False)
    assert patience_s() == math.inf
    progress.report()
    assert patience_s() == math.inf
    progress.report("generation")
    assert patience_s() == progress.MIN_PATIENCE_S
    file.close()
