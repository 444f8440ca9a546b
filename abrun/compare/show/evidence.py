"""What stands beside a verdict's claims, in markdown and on a terminal: a line each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from abrun.compare.judge.description import Description
from abrun.compare.judge.divergence import Divergence, UlpGrowth
from abrun.compare.judge.final_weights import FinalWeights
from abrun.compare.judge.guards import Guard, Saving
from abrun.compare.judge.step_one import StepOne, share_of_scale
from abrun.compare.judge.verdict_file import ArmSection, VerdictFile
from abrun.compare.read.reference import ARM as REFERENCE
from abrun.compare.show.by_prompt import by_prompt_facts
from abrun.compare.show.levels import levels
from abrun.compare.show.planted import sentence
from abrun.compare.show.spent import spent_sentence
from abrun.redaction import in_yaml

MOST_LEVELS = 2  # of an arm's claims; the page has all


def evidence(content: VerdictFile) -> Iterator[tuple[str, str]]:
    """The evidence beside the primaries, a line each and arm."""
    for arm, section in content.arms.items():
        mark = f"{arm}, " if len(content.arms) > 1 else ""
        if mark:
            yield arm, section.verdict
        of_arm = [one.text for one in levels(content) if one.arm == arm]
        yield from ((f"{mark}levels", text) for text in of_arm[:MOST_LEVELS])
        if section.treatment_diff:
            yield f"{mark}treatment", _differences(section.treatment_diff)
        shared = _shared_steps(content, section.coverage)
        if section.num_runs:
            both = f"{section.num_runs[0]} of {content.baseline} and {section.num_runs[1]} of {arm}"
            yield f"{mark}runs", f"{both}, unpaired; {shared}"
        else:
            yield f"{mark}pairs", f"{_pairs(section)}; {shared}"
            yield f"{mark}step one", _step_one([one for one in content.step_one if one.arm == arm])
        if section.num_metrics and content.post_hoc:
            yield f"{mark}metrics", _metrics(content.descriptions, arm, section.num_metrics)
        yield f"{mark}guards", _guards([one for one in content.guards if one.arm == arm])
        if not section.num_runs:
            yield (
                f"{mark}divergence",
                _divergence([one for one in content.divergence if one.arm == arm]),
            )
        for one in content.final_weights:
            if one.arm == arm:
                yield f"{mark}final weights", _final_weights(one)
        for one in content.by_prompt:
            if one.arm == arm:
                yield f"{mark}validation by prompt", "; ".join(by_prompt_facts(one))
        savings = [one for one in content.savings if one.arm == arm and "," not in one.quantity]
        if savings:
            yield f"{arm} / {content.baseline}", "; ".join(_saving(one) for one in savings)
        looks = [look for look in section.looks if look.verdict]
        if section.looks:
            taken = ", ".join(f"{look.num_pairs} pairs: {look.verdict}" for look in looks) or "none yet"
            planned = ", ".join(str(look.num_pairs) for look in section.looks)
            yield f"{mark}looks", f"declared at {planned} pairs; taken: {taken}"
    if content.spent:
        yield "spent", spent_sentence(content.spent)
    if content.sensitivity:
        yield "sensitivity", sentence(content.sensitivity, paired=content.paired)
    if content.not_tested:
        yield "not tested", "; ".join(content.not_tested)
    for guess in content.guessed:
        yield "guessed", guess
    if content.notes:
        more = f"; and {len(content.notes) - 3} more" if len(content.notes) > 3 else ""
        yield "notes", "; ".join(content.notes[:3]) + more


def _shared_steps(content: VerdictFile, coverage: Mapping[str, int]) -> str:
    shared, everything = coverage["shared_steps"], coverage["all_steps"]
    is_thinned = content.reference and content.baseline == REFERENCE and shared < everything
    why = " (a reference keeps every step of its claims' windows, and fewer outside)"
    return f"{shared} of {everything} steps shared{why * bool(is_thinned)}"


def _pairs(section: ArmSection) -> str:
    """Return how many pairs the verdict is over: with looks, those of the last one taken."""
    if section.looks:
        return f"{section.num_pairs} compared, of {section.num_planned_pairs} planned"
    return f"{section.num_pairs} of {section.num_planned_pairs} finished"


def _metrics(described: Sequence[Description], arm: str, counts: Sequence[int]) -> str:
    shown = [one.metric for one in described if one.arm == arm]
    more = counts[0] - len(shown)
    named = f": {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")
    return f"{counts[0]} of {counts[1]} recorded in every run{named}"


def _differences(treatment_diff: Mapping[str, Sequence[Any]]) -> str:
    shown = [f"{key}: {in_yaml(old)} -> {in_yaml(new)}" for key, (old, new) in treatment_diff.items()]
    return "; ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _step_one(checks: Sequence[StepOne]) -> str:
    if not checks:
        return "not read"
    failed = [one.metric for one in checks if one.result == "fail"]
    unsure = [one.metric for one in checks if one.result == "open"]
    untested = [one for one in checks if one.result == "not tested"]
    tested = [one for one in checks if one.result != "not tested"]
    state = (
        f"fails for {', '.join(failed)}"
        if failed
        else f"open for {', '.join(unsure)}"
        if unsure
        else f"{len(tested)} metric{'s' * (len(tested) > 1)} agree{'s' * (len(tested) == 1)}"
    )
    said = []
    if tested and not any(one.deviation for one in tested):
        said.append(f"{state} exactly")
    elif tested:
        said.append(f"{state}; {'of these ' * bool(untested)}the arms differ most in {_furthest(tested)}")
    if untested:
        more = f", and {len(untested) - 1} more" * (len(untested) > 1)
        said.append(f"not tested: {_furthest(untested)}{more}")
    return "; ".join(said)


def _furthest(checks: Sequence[StepOne]) -> str:
    """The metric closest to its tolerance, or furthest beyond it: it speaks for the rest."""
    one = max(checks, key=lambda one: one.deviation / one.tolerance)
    share = share_of_scale(one.deviation, one.scale, one.scale_from)
    return f"{one.metric}: by {share}, where {one.tolerance:.2g} is allowed ({one.tolerance_from})"


def _guards(guards: Sequence[Guard]) -> str:
    broken = [
        f"{one.guard}: {one.result}" for one in guards if one.result in ("fail", "baseline too", "open")
    ]
    passed = [
        f"{one.guard} (at its limit)" if one.limit and one.value == one.limit > 0 else one.guard
        for one in guards
        if one.result == "pass"
    ]
    return "; ".join([*broken, f"pass: {', '.join(passed)}"] if passed else broken)


def _divergence(divergences: Sequence[Divergence]) -> str:
    if not divergences:
        return "no finished pair"
    first = divergences[0]
    repeating = [one for one in divergences if one.noise_floor == "zero"]
    measured = [one for one in divergences[:3] if one.noise_floor == "measured"]
    said = [*map(_against_noise, measured), *([_repeats(repeating)] if repeating else [])]
    said = said or ["noise floor unknown (no A/A reruns)"]
    if first.ulp:
        said.append(f"{first.metric}: {_against_ulp(first.ulp)}")
    if first.share_of_seed_spread is not None:
        share = f"{first.share_of_seed_spread:.2g} of its spread over seeds"
        said.append(f"mean |difference| of {first.metric} {share}")
    return "; ".join(said)


def _against_ulp(grown: UlpGrowth) -> str:
    if grown.ratio is None:
        return "against what one ULP grows into: no ratio, as one of them is 0"
    interval = f" [{grown.ci95[0]:.2g}, {grown.ci95[1]:.2g}]" if grown.ci95 else ""
    return f"{grown.ratio:.2g}x{interval} what one ULP grows into"


def _repeats(divergences: Sequence[Divergence]) -> str:
    """Said once of all metrics of which reruns of the baseline are no distance away."""
    steps = [one.first_step_apart for one in divergences if one.first_step_apart is not None]
    treatment = "so does the treatment"
    if steps:
        first = min(steps)
        earliest = [one.metric for one in divergences if one.first_step_apart == first]
        more = f" and {len(earliest) - 1} more" if len(earliest) > 1 else ""
        treatment = f"the arms differ from step {first} on" + f" ({earliest[0]}{more})" * (
            len(divergences) > 1
        )
    of = f" in {len(divergences)} metrics" if len(divergences) > 1 else f" in {divergences[0].metric}"
    return f"reruns of the baseline repeat it bit for bit{of}; {treatment}"


def _against_noise(one: Divergence) -> str:
    said = "not further than its reruns in every seed"
    if one.p_beyond is not None and one.p_beyond < 1:
        said = f"further than its reruns in every seed (p = {one.p_beyond:.2g})"
    return f"{one.metric}: {one.ratio:.2g}x the A/A noise floor, {said}"


def _final_weights(one: FinalWeights) -> str:
    equal = f"equal bit for bit in {one.num_equal} of {one.num_pairs} pairs"
    if one.num_equal == one.num_pairs or one.seed is None:
        return equal
    floor = one.aa_relative_difference
    against = "" if floor is None else f"; A/A: {floor:.2g}"
    grown = one.ulp_relative_difference
    against += "" if grown is None else f"; what one ULP grows into: {grown:.2g}"
    return (
        f"{equal}; distance {one.relative_difference:.2g} of the baseline's norm (seed {one.seed}"
        f"{against}), {one.tensor_relative_difference:.2g} in {one.tensor}; estimated from a sketch, "
        "within 8 %"
    )


def _saving(one: Saving) -> str:
    ci95 = one.ci95
    interval = f" [95 %: {ci95[0]:.3g}, {ci95[1]:.3g}]" if ci95 else ""
    return f"{one.quantity} {one.ratio:.3g}{interval}"
