"""The benchmarks' bars: every name readable, and what a bar is in all at its end."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.bench.charts import chart
from tests.report.test_plots import ARMS, misplaced

PHASES = ("generation", "logprobs", "values", "value_forward_backward", "value_optimizer", "weight_sync")


def test_names_of_many_parts_stay_in_the_figure_and_totals_stand_at_the_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Figure] = []

    def saved(self: Figure, *_: Any, **__: Any) -> None:
        assert not misplaced(self)
        found.append(self)

    monkeypatch.setattr(Figure, "savefig", saved)
    parts: dict[str, dict[str, float]] = {arm: dict.fromkeys((*PHASES, "all else"), 0.25) for arm in ARMS[:3]}
    chart(parts | {"short": {"all else": 0.125}}, Path("chart"), "s a step")
    assert [text.get_text() for text in found[0].axes[0].texts] == ["1.75", "1.75", "1.75", "0.125"]
