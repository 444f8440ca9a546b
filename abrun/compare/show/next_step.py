"""What to do after a verdict: a sentence and a command for every one of them."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

from abrun.compare.read.experiment import Experiment
from abrun.metric_names import GEN_KL_ERROR, TOKEN_MULT_PROB_ERROR

MOST_STEPS = 2
UNPAIRED = " --unpaired"
Content = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """RECIPE in a command stands for the recipe's file, RUNS for what was compared, where it is not known."""

    text: str
    command: str


def next_steps(experiment: Experiment, content: Content, typed: str | None = None) -> list[NextStep]:
    """The most useful first; at least one. `typed`: the command line that asked for the comparison."""
    of = {"MATCH": _match, "MISMATCH": _mismatch, "INCONCLUSIVE": _inconclusive, "INVALID": _invalid}
    steps = islice(of[content["verdict"]](experiment, content), MOST_STEPS)
    return [replace(step, command=_filled(step.command, typed or "")) for step in steps]


def _filled(command: str, typed: str) -> str:
    """With what was typed in the place of RECIPE or RUNS, as far as that can be told."""
    words = shlex.split(typed)
    recipe = next((word for word in words if word.endswith((".yaml", ".yml"))), None)
    if recipe is None and words[:2] == ["abrun", "launch"] and words[2:3] and words[2][0] != "-":
        recipe = words[2]  # the name of one that ships
    if recipe:
        command = command.replace("RECIPE", shlex.quote(recipe))
    if words[:2] == ["abrun", "compare"]:
        sources = [*takewhile(lambda word: not word.startswith("-"), words[2:])]
        if UNPAIRED in f"{typed} ":
            command = command.replace(UNPAIRED, "")
        command = command.replace("abrun compare RUNS", typed)
        command = command.replace("RUNS", shlex.join(sources) or "RUNS")
    return command


def _name(experiment: Experiment) -> str:
    return shlex.quote(experiment.name)


def _match(experiment: Experiment, content: Content) -> Iterator[NextStep]:
    if content["post_hoc"]:
        declare = "Declare the claim in the recipe" if experiment.has_recipe else "Settle on the claim now"
        yield _with_fresh_seeds(experiment, f"{declare}, and test it on fresh seeds")
    elif content["sensitivity"] is None and experiment.can_plant:
        yield NextStep(
            text="Measure what this comparison would have caught: faults planted in the baseline",
            command="abrun sensitivity RECIPE",
        )
    if not experiment.regression:
        of = _name(experiment) if experiment.has_recipe else "RUNS"
        yield NextStep(
            text="Hold later versions to these runs",
            command=f"abrun freeze {of} --output {_name(experiment)}.json",
        )
    elif experiment.has_recipe:
        yield NextStep(text="Launch it again after the next change", command="abrun launch RECIPE --name NEW")
    else:
        yield NextStep(
            text="Compare later runs with the same reference", command="abrun compare NEW --reference FILE"
        )


def _mismatch(experiment: Experiment, content: Content) -> Iterator[NextStep]:
    failing = [one for one in content["guards"] if one["result"] == "fail"]
    deviating = [one for one in content["step_one"] if one["result"] == "fail"]
    differing = [one for one in content["primaries"] if one["result"] == "different"]
    if not experiment.has_recipe:
        if deviating and not (failing or differing):
            yield NextStep(
                text="If the arms saw other prompts, step one says nothing: leave it out",
                command="abrun compare RUNS --no-step-one",
            )
        yield _with_fresh_seeds(experiment, "See whether fresh seeds say so too")
        return
    arm, seed = _of_first([*deviating, *failing, *differing], experiment)
    run = shlex.quote(f"{experiment.name}/{arm}/seed-{seed}")
    if any(one["guard"] == "finished" for one in failing):
        yield NextStep(text="See how the failed runs ended", command=f"abrun status {_name(experiment)}")
    errors = {TOKEN_MULT_PROB_ERROR, GEN_KL_ERROR}
    if any(one["metric"] in errors for one in deviating) or any(
        "prob_error" in one["guard"] or "kl_error" in one["guard"] for one in failing
    ):
        yield NextStep(
            text="Find what makes trainer and rollout engine differ", command=f"abrun mismatch {run}"
        )
    if not experiment.regression:
        step = f" --step {deviating[0]['step']}" if deviating else ""
        other = shlex.quote(f"{experiment.name}/{experiment.baseline}/seed-{seed}")
        yield NextStep(
            text="Read what both arms said to each prompt",
            command=f"abrun samples {run} --against {other}{step}",
        )
    yield _with_fresh_seeds(experiment, "See whether fresh seeds say so too")


def _inconclusive(experiment: Experiment, content: Content) -> Iterator[NextStep]:
    looks = [look for section in content["arms"].values() for look in section["looks"]]
    problems = [one["problem"] for one in content["primaries"] if one["problem"]]
    undecided = [one for one in content["primaries"] if one["result"] == "undecided"]
    if not experiment.has_recipe:
        yield from _inconclusive_of_others(content)
        return
    if content["descriptions"]:
        yield _with_fresh_seeds(experiment, "Three seeds or more can decide", 3)
        return
    if any(look["verdict"] is None for look in looks):
        yield NextStep(
            text="A declared look is still to come: let its pairs finish",
            command=_resumed(experiment),
        )
        return
    if not content["primaries"]:
        yield NextStep(
            text="Declare compare.primary with a margin, then see how many seeds it takes",
            command=f"abrun plan RECIPE --from {_name(experiment)}",
        )
    if problems:
        grid = experiment.all_steps()
        steps = 2 * int(grid[-1]) if len(grid) else 1
        yield NextStep(
            text="These runs could not have shown it (see the reasons); if they were too short, train longer",
            command=f"abrun launch RECIPE --set steps={steps} --name {_name(experiment)}-longer",
        )
    needed = [one["pairs_needed"] for one in undecided]
    if needed and None not in needed:
        text = f"{max(needed)} pairs decide it with 80 % power, if the arms are truly equal"
        yield _with_fresh_seeds(experiment, text, max(needed))
    elif needed:
        yield NextStep(
            text="This margin takes more than 1000 pairs: see what a wider one takes",
            command=f"abrun plan RECIPE --from {_name(experiment)}",
        )
    cheaper = [one for one in content["by_prompt"] if _fewer_pairs(one)]
    if cheaper and undecided:
        pairs, prompts = cheaper[0]["pairs_needed_with_twice"], 2 * cheaper[0]["num_prompts"]
        text = f"Or twice the validation prompts, with which {pairs} pairs would do"
        fresh = _with_fresh_seeds(experiment, text, pairs)
        yield replace(fresh, command=f"{fresh.command} --set validation.num_prompts={prompts}")
    yield _with_fresh_seeds(experiment, "Fresh seeds say whether it was chance")


def _inconclusive_of_others(content: Content) -> Iterator[NextStep]:
    """Of runs that abrun did not launch."""
    described = content["descriptions"]
    if described:
        yield from _claim_to_make(content)
        if max(described[0]["num_runs"]) == 1:
            shared = ", with the same seeds in both arms" if content["paired"] else ""
            yield NextStep(
                text=f"Train two runs or more beside each{shared}, then compare again",
                command="abrun compare RUNS",
            )
    elif not content["primaries"]:
        yield NextStep(
            text="Say which metrics are the same", command="abrun compare RUNS --alias train/reward=NAME"
        )
    else:
        more = "More pairs narrow the interval: train more seeds, then compare again"
        if not content["paired"]:
            more = (
                "Runs of the same seeds in both arms narrow the interval most: train some, then compare again"
            )
        yield NextStep(text=more, command="abrun compare RUNS")


def _claim_to_make(content: Content) -> Iterator[NextStep]:
    """Of runs without a claim: one on what they learn, with a margin that owes nothing to the treatment."""
    described = next((one for one in content["descriptions"] if one["margin"] is not None), None)
    if content["primaries"] or described is None:
        return
    claim = shlex.quote(f"{described['metric']}:{described['window']}:{described['margin']:g}")
    yield NextStep(
        text=f"Claim that they are alike within a margin that you accept (here {described['margin_is']})",
        command=f"abrun compare RUNS{'' if content['paired'] else UNPAIRED} --primary {claim}",
    )


def _fewer_pairs(one: Content) -> bool:
    """Whether more prompts would spare pairs."""
    needed, with_twice = one["pairs_needed"], one["pairs_needed_with_twice"]
    return with_twice is not None and (needed is None or with_twice < needed)


def _invalid(experiment: Experiment, content: Content) -> Iterator[NextStep]:
    if not experiment.has_recipe:
        shared = [str(pair.seed) for arm in experiment.treatments for pair in experiment.pairs(arm)]
        apart = any("seed" in reason and "--unpaired" in reason for reason in content["reasons"])
        if apart and shared:
            seeds = ",".join(dict.fromkeys(shared))
            yield NextStep(
                text="Compare the seeds that both arms have", command=f"abrun compare RUNS --seeds {seeds}"
            )
        elif apart:
            yield NextStep(
                text="Compare them as independent runs, of other seeds",
                command="abrun compare RUNS --unpaired",
            )
        yield NextStep(text="Mend what the reasons name, then compare again", command="abrun compare RUNS")
        return
    broken = [run for run in experiment.runs.values() if not run.finished and not run.thinned]
    if broken:
        began = [run for run in broken if run.status != "missing"]
        if began:
            run = shlex.quote(f"{experiment.name}/{began[0].name}")
            yield NextStep(text="See how the first of them ended", command=f"abrun logs {run}")
        yield NextStep(
            text="Continue the runs that did not finish",
            command=_resumed(experiment),
        )
    else:
        yield NextStep(
            text="Mend what the reasons name in the recipe, and look at the plan before anything runs",
            command="abrun launch RECIPE --dry-run",
        )


def _resumed(experiment: Experiment) -> str:
    """What takes a launch up again; one with looks in stages, however it was begun."""
    looks = experiment.compare.looks
    stages = f"--until-decided --max-seeds {looks[-1]} " if looks else ""
    return f"abrun launch RECIPE {stages}--name {_name(experiment)} --resume"


def _of_first(evidence: list[Content], experiment: Experiment) -> tuple[str, int]:
    """The arm and a seed that the evidence is about: a step-one check names its seed, a claim has several."""
    arm = evidence[0]["arm"] if evidence else experiment.treatments[0]
    seeds = [pair.seed for pair in experiment.pairs(arm)]
    named = evidence[0].get("seed") if evidence else None
    return arm, seeds[0] if named is None and seeds else named or 0


def _with_fresh_seeds(experiment: Experiment, text: str, num_pairs: int | None = None) -> NextStep:
    """Seeds that no look has been taken at, as many as there were unless more are needed."""
    if not experiment.has_recipe:
        return NextStep(text=text, command="abrun compare RUNS")
    seeds = [seed for arm in experiment.treatments for seed in experiment.arm(arm)]
    first, count = max(seeds, default=-1) + 1, num_pairs or max(1, len(set(seeds)))
    return NextStep(
        text=text,
        command=f"abrun launch RECIPE --seeds {first}-{first + count - 1} --name {_name(experiment)}-fresh",
    )
