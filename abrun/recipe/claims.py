"""What a comparison claims, declared before the runs: claims with margins, guards, controls."""

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
from abrun.recipe.faults import NAMED, ONE_ULP, InjectedFault
from abrun.recipe.refusals import nearest, shortened, validated
from abrun.recipe.section import Count, FieldError, PathText, Positive, Section

DEFAULT_WINDOW = "last 20%"
WINDOW = r"all|last [1-9]\d?%|last 100%|steps [1-9]\d{0,9}-[1-9]\d{0,9}"
MARGIN = r"(?P<number>\d+(\.\d+)?)(?P<unit> sigma|%( of climb)?)"
RATIO = r"\d+(\.\d+)?x"
Spending = Literal["equal", "rising"]  # how interim analyses share the level
Unit = Literal["", "sigma", "level", "climb"]  # what a margin is measured in; "": the metric's own unit


class Claim(Section):
    """One declared claim: arms agree on `metric` over `window` within `margin`, keep a limit, or are `exact`.

    `margin` is absolute, in units of the transformed metric; or `"1.5 sigma"`: in standard deviations of the
    baseline over seeds, or of `Compare.reference` where one is named; or `"5%"` of the baseline's level in
    the window, or `"5% of climb"`: of what the baseline learned up to the window's end. A match needs a
    baseline that climbed by more than the margin, unless `climbs` is false. `sigma` (over seeds) and
    `correlation` (between paired arms) are assumptions that only the power shown before launch depends on.
    """

    metric: (
        str  # recorded, or `memory` (the peak over all phases; a limit), or `final_weights` (exact, or below)
    )
    window: str = DEFAULT_WINDOW
    margin: float | str | None = None
    # Of the treatment's level over seeds, or `0.6x`: of treatment / baseline (of `log_excess`: of their
    # excesses over 1)
    below: float | str | None = None
    above: float | str | None = None  # likewise; a claim has one of margin, below, above and exact
    exact: bool = False  # every value of the window is the same in both runs of each pair, bit for bit
    transform: Literal["identity", "log", "log_excess"] | None = None  # None: by the metric's name
    climbs: bool = (
        True  # false: the metric need not move, as where the baseline is at its best from the start
    )
    sigma: Positive | None = None
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0

    @field_validator("window")
    @classmethod
    def _window_is_readable(cls, window: str) -> str:
        if not re.fullmatch(WINDOW, window):
            raise FieldError(f"got {shortened(window)}; allowed: 'last 20%', 'steps 10-50' or 'all'")
        if window.startswith("steps") and int(window[6:].split("-")[0]) > int(window.split("-")[1]):
            raise FieldError(f"got {window!r}, which ends before it begins; write the smaller step first")
        return window

    @field_validator("margin", mode="before")
    @classmethod
    def _margin_is_readable(cls, margin: Any) -> Any:
        if margin is None:
            return None
        found = re.fullmatch(MARGIN, margin) if isinstance(margin, str) else None
        number: Any = float(found["number"]) if found else margin
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise FieldError(
                f"got {shortened(margin)}; allowed: a number above 0, '1.5 sigma', '5%', '5% of climb' (of "
                "--claim also '<1.2', '>0.65', '<0.6x', 'exact')"
            )
        if found and "%" in (found["unit"] or "") and number >= 100:
            raise FieldError(f"got {shortened(margin)}, as wide as all of it; allowed: less than 100%")
        return margin

    @field_validator("below", "above", mode="before")
    @classmethod
    def _limit_is_readable(cls, limit: Any) -> Any:
        of_baseline = isinstance(limit, str) and re.fullmatch(RATIO, limit)
        number: Any = float(limit[:-1]) if of_baseline else limit
        is_number = type(number) in (int, float) and abs(number) <= sys.float_info.max
        if limit is not None and (not is_number or (of_baseline and number <= 0)):
            raise FieldError(f"got {shortened(limit)}; allowed: a number, or '0.6x' of the baseline")
        return limit

    @model_validator(mode="after")
    def _claims_one_thing(self) -> Self:
        said = [name for name in ("margin", "below", "above") if getattr(self, name) is not None]
        said += ["exact"] * self.exact
        if len(said) != 1:
            raise FieldError(
                f"got {' and '.join(said) or 'no claim'} for {shortened(self.metric)}; allowed: one of "
                "margin, below, above and exact"
            )
        if self.metric == FINAL_WEIGHTS and not self.exact and not _is_distance(self.below):
            raise FieldError(
                f"got {said[0]}: {getattr(self, said[0])} for {FINAL_WEIGHTS}; allowed: exact: true, or "
                "below: a distance above 0, in units of how far the baseline moved, such as 0.05"
            )
        if self.metric == MEMORY_PEAK and said[0] not in ("below", "above"):
            raise FieldError(f"got {said[0]} for {MEMORY_PEAK}; allowed: below or above, such as '0.6x'")
        return self

    @property
    def limit(self) -> tuple[float, bool] | None:
        """A limit's number, and whether it is one of the ratio to the baseline; None: there is none."""
        limit = self.below if self.below is not None else self.above
        if limit is None:
            return None
        return (float(limit[:-1]), True) if isinstance(limit, str) else (float(limit), False)

    @property
    def bound(self) -> str:
        """What bounds the difference, as a refusal names it."""
        return "an equivalence margin" if self.margin is not None else f"a limit, {claim_text(self)}"

    @property
    def limits_excess(self) -> bool:
        """Return whether a limit is of treatment / baseline of the excess over 1."""
        of_baseline = self.limit is not None and self.limit[1]
        return of_baseline and (self.transform or default_transform(self.metric)) == "log_excess"

    @property
    def margin_in(self) -> tuple[float, Unit]:
        """The margin's number and unit; a percentage as a share."""
        assert self.margin is not None
        found = re.fullmatch(MARGIN, self.margin) if isinstance(self.margin, str) else None
        if found is None:
            return float(self.margin), ""
        number = float(found["number"])
        if found["unit"] == " sigma":
            return number, "sigma"
        return number / 100, "climb" if "climb" in found["unit"] else "level"

    @property
    def sigmas(self) -> float | None:
        """A margin in standard deviations over seeds; None where it is in another unit."""
        number, unit = self.margin_in if self.margin is not None else (None, "")
        return number if unit == "sigma" else None


class Guards(Section):
    """One-sided limits that a treatment must keep, over all steps, besides to finish and to stay finite.

    A limit fails where the treatment is beyond it and worse than its paired baseline by a t-test. `alpha` is
    what all of these tests together take of the 5 % in which equal arms may be called a mismatch.
    """

    alpha: Annotated[float, Field(gt=0, lt=0.05)] = 0.01
    # No NaN or Inf that the baseline does not have: in these metrics, and in those that are claimed.
    finite: list[str] = Field(default=["train/loss", "train/grad_norm", "train/reward"], max_length=1000)
    # Of train/token_mult_prob_error: the worst run's median, and the share of steps that lie above it.
    token_mult_prob_error_median: Annotated[float, Field(gt=1)] = 1.05
    token_mult_prob_error_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    step_time_ratio: Positive | None = None  # treatment / baseline, geometric mean over pairs; None: no limit
    peak_memory_ratio: Positive | None = None  # likewise


def is_interim_schedule(counts: Sequence[int]) -> bool:
    """Return whether these are two or more numbers of pairs going up from 2."""
    return len(counts) > 1 and counts[0] > 1 and all(a < b for a, b in pairwise(counts))


class Compare(Section):
    """The comparison, declared before the runs and hashed into the experiment at launch."""

    claims: list[Claim] = Field(default=[], max_length=100)
    guards: Guards = Guards()
    step_one: bool = True  # False: the first step follows an update, or rollouts do not repeat
    # Relative, of all metrics or by name, {train/gen_kl_error: 0.05}; None: by A/A reruns, or the dtype
    step_one_tolerance: float | dict[str, float] | None = None
    # False: runs are independent, whatever their seeds (Welch); wider than pairs where arms share their noise
    paired: bool = True
    interim: list[Count] = Field(
        default=[]
    )  # numbers of pairs at which a verdict may be taken; the last: all
    # Levels of the interim analyses: the same for each, or in proportion to its pairs, which costs less power
    alpha_spending: Spending = "equal"
    reference: PathText | None = (
        None  # a frozen ensemble (abrun freeze), from here or from the recipe's folder
    )

    @field_validator("step_one_tolerance", mode="before")
    @classmethod
    def _one_tolerance_or_some(cls, tolerance: Any) -> Any:
        if tolerance is None:
            return None
        by_metric: dict[str, Any] = tolerance if isinstance(tolerance, dict) else {"": tolerance}
        for metric, one in by_metric.items():
            if by_metric is tolerance and metric not in STEP_ONE:
                raise FieldError(
                    f"got {shortened(metric)}, which step one does not read; {nearest(metric, STEP_ONE)}"
                )
            if isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < math.inf:
                raise FieldError(
                    f"got {shortened(tolerance)}; allowed: a number above 0, or one for each of some "
                    "metrics, as {train/gen_kl_error: 0.05}"
                )
        return tolerance

    @field_validator("interim")
    @classmethod
    def _interim_counts_rise(cls, interim: list[int]) -> list[int]:
        if interim and not is_interim_schedule(interim):
            raise FieldError(
                f"got {interim}; allowed: two or more numbers of pairs going up from 2, as [4, 8]"
            )
        return interim


class Controls(Section):
    """Runs of the baseline beside the arms, which no verdict is about: what others are held against."""

    aa_reruns: Annotated[int, Field(ge=0, le=1000)] = (
        0  # with their own seed again: the machine's noise floor
    )
    # With initial weights moved by one ULP of policy.dtype: what so small a difference grows into
    ulp_reruns: Annotated[int, Field(ge=0, le=1000)] = 0
    # Each injected at every seed: what the comparison would have caught. Names of docs/faults.md, or sections
    faults: list[Annotated[InjectedFault, NAMED]] = Field(default=[], max_length=100)

    @field_validator("faults")
    @classmethod
    def _faults_differ(cls, faults: list[InjectedFault]) -> list[InjectedFault]:
        arms = [fault.arm for fault in faults]
        twice = next((arm for arm in arms if arms.count(arm) > 1), None)
        if twice:
            raise FieldError(f"got {twice.removeprefix('fault-')!r} twice; every fault and size once")
        if any(fault.name == ONE_ULP for fault in faults):
            raise FieldError(f"got {ONE_ULP!r}, which is no fault; use controls.ulp_reruns")
        return faults

    def arms(self, num_seeds: int) -> dict[str, InjectedFault]:
        """What is injected in each arm of a control."""
        rounds = range(-(-self.ulp_reruns // num_seeds))
        moved = {f"one-ulp{f'-{i + 1}' if i else ''}": InjectedFault(name=ONE_ULP, draw=i) for i in rounds}
        return moved | {fault.arm: fault for fault in self.faults}


def _is_distance(limit: float | str | None) -> bool:
    return limit is not None and not isinstance(limit, str) and limit > 0


def claim_text(claim: Claim) -> str:
    """What is claimed besides where: `±0.02`, `below 0.6 x the baseline`, `exact`."""
    if claim.margin is not None:
        return f"±{claim.margin}" if isinstance(claim.margin, str) else f"±{claim.margin:g}"
    if claim.limit is None:
        return "exact"
    number, of_baseline = claim.limit
    side = "below" if claim.below is not None else "above"
    text = f"{side} {number:g}{' x the baseline' if of_baseline else ''}"
    return f"{text}'s excess over 1" if claim.limits_excess else text


def parse_claim(text: str) -> Claim:
    """A claim given as METRIC:WINDOW:MARGIN on the command line; a metric's name may hold colons.

    In the place of the margin: `<1.2` (below), `>0.65` (above), `<0.6x` (of the baseline), or `exact`.
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
    """What `parse_claim` reads the claim from; its transform, climb and planning are not in it."""
    said: object = claim.margin
    if claim.limit is not None:
        said = f"<{claim.below}" if claim.below is not None else f">{claim.above}"
    return f"{claim.metric}:{claim.window}:{'exact' if claim.exact else said}"
