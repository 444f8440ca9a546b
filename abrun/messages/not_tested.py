"""Sentences on what a comparison leaves out, and on what it did not test."""

from abrun.messages.message import Message
from abrun.reasons import Code

_MOST_LISTED = 4


def how_to_rerun(has_recipe: bool) -> str:
    return "controls.aa_reruns" if has_recipe else "names that end in -aa1"


def _step_one_not_settled(
    metric: str,
    seed: int,
    deviation: float,
    scale: float,
    scale_from: str,
    tolerance: float,
    tolerance_from: str,
    raised_by_rounding: bool,
    has_recipe: bool,
) -> str:
    """Say that a first step neither agrees nor shows a fault, and what would settle it."""
    seen = (
        f"step one of {metric}: in seed {seed} it deviates by {deviation:.2g} of {scale_from} ({scale:.3g})"
    )
    limit = f"{tolerance:.2g} ({tolerance_from})"
    reruns = how_to_rerun(has_recipe)
    if tolerance >= 1:
        return f"{seen}, and {limit} allows anything: more reruns narrow it ({reruns})"
    # Of what rounding raises, the baseline's reruns say nothing
    settling = "one step in float32" if raised_by_rounding else f"reruns where they differ ({reruns})"
    settles = f"{'compare.step_one_tolerance, or ' * has_recipe}{settling}"
    return f"{seen}, beyond {limit}, and nothing says how far rounding takes it here: give {settles}"


def _token_error_not_measured(metric: str, recorded: bool) -> str:
    why = f"{metric} is not a number at any step of any run" if recorded else f"{metric} is not recorded"
    return f"agreement of trainer and rollout engine: {why}"


def _not_paired(num_shared_seeds: int) -> str:
    seeds = f"{num_shared_seeds} seed{'s' * (num_shared_seeds > 1)} of both arms not paired, as asked"
    shared = f" ({seeds})" if num_shared_seeds else ""
    return f"how the arms part step by step, and from their first one: they are unpaired{shared}"


def _no_reruns(has_recipe: bool) -> str:
    return f"divergence against the noise floor: no A/A reruns ({how_to_rerun(has_recipe)})"


def _rare_failures(num_runs: int, paired: bool, rate: float) -> str:
    runs = f"{num_runs} {'seed' if paired else 'treated run'}{'s' * (num_runs != 1)}"
    return f"rare failures: {runs} can miss a failure rate of up to {100 * rate:.0f} % (95 % bound)"


def _no_fault_planted(faults: list[str], can_plant: bool) -> str:
    beside = f" beside {', '.join(faults)}" if faults else ""
    return f"what it would have caught: no fault was planted{beside}{' (abrun sensitivity)' * can_plant}"


def _other_conditions(first: int, last: int, has_recipe: bool) -> str:
    made = "this recipe, these seeds" if has_recipe else "these runs' configurations, seeds"
    return f"anything but {made} and steps {first}-{last}"


def _excluded(runs: list[str], partners: list[str]) -> str:
    also = f", and with them {', '.join(partners)}" if partners else ""
    return f"left out by --exclude: {', '.join(runs)}{also}"


def _seeds_left_out(seeds: list[int], broken: list[str]) -> str:
    more = f" and {len(broken) - _MOST_LISTED} more" if len(broken) > _MOST_LISTED else ""
    endings = f" ({', '.join(broken[:_MOST_LISTED])}{more})" if broken else ""
    return f"left out by --seeds: seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}{endings}"


def _counter_restarted(runs: list[str], num_repeated: int, num_steps: int) -> str:
    others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return (
        f"the step counter begins anew in {runs[0]}{others} ({num_repeated} of {num_steps} steps are there "
        "twice): the last values count, and step one of such a run is not read"
    )


NOT_TESTED = {
    Code.STEP_ONE_NOT_SETTLED: Message(
        _step_one_not_settled, meaning="a first step deviates by more than rounding does as a rule"
    ),
    Code.STEP_ONE_NOT_READ: Message("step one: {why}"),
    Code.RUNS_DO_NOT_SAY: Message("the runs do not say: {missing:list}"),
    Code.OTHER_CODE: Message("whether the different code of the runs changes their numbers"),
    Code.TOKEN_ERROR_NOT_MEASURED: Message(
        _token_error_not_measured, meaning="no run measures trainer against rollout engine"
    ),
    Code.NOT_PAIRED: Message(_not_paired, meaning="unpaired runs show no divergence from step to step"),
    Code.REFERENCE_SEEDS_UNUSED: Message(
        "{seeds:plural seed} {seeds:list} of the reference: without a later run"
    ),
    Code.ULP_RUN_NOT_FINISHED: Message(
        "what one ULP grows into: {run} did not finish ({why}): launch with --resume"
    ),
    Code.NO_RERUNS: Message(_no_reruns, meaning="no same-seed rerun shows the noise floor"),
    Code.LEARNING_NOT_RECORDED: Message(
        "whether the baseline learned: no reward, accuracy or supervised loss is recorded"
    ),
    Code.RARE_FAILURES: Message(_rare_failures, meaning="a failure rate that so few runs can miss"),
    Code.NO_MARGIN: Message("whether the arms converge alike: no claim has a margin"),
    Code.LEARNING_NOT_CHECKED: Message(
        "whether the baseline learned anything: `climbs: false` is declared for {metrics:list}"
    ),
    Code.NO_FAULT_PLANTED: Message(_no_fault_planted, meaning="no fault was planted in the baseline"),
    Code.METRICS_WITHOUT_CLAIM: Message("{num_metrics:count other metric}: recorded, without a claim"),
    Code.OTHER_CONDITIONS: Message(_other_conditions, meaning="other recipes, seeds and steps"),
}
LEFT_OUT = {
    Code.EXCLUDED: Message(_excluded, meaning="runs that --exclude leaves out"),
    Code.SEEDS_LEFT_OUT: Message(_seeds_left_out, meaning="seeds that --seeds leaves out"),
    Code.START_LEFT_OUT: Message(
        "left out as an interrupted start: {place} ({run}, steps {first}-{last}), which {repeated_by} repeats"
    ),
    Code.COUNTER_RESTARTED: Message(_counter_restarted, meaning="a run's step counter begins anew"),
}
MESSAGES = {**NOT_TESTED, **LEFT_OUT}
