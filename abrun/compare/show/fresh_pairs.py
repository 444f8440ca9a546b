"""More runs for a claim that is open: how many fresh ones decide it, and the next declared look."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from abrun.compare.judge.results import PrimaryResult
from abrun.compare.judge.verdict_file import VerdictFile
from abrun.compare.read.experiment import Experiment
from abrun.messages.numbers import AT_OBSERVED
from abrun.plan import compare_hash
from abrun.recipe import primary_option, units


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """RUNS in a command stands for what was compared, where it is not known; NEW for what is yet to come."""

    text: str
    command: str


def folder_name(experiment: Experiment, suffix: str = "") -> str:
    assert experiment.directory
    return shlex.quote(experiment.directory.name + suffix)


def claim_options(experiment: Experiment) -> str:
    """Return the claims as options of a command."""
    return "".join(f" --primary {shlex.quote(primary_option(one))}" for one in experiment.compare.primary)


def with_fresh_seeds(experiment: Experiment, text: str, num_pairs: int | None = None) -> NextStep:
    """Seeds that no look has been taken at, as many as there were unless more are needed."""
    first = 1 + max((seed for arm in experiment.arms for seed in experiment.arm(arm)), default=-1)
    count = num_pairs or max([1, *(len(experiment.arm(arm)) for arm in experiment.treatments)])
    fresh = f"{first}-{first + count - 1}"
    if experiment.regression:
        file = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', experiment.name).strip('-')}-fresh.json"
        return NextStep(
            text=f"{text}: of those the reference has none; train its arm on seeds {fresh} and freeze it",
            command=f"abrun freeze NEW{claim_options(experiment)} --output {file}",
        )
    if experiment.directory:
        return NextStep(
            text=text,
            command=f"abrun launch RECIPE --seeds {fresh}{declared_options(experiment, count)} "
            f"--name {folder_name(experiment, '-fresh')}",
        )
    if not experiment.seeds_known:
        return NextStep(
            text=f"{text}: train {count} more runs of each arm into folders of their own, and compare those",
            command=f"abrun compare NEW NEW --unpaired{claim_options(experiment)}",
        )
    return NextStep(
        text=f"{text}: train both arms on seeds {fresh} beside these runs, then compare those alone",
        command=f"abrun compare RUNS --seeds {fresh}",
    )


def declared_options(experiment: Experiment, num_pairs: int | None = None) -> str:
    """Return the option that sets the comparison, if it is not the launched one or its looks do not fit."""
    compare = experiment.compare
    looks = compare.looks if num_pairs in (None, *compare.looks[-1:]) else []
    if compare_hash(compare) != experiment.launched_compare_sha256:
        content = compare.model_copy(update={"looks": looks}).model_dump(mode="json", exclude_defaults=True)
        return f" --set {shlex.quote(f'compare={json.dumps(content)}')}"
    return "" if looks == compare.looks else " --set compare.looks=[]"


def pairs_that_decide(content: VerdictFile, undecided: Sequence[PrimaryResult]) -> tuple[str, int | None]:
    """A sentence on how many fresh pairs decide the claims, and their number; None: no such number."""
    counted = units(paired=content.paired)
    needed = [one.power.pairs_needed for one in undecided if one.power.pairs_needed is not None]
    if any(map(beyond_margin, undecided)):
        return f"No number of {counted} shows this margin if the observed difference is the true one", None
    if any(one.estimate.limited is not None for one in undecided):
        text = f"Four times the {counted} halve the interval that a limit is tested by"
        return text, 4 * max(undecided[0].claim.num_runs or [undecided[0].claim.num_pairs])
    if len(needed) < len(undecided):
        return f"This margin takes more than 1000 {counted}", None
    text = f"{max(needed)} {counted} decide it with 80 % power {AT_OBSERVED}, if the arms are truly equal"
    observed = [
        one.power.pairs_needed_observed for one in undecided if one.power.pairs_needed_observed is not None
    ]
    if len(observed) == len(undecided) and max(observed) > max(needed):
        text += f" ({max(observed)}, if they differ as they do here)"
    return text, max(needed)


def beyond_margin(claim: PrimaryResult) -> bool:
    """Return whether a difference was detected, and the observed one is no smaller than the margin."""
    if (
        claim.estimate.interval is None
        or claim.estimate.mean_difference is None
        or claim.claim.margin is None
    ):
        return False
    low, high = claim.estimate.interval
    is_detected = claim.claim.margin_unit != "sigma" and not low <= 0 <= high
    return is_detected and abs(claim.estimate.mean_difference) >= claim.claim.margin


def in_stages(fresh: NextStep, num_pairs: int) -> NextStep | None:
    """Return the same step with interim analyses after each third of its pairs; None: too few for that."""
    looks = [-(-num_pairs * third // 3) for third in (1, 2, 3)]
    if looks[0] < 2:
        return None
    return NextStep(
        text="Or test these in stages, with the same --looks each time",
        command=f"{fresh.command} --looks {_listed(looks)}",
    )


def next_look(experiment: Experiment) -> NextStep:
    """The pairs that a declared look of others' runs still waits for."""
    pairs = max((experiment.pairs(arm) for arm in experiment.treatments), key=len)
    seeds = [pair.seed for pair in pairs]
    looks = experiment.compare.looks
    missing = next(look for look in looks if look > len(seeds)) - len(seeds)
    new = range(max(seeds) + 1, max(seeds) + 1 + missing)
    noun = "seed" if len(new) == 1 else "seeds"
    return NextStep(
        text=f"A declared look is still to come: train both arms on {noun} {_listed(new)}",
        command=f"abrun compare RUNS --seeds {_listed([*seeds, *new])} --looks {_listed(looks)}",
    )


def _listed(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))
