"""Sentences of notes: facts that qualify a verdict, and guesses about runs."""

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.validity import first_and_more


def _counters_differ(metric, grids, late, num_shared, first, last) -> str:
    counts = ", ".join(f"{name} counts {grid['first']}-{grid['last']}" for name, grid in grids.items())
    return (
        f"{metric}: the step counters differ by one ({counts}), so at the same step {late} has made one "
        f"update fewer; {_compared_on(num_shared, first, last)}"
    )


def _grids_differ(metric, grids, averaged, num_shared, first, last) -> str:
    ranges = ", ".join(
        f"{name} {grid['first']}-{grid['last']}" + f" every {grid['every']}" * (grid["every"] > 1)
        for name, grid in grids.items()
    )
    caution = "; the runs that log less often may log averages" * averaged
    return (
        f"{metric}: recorded at different steps ({ranges}); {_compared_on(num_shared, first, last)}{caution}"
    )


def _compared_on(num_shared: int, first: int, last: int) -> str:
    return f"compared on the {num_shared} steps that all runs have ({first}-{last})"


def _trace_differs(step, seed, num_tensors, num_beyond, first, relative_error, ulps, last_agreeing) -> str:
    before = f"up to {last_agreeing} they agree" if last_agreeing else "nothing before it is compared"
    return (
        f"step {step} of seed {seed}, on the same rollouts: the arms first differ in {first}, by "
        f"{relative_error:.2g} of its size (at most {ulps:.3g} ULPs); {before}; {num_beyond} of "
        f"{num_tensors} tensors differ"
    )


POST_HOC: dict[Code, Message] = {
    Code.NOTHING_DECLARED: "no comparison was declared before these runs",
    Code.COMPARISON_CHANGED: "the comparison is not the one declared at launch",
    Code.PAIRS_ADDED: "{num_pairs} pairs were added after the launch; to analyse more than once, declare "
    "compare.interim",
    Code.CLAIMS_CHANGED: "the claims are not those declared at launch",
    Code.BASELINE_CHANGED: "{baseline} was chosen as the baseline after the launch, which declared "
    "{launched}; reruns and controls of {launched} do not count",
    Code.PAIRING_CHANGED: "the arms were compared unpaired, which was not declared at launch",
    Code.LEVEL_CHANGED: "alpha, or how many claims must hold, is not what was declared at launch",
    Code.STEP_ONE_DROPPED: "step one was left out, which was not declared at launch",
}
NOTES: dict[Code, Message] = {
    Code.NOTE_OF_RUNS: "{runs:some}: {note}",
    Code.DECIDED_AT_LAUNCH: "{decision}",
    Code.NOISE_NOT_WRITTEN: "the noise of this experiment was not added to its history: {problem}",
    Code.CODE_DIFFERS: lambda versions: (
        "the runs used different code: "
        + ", ".join(
            f"{', then '.join(group['code'])} ({first_and_more(group['runs'])})" for group in versions
        )
    ),
    Code.PRECISION_DIFFERS: lambda arm, precisions: (
        f"{arm}: "
        + ", ".join(f"{label} in {dtype} instead of {usual}" for label, (usual, dtype) in precisions.items())
    ),
    Code.ON_RECORDED_ROLLOUTS: "{arm} trained on recorded rollouts: the verdict is about the trainers on "
    "these rollouts, as far as train/token_mult_prob_error stays near the baseline's",
    Code.GPUS_SHARED: "up to {runs_per_gpu} runs shared each GPU, so their step times are not compared",
    Code.COUNTERS_DIFFER: _counters_differ,
    Code.GRIDS_DIFFER: _grids_differ,
    Code.GATE_AGE: "the oldest run of {incumbent} is {days:count day} old; if code or machine changed since, "
    "the difference may be theirs",
    Code.GATE_ENVIRONMENT: "package versions or devices of {candidate} and {incumbent} differ, so the "
    "difference may be theirs; run both in one round",
    Code.GATE_OLD_RUNS: "judged by old runs of {incumbent} alone: the error allows for an environment that "
    "moved by {moved:g} sd of a run, so fewer improvements are kept; run both in one round (--round, "
    "--control)",
    Code.SEED_NOT_KNOWN: "numbered, because its seed is unknown: {place}",
}
TRACES: dict[Code, Message] = {
    Code.TRACE_AGREES: "step {step} of seed {seed}, on the same rollouts: {num_tensors} tensors agree up to "
    "rounding{detectable_error:if ; in any of them an error of {detectable_error:.2g} of its size would have "
    "shown}{num_zero:if ; {num_zero} are zero in the baseline, where an error of scale does not show}",
    Code.TRACE_DIFFERS: _trace_differs,
    Code.TRACE_OF_OTHER_VALUES: "the trace of {arm} at step {step} is not shown: it had other values of "
    "{keys:some}; trace again",
    Code.TRACE_UNREADABLE: "the trace is not shown: {problem}; trace again",
}
GUESSED: dict[Code, Message] = {
    Code.SEEDS_FROM: "{arm:if arms and }seeds from {how}: {arm:if {arm}, }seed {seed}",
    Code.ARMS_FROM_NAMES: "each of the {num_arms} arms from the names of its runs",
    Code.NOTHING_SAYS_SEEDS: "seeds are unknown, so the runs are independent; if the names hold them, say "
    "where: --pattern '*-s{{seed}}'",
    Code.LOG_READ_AS: "{guess}",
    Code.ARMS_SHARE_NO_SEED: "the arms have no common seed, so the runs are independent",
    Code.SOURCES_ARE_ARMS: "each of the {num_sources} sources is an arm; if they are seeds of one arm, give "
    "their folder",
    Code.BASELINE_GUESSED: "the baseline is {baseline:repr} (--baseline selects another: {others})",
}
MESSAGES = {**POST_HOC, **NOTES, **TRACES, **GUESSED}
