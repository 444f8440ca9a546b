"""Validation paired by prompt, in sentences: for the terminal, a pull request, a plan and the page."""

from collections.abc import Iterator

from abrun.compare.judge.by_prompt import ByPrompt


def by_prompt_facts(one: ByPrompt) -> list[str]:
    """Return what validation by prompt says, a clause a fact."""
    if one.problem:
        return [one.problem]
    last = one.by_step[-1]
    counted = (
        f"{one.metric} {last.baseline:.3f} and {last.treatment:.3f} at step {last.step}, where "
        f"the treatment won {last.num_won} and lost {last.num_lost} of {last.num_answers} answers"
    )
    return [counted, *advice(one)]


def advice(one: ByPrompt) -> Iterator[str]:
    """What the pairing by prompt says of the spread over seeds; of one pair, what it does not say."""
    if len(one.pairs) == 1:
        (pair,) = one.pairs
        found = _with_interval(pair.difference, pair.interval)
        yield (
            f"these two models on prompts like these: {found}, which says nothing of the change: that "
            "takes seeds"
        )
    parts = one.parts
    if not parts:
        return
    low, high = parts.noise_share_interval
    yield (
        f"{parts.noise_share:.0%} [{low:.0%}, {high:.0%}] of the variance of paired differences is that "
        f"of only {one.num_prompts} prompts"
    )
    if one.worth_pairs:
        worth, *ends = one.worth_pairs
        yield f"twice the prompts would be worth {worth:.1f} more pairs [{ends[0]:.1f}, {ends[1]:.1f}]"
    if one.pairs_needed and one.pairs_needed_with_twice:
        yield (
            f"80 % power takes {one.pairs_needed} pairs, and {one.pairs_needed_with_twice} with twice "
            "the prompts"
        )
    if one.effective_pairs:
        yield (
            f"with prompts of their own, runs would take {one.effective_pairs:.1f} pairs for what these "
            f"{len(one.pairs)} say"
        )
    yield f"on any prompts like these: {_with_interval(parts.mean, parts.interval_of_prompts)}"


def _with_interval(mean: float, interval: tuple[float, float]) -> str:
    return f"{mean:+.3g} [90 %: {interval[0]:.3g}, {interval[1]:.3g}]"
