"""What to do after a verdict: a sentence and a command for every one of them, which works when pasted."""

import difflib
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from abrun.compare.judge.assay import no_signal
from abrun.compare.judge.by_prompt import ByPrompt
from abrun.compare.judge.claims import PrimaryResult
from abrun.compare.judge.description import Description, claim_on, claimable
from abrun.compare.judge.grids import held_by_all
from abrun.compare.judge.guards import Guard
from abrun.compare.judge.machines import versions_follow_arms
from abrun.compare.judge.step_one import StepOne
from abrun.compare.judge.verdict import AT_OBSERVED
from abrun.compare.judge.verdict_file import VerdictFile
from abrun.compare.read.experiment import Experiment, no_shared_step
from abrun.compare.read.samples import samples_in
from abrun.compare.show.fresh_pairs import (
    NextStep,
    beyond_margin,
    claim_options,
    declared_options,
    folder_name,
    in_stages,
    next_look,
    pairs_that_decide,
    with_fresh_seeds,
)
from abrun.compare.show.pasted import AGAIN, UNPAIRED, WITHOUT_CLAIMS, filled, folder_of, name_of
from abrun.errors import StoreError
from abrun.metric_names import GEN_KL_ERROR, REWARD, TOKEN_MULT_PROB_ERROR
from abrun.plan import compare_hash
from abrun.recipe import Primary, units
from abrun.redaction import shown

MOST_STEPS = 2
MEND = "Mend what the reasons name, then compare again"


def next_steps(experiment: Experiment, content: VerdictFile, typed: str | None = None) -> list[NextStep]:
    """The most useful first; at least one. `typed`: the command line that asked for the comparison."""
    of = {"MATCH": _match, "MISMATCH": _mismatch, "INCONCLUSIVE": _inconclusive, "INVALID": _invalid}
    steps = islice(of[content.verdict](experiment, content), MOST_STEPS)
    words = shlex.split(typed or "")
    return [replace(step, command=shown(filled(step.command, experiment, words))) for step in steps]


def _match(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    declared = compare_hash(experiment.compare) == experiment.launched_compare_sha256
    if content.post_hoc:
        declare = "Declare the claim, and test it on fresh seeds"
        yield with_fresh_seeds(
            experiment, declare if experiment.directory else "Test the claim on fresh seeds"
        )
    elif content.sensitivity is None and experiment.can_plant:
        yield NextStep(
            text="Measure what this comparison would have caught: faults planted in the baseline",
            command="abrun sensitivity RECIPE",
        )
    if experiment.regression and experiment.directory:
        again = f"abrun launch RECIPE --name NEW && {AGAIN}"
        yield NextStep(text="Launch it again after the next change", command=again)
    elif experiment.regression:
        yield NextStep(text="Compare the runs of the next change with it, too", command=AGAIN)
    elif declared or (content.paired and experiment.compare.step_one):
        # A reference takes claims alone: later runs are compared seed by seed, their first step too
        of, file = "RUNS", f"{name_of(experiment)}.json"
        if experiment.directory:
            of, file = name_of(experiment), f"{folder_name(experiment)}.json"
        yield NextStep(
            text="Hold later versions to these runs",
            command=f"abrun freeze {of}{'' if declared else claim_options(experiment)} --output {file}",
        )


def _mismatch(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    failing = [one for one in content.guards if one.result == "fail"]
    deviating = [one for one in content.step_one if one.result == "fail"]
    differing = [one for one in content.primaries if one.result == "different"]
    if experiment.directory is None:
        if deviating and not (failing or differing):
            yield NextStep(
                text="If the arms saw other prompts, step one says nothing: leave it out",
                command="abrun compare RUNS --no-step-one",
            )
        yield with_fresh_seeds(experiment, "See whether fresh seeds say so too")
        return
    arm, seed = _of_first([*deviating, *failing, *differing], experiment)
    run = f"{name_of(experiment)}/{shlex.quote(arm)}/seed-{seed}"
    if any(one.guard == "finished" for one in failing):
        yield NextStep(text="See how the failed runs ended", command=f"abrun status {name_of(experiment)}")
    errors = {TOKEN_MULT_PROB_ERROR, GEN_KL_ERROR}
    of_engines = [one for one in deviating if one.metric in errors]
    if of_engines or any("prob_error" in one.guard or "kl_error" in one.guard for one in failing):
        before = f" --step {of_engines[0].step - 1}" if of_engines else ""  # its first update
        yield NextStep(
            text="Find what makes trainer and rollout engine differ", command=f"abrun mismatch {run}{before}"
        )
    if not experiment.regression and all(_said(experiment, one, seed) for one in (arm, experiment.baseline)):
        step = f" --step {deviating[0].step}" if deviating else ""
        other = f"{name_of(experiment)}/{experiment.baseline}/seed-{seed}"
        yield NextStep(
            text="Read what both arms said to each prompt",
            command=f"abrun samples {run} --against {other}{step}",
        )
    yield with_fresh_seeds(experiment, "See whether fresh seeds say so too")


def _said(experiment: Experiment, arm: str, seed: int) -> bool:
    """Whether a run has kept completions: none where it draws none, or failed before its first step."""
    run = experiment.arm(arm).get(seed)
    with suppress(StoreError):
        return run is not None and bool(samples_in(Path(run.place)))
    return False


def _inconclusive(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    unsettled = {one.arm for one in content.step_one if one.result == "open"}  # by any more pairs
    looks = [
        look
        for arm, section in content.arms.items()
        if section.verdict == "INCONCLUSIVE" and arm not in unsettled
        for look in section.looks
    ]
    problems = [one.problem for one in content.primaries if one.problem]
    undecided = [one for one in content.primaries if one.result == "undecided"]
    if experiment.regression:
        yield from _inconclusive_with_reference(experiment, content)
        return
    if experiment.directory is None:
        yield from _inconclusive_of_others(experiment, content)
        return
    if not content.primaries:
        yield from _claim_to_declare(experiment)
        return
    if content.descriptions:
        yield with_fresh_seeds(experiment, "Three seeds or more can decide", 3)
        return
    if any(look.verdict is None for look in looks):
        yield NextStep(
            text="A declared look is still to come: let its pairs finish", command=_resumed(experiment)
        )
        return
    if problems:
        yield _longer(experiment, "These runs could not have shown it (see the reasons)")
    if unsettled:
        num_pairs = max((one.pairs_needed or 0 for one in undecided), default=0) or None
        yield from _rounding_or_fault(experiment, content.step_one, num_pairs)
    if undecided:
        yield from _more_pairs(experiment, content, undecided)
    elif problems:
        yield from _other_claims(experiment, content)
    elif not unsettled:
        yield with_fresh_seeds(experiment, "Fresh seeds say whether it was chance")


def _more_pairs(
    experiment: Experiment, content: VerdictFile, undecided: Sequence[PrimaryResult]
) -> Iterator[NextStep]:
    """Yield how many more pairs decide the claims that are open."""
    text, count = pairs_that_decide(content, undecided)
    if count is None:
        yield NextStep(
            text=f"{text}: see what a wider one takes",
            command=f"abrun plan RECIPE{declared_options(experiment)} --from {name_of(experiment)}",
        )
    else:
        yield with_fresh_seeds(experiment, text, count)
    cheaper = [one for one in content.by_prompt if _fewer_pairs(one)]
    if cheaper and not any(map(beyond_margin, undecided)):
        pairs, prompts = cheaper[0].pairs_needed_with_twice, 2 * cheaper[0].num_prompts
        text = f"Or twice the validation prompts, with which {pairs} pairs would do"
        fresh = with_fresh_seeds(experiment, text, pairs)
        yield replace(fresh, command=f"{fresh.command} --set validation.num_prompts={prompts}")


def _rounding_or_fault(
    experiment: Experiment, checks: Sequence[StepOne], num_pairs: int | None
) -> Iterator[NextStep]:
    """What raises the first step's distance between trainer and engine where values are rounded coarsely."""
    runs = experiment.runs.values()
    changed = {key for of_arm in (experiment.treatment_diff or {}).values() for key in of_arm}
    if "policy.dtype" not in changed and all(
        (run.config or {}).get("trainer.type") == "abrun" for run in runs
    ):
        yield NextStep(
            text="One step in float32 tells rounding, which agrees there to 1e-4, from a fault",
            command="abrun launch RECIPE --set policy.dtype=float32 --set steps=1 --set 'controls={}' "
            f"--name {folder_name(experiment, '-float32')}",
        )
    declared = experiment.compare.step_one_tolerance
    unsure = [one for one in checks if one.result == "open"]
    tolerances = {one.metric: math.ceil(125 * one.deviation) / 100 for one in unsure}
    tolerances = {**(declared if isinstance(declared, dict) else {}), **tolerances}
    compare = experiment.compare.model_copy(update={"step_one_tolerance": tolerances})
    text = "If it was rounding, declare how far that may take it, and test on fresh seeds"
    # Of the others the largest deviation is noise: that of 5 fresh pairs is beyond 1.25 times it 1 time in 3.
    left = dict.fromkeys(one.metric for one in checks if one.result == "not tested")
    untested = ", ".join(metric for metric in left if metric not in tolerances)
    text += f"; untested stays, as rounding may well take fresh seeds further: {untested}" if untested else ""
    yield with_fresh_seeds(replace(experiment, compare=compare), text, num_pairs)


def _open_of_others(content: VerdictFile) -> Iterator[NextStep]:
    """Of runs that no recipe is at hand for."""
    if any(one.result == "open" for one in content.step_one):
        yield NextStep(
            text="Train one step in float32, where rounding is no reason; if it was one, leave step one out",
            command="abrun compare RUNS --no-step-one",
        )


def _longer(experiment: Experiment, text: str) -> NextStep:
    grid = experiment.all_steps()
    steps = 2 * int(grid[-1]) if len(grid) else 1
    return NextStep(
        text=f"{text}; if they were too short, train longer",
        command=f"abrun launch RECIPE --set steps={steps}{declared_options(experiment)} {_stages(experiment)}"
        f"--name {folder_name(experiment, '-longer')}",
    )


def _claim_to_declare(experiment: Experiment) -> Iterator[NextStep]:
    """Of launched runs without a claim, which no number of seeds decides."""
    sides = experiment.sides(experiment.treatments[0]).finished
    if min(sides.sizes) and (empty := no_signal(sides, REWARD, may_repeat=True)):
        yield _longer(experiment, f"These runs could show nothing: {empty}")
        return
    found = claimable(experiment)
    if found is None:
        yield NextStep(
            text="Declare what has to agree, and how closely",
            command="abrun plan RECIPE --set 'compare.primary=[{metric: METRIC, margin: MARGIN}]'",
        )
        return
    claimed = _claiming(experiment, [claim_on(found)])
    text = f"Declare a margin that you accept ({_margin_offered(found)}), and test it on fresh seeds"
    alone = found.interval is None
    if alone or found.runs_needed is not None:
        count = max(3, found.runs_needed or 3)
        if not alone:
            counted = units(paired=found.paired)
            text += (
                f": {count} {counted} decide it with 80 % power {AT_OBSERVED}, if the arms are truly equal"
            )
        yield with_fresh_seeds(claimed, text, count)
    if not alone:
        yield NextStep(
            text="Or see first how many seeds it takes",
            command=f"abrun plan RECIPE{declared_options(claimed)} --from {name_of(experiment)}",
        )


def _inconclusive_of_others(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    """Of runs that abrun did not launch."""
    described = content.descriptions
    yield from _open_of_others(content)
    problems = any(one.problem for one in content.primaries)
    if problems and not described:
        yield from _other_claims(experiment, content)
    open_arms = [one for one in content.arms.values() if one.verdict == "INCONCLUSIVE"]
    if any(look.verdict is None for one in open_arms for look in one.looks):
        yield next_look(experiment)
        return
    if described and not content.primaries:
        yield _claim_to_make(experiment, content)
    if described:
        if max(described[0].num_runs) == 1:
            shared = ", with the same seeds in both arms" if content.paired else ""
            yield NextStep(
                text=f"Train two runs or more beside each{shared}, then compare again",
                command="abrun compare RUNS",
            )
    elif not content.primaries and any(run.unread for run in experiment.runs.values()):
        yield NextStep(text=MEND, command="abrun compare RUNS")
    elif not content.primaries:
        yield NextStep(
            text="Say which metrics are the same", command="abrun compare RUNS --alias train/reward=NAME"
        )
    elif problems:
        yield NextStep(text=MEND, command="abrun compare RUNS")
    else:
        yield from _fresh_pairs_of_others(experiment, content)


def _fresh_pairs_of_others(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    """More runs for an open claim: fresh ones judged alone, as a test repeated on the same runs errs more."""
    undecided = [one for one in content.primaries if one.result == "undecided" and one.interval]
    text, count = pairs_that_decide(content, undecided) if undecided else ("Fresh seeds decide", None)
    if count is None and undecided:
        yield NextStep(
            text=f"{text}: see in what else the arms differ", command=f"abrun compare RUNS{WITHOUT_CLAIMS}"
        )
        if any(map(beyond_margin, undecided)):
            yield with_fresh_seeds(experiment, "See whether fresh seeds show a mismatch")
        return
    fresh = with_fresh_seeds(experiment, text, count)
    yield fresh
    if content.paired and count and (staged := in_stages(fresh, count)):
        yield staged


def _inconclusive_with_reference(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    """Of a frozen reference, which pairs the seeds that it has, and no others."""
    yield from _open_of_others(content)
    if not content.primaries:
        yield NextStep(
            text="The reference keeps no claim: say what has to agree, and how closely",
            command="abrun compare RUNS --primary METRIC:WINDOW:MARGIN",
        )
        return
    there, here = set(experiment.arm(experiment.baseline)), set(experiment.arm(experiment.treatments[0]))
    left = ", ".join(map(str, sorted(there - here)))
    if not left and any(one.problem for one in content.primaries):
        yield from _over_shared_steps(experiment)
        yield NextStep(text=MEND, command="abrun compare RUNS")
        return
    if not left:
        yield with_fresh_seeds(experiment, "More pairs narrow the interval")
        return
    if len(there - here) > 1:
        seeds = left.replace(" ", "")
        alone = f"abrun compare RUNS --seeds {seeds}"
        if experiment.directory:
            alone = f"abrun launch RECIPE --seeds {seeds} --name NEW && {AGAIN}"
        yield NextStep(
            text=f"Train the other seeds of the reference ({left}), then compare those alone", command=alone
        )
        return
    seeds, again = ",".join(map(str, sorted(there | here))), "abrun compare RUNS"
    if experiment.directory:
        again = f"abrun launch RECIPE --seeds {seeds} --name {folder_name(experiment)} --resume && {again}"
    yield NextStep(
        text=f"Train the other seeds of the reference too ({left}), then compare again", command=again
    )


def _claim_to_make(experiment: Experiment, content: VerdictFile) -> NextStep:
    """Of runs without a claim: one on what they learn, with a margin that owes nothing to the treatment."""
    found = claimable(experiment)
    if found is None:
        return NextStep(
            text="On no metric could these runs show a difference: log what they learn, or train longer",
            command="abrun compare RUNS",
        )
    claims = claim_options(_claiming(experiment, [claim_on(found)]))
    return NextStep(
        text=f"Claim that they are alike within a margin that you accept ({_margin_offered(found)})",
        command=f"abrun compare RUNS{'' if content.paired else UNPAIRED}{claims}",
    )


def _margin_offered(found: Description) -> str:
    """Say where the margin comes from, and which difference is seen: a wide margin would let it pass."""
    offered = f"here {found.margin_is}"
    if found.detected is None:
        return offered
    seen = found.detected
    offered += f"; but the difference seen is {seen.difference:+.3g}, {seen.direction} {seen.where}"
    if (
        found.certified_bound is not None
        and found.margin is not None
        and found.certified_bound < found.margin
    ):
        return f"{offered}: these runs already pass that margin, so choose yours by what loss you accept"
    return offered


def _other_claims(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    """In the place of those that these runs cannot show, however many seeds there are."""
    cannot = {(one.metric, one.window) for one in content.primaries if one.problem}
    claims = [one for one in experiment.compare.primary if (one.metric, one.window) not in cannot]
    text = "Leave out what these runs cannot show"
    if not cannot:
        return
    if not claims:
        found = claimable(experiment)
        if found is None:
            return
        claims = [claim_on(found)]
        text = f"Claim what these runs can show, within a margin that you accept ({_margin_offered(found)})"
    claimed = _claiming(experiment, claims)
    if experiment.directory:
        yield with_fresh_seeds(claimed, f"{text}, on fresh seeds")
    else:
        yield NextStep(text=text, command=f"abrun compare RUNS{claim_options(claimed)}")


def _claiming(experiment: Experiment, claims: list[Primary]) -> Experiment:
    return replace(experiment, compare=experiment.compare.model_copy(update={"primary": claims}))


def _fewer_pairs(one: ByPrompt) -> bool:
    """Whether more prompts would spare pairs."""
    needed, with_twice = one.pairs_needed, one.pairs_needed_with_twice
    return with_twice is not None and (needed is None or with_twice < needed)


def _invalid(experiment: Experiment, content: VerdictFile) -> Iterator[NextStep]:
    if experiment.directory is None:
        if versions_follow_arms(experiment):
            text = "If the versions are what you compare, say that they are the treatment"
            yield NextStep(text=text, command="abrun compare RUNS --versions-differ")
        of_arms = [{pair.seed for pair in experiment.pairs(arm)} for arm in experiment.treatments]
        shared = sorted(set.intersection(*of_arms)) if of_arms else []
        apart = any("seed" in reason and "--unpaired" in reason for reason in content.reasons)
        if apart and shared:
            seeds = ",".join(map(str, shared))
            yield NextStep(
                text="Compare the seeds that both arms have", command=f"abrun compare RUNS --seeds {seeds}"
            )
        elif apart:
            yield NextStep(
                text="Compare them as independent runs, of other seeds",
                command="abrun compare RUNS --unpaired",
            )
        elif no_shared_step([*experiment.runs.values()]):
            yield NextStep(
                text="If another column counts the steps of all of them, name it",
                command="abrun compare RUNS --step-column NAME",
            )
        yield from _over_shared_steps(experiment)
        yield NextStep(text=MEND, command="abrun compare RUNS")
        return
    broken = [run for run in experiment.runs.values() if not run.finished and not run.thinned]
    if broken:
        began = [run for run in broken if run.status != "missing"]
        if began:
            run = f"{name_of(experiment)}/{began[0].name}"
            yield NextStep(text="See how the first of them ended", command=f"abrun logs {run}")
        yield NextStep(text="Continue the runs that did not finish", command=_resumed(experiment))
    else:
        missing = any("(primary)" in reason for reason in content.reasons)
        if missing and not experiment.regression:
            reread = [*_read_with_another_alias(experiment)]
            # A launch with the wrong alias would end its runs again
            yield from reread or _other_claims(experiment, content)
        yield NextStep(
            text="Mend what the reasons name (--set, or the recipe): look at the plan before anything runs",
            command="abrun launch RECIPE --dry-run",
        )


def _over_shared_steps(experiment: Experiment) -> Iterator[NextStep]:
    """Yield a window that all runs hold, or the seeds that hold this one, where runs lack steps of it."""
    claims, seeds = held_by_all(experiment)
    if claims:
        options = claim_options(_claiming(experiment, claims))
        yield NextStep(text="Claim it over steps that all runs hold", command=f"abrun compare RUNS{options}")
    if len(seeds) > 1:
        yield NextStep(
            text="Compare the seeds whose runs hold the window whole",
            command=f"abrun compare RUNS --seeds {','.join(map(str, seeds))}",
        )


def _read_with_another_alias(experiment: Experiment) -> Iterator[NextStep]:
    """Read the runs as those of another trainer: their recipe's aliases name metrics that they lack."""
    runs = [run for run in experiment.runs.values() if run.finished]
    metrics = {claim.metric for claim in experiment.compare.primary}
    named = {metric: (runs[0].config or {}).get(f"trainer.aliases.{metric}") for metric in metrics if runs}
    wrong = {ours: str(theirs) for ours, theirs in named.items() if theirs and ours not in runs[0].metrics}
    if not wrong or experiment.directory is None:
        return
    aliases = []
    for metric, theirs in wrong.items():
        close = difflib.get_close_matches(theirs, runs[0].metrics, 1) or ["NAME"]
        aliases.append(f"--alias {shlex.quote(f'{metric}={close[0]}')}")
    path = folder_of(experiment.directory)
    arms = " ".join(shlex.quote(f"{arm}={path}/{arm}") for arm in experiment.arms)
    yield NextStep(
        text="Read the same runs with the name that they log",
        command=f"abrun compare {arms} {' '.join(aliases)}{claim_options(experiment)}",
    )


def _resumed(experiment: Experiment) -> str:
    """What takes a launch up again."""
    return f"abrun launch RECIPE {_stages(experiment)}--name {folder_name(experiment)} --resume"


def _stages(experiment: Experiment) -> str:
    """One with looks is launched in stages, however it was begun."""
    looks = experiment.compare.looks
    return f"--until-decided --max-seeds {looks[-1]} " if looks else ""


def _of_first(evidence: Sequence[StepOne | Guard | PrimaryResult], experiment: Experiment) -> tuple[str, int]:
    """The arm and a seed that the evidence is about: a step-one check names its seed, a claim has several."""
    arm = evidence[0].arm if evidence else experiment.treatments[0]
    seeds = [pair.seed for pair in experiment.pairs(arm)]
    if evidence and isinstance(evidence[0], StepOne):
        return arm, evidence[0].seed
    return arm, seeds[0] if seeds else 0
