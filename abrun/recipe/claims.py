"""Comparison sections of a recipe, declared before the runs: claims with margins, guards, controls."""

import math
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from abrun.errors import RecipeError
from abrun.metric_names import FINAL_WEIGHTS, MEMORY_PEAK, STEP_ONE, default_transform
from abrun.reasons import Code
from abrun.recipe.faults import ACCEPT_FAULT_NAME, ONE_ULP, InjectedFault
from abrun.recipe.refusals import shortened, suggest_name, validated
from abrun.recipe.section import Count, FieldError, PathText, Positive, Section

DEFAULT_WINDOW = "last 20%"
WINDOW_PATTERN = r"all|last [1-9]\d?%|last 100%|steps [1-9]\d{0,9}-[1-9]\d{0,9}"
MARGIN_PATTERN = r"(?P<number>\d+(\.\d+)?)(?P<unit> sigma|%( of climb)?)"
RATIO_PATTERN = r"\d+(\.\d+)?x"
Spending = Literal["equal", "rising"]  # how alpha is spent over interim analyses
Unit = Literal["", "sigma", "level", "climb"]  # unit of a margin; "": the metric's own unit


class Claim(Section):
    """Claim on `metric` over `window`: arms agree within `margin`, keep a limit, or are bit-identical.

    `margin` is absolute, in units of the transformed metric, or `"1.5 sigma"` (standard deviations of the
    baseline or reference over seeds), `"5%"` of the baseline's level in the window, or `"5% of climb"` (its
    improvement up to the window's end). A match requires that the baseline improved by more than the margin,
    unless `climbs` is false. `sigma` and `correlation` (of paired arms) are assumptions for the power
    analysis.
    """

    # A recorded metric, `memory` (peak; limit only) or `final_weights` (exact or below)
    metric: str
    window: str = DEFAULT_WINDOW
    margin: float | str | None = None
    # Upper limit on the treatment's mean; `0.6x`: on treatment / baseline (`log_excess`: of their excesses
    # over 1)
    below: float | str | None = None
    above: float | str | None = None  # lower limit; a claim has one of margin, below, above, exact
    exact: bool = False  # pairs are bit-identical at every step of the window
    transform: Literal["identity", "log", "log_excess"] | None = None  # None: chosen by the metric's name
    climbs: bool = True  # False: a match does not require the metric to improve
    sigma: Positive | None = None
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0

    @field_validator("window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        if not re.fullmatch(WINDOW_PATTERN, window):
            raise FieldError(f"got {shortened(window)}; allowed: 'last 20%', 'steps 10-50' or 'all'")
        if window.startswith("steps") and int(window[6:].split("-")[0]) > int(window.split("-")[1]):
            raise FieldError(f"got {window!r}, which ends before it starts; write the smaller step first")
        return window

    @field_validator("margin", mode="before")
    @classmethod
    def _check_margin(cls, margin: Any) -> Any:
        if margin is None:
            return None
        match = re.fullmatch(MARGIN_PATTERN, margin) if isinstance(margin, str) else None
        number: Any = float(match["number"]) if match else margin
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise FieldError(
                f"got {shortened(margin)}; allowed: a number above 0, '1.5 sigma', '5%', '5% of climb' (for "
                "--claim also '<1.2', '>0.65', '<0.6x', 'exact')"
            )
        if match and "%" in (match["unit"] or "") and number >= 100:
            raise FieldError(f"got {shortened(margin)}; allowed: less than 100%")
        return margin

    @field_validator("below", "above", mode="before")
    @classmethod
    def _check_limit(cls, limit: Any) -> Any:
        is_ratio = isinstance(limit, str) and re.fullmatch(RATIO_PATTERN, limit)
        number: Any = float(limit[:-1]) if is_ratio else limit
        is_number = type(number) in (int, float) and abs(number) <= sys.float_info.max
        if limit is not None and (not is_number or (is_ratio and number <= 0)):
            raise FieldError(
                f"got {shortened(limit)}; allowed: a number, or a ratio to the baseline such as '0.6x'"
            )
        return limit

    @model_validator(mode="after")
    def _check_single_claim(self) -> Self:
        claim_kinds = [name for name in ("margin", "below", "above") if getattr(self, name) is not None]
        claim_kinds += ["exact"] * self.exact
        if len(claim_kinds) != 1:
            raise FieldError(
                f"got {' and '.join(claim_kinds) or 'no claim'} for {shortened(self.metric)}; allowed: one "
                "of margin, below, above and exact"
            )
        if self.metric == FINAL_WEIGHTS and not self.exact and not _is_distance(self.below):
            raise FieldError(
                f"got {claim_kinds[0]}: {getattr(self, claim_kinds[0])} for {FINAL_WEIGHTS}; "
                "allowed: exact: true, or below: a distance above 0, in units of how far the baseline "
                "moved, such as 0.05"
            )
        if self.metric == MEMORY_PEAK and claim_kinds[0] not in ("below", "above"):
            raise FieldError(
                f"got {claim_kinds[0]} for {MEMORY_PEAK}; allowed: below or above, such as '0.6x'"
            )
        return self

    @property
    def limit(self) -> tuple[float, bool] | None:
        """Return the limit's number and whether it limits the ratio to the baseline; None without a limit."""
        limit = self.below if self.below is not None else self.above
        if limit is None:
            return None
        return (float(limit[:-1]), True) if isinstance(limit, str) else (float(limit), False)

    @property
    def bound(self) -> str:
        """Return a description of the margin or limit for error messages."""
        return "an equivalence margin" if self.margin is not None else f"a limit, {describe_claim(self)}"

    @property
    def is_limit_on_excess(self) -> bool:
        """Return whether the limit applies to the ratio of both arms' excesses over 1."""
        is_ratio = self.limit is not None and self.limit[1]
        return is_ratio and (self.transform or default_transform(self.metric)) == "log_excess"

    @property
    def margin_in(self) -> tuple[float, Unit]:
        """Return the margin's number and unit; a percentage as a fraction."""
        assert self.margin is not None
        match = re.fullmatch(MARGIN_PATTERN, self.margin) if isinstance(self.margin, str) else None
        if match is None:
            return float(self.margin), ""
        number = float(match["number"])
        if match["unit"] == " sigma":
            return number, "sigma"
        return number / 100, "climb" if "climb" in match["unit"] else "level"

    @property
    def sigma_margin(self) -> float | None:
        """Return the margin in standard deviations over seeds; None if it has another unit."""
        number, unit = self.margin_in if self.margin is not None else (None, "")
        return number if unit == "sigma" else None


class Guards(Section):
    """One-sided limits for every treatment over all steps; it must also finish and stay finite.

    A guard fails if the treatment exceeds the limit and a t-test shows it worse than its baseline. These
    tests together spend `alpha` of the 0.05 at which a verdict calls equal arms a mismatch.
    """

    alpha: Annotated[float, Field(gt=0, lt=0.05)] = 0.01
    # Besides claimed metrics: metrics in which the treatment may have no NaN or Inf that the baseline lacks
    finite: list[str] = Field(default=["train/loss", "train/grad_norm", "train/reward"], max_length=1000)
    token_mult_prob_error_median: Annotated[float, Field(gt=1)] = 1.05  # limit on the worst run's median
    token_mult_prob_error_share: Annotated[float, Field(ge=0, le=1)] = 0.02  # limit on the steps above that
    step_time_ratio: Positive | None = None  # treatment / baseline, geometric mean over pairs; None: no limit
    peak_memory_ratio: Positive | None = None  # likewise


def is_interim_schedule(counts: Sequence[int]) -> bool:
    """Return whether these are two or more numbers of pairs going up from 2."""
    return len(counts) > 1 and counts[0] > 1 and all(a < b for a, b in pairwise(counts))


class Compare(Section):
    """Comparison settings, declared before the runs and hashed into the experiment at launch."""

    claims: list[Claim] = Field(default=[], max_length=100)
    guards: Guards = Guards()
    step_one: bool = True  # False: the first step follows an update, or rollouts are not reproducible
    # Relative, for all metrics or one: {train/gen_kl_error: 0.05}; None: from A/A reruns, else the dtype
    step_one_tolerance: float | dict[str, float] | None = None
    paired: bool = True  # False: runs are independent whatever their seeds (Welch's test)
    # Numbers of pairs at which a verdict may be given, the last being all pairs
    interim: list[Count] = Field(default=[])
    # equal: the same alpha for each interim analysis; rising: in proportion to its pairs
    alpha_spending: Spending = "equal"
    # File of abrun reference save; path relative to the working directory or the recipe's folder
    reference: PathText | None = None

    @field_validator("step_one_tolerance", mode="before")
    @classmethod
    def _check_tolerances(cls, tolerance: Any) -> Any:
        if tolerance is None:
            return None
        by_metric: dict[str, Any] = tolerance if isinstance(tolerance, dict) else {"": tolerance}
        for metric, limit in by_metric.items():
            if by_metric is tolerance and metric not in STEP_ONE:
                raise FieldError(
                    f"got {shortened(metric)}, which the step-one check does not compare; "
                    f"{suggest_name(metric, STEP_ONE)}"
                )
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
                raise FieldError(
                    f"got {shortened(tolerance)}; allowed: a number above 0, or a number per "
                    "metric, such as {train/gen_kl_error: 0.05}"
                )
        return tolerance

    @field_validator("interim")
    @classmethod
    def _check_interim_counts(cls, interim: list[int]) -> list[int]:
        if interim and not is_interim_schedule(interim):
            raise FieldError(
                f"got {interim}; allowed: two or more increasing numbers of pairs from 2, such as [4, 8]"
            )
        return interim


class Controls(Section):
    """Control runs of the baseline: they calibrate the comparison and have no verdict of their own."""

    # Reruns with the same seed (A/A runs), which measure the noise floor
    aa_reruns: Annotated[int, Field(ge=0, le=1000)] = 0
    # Reruns with initial weights moved by one ULP of policy.dtype, which show how such a difference grows
    ulp_reruns: Annotated[int, Field(ge=0, le=1000)] = 0
    # Faults injected into the baseline, which show what the comparison would catch: names of
    # docs/reference/faults.md, or sections
    faults: list[Annotated[InjectedFault, ACCEPT_FAULT_NAME]] = Field(default=[], max_length=100)

    @field_validator("faults")
    @classmethod
    def _check_faults_differ(cls, faults: list[InjectedFault]) -> list[InjectedFault]:
        arms = [fault.arm for fault in faults]
        duplicate = next((arm for arm in arms if arms.count(arm) > 1), None)
        if duplicate:
            raise FieldError(f"got {duplicate.removeprefix('fault-')!r} twice; list each fault and size once")
        if any(fault.name == ONE_ULP for fault in faults):
            raise FieldError(f"got {ONE_ULP!r}, which is not a fault; use controls.ulp_reruns")
        return faults

    def arms(self, num_seeds: int) -> dict[str, InjectedFault]:
        """Return the injected fault of each control arm by the arm's name."""
        rounds = range(-(-self.ulp_reruns // num_seeds))
        ulp_arms = {f"one-ulp{f'-{i + 1}' if i else ''}": InjectedFault(name=ONE_ULP, draw=i) for i in rounds}
        return ulp_arms | {fault.arm: fault for fault in self.faults}


def _is_distance(limit: float | str | None) -> bool:
    return limit is not None and not isinstance(limit, str) and limit > 0


def describe_claim(claim: Claim) -> str:
    """Return the claim without metric and window: `±0.02`, `below 0.6x the baseline`, `exact`."""
    if claim.margin is not None:
        return f"±{claim.margin}" if isinstance(claim.margin, str) else f"±{claim.margin:g}"
    if claim.limit is None:
        return "exact"
    number, is_ratio = claim.limit
    side = "below" if claim.below is not None else "above"
    text = f"{side} {number:g}{'x the baseline' if is_ratio else ''}"
    return f"{text}'s excess over 1" if claim.is_limit_on_excess else text


def parse_claim(text: str) -> Claim:
    """Parse METRIC:WINDOW:MARGIN from the command line; the metric's name may contain colons.

    MARGIN may also be `<1.2` (below), `>0.65` (above), `<0.6x` (ratio to the baseline) or `exact`. Raises
    RecipeError.
    """
    metric, window, margin = ["", "", "", *text.rsplit(":", 2)][-3:]
    if not (metric and margin):
        raise RecipeError(Code.SETTING_REFUSED(field="--claim", got=shortened(text)))
    if window[:1] in ("<", ">"):
        raise RecipeError(Code.CLAIM_LIMIT_SYNTAX(got=shortened(text)))
    if margin == "exact":
        return validated(Claim, {"metric": metric, "window": window, "exact": True}, "--claim")
    field = {"<": "below", ">": "above"}.get(margin[0], "margin")
    text = margin if field == "margin" else margin[1:].strip()
    try:
        number: float | str = float(text)
    except ValueError:
        number = text
    return validated(Claim, {"metric": metric, "window": window, field: number}, "--claim")


def claim_option(claim: Claim) -> str:
    """Return the claim as text for `parse_claim`, without transform, climbs, sigma and correlation."""
    bound: object = claim.margin
    if claim.limit is not None:
        bound = f"<{claim.below}" if claim.below is not None else f">{claim.above}"
    return f"{claim.metric}:{claim.window}:{'exact' if claim.exact else bound}"
