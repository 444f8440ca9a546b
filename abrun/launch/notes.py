"""Notes on a plan: settings that are allowed and have no effect, commands that are the same in every seed."""

from collections.abc import Iterator

from abrun.experiment.plan import ExperimentPlan
from abrun.reasons import Code, Reason
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import BASELINE

RATIO_LOSSES = ("gspo", "cispo")  # which differ from a policy gradient by their importance ratio alone
CLIPPING = ("clip_low", "clip_high", "dual_clip", "value_clip_range")


def notes(plan: ExperimentPlan) -> list[Reason]:
    """Return a reason for each setting without effect, with the arms that have it.

    With one update a step, the importance ratio is 1 where the gradient is taken, and nothing is clipped.
    That is common and right for the default loss at its default clip range, so nothing is said of it. It is
    said of a loss that is chosen for its ratio, of clip ranges that a recipe states, and of arms that differ
    in nothing else: up to rounding, all losses of GRPO's family then have the same gradient, if the tokens of
    a sequence have the same advantage and weight.
    """
    arms_of: dict[Reason, list[str]] = {}
    for arm, settings in _with_one_update(plan).items():
        for reason in _without_effect(settings):
            arms_of.setdefault(reason, []).append(arm)
    inert = [Code.ARMS_WITHOUT_EFFECT(arms=arms, problem=reason) for reason, arms in arms_of.items()]
    return [*inert, *_equal_arms(plan), *_commands_without_a_seed(plan)]


def _commands_without_a_seed(plan: ExperimentPlan) -> Iterator[Reason]:
    """Yield a reason for the arms whose command line is the same for every seed."""
    configs = {run.name.arm: run.config for run in plan.runs}
    arms = [
        arm
        for arm, config in configs.items()
        if isinstance(config, CommandRunConfig) and not config.trainer.uses_seed
    ]
    if arms and len(plan.recipe.seeds) > 1:
        yield Code.COMMANDS_WITHOUT_SEED(arms=arms)


def _with_one_update(plan: ExperimentPlan) -> dict[str, PolicyGradientSettings]:
    algorithms = {
        run.name.arm: getattr(run.config, "algorithm", None) for run in plan.runs if not run.is_control
    }
    return {
        arm: settings
        for arm, settings in algorithms.items()
        if isinstance(settings, PolicyGradientSettings) and settings.num_updates == 1
    }


def _without_effect(settings: PolicyGradientSettings) -> Iterator[Reason]:
    loss, fields = getattr(settings, "loss", None), type(settings).model_fields
    stated = [name for name in CLIPPING if name in fields and getattr(settings, name) != fields[name].default]
    if loss in RATIO_LOSSES:
        yield Code.LOSS_NEVER_CLIPS(loss=loss)
    elif stated:
        yield Code.CLIPPING_WITHOUT_EFFECT(settings={name: getattr(settings, name) for name in stated})


def _equal_arms(plan: ExperimentPlan) -> Iterator[Reason]:
    one_update = _with_one_update(plan)
    for arm, changes in plan.treatment_diff.items():
        if not {arm, BASELINE} <= one_update.keys():
            continue
        inert = {f"algorithm.{name}" for name in CLIPPING}
        baseline = one_update[BASELINE]
        of_tokens = baseline.importance_correction or baseline.kl_in == "reward_to_go"
        if changes.keys() <= (inert if of_tokens else inert | {"algorithm.loss"}):
            yield Code.ARM_EQUALS_BASELINE(arm=arm, keys=[*changes])
