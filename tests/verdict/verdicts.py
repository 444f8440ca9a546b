"""Records of a verdict file with defaults, for tests of what shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from abrun.verdict.decide import ArmSection
from abrun.verdict.results import ClaimEstimate, ClaimResult, ClaimTerms, Power
from abrun.verdict.validity import Coverage
from abrun.verdict.verdict_file import SCHEMA_VERSION, VerdictFile

CLAIM = ClaimResult(
    arm="treatment",
    claim=ClaimTerms(
        metric="train/reward",
        window="last 20%",
        steps=(33, 40),
        num_steps=8,
        transform="identity",
        reduction="mean",
        test="paired TOST",
        margin=0.05,
        margin_unit="",
        margin_number=0.05,
        margin_text="±0.05",
        alpha=0.05,
        alpha_difference=0.05,
        num_pairs=3,
        seeds=(0, 1, 2),
    ),
    estimate=ClaimEstimate(
        differences=(0.01, -0.004, 0.002),
        mean_difference=0.0027,
        ci90=(-0.009, 0.0144),
        interval=(-0.009, 0.0144),
        certified_bound=0.0144,
    ),
    result="equivalent",
)
SECTION = ArmSection(
    verdict="MATCH",
    reasons=[],
    not_tested=[],
    num_pairs=3,
    num_planned_pairs=3,
    num_runs=None,
    treatment_diff={"policy.logprobs.impl": ["logits", "chunked"]},
    coverage=Coverage(shared_steps=40, all_steps=40),
    num_metrics=None,
    interim_analyses=[],
)
VERDICT = VerdictFile(
    schema_version=SCHEMA_VERSION,
    experiment="simulated",
    baseline="baseline",
    verdict="MATCH",
    exit_code=0,
    reasons=[],
    post_hoc=False,
    num_pairs=3,
    paired=True,
    claims=[],
    evidence=[],
    arms={},
    not_tested=[],
    guessed=[],
    notes=[],
    wandb={},
    environments=[],
    reference=None,
)


def claim(metric: str = "train/reward", arm: str = "treatment", **changed: Any) -> ClaimResult:
    """Return a result; `changed` may name a field of any of its parts."""
    parts: dict[str, Any] = {"claim": {"metric": metric}, "estimate": {}, "power": {}}
    for name in [*changed]:
        for part, record in (("claim", ClaimTerms), ("estimate", ClaimEstimate), ("power", Power)):
            if name in record.__dataclass_fields__:
                parts[part][name] = changed.pop(name)
    made = {part: replace(getattr(CLAIM, part), **values) for part, values in parts.items()}
    return replace(CLAIM, arm=arm, **made, **changed)


def section(**changed: Any) -> ArmSection:
    return replace(SECTION, **changed)


def verdict(
    claims: Sequence[ClaimResult] = (),
    arms: Sequence[str] | Mapping[str, ArmSection] = ("treatment",),
    **changed: Any,
) -> VerdictFile:
    sections = dict(arms) if isinstance(arms, Mapping) else dict.fromkeys(arms, SECTION)
    return replace(VERDICT, claims=list(claims), arms=sections, **changed)
