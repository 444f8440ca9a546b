"""Settings of a plan that are allowed but have no effect, and commands that are the same for every seed."""

from collections.abc import Iterator

from abrun.experiment.plan import ExperimentPlan
from abrun.messages.codes import Code, Reason
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import BASELINE

RATIO_LOSSES = ("gspo", "cispo")  # differ from a policy gradient only by their importance ratio
CLIPPING = ("clip_low", "clip_high", "dual_clip", "value_clip_range")


def find_ineffective_settings(plan: ExperimentPlan) -> list[Reason]:
    """Return a reason for each setting without effect, with the arms that have it.

    With one update per step, the importance ratio is 1 where the gradient is taken, and nothing is clipped.
    For the default loss and clip range that is common and not reported. It is reported for a loss that is
    chosen for its ratio, for clip ranges that a recipe states, and for arms that differ in nothing else: up
    to rounding, all losses of the GRPO family then have the same gradient, if the tokens of a sequence share
    one advantage and weight.
    """
    arms_of: dict[Reason, list[str]] = {}
    for arm, settings in _select_one_update(plan).items():
        for reason in _find_ineffective_clipping(settings):
            arms_of.setdefault(reason, []).append(arm)
    inert = [Code.ARMS_WITHOUT_EFFECT(arms=arms, problem=reason) for reason, arms in arms_of.items()]
    return [*inert, *_find_equal_arms(plan), *_find_commands_without_seed(plan)]


def _find_commands_without_seed(plan: ExperimentPlan) -> Iterator[Reason]:
    """Yield a reason for the arms whose command line is the same for every seed."""
    configs = {run.name.arm: run.config for run in plan.runs}
    arms = [
        arm
        for arm, config in configs.items()
        if isinstance(config, CommandRunConfig) and not config.trainer.uses_seed
    ]
    if arms and len(plan.recipe.seeds) > 1:
        yield Code.COMMANDS_WITHOUT_SEED(arms=arms)


def _select_one_update(plan: ExperimentPlan) -> dict[str, PolicyGradientSettings]:
    algorithms = {
        run.name.arm: getattr(run.config, "algorithm", None) for run in plan.runs if not run.is_control
    }
    return {
        arm: settings
        for arm, settings in algorithms.items()
        if isinstance(settings, PolicyGradientSettings) and settings.num_updates == 1
    }


def _find_ineffective_clipping(settings: PolicyGradientSettings) -> Iterator[Reason]:
    loss, fields = getattr(settings, "loss", None), type(settings).model_fields
    changed_fields = [
        name for name in CLIPPING if name in fields and getattr(settings, name) != fields[name].default
    ]
    if loss in RATIO_LOSSES:
        yield Code.LOSS_NEVER_CLIPS(loss=loss)
    elif changed_fields:
        yield Code.CLIPPING_WITHOUT_EFFECT(
            settings={name: getattr(settings, name) for name in changed_fields}
        )


def _find_equal_arms(plan: ExperimentPlan) -> Iterator[Reason]:
    one_update = _select_one_update(plan)
    for arm, changes in plan.treatment_diff.items():
        if not {arm, BASELINE} <= one_update.keys():
            continue
        clipping_keys = {f"algorithm.{name}" for name in CLIPPING}
        baseline = one_update[BASELINE]
        is_per_token = baseline.importance_correction or baseline.kl_in == "reward_to_go"
        if changes.keys() <= (clipping_keys if is_per_token else clipping_keys | {"algorithm.loss"}):
            yield Code.ARM_EQUALS_BASELINE(arm=arm, keys=[*changes])
