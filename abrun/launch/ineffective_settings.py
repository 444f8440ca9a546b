"""Settings of a plan that are allowed but have no effect, and commands that are the same for every seed."""

import json
from collections.abc import Iterator

from abrun.experiment.plan import ExperimentPlan
from abrun.messages.texts import plural
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import BASELINE

RATIO_LOSSES = ("gspo", "cispo")  # differ from a policy gradient only by their importance ratio
CLIPPING = ("clip_low", "clip_high", "dual_clip", "value_clip_range")


def find_ineffective_settings(plan: ExperimentPlan) -> list[str]:
    """Return a line for each setting without effect, with the arms that have it.

    With one update per step, the importance ratio is 1 where the gradient is taken, and nothing is clipped.
    For the default loss and clip range that is common and not reported. It is reported for a loss that is
    chosen for its ratio, for clip ranges that a recipe states, and for arms that differ in nothing else: up
    to rounding, all losses of the GRPO family then have the same gradient, if the tokens of a sequence share
    one advantage and weight.
    """
    arms_of: dict[str, list[str]] = {}
    for arm, settings in _select_one_update(plan).items():
        for reason in _find_ineffective_clipping(settings):
            arms_of.setdefault(reason, []).append(arm)
    inert = [f"{plural(arms, 'arm')} {', '.join(arms)}: {reason}" for reason, arms in arms_of.items()]
    return [*inert, *_find_equal_arms(plan), *_find_commands_without_seed(plan)]


def _find_commands_without_seed(plan: ExperimentPlan) -> Iterator[str]:
    """Yield a line for the arms whose command line is the same for every seed."""
    configs = {run.name.arm: run.config for run in plan.runs}
    arms = [
        arm
        for arm, config in configs.items()
        if isinstance(config, CommandRunConfig) and not config.trainer.uses_seed
    ]
    if arms and len(plan.recipe.seeds) > 1:
        yield (
            f"{plural(arms, 'arm')} {', '.join(arms)}: trainer.argv and trainer.env do not use {{seed}}, so "
            "all seeds run the same command unless it reads ABRUN_SEED"
        )


def _select_one_update(plan: ExperimentPlan) -> dict[str, PolicyGradientSettings]:
    algorithms = {
        run.name.arm: getattr(run.config, "algorithm", None) for run in plan.runs if not run.is_control
    }
    return {
        arm: settings
        for arm, settings in algorithms.items()
        if isinstance(settings, PolicyGradientSettings) and settings.num_updates == 1
    }


def _find_ineffective_clipping(settings: PolicyGradientSettings) -> Iterator[str]:
    loss, fields = getattr(settings, "loss", None), type(settings).model_fields
    changed_fields = [
        name for name in CLIPPING if name in fields and getattr(settings, name) != fields[name].default
    ]
    if loss in RATIO_LOSSES:
        yield (
            f"algorithm.loss: got '{loss}', but with one update per step the importance ratio is 1 and "
            "nothing is ever clipped; use algorithm.minibatches_per_step: 2 or more"
        )
    elif changed_fields:
        got = ", ".join(f"{name} {json.dumps(getattr(settings, name))}" for name in changed_fields)
        yield (
            f"algorithm.{changed_fields[0]}: got {got}, but with one update per step nothing is ever "
            "clipped; use algorithm.minibatches_per_step: 2 or more, or drop it"
        )


def _find_equal_arms(plan: ExperimentPlan) -> Iterator[str]:
    one_update = _select_one_update(plan)
    for arm, changes in plan.treatment_diff.items():
        if not {arm, BASELINE} <= one_update.keys():
            continue
        clipping_keys = {f"algorithm.{name}" for name in CLIPPING}
        baseline = one_update[BASELINE]
        is_per_token = baseline.importance_correction or baseline.kl_in == "reward_to_go"
        if changes.keys() <= (clipping_keys if is_per_token else clipping_keys | {"algorithm.loss"}):
            yield (
                f"arm {arm}: differs from the baseline only in {', '.join(changes)}, but with one update per "
                "step this changes no gradient; use algorithm.minibatches_per_step: 2 or more"
            )
