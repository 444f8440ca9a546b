"""The next steps suggested after a verdict: for each situation its sentences and commands ready to paste."""

import math
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from abrun.logs.recorded.experiment import RecordedExperiment, no_shared_step_reason
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.messages.numbers import AT_OBSERVED, direction_text, listed, plural, sample_unit
from abrun.recipe.extras import missing_package
from abrun.report.commands import (
    COMPARE_WITH_REFERENCE,
    LAUNCH_COMMANDS,
    UNPAIRED,
    claim_options,
    comparison_options,
    experiment_argument,
    fill_placeholders,
    folder_name,
    join_numbers,
    relative_path,
    with_claims,
)
from abrun.report.facts import ENGINE_ERRORS, Facts
from abrun.runs.experiment import open_experiment
from abrun.runs.files import is_directory
from abrun.runs.layout import RunName
from abrun.runs.redaction import display_safe
from abrun.runs.rundir import RunDir
from abrun.verdict.description import build_claim
from abrun.verdict.machines import versions_follow_arms
from abrun.verdict.outcomes import planned_improvement
from abrun.verdict.results import ClaimResult
from abrun.verdict.verdict_file import VerdictFile

MAX_STEPS = 2
COMPARE = "abrun compare RUNS"


@dataclass(frozen=True, slots=True)
class NextStep:
    """A suggestion and its command. RUNS stands for unknown compared runs, NEW for runs to be made."""

    text: str
    command: str


def next_steps(
    experiment: RecordedExperiment, content: VerdictFile, typed: str | None = None
) -> list[NextStep]:
    """Return one or two next steps, the most useful first. `typed` is the command line of the comparison."""
    facts, words = Facts(experiment, content), shlex.split(typed or "")
    steps = []
    for step in islice(suggest_steps(facts), MAX_STEPS):
        command = fill_placeholders(step.command, experiment, words)
        steps.append(replace(step, command=display_safe(install_trainer(facts, command) + command)))
    return steps


def suggest_steps(facts: Facts) -> Iterator[NextStep]:
    """Yield all steps in order. They depend on who made the runs, and on whether there are claims."""
    content = facts.content
    if content.select("seed noise"):
        return after_one_arm(facts)
    if content.verdict != "INVALID" and any(claim.claim.unit == "prompt" for claim in content.claims):
        return iter([train_two_each(facts)])
    match content.verdict:
        case "MATCH" | "PASS":
            return after_match(facts)
        case "MISMATCH" | "FAIL":
            return after_mismatch(facts) if facts.launched else after_mismatch_of_others(facts)
        case "INVALID":
            return after_invalid(facts) if facts.launched else after_invalid_of_others(facts)
    if facts.experiment.regression:
        return while_open_with_reference(facts)
    if not facts.launched:
        return while_open_of_others(facts)
    return while_open(facts) if content.claims else while_unclaimed(facts)


# --- one function per situation: a rule that returns ends the search ---


def after_match(facts: Facts) -> Iterator[NextStep]:
    experiment = facts.experiment
    if facts.content.post_hoc and not is_confirmation(experiment):
        text = "Declare the claim, and test it" if facts.launched else "Test the claim"
        yield on_fresh_seeds(f"{text} on fresh seeds", experiment)
    elif experiment.can_inject and not facts.content.select("injected fault"):
        text = "Measure which bugs this comparison would catch, by injecting faults into the baseline"
        yield NextStep(text, "abrun faults run RECIPE")
    if experiment.regression and facts.launched:
        launch = "abrun launch RECIPE --name NEW --no-compare"
        yield NextStep("Launch it again after the next change", f"{launch} && {COMPARE_WITH_REFERENCE}")
    elif experiment.regression:
        text = "Compare the runs of the next change with this reference, too"
        yield NextStep(text, COMPARE_WITH_REFERENCE)
    # A reference keeps only the claims. Later runs are compared with it seed by seed, step one included.
    elif facts.is_declared or (facts.content.paired and experiment.compare.step_one):
        yield NextStep("Compare later versions with these runs", save_reference(facts))


def after_mismatch(facts: Facts) -> Iterator[NextStep]:
    experiment = facts.experiment
    if any(guard["guard"] == "finished" for guard in facts.failed_guards):
        yield NextStep("See how the failed runs ended", f"abrun status {experiment_argument(experiment)}")
    if facts.has_engine_mismatch and facts.has_initial_weights:
        yield NextStep("Find out why trainer and rollout engine differ", measure_mismatch(facts))
    if facts.failed_checks and facts.can_trace:
        yield NextStep("Find the first tensor in which the arms differ", trace_arms(facts))
    if not experiment.regression and facts.has_completions:
        yield NextStep("Compare completions side by side", show_completions(facts))
    if not is_confirmation(experiment):
        yield on_fresh_seeds("Confirm it on fresh seeds", experiment)


def after_mismatch_of_others(facts: Facts) -> Iterator[NextStep]:
    if facts.redefined_metrics and facts.claimable:
        text = f"Claim a metric that both arms define alike ({origin_of_margin(facts)})"
        claimed = with_claims(facts.experiment, [build_claim(facts.claimable)])
        yield NextStep(text, f"{COMPARE}{claim_options(claimed)}")
        return
    if facts.failed_checks and not (facts.failed_guards or facts.failed_claims):
        text = "If the arms saw different prompts, step one is meaningless: leave it out"
        yield NextStep(text, f"{COMPARE} --no-step-one")
    if not is_confirmation(facts.experiment):
        yield on_fresh_seeds("Confirm it on fresh seeds", facts.experiment)


def while_open(facts: Facts) -> Iterator[NextStep]:
    experiment = facts.experiment
    if facts.content.select("description"):
        yield on_fresh_seeds("Three or more seeds can decide", experiment, 3)
        return
    if facts.waiting_arms - facts.arms_with_open_checks:
        text = "An interim analysis is still to come: let its pairs finish"
        yield NextStep(text, resume_launch(experiment))
        return
    if needed := facts.runs_of_a_spread:
        text = f"Test the spread on fresh seeds: it needs at least {needed} pairs"
        yield on_fresh_seeds(text, experiment, needed)
        return
    if facts.has_untestable_claims:
        yield train_longer(experiment, " (see the reasons)")
    if facts.arms_with_open_checks and facts.is_float32_conclusive:
        options = f"--set steps=1 --set 'controls={{}}' --name {folder_name(experiment, '-float32')}"
        yield NextStep(TRAIN_IN_FLOAT32, f"abrun launch RECIPE --set policy.dtype=float32 {options}")
    if facts.arms_with_open_checks:
        yield declare_tolerances(facts)
    if facts.undecided_claims:
        needed, num_pairs = pairs_that_decide(facts)
        if num_pairs is None:
            yield NextStep(f"{needed}; plan with a wider margin", plan_command(experiment))
        else:
            yield on_fresh_seeds(needed, experiment, num_pairs)
    elif facts.replacement_claims:
        yield replace_claims(facts)
    elif not (facts.has_untestable_claims or facts.arms_with_open_checks):
        yield on_fresh_seeds("Train fresh seeds to see whether it was chance", experiment)


def while_unclaimed(facts: Facts) -> Iterator[NextStep]:
    """Without a claim, no number of seeds gives a verdict."""
    if reason := facts.nothing_shown:
        yield train_longer(facts.experiment, f" ({sentence(reason)})")
        return
    description = facts.claimable
    if description is None:
        text = "Declare which metric has to agree, and how closely"
        claims = "compare.claims=[{metric: METRIC, margin: MARGIN}]"
        yield NextStep(text, f"abrun power RECIPE --set '{claims}'")
        return

    has_several_runs, runs_needed = description["interval"] is not None, description["runs_needed"]
    num_pairs = max(3, runs_needed or 3)
    claimed = with_claims(facts.experiment, [build_claim(description)])
    if runs_needed is not None or not has_several_runs:
        text = f"Declare a margin that you accept ({origin_of_margin(facts)}), and test it on "
        text += "fresh seeds"
        if has_several_runs and not description["detected"]:
            text += f": {num_pairs} {sample_unit(paired=description['paired'])} {WITH_POWER}, if {EQUAL_ARMS}"
        yield on_fresh_seeds(text, claimed, num_pairs)
    if has_several_runs:
        yield NextStep("Or first plan the number of seeds", plan_command(claimed))


def while_open_with_reference(facts: Facts) -> Iterator[NextStep]:
    """A reference can only be paired with runs of its own seeds."""
    yield from settle_step_one(facts)
    # The seeds of the reference, and those of the runs compared with it
    reference_seeds, run_seeds = facts.reference_seeds
    seeds_left = sorted(reference_seeds - run_seeds)
    if not facts.content.claims:
        text = "The reference has no claim: say which metric has to agree, and how closely"
        yield NextStep(text, f"{COMPARE} --claim METRIC:WINDOW:MARGIN")
    elif len(seeds_left) > 1:
        seeds, named = join_numbers(seeds_left), listed(seeds_left)
        text = f"Train the remaining seeds of the reference ({named}), then compare only those"
        launch = f"abrun launch RECIPE --seeds {seeds} --name NEW --no-compare && {COMPARE_WITH_REFERENCE}"
        yield NextStep(text, launch if facts.launched else f"{COMPARE} --seeds {seeds}")
    elif seeds_left:
        seeds = join_numbers(sorted(reference_seeds | run_seeds))
        text = f"Train the remaining seeds of the reference, too ({seeds_left[0]}), then compare again"
        launch = ""
        if facts.launched:
            name = folder_name(facts.experiment)
            launch = f"abrun launch RECIPE --seeds {seeds} --name {name} --resume --no-compare && "
        yield NextStep(text, f"{launch}{COMPARE}")
    elif facts.has_untestable_claims:
        yield repair(facts)
    else:
        yield on_fresh_seeds("Train more pairs to narrow the interval", facts.experiment)


def while_open_of_others(facts: Facts) -> Iterator[NextStep]:
    """Suggest fresh runs: repeating a test on the same runs inflates its error rate."""
    yield from settle_step_one(facts)
    content, experiment = facts.content, facts.experiment
    described = content.select("description")
    if needed := facts.runs_of_a_spread:
        unit = sample_unit(paired=content.paired)
        text = f"Train more, for at least {needed} {unit}, then compare again"
        yield NextStep(text, COMPARE)
        return
    if content.select("new run") and not facts.waiting_arms:
        text = "For a verdict, train at least two more runs of the arm that has one"
        yield NextStep(text, COMPARE)
        return
    if facts.replacement_claims and not described:
        yield replace_claims(facts)
    if facts.waiting_arms:
        yield reach_next_analysis(facts)
    elif described:
        if not content.claims:
            yield claim_what_was_described(facts)
        if max(described[0]["num_runs"]) == 1:
            yield train_two_each(facts)
    elif not (content.claims or any(run.unread for run in experiment.runs.values())):
        text = "Map metrics that mean the same"
        yield NextStep(text, f"{COMPARE} --alias train/reward=NAME")
    elif facts.has_untestable_claims or not content.claims:
        yield repair(facts)
    elif not facts.undecided_claims:
        yield on_fresh_seeds("Decide it with fresh seeds", experiment)
    else:
        needed, num_pairs = pairs_that_decide(facts)
        beyond = "; see whether fresh seeds show a mismatch" * (num_pairs is None)
        yield on_fresh_seeds(f"{needed}{beyond}", experiment, num_pairs)


def claim_what_was_described(facts: Facts) -> NextStep:
    """Suggest a claim on the first described metric, or say why none can be tested."""
    if facts.claimable is None:
        why = f" ({sentence(facts.claim_problem)})" if facts.claim_problem else ""
        text = f"No claim could be tested on these runs{why}: log what they learn, or train others"
        return NextStep(text, "abrun compare NEW NEW")
    text = f"Claim that they agree within a margin that you accept ({origin_of_margin(facts)})"
    claimed = with_claims(facts.experiment, [build_claim(facts.claimable)])
    unpaired = "" if facts.content.paired else UNPAIRED
    runs = [reason["run"] for reason in facts.claimable["left_out"]]
    return NextStep(text, f"{COMPARE}{unpaired}{exclude_options(runs)}{claim_options(claimed)}")


def after_one_arm(facts: Facts) -> Iterator[NextStep]:
    """One arm alone was described, or has claims on its level, which more of its runs may decide."""
    content, directory = facts.content, facts.experiment.directory
    metrics = content.select("seed noise")
    is_level_open = any(claim.result == "undecided" for claim in content.claims)
    if content.verdict == "INVALID":
        yield NextStep(FIX, "abrun compare NEW")
    elif is_level_open or all(noise["gap"] is None or len(noise["levels"]) < 3 for noise in metrics):
        text = "Train at least two more runs of this arm with other seeds, then measure again"
        yield NextStep(text, COMPARE)
    else:
        source = shlex.quote(str(relative_path(directory))) if directory else "RUNS"
        claims = claim_options(facts.experiment)
        yield NextStep("Compare runs of a change with these", f"abrun compare {source} NEW{claims}")


def after_invalid(facts: Facts) -> Iterator[NextStep]:
    experiment = facts.experiment
    if started := [run for run in facts.unfinished_runs if run.status != "missing"]:
        run = run_argument(experiment, started[0].name)
        yield NextStep("See how the first of them ended", f"abrun logs {run}")
    if facts.unfinished_runs:
        yield NextStep("Continue the runs that did not finish", resume_launch(experiment))
        return
    # Launching again with the wrong alias would lose the metric again.
    if facts.is_claim_unrecorded and facts.suggested_aliases:
        text = "Compare the same runs under the metric name that they log"
        yield NextStep(text, compare_with_aliases(facts))
    elif facts.is_claim_unrecorded and facts.replacement_claims:
        yield replace_claims(facts)
    # No change of the recipe repairs directories that were swapped or copied.
    if facts.has_misplaced_runs:
        yield repair(facts)
        return
    text = "Fix what makes the comparison invalid (in the recipe, or with --set), then check the plan"
    yield NextStep(f"{text} with a dry run", "abrun launch RECIPE --dry-run")


def after_invalid_of_others(facts: Facts) -> Iterator[NextStep]:
    if versions_follow_arms(facts.experiment):
        text = "If you compare versions, declare them as the treatment"
        yield NextStep(text, f"{COMPARE} --versions-differ")
    if facts.can_unpair and facts.shared_seeds:
        text = "Compare only the seeds that both arms have"
        yield NextStep(text, f"{COMPARE} --seeds {join_numbers(facts.shared_seeds)}")
    elif facts.can_unpair:
        yield NextStep("Compare them as independent runs", f"{COMPARE}{UNPAIRED}")
    elif no_shared_step_reason([*facts.experiment.runs.values()]):
        text = "If another column has the steps of all runs, name it"
        yield NextStep(text, f"{COMPARE} --step-column NAME")
    yield repair(facts)


# --- steps and sentences of several situations ---

TRAIN_IN_FLOAT32 = (
    "Train one step in float32, where rounding errors stay below 1e-4, to tell rounding from a fault"
)
FIX = "Repair the runs that the reasons name, then compare the repaired ones"
FRESH = "-fresh"
EQUAL_ARMS = "the arms are truly equal"
WITH_POWER = f"give 80 % power {AT_OBSERVED}"


def repair(facts: Facts) -> NextStep:
    """Leave out the runs that make the comparison invalid, if pairs remain; or else compare others."""
    if facts.experiment.regression:
        return NextStep(FIX, COMPARE_WITH_REFERENCE)
    if runs := facts.excludable_runs:
        text = f"Leave out the {plural(runs, 'run')} that the reasons name"
        return NextStep(text, f"{COMPARE}{exclude_options(runs)}")
    return NextStep(FIX, f"abrun compare NEW NEW{claim_options(facts.experiment)}")


def is_confirmation(experiment: RecordedExperiment) -> bool:
    """Return True for fresh seeds of an earlier comparison: an experiment of their own, or the highest."""
    if experiment.directory:
        return experiment.name.endswith(FRESH)
    earlier = [reason["seeds"] for reason in experiment.left_out if reason.code == Code.SEEDS_LEFT_OUT]
    return any(max(seeds) < min(name.seed for name in experiment.runs) for seeds in earlier)


def on_fresh_seeds(text: str, experiment: RecordedExperiment, num_pairs: int | None = None) -> NextStep:
    """Compare seeds that no interim analysis has used, as many as there were unless more are needed.

    The text says how to get the runs, if the command does not.
    """
    seeds = [name.seed for runs in (experiment.runs, experiment.controls) for name in runs]
    seeds += [int(seed) for run in experiment.unselected for seed in re.findall(r"/seed-(\d+)", run)]
    first_seed = 1 + max(seeds, default=-1)
    count = num_pairs or max([1, *(len(experiment.arm(arm)) for arm in experiment.treatments)])
    seeds = f"{first_seed}-{first_seed + count - 1}"
    if experiment.regression:
        file = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', experiment.name).strip('-')}-fresh.json"
        return NextStep(
            f"{text}: the reference has none, so train its arm on seeds {seeds} and save it as a reference",
            f"abrun reference save NEW{claim_options(experiment)} --output {file}",
        )
    if experiment.directory:
        options = f"--seeds {seeds}{comparison_options(experiment, count)}"
        name = folder_name(experiment, FRESH)
        command = f"abrun launch RECIPE {options} --name {name}"
        if experiment.launched_baseline:
            command += f" --no-compare && abrun compare {name} --baseline {shlex.quote(experiment.baseline)}"
        return NextStep(text, command)
    if not experiment.seeds_known:
        return NextStep(
            f"{text}: train {count} more runs of each arm into new folders, and compare only those",
            f"abrun compare NEW NEW --unpaired{claim_options(experiment)}",
        )
    return NextStep(
        f"{text}: train both arms on seeds {seeds} next to these runs, then compare only the new ones",
        f"{COMPARE} --seeds {seeds}",
    )


def settle_step_one(facts: Facts) -> Iterator[NextStep]:
    """Yield what tells rounding from a fault, for runs that abrun did not launch."""
    if facts.arms_with_open_checks:
        text = (
            "Train one step in float32, where rounding cannot explain it; if rounding was the cause, leave "
            "step one out"
        )
        yield NextStep(text, f"{COMPARE} --no-step-one")


def train_two_each(facts: Facts) -> NextStep:
    same_seeds = ", with the same seeds in both" * facts.content.paired
    return NextStep(f"Train at least two more runs of each arm{same_seeds}, then compare again", COMPARE)


def train_longer(experiment: RecordedExperiment, why: str) -> NextStep:
    text = f"These runs could not show a difference{why}; if they were too short, train longer"
    grid = experiment.all_steps()
    num_steps = 2 * int(grid[-1]) if len(grid) else 1
    options = f"--set steps={num_steps}{comparison_options(experiment)} {stage_options(experiment)}"
    return NextStep(text, f"abrun launch RECIPE {options}--name {folder_name(experiment, '-longer')}")


def declare_tolerances(facts: Facts) -> NextStep:
    """Declare step-one tolerances that these runs would have met; other metrics stay untested.

    The largest deviation of 5 fresh pairs is beyond 1.25 times that of these 1 time in 3.
    """
    experiment, checks = facts.experiment, facts.content.select("step one")
    declared = experiment.compare.step_one_tolerance
    tolerances = {**declared} if isinstance(declared, dict) else {}
    for check in checks:
        if check.result == "open":
            tolerances[check["metric"]] = math.ceil(125 * check["deviation"]) / 100
    # Their deviation cannot be distinguished from noise
    untested = dict.fromkeys(check["metric"] for check in checks if check.result == "not tested")
    untested = [metric for metric in untested if metric not in tolerances]
    text = "If it was rounding, declare a tolerance for it and test on fresh seeds"
    if untested:
        text += f" (left untested, because fresh seeds may round differently: {listed(untested)})"
    compare = experiment.compare.model_copy(update={"step_one_tolerance": tolerances})
    num_pairs = max((claim.power.pairs_needed or 0 for claim in facts.undecided_claims), default=0)
    return on_fresh_seeds(text, replace(experiment, compare=compare), num_pairs or None)


def replace_claims(facts: Facts) -> NextStep:
    """Claim only what these runs can show."""
    text = "Leave out the claims that these runs cannot show"
    if not facts.testable_claims:
        margin = origin_of_margin(facts)
        text = f"Claim what these runs can show, within a margin that you accept ({margin})"
    experiment = with_claims(facts.experiment, facts.replacement_claims)
    if facts.launched:
        return on_fresh_seeds(f"{text}, and use fresh seeds", experiment)
    return NextStep(text, f"{COMPARE}{claim_options(experiment)}")


def reach_next_analysis(facts: Facts) -> NextStep:
    """Train the pairs of the next declared analysis, on seeds after those of the arm with most pairs."""
    experiment, interim = facts.experiment, facts.experiment.compare.interim
    seeds = max(([pair.seed for pair in experiment.pairs(arm)] for arm in experiment.treatments), key=len)
    num_pairs = next(count for count in interim if count > len(seeds))
    new_seeds = [max(seeds) + 1 + index for index in range(num_pairs - len(seeds))]
    named = f"{plural(new_seeds, 'seed')} {join_numbers(new_seeds)}"
    text = f"An interim analysis is still to come: train both arms on {named}"
    options = f"--seeds {join_numbers([*seeds, *new_seeds])} --interim {join_numbers(interim)}"
    return NextStep(text, f"{COMPARE} {options}")


def pairs_that_decide(facts: Facts) -> tuple[str, int | None]:
    """Return a sentence on the fresh pairs that would decide the undecided claims, and their number."""
    undecided, unit = facts.undecided_claims, sample_unit(paired=facts.content.paired)
    needed = [claim.power.pairs_needed for claim in undecided if claim.power.pairs_needed is not None]
    if any(map(_is_beyond_margin, undecided)):
        return f"No number of {unit} shows this margin if the observed difference is the true one", None
    if needed and all(claim.estimate.limited == 0 and claim.estimate.diverged for claim in undecided):
        return f"{max(needed)} {unit} show this rate if none of them diverges", max(needed)
    if any(claim.estimate.limited is not None or claim.estimate.diverged for claim in undecided):
        count = 4 * max(undecided[0].claim.num_runs or [undecided[0].claim.num_pairs])
        return f"Four times as many {unit} halve the interval that a limit is tested with", count
    if len(needed) < len(undecided):
        return f"This margin takes more than 1000 {unit}", None

    count = max(needed)
    observed = [claim.power.pairs_needed_observed for claim in undecided]
    if_differing = None if None in observed else max(filter(None, observed), default=None)
    differing = [claim for claim in undecided if claim.estimate.detected and claim.claim.kind != "better"]
    if differing and if_differing:  # not equal, so that equal arms are no plan
        return f"{if_differing} {unit} {WITH_POWER}, if they differ as they do here", if_differing
    gains = [planned_improvement(claim) for claim in undecided if claim.claim.kind == "better"]
    truths = [EQUAL_ARMS] * (len(gains) < len(undecided))
    if gains:
        truths.append(f"the true gain is {' or '.join(sorted({f'{gain:.3g}' for gain in gains}, key=float))}")
    text = f"{count} {unit} {WITH_POWER}, if {' or '.join(truths)}"
    if if_differing and count < if_differing:
        text += f" ({if_differing}, if they differ as they do here)"
    return text, count


def _is_beyond_margin(claim: ClaimResult) -> bool:
    """Return True if no number of pairs shows the claim at the detected difference."""
    estimate, margin = claim.estimate, claim.claim.margin
    if claim.claim.kind in ("not_worse", "better"):
        return estimate.detected is not None and claim.power.pairs_needed_observed is None
    if estimate.interval is None or estimate.mean_difference is None or margin is None:
        return False
    low, high = estimate.interval
    is_detected = claim.claim.margin_unit != "sigma" and not low <= 0 <= high
    return is_detected and abs(estimate.mean_difference) >= margin


def origin_of_margin(facts: Facts) -> str:
    """Return how the suggested margin comes from the baseline, and a detected difference of these runs."""
    description = facts.claimable
    assert description
    origin = f"suggested here: {sentence(description['margin_is'])}"
    detected, bound, margin = (description[key] for key in ("detected", "certified_bound", "margin"))
    if detected is None or len(facts.experiment.treatments) > 1:
        return origin
    direction = direction_text(detected, description.arm, facts.experiment.baseline)
    difference = f"{detected['difference']:+.3g}, {direction}"
    if bound is not None and margin is not None and bound < margin:
        return (
            f"{origin}, but these runs pass it although they differ by {difference}: choose the margin by "
            "the loss that you accept"
        )
    return f"{origin}; the runs differ by {difference}"


# --- commands ---


def exclude_options(runs: Iterable[str]) -> str:
    return "".join(f" --exclude {shlex.quote(run)}" for run in dict.fromkeys(runs))


def plan_command(experiment: RecordedExperiment) -> str:
    return f"abrun power RECIPE{comparison_options(experiment)} --from {experiment_argument(experiment)}"


def resume_launch(experiment: RecordedExperiment) -> str:
    return f"abrun launch RECIPE {stage_options(experiment)}--name {folder_name(experiment)} --resume"


def stage_options(experiment: RecordedExperiment) -> str:
    """An experiment with interim analyses is launched in stages, however it was begun."""
    interim = experiment.compare.interim
    return f"--until-decided --max-seeds {interim[-1]} " if interim else ""


def save_reference(facts: Facts) -> str:
    experiment = facts.experiment
    name = experiment_argument(experiment)
    source, stem = (name, folder_name(experiment)) if facts.launched else ("RUNS", name)
    claims = "" if facts.is_declared else claim_options(experiment)
    return f"abrun reference save {source}{claims} --output {stem}.json"


def compare_with_aliases(facts: Facts) -> str:
    experiment = facts.experiment
    assert experiment.directory
    path = relative_path(experiment.directory)
    words = [shlex.quote(f"{arm}={path}/{arm}") for arm in experiment.arms]
    for metric, logged_name in facts.suggested_aliases.items():
        words += ["--alias", shlex.quote(f"{metric}={logged_name}")]
    return f"abrun compare {' '.join(words)}{claim_options(experiment)}"


def measure_mismatch(facts: Facts) -> str:
    # The weights before the update of the failed step; without a checkpoint, the initial ones
    steps = [check["step"] - 1 for check in facts.failed_checks if check["metric"] in ENGINE_ERRORS]
    name = facts.first_failing_run
    run = facts.experiment.runs.get(name)
    if run is None or not is_directory(RunDir(Path(run.place)).checkpoints):
        steps.append(0)
    step_option = f" --step {steps[0]}" if steps else ""
    return f"abrun logprob-diff {run_argument(facts.experiment, name)}{step_option}"


def trace_arms(facts: Facts) -> str:
    check = facts.failed_checks[0]
    arm = f" --arm {shlex.quote(check.arm)}" if len(facts.experiment.treatments) > 1 else ""
    return f"abrun trace RECIPE{arm}" + (f" --step {check['step']}" if check["step"] > 1 else "")


def show_completions(facts: Facts) -> str:
    step = f" --step {facts.failed_checks[0]['step']}" if facts.failed_checks else ""
    experiment, name = facts.experiment, facts.first_failing_run
    baseline_run = f"{experiment_argument(experiment)}/{experiment.baseline}/seed-{name.seed}"
    return f"abrun completions {run_argument(experiment, name)} --against {baseline_run}{step}"


def run_argument(experiment: RecordedExperiment, name: RunName) -> str:
    """Return a run as a word of a command; against a reference, where its arm has another name, as a path."""
    if experiment.regression and name in experiment.runs:
        return shlex.quote(str(relative_path(Path(experiment.runs[name].place))))
    return f"{experiment_argument(experiment)}/{shlex.quote(str(name))}"


def install_trainer(facts: Facts, command: str) -> str:
    """Return the command that must precede one that trains on this machine: empty if nothing is missing."""
    name, directory = command.split()[1], facts.experiment.directory
    trains = name in ("trace", "logprob-diff")
    if name in LAUNCH_COMMANDS and directory:
        launcher = open_experiment(directory)["recipe"].get("launcher") or {}
        trains = launcher.get("type", "local") == "local"
    is_lacking = trains and facts.is_own_trainer and missing_package("train")
    return "pip install 'abrun[train]' && " if is_lacking else ""
