"""Settings without effect are named before a launch, and plain recipes have none."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.experiment.plan import make_plan
from abrun.launch.prepare import find_ineffective_settings, own_experiment
from abrun.messages.codes import Reason
from abrun.recipe.experiment import load_recipe
from tests.snapshot import Snapshot

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
TWO = "algorithm.minibatches_per_step=2"
PPO = "algorithm={type: ppo, prompts_per_step: 32"
BOTH = ["baseline", "treatment"]


def clipping(**settings: float | None) -> str:
    got = ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())
    return (
        f"algorithm.{next(iter(settings))}: got {got}, but with one update per step nothing is ever clipped"
    )


def never_clips(loss: str) -> str:
    return f"algorithm.loss: got '{loss}', but with one update per step the importance ratio is 1"


def reasons(*overrides: str) -> list[str]:
    return find_ineffective_settings(make_plan(load_recipe(QUICKSTART, overrides)))


@pytest.mark.parametrize(
    ("overrides", "arms", "expected"),
    [
        (["algorithm.loss=gspo"], BOTH, never_clips("gspo")),
        (["algorithm.loss=cispo"], BOTH, never_clips("cispo")),
        (["algorithm.loss=gspo", "algorithm.ratio=old"], BOTH, never_clips("gspo")),
        (["algorithm.clip_high=0.28"], BOTH, clipping(clip_high=0.28)),
        (["algorithm.dual_clip=3.0", "algorithm.clip_low=0.1"], BOTH, clipping(clip_low=0.1, dual_clip=3.0)),
        ([PPO + ", dual_clip: 3.0}"], BOTH, clipping(dual_clip=3.0)),
        ([PPO + ", value_clip_range: null}"], BOTH, clipping(value_clip_range=None)),
        (["arms.treatment={algorithm.dual_clip: 3.0, steps: 5}"], ["treatment"], clipping(dual_clip=3.0)),
    ],
)
def test_what_one_update_a_step_never_does_is_said_once(
    overrides: list[str], arms: list[str], expected: Reason, snapshot: Snapshot
) -> None:
    (reason,) = reasons(*overrides)
    assert reason.startswith(f"arm{'s' * (len(arms) > 1)} {', '.join(arms)}: {expected}")
    snapshot(reason)
    assert reasons(*overrides, TWO if "old" in overrides[-1] else "algorithm.epochs_per_step=2") == []


def test_arms_with_equal_gradients_are_named(snapshot: Snapshot) -> None:
    change = "arms.treatment={algorithm.loss: gspo, algorithm.clip_high: 0.0004}"
    (equal,) = reasons(change)[1:]
    assert equal.startswith(
        "arm treatment: differs from the baseline only in algorithm.clip_high, algorithm.loss"
    )
    snapshot(equal)
    assert reasons(change, TWO) == []
    of_tokens = "algorithm.importance_correction={type: truncated, high: 2.0}"
    assert len(reasons(change, of_tokens)) == 1  # whose weights differ from token to token
    assert len(reasons(change, "arms.treatment.steps=5")) == 1  # which is a difference
    assert len(reasons(change, "arms.treatment.algorithm.minibatches_per_step=2")) == 0


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
    assert reasons(override) == []


def test_a_dry_run_and_a_launch_say_it(tmp_path: Path) -> None:
    arguments = ["launch", str(QUICKSTART), "--dry-run", "--set", "algorithm.loss=gspo"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert "Settings without effect" in shown and "got 'gspo', but with one" in " ".join(shown.split())
    shown = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout
    (line,) = json.loads(shown[shown.index("{") :])["notes"]
    assert "got 'gspo'" in line
    said: list[str] = []
    plan = make_plan(load_recipe(QUICKSTART, ["algorithm.loss=gspo"]))
    with own_experiment(plan, tmp_path / "runs" / "gspo", resume=False, say=said.append):
        assert said == [line]
