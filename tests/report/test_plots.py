"""The figures: arms named at their lines, long runs readable, every claim on one scale."""

from itertools import combinations
from unittest import mock

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from abrun.report import plots
from abrun.report.panels import NUM_BUCKETS
from abrun.report.present.figures import figure_style
from tests.report.test_page import experiment, learning
from tests.verdict.verdicts import claim


def labels(ax: Axes) -> dict[str, float]:
    """Names beside the axis and how high they stand, from 0 to 1."""
    notes = [child for child in ax.get_children() if isinstance(child, Annotation)]
    return {note.get_text(): note.xy[1] for note in notes if note.xy[0] > 1}


def figure(values, claims):
    made = plots.draw_metric(experiment(values), "train/reward", claims)
    assert made is not None
    return made


def test_each_mean_is_named_at_its_end_with_its_level_in_the_window():
    values = {
        (arm, seed): {"train/reward": np.where(np.arange(40) < 32, 0.1, level)}
        for arm, level in (("baseline", 0.5), ("treatment", 0.75))
        for seed in range(3)
    }
    ax = figure(values, [claim(steps=(33, 40))]).axes[0]
    found = labels(ax)
    assert list(found) == ["baseline 0.5", "treatment 0.75"]
    low, high = ax.get_ylim()
    assert list(found.values()) == pytest.approx([(0.5 - low) / (high - low), (0.75 - low) / (high - low)])


def test_names_of_arms_that_end_together_do_not_overlap():
    first, second = labels(figure(learning(), [claim()]).axes[0]).values()
    assert second - first >= plots.LABEL_GAP - 1e-9


@pytest.mark.parametrize(("num_steps", "num_lines"), [(500, 8), (501, 2)])
def test_many_steps_are_drawn_as_means_of_buckets_without_seeds(num_steps, num_lines):
    values = learning(num_steps=num_steps)
    ax = figure(values, [claim(steps=(401, num_steps))]).axes[0]
    lines = [line for line in ax.lines if len(np.asarray(line.get_xdata()))]
    assert len(lines) == num_lines
    if num_steps > 500:
        mean = np.mean([values["baseline", seed]["train/reward"] for seed in range(3)], axis=0)
        shown = np.asarray(lines[0].get_ydata())
        assert len(shown) == NUM_BUCKETS and shown[0] == pytest.approx(mean[:2].mean())


def test_claims_stand_on_one_scale_of_margins():
    of = experiment(learning())
    claims = [
        claim(margin=0.1, interval=(-0.05, 0.05)),
        claim(metric="train/entropy", margin=2.0, interval=(1.0, 3.0), result="undecided"),
        claim(metric="no margin", margin=None),
    ]
    made = plots.draw_forest(of, claims)
    assert made is not None
    ax = made.axes[0]
    bars = [line.get_xdata() for line in ax.lines if len(np.asarray(line.get_xdata())) == 2][1:]
    assert np.array(bars) == pytest.approx(np.array([[-0.5, 0.5], [0.5, 1.5]]))
    assert list(labels(ax)) == ["equivalent", "undecided"]
    assert plots.draw_forest(of, claims[:1]) is None


ARMS = ("no-right-shift", "bfloat16-value-head", "vllm-batch-invariant", "packed.layers_" * 7, "a" * 100)


def misplaced(made: Figure) -> list[tuple[str, ...]]:
    """Texts that are drawn over each other, and those that are not wholly in the figure."""
    texts: list[Text] = []
    draw = Text.draw
    with mock.patch.object(Text, "draw", lambda self, renderer: (texts.append(self), draw(self, renderer))):
        FigureCanvasAgg(made).draw()
    drawn = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent().extents) for text in drawn]
    *_, width, height = made.bbox.extents
    outside = [(text,) for text, (*low, x, y) in boxes if min(low) < 0 or x > width or y > height]
    return outside + [
        (one, other)
        for (one, a), (other, b) in combinations(boxes, 2)
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]


@pytest.mark.parametrize("num_arms", [2, 6])
def test_no_text_hides_another_or_leaves_its_figure(num_arms):
    arms = ("baseline", *ARMS[: num_arms - 1])
    metrics = ("train/" + "response_length_" * 5, "train/reward")
    values = learning(num_steps=12, metrics=metrics, arms=arms)
    of = experiment(values, arms=arms, name="e" * 100)
    wide = {"steps": (9, 12), "margin_text": f"±10 % of {'baseline ' * 3}", "interval": (-0.4, 0.1)}
    claims = [claim(metric=metric, arm=arm, **wide) for metric in metrics for arm in arms[1:]]
    with figure_style():
        of_metric = plots.draw_metric(of, metrics[0], claims[: len(arms) - 1])
        for made in (plots.draw_forest(of, claims), of_metric):
            assert made is not None
            assert not misplaced(made)
