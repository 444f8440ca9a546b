"""Settings without effect are named before a launch, and plain recipes have none."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.launch.experiment import owned_experiment
from abrun.launch.notes import notes
from abrun.plan import make_plan
from abrun.recipe import load_recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
TWO = "algorithm.minibatches_per_step=2"
PPO = "algorithm={type: ppo, prompts_per_step: 32"


def lines(*overrides: str) -> list[str]:
    return notes(make_plan(load_recipe(QUICKSTART, overrides)))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.loss=gspo"], ["arms baseline, treatment: algorithm.loss: got 'gspo'", "ratio is 1"]),
        (["algorithm.loss=cispo"], ["algorithm.loss: got 'cispo'", "minibatches_per_step: 2 or more"]),
        (["algorithm.loss=gspo", "algorithm.ratio=old"], ["algorithm.loss: got 'gspo'"]),
        (["algorithm.clip_high=0.28"], ["algorithm.clip_high: got clip_high 0.28", "or leave it out"]),
        (["algorithm.dual_clip=3.0", "algorithm.clip_low=0.1"], ["clip_low 0.1, dual_clip 3.0"]),
        ([PPO + ", dual_clip: 3.0}"], ["dual_clip 3.0"]),
        ([PPO + ", value_clip_range: null}"], ["value_clip_range null"]),
        (["arms.treatment={algorithm.dual_clip: 3.0, steps: 5}"], ["arm treatment: algorithm.dual_clip"]),
    ],
)
def test_what_one_update_a_step_never_does_is_said_once(overrides: list[str], words: list[str]) -> None:
    (line,) = lines(*overrides)
    assert all(word in line for word in words), line
    assert lines(*overrides, TWO if "old" in overrides[-1] else "algorithm.epochs_per_step=2") == []


def test_arms_with_equal_gradients_are_named() -> None:
    change = "arms.treatment={algorithm.loss: gspo, algorithm.clip_high: 0.0004}"
    assert [line.partition(";")[0] for line in lines(change)][1:] == [
        "arm treatment: differs from the baseline only in algorithm.clip_high, algorithm.loss, which changes "
        "no gradient with one update a step"
    ]
    assert lines(change, TWO) == []
    of_tokens = "algorithm.importance_correction={type: truncated, high: 2.0}"
    assert len(lines(change, of_tokens)) == 1, "whose weights differ from token to token"
    assert len(lines(change, "arms.treatment.steps=5")) == 1, "which is a difference"
    assert len(lines(change, "arms.treatment.algorithm.minibatches_per_step=2")) == 0


@pytest.mark.parametrize(
    "override",
    [
        "steps=60",
        "algorithm.loss=reinforce",
        "algorithm.loss_reduction=sequence_mean",
        "algorithm.group_size=4",
    ],
)
def test_plain_grpo_with_one_update_is_none_of_it(override: str) -> None:
    assert lines(override) == []


def test_a_dry_run_and_a_launch_say_it(tmp_path: Path) -> None:
    arguments = ["launch", str(QUICKSTART), "--dry-run", "--set", "algorithm.loss=gspo"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert "Settings without effect" in shown and "got 'gspo' with one update a step" in " ".join(
        shown.split()
    )
    shown = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout
    (line,) = json.loads(shown[shown.index("{") :])["notes"]
    assert "got 'gspo'" in line
    said: list[str] = []
    plan = make_plan(load_recipe(QUICKSTART, ["algorithm.loss=gspo"]))
    with owned_experiment(plan, tmp_path / "runs" / "gspo", resume=False, say=said.append):
        assert said == [line]
