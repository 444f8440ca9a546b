"""Sentences on properties that a comparison did not test, and on runs that it left out."""

from collections.abc import Sequence

from abrun.messages.codes import Code, Reason
from abrun.messages.message import Message
from abrun.messages.numbers import counted, deviation_text, listed, more_text, plural

_MAX_LISTED = 4


def how_to_rerun(has_recipe: bool) -> str:
    """Return how to get same-seed reruns of the baseline."""
    return "controls.aa_reruns" if has_recipe else "names that end in -aa1"


def _step_one_not_settled(
    metric, seed, deviation, scale, scale_from, tolerance, tolerance_from, raised_by_rounding, has_recipe
) -> str:
    """The step-one check is inconclusive; the sentence says what would settle it."""
    size = deviation_text(deviation, scale, scale_from)
    problem = f"step one of {metric}: in seed {seed} it deviates by {size}"
    limit = f"{tolerance:.2g} ({tolerance_from})"
    reruns = how_to_rerun(has_recipe)
    if tolerance >= 1:
        return f"{problem}, but a tolerance of {limit} allows anything; add A/A reruns ({reruns})"
    # Reruns of the baseline do not show the rounding errors of another implementation.
    remedy = "one step in float32" if raised_by_rounding else f"A/A reruns that differ ({reruns})"
    remedies = f"{'compare.step_one_tolerance, or ' * has_recipe}{remedy}"
    return (
        f"{problem}, more than {limit}, and the size of rounding errors is unknown; settle it with {remedies}"
    )


def _seeds_left_out(seeds: list[int], broken: list[str]) -> str:
    endings = listed(broken[:_MAX_LISTED]) + more_text(len(broken) - _MAX_LISTED)
    text = f"left out by --seeds: {plural(seeds, 'seed')} {listed(seeds)}"
    return f"{text} ({endings})" if broken else text


NOT_TESTED: dict[Code, Message] = {
    Code.STEP_ONE_NOT_SETTLED: _step_one_not_settled,
    Code.STEP_ONE_NOT_READ: "step one: {why}",
    Code.COMPLETIONS_SAMPLED_ANEW: "step one of {metrics:list}: each arm sampled its own completions, so a "
    "difference counts only if it is shown over all pairs",
    Code.RUNS_DO_NOT_SAY: "not recorded by the runs: {missing:list}",
    Code.OTHER_CODE: "whether the different code of the runs changes their numbers",
    Code.TOKEN_ERROR_NOT_MEASURED: "agreement of trainer and rollout engine: {metric} is {recorded:if not a "
    "number at any step of any run|not recorded}",
    Code.NOT_PAIRED: "step one and the divergence step by step: the runs are unpaired{num_shared_seeds:if , "
    "although both arms have {num_shared_seeds:count common seed}}",
    Code.SAMPLER_NOT_TESTED: "the sampler: completions, rewards and lengths are those of the recording",
    Code.REFERENCE_SEEDS_UNUSED: "{seeds:plural seed} {seeds:list} of the reference: without a later run",
    Code.ULP_RUN_NOT_FINISHED: "growth of a one-ULP perturbation: {run} did not finish ({why}); launch with "
    "--resume",
    Code.NO_RERUNS: lambda has_recipe: (
        f"divergence against the noise floor: no A/A reruns ({how_to_rerun(has_recipe)})"
    ),
    Code.LEARNING_NOT_RECORDED: "whether the baseline learned: no reward, accuracy or supervised loss is "
    "recorded",
    Code.RARE_FAILURES: lambda num_runs, paired, rate: (
        f"rare failures: 0 of {counted(num_runs, 'seed' if paired else 'treatment run')} failed, but a "
        f"failure rate of up to {100 * rate:.0f} % is still possible (95 % bound)"
    ),
    Code.NO_MARGIN: "whether the arms converge alike: no claim has a margin",
    Code.LEARNING_NOT_CHECKED: "whether the baseline learned anything: `climbs: false` is declared for "
    "{metrics:list}",
    Code.NO_FAULT_INJECTED: "which bugs this comparison would catch: no fault was injected{faults:if  "
    "besides {faults:list}}{can_inject:if  (abrun faults run)}",
    Code.METRICS_WITHOUT_CLAIM: "{num_metrics:count other metric}: recorded, but without a claim",
    Code.OTHER_CONDITIONS: "anything but {has_recipe:if this recipe, these seeds|these configurations, "
    "seeds} and steps {first}-{last}",
    Code.OTHER_SCORES: "anything but these runs and benchmarks: only their scores are recorded",
}
LEFT_OUT: dict[Code, Message] = {
    Code.EXCLUDED: "left out by --exclude: {runs:list}{partners:if , and the other arm's {partners:list}}",
    Code.SEEDS_LEFT_OUT: _seeds_left_out,
    Code.RERUNS_LEFT_OUT: "left out: {runs:list}: only A/A reruns of the baseline count",
    Code.PROMPTS_NOT_SHARED: "{metric}: {shared} of {total} prompts are in every run; the others are "
    "left out, which favours an arm that failed on hard prompts",
    Code.START_LEFT_OUT: "left out as an interrupted start: {place} ({run}, steps {first}-{last}), repeated "
    "by {repeated_by}",
    Code.COUNTER_RESTARTED: "the step counter restarts in {runs:first} ({num_repeated} of {num_steps} steps "
    "were logged twice): the last values count, and step one is not read",
}
MESSAGES = {**NOT_TESTED, **LEFT_OUT}
# Names for a summary, the most important first
SHORT_NAMES: dict[Code, str] = {
    Code.SEEDS_LEFT_OUT: "seeds left out",
    Code.EXCLUDED: "runs left out",
    Code.RERUNS_LEFT_OUT: "A/A reruns of a treatment",
    Code.STEP_ONE_NOT_SETTLED: "step one of some metrics",
    Code.STEP_ONE_NOT_READ: "step one",
    Code.COMPLETIONS_SAMPLED_ANEW: "step one, pair by pair",
    Code.NO_MARGIN: "whether the arms converge alike",
    Code.LEARNING_NOT_RECORDED: "whether the baseline learned",
    Code.LEARNING_NOT_CHECKED: "whether the baseline learned",
    Code.OTHER_CODE: "the effect of different code",
    Code.NO_FAULT_INJECTED: "which bugs would be caught",
    Code.NOT_PAIRED: "step one and the divergence",
    Code.SAMPLER_NOT_TESTED: "the sampler",
    Code.REFERENCE_SEEDS_UNUSED: "some seeds of the reference",
    Code.RARE_FAILURES: "rare failures",
    Code.TOKEN_ERROR_NOT_MEASURED: "agreement of trainer and rollout engine",
    Code.RUNS_DO_NOT_SAY: "conditions that the runs do not record",
    Code.NO_RERUNS: "divergence against the noise floor",
    Code.ULP_RUN_NOT_FINISHED: "growth of a one-ULP perturbation",
    Code.METRICS_WITHOUT_CLAIM: "metrics without a claim",
    Code.START_LEFT_OUT: "an interrupted start",
    Code.COUNTER_RESTARTED: "steps logged twice",
    Code.PROMPTS_NOT_SHARED: "prompts that some run lacks",
    Code.OTHER_CONDITIONS: "other recipes, seeds and steps",
    Code.OTHER_SCORES: "other recipes, seeds and benchmarks",
}
_MAX_NAMED = 2


def summarize_not_tested(reasons: Sequence[Reason]) -> str:
    """Return the number of reasons and the names of the most important ones, in one line."""
    ranks = {code: rank for rank, code in enumerate(SHORT_NAMES)}
    codes = sorted({reason.code for reason in reasons}, key=lambda code: ranks[code])
    names = list(dict.fromkeys(SHORT_NAMES[code] for code in codes))
    omitted = ", ..." if len(names) > _MAX_NAMED else ""
    return f"{counted(reasons, 'thing')} ({listed(names[:_MAX_NAMED])}{omitted})"
