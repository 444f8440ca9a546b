"""Comparison sections of a recipe, declared before the runs: claims with margins, guards, controls."""

import math
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from abrun.errors import RecipeError
from abrun.recipe.faults import ACCEPT_FAULT_NAME, ONE_ULP, InjectedFault
from abrun.recipe.refusals import shortened, suggest_name, validated
from abrun.recipe.section import Count, FieldError, PathText, Positive, Section, check_path, rule
from abrun.runs.metric_names import (
    DIVERGENCE_RATE,
    FINAL_WEIGHTS,
    MEMORY_PEAK,
    STEP_ONE,
    Better,
    Transform,
    better_direction,
    default_transform,
    learning_sign,
)

DEFAULT_WINDOW = "last 20%"
WINDOW_PATTERN = r"all|last [1-9]\d?%|last 100%|steps [1-9]\d{0,9}-[1-9]\d{0,9}"
MARGIN_PATTERN = r"(?P<number>\d+(\.\d+)?)(?P<unit> sigma|%( of climb)?)"
RATIO_PATTERN = r"\d+(\.\d+)?x"
LEVEL_PATTERN = r"level (?P<level>-?\d+(\.\d+)?)"
BOUND_PATTERN = r"((?P<word>within|not_worse|better|sd) +|(?P<level>level +)?(?P<sign>[<>]) *)?(?P<number>.*)"
DIRECTIONS = {", higher is better": True, ", lower is better": False}
# Claims on the difference of the arms: equivalence, non-inferiority, superiority by at least the margin
DifferenceKind = Literal["within", "not_worse", "better"]
ClaimKind = Literal["within", "not_worse", "better", "limit", "sd", "exact"]
ClaimField = Literal["margin", "not_worse", "better", "below", "above", "sd", "exact"]
CLAIM_FIELDS: tuple[ClaimField, ...] = get_args(ClaimField)
MAX_SD = 1e100  # of a recorded noise: its square is finite
CLAIM_NAMES: dict[DifferenceKind, str] = {
    "within": "an equivalence",
    "not_worse": "a non-inferiority",
    "better": "a superiority",
}
Spending = Literal["equal", "rising", "obrien_fleming"]  # how alpha is spent over interim analyses
Unit = Literal["", "sigma", "level", "climb"]  # unit of a margin; "": the metric's own unit


def _read_limit(limit: Any) -> tuple[Any, bool, bool]:
    """Return a limit's number, and whether it is a ratio and written as a level; else what was given."""
    if isinstance(limit, str) and re.fullmatch(RATIO_PATTERN, limit):
        return float(limit[:-1]), True, False
    level = re.fullmatch(LEVEL_PATTERN, limit) if isinstance(limit, str) else None
    return (float(level["level"]) if level else limit), False, level is not None


class Claim(Section):
    """Claim on `metric` over `window`; it has one of margin, not_worse, better, below, above, sd and exact.

    `margin` (also written `within`), `not_worse` and `better` are about the difference of the arms. Their
    number is absolute, in units of the transformed metric, or `"1.5 sigma"` (standard deviations of the
    baseline or reference over seeds), `"5%"` of the baseline's level in the window, or `"5% of climb"` (its
    improvement up to the window's end). `below` and `above` limit the level of the treatment alone, or with
    an `x` its ratio to the baseline; `sd` limits the ratio of the spreads over seeds. A match, and a pass of
    `not_worse`, require that the baseline improved by more than the margin, unless `climbs` is false.
    `sigma`, `correlation` (of paired arms) and `improvement` are assumptions for the power analysis.
    """

    # A recorded metric, `memory` (peak; limit only), `final_weights` (exact or below) or `rate of divergence`
    # (below, not_worse or better: a share of runs, such as 0.05 or '5%')
    metric: str
    window: str = DEFAULT_WINDOW
    margin: float | str | None = None  # equivalence: the arms differ by less than this, in either direction
    not_worse: float | str | None = None  # non-inferiority: the treatment is worse by less than this
    better: float | str | None = None  # superiority: the treatment is better by more than this; 0: at all
    higher_is_better: bool | None = None  # None: from the metric's name
    # Upper limit on the treatment's mean; `0.6x`: on treatment / baseline (`log_excess`: of their excesses
    # over 1); `level -0.5` for a negative level
    below: float | str | None = None
    above: float | str | None = None  # lower limit
    sd: str | None = None  # the treatment's spread over seeds is less than `1.5x` the baseline's
    exact: bool = False  # pairs are bit-identical at every step of the window
    transform: Literal["identity", "log", "log_excess"] | None = None  # None: chosen by the metric's name
    climbs: bool = True  # False: the metric is not required to improve
    sigma: Positive | None = None
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    improvement: Positive | None = None  # true improvement, for `better`; None: twice its margin

    @model_validator(mode="before")
    @classmethod
    def _accept_within(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "within" not in raw:
            return raw
        if raw.get("margin") is not None:
            raise FieldError("got within and margin, which are the same; drop one of the two")
        return {"margin" if key == "within" else key: raw[key] for key in raw if key != "margin"}

    @model_validator(mode="before")
    @classmethod
    def _accept_percentage_of_runs(cls, raw: Any) -> Any:
        """Return a claim on a rate with percentages as numbers; elsewhere they are shares of a level."""
        if not isinstance(raw, dict) or raw.get("metric") != DIVERGENCE_RATE:
            return raw
        texts = {key: value for key, value in raw.items() if isinstance(value, str)}
        matches = {key: re.fullmatch(r"(\d+(\.\d+)?) ?%", text) for key, text in texts.items()}
        shares = {key: float(match[1]) / 100 for key, match in matches.items() if match}
        return raw | shares | {"window": "all"}

    @field_validator("window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        if not re.fullmatch(WINDOW_PATTERN, window):
            gone = "; claims on the time to a target were removed" * window.startswith("reaches")
            raise FieldError(f"got {shortened(window)}{gone}; allowed: 'last 20%', 'steps 10-50' or 'all'")
        if window.startswith("steps") and int(window[6:].split("-")[0]) > int(window.split("-")[1]):
            raise FieldError(f"got {window!r}, which ends before it starts; write the smaller step first")
        return window

    @field_validator("margin", "not_worse", "better", mode="before")
    @classmethod
    def _check_margin(cls, margin: Any, info: ValidationInfo) -> Any:
        if margin is None:
            return None
        match = re.fullmatch(MARGIN_PATTERN, margin) if isinstance(margin, str) else None
        number: Any = float(match["number"]) if match else margin
        is_number = type(number) in (int, float) and 0 <= number < math.inf
        if is_number and number == 0 and info.field_name == "not_worse":
            raise FieldError("got 0, which only a better treatment keeps; use better: 0")
        if not is_number or (number == 0 and info.field_name != "better"):
            raise FieldError(
                f"got {shortened(margin)}; allowed: a number above 0, '1.5 sigma', '5%', '5% of climb' (for "
                "--claim also 'not_worse 0.02', 'better 0.02', '<1.2', '>0.65', '<0.6x', 'exact')"
            )
        if match and "%" in (match["unit"] or "") and number >= 100:
            raise FieldError(f"got {shortened(margin)}; allowed: less than 100%")
        return margin

    @field_validator("below", "above", mode="before")
    @classmethod
    def _check_limit(cls, limit: Any, info: ValidationInfo) -> Any:
        """Accept a limit on a level or a ratio; a negative number would also read as a difference."""
        number, is_ratio, is_level = _read_limit(limit)
        is_number = type(number) in (int, float) and abs(number) <= sys.float_info.max
        if limit is not None and (not is_number or (is_ratio and number <= 0)):
            raise FieldError(
                f"got {shortened(limit)}; allowed: a number, or a ratio to the baseline such as '0.6x'"
            )
        if is_number and number < 0 and not is_level:
            size, sign = f"{-number:g}", "<" if info.field_name == "below" else ">"
            raise FieldError(
                f"got {limit:g}, which may be a level or a difference; for the treatment's own level write "
                f"'level {limit:g}' (--claim METRIC:WINDOW:'level {sign} {limit:g}'); for its difference "
                f"from the baseline not_worse: {size} or better: {size} (METRIC:WINDOW:'not_worse {size}')"
            )
        return limit

    @field_validator("sd", mode="before")
    @classmethod
    def _check_spread(cls, limit: Any) -> Any:
        number, is_ratio, _ = _read_limit(limit)
        if limit is None or (is_ratio and number > 0):
            return limit
        raise FieldError(f"got {shortened(limit)}; allowed: a ratio to the baseline's sd such as '1.5x'")

    @rule
    def _check_single_claim(self) -> None:
        fields = self._declared_fields()
        if len(fields) != 1:
            raise FieldError(
                f"got {' and '.join(fields) or 'no claim'} for {shortened(self.metric)}; allowed: one "
                "of margin, not_worse, better, below, above, sd and exact"
            )
        got = f"got {fields[0]}: {getattr(self, fields[0])} for"
        if self.metric == DIVERGENCE_RATE and not self._is_share_of_runs():
            raise FieldError(
                f"{got} {DIVERGENCE_RATE!r}; allowed: below, not_worse or better with a share of the runs "
                "below 1, such as '5%'"
            )
        if self.metric == DIVERGENCE_RATE and self.higher_is_better:
            raise FieldError(f"got 'higher is better' for {DIVERGENCE_RATE!r}, where lower is; drop it")
        is_distance = isinstance(self.below, float | int) and self.below > 0
        if self.metric == FINAL_WEIGHTS and not (self.exact or is_distance):
            raise FieldError(
                f"{got} {FINAL_WEIGHTS}; allowed: exact: true, or below: a distance above 0, in units of how "
                "far the baseline moved, such as 0.05"
            )
        if self.metric == MEMORY_PEAK and fields[0] not in ("below", "above"):
            raise FieldError(f"got {fields[0]} for {MEMORY_PEAK}; allowed: below or above, such as '0.6x'")
        if self.improvement is not None and self.better is None:
            raise FieldError("got improvement without better; drop it")

    def _is_share_of_runs(self) -> bool:
        bounds = self.below, self.not_worse, self.better
        share = next((bound for bound in bounds if bound is not None), None)
        return isinstance(share, float | int) and (0 < share < 1 or (share == 0 and self.better is not None))

    def _declared_fields(self) -> list[ClaimField]:
        fields = type(self).model_fields
        return [field for field in CLAIM_FIELDS if getattr(self, field) != fields[field].default]

    @property
    def kind(self) -> ClaimKind:
        """Return what is claimed: a difference (three kinds), a limit, or bit-identical arms."""
        kinds: dict[Any, Any] = {"margin": "within", "below": "limit", "above": "limit"}
        field = self._declared_fields()[0]
        return kinds.get(field, field)

    @property
    def difference_kind(self) -> DifferenceKind | None:
        """Return the kind of a claim on the arms' mean difference; None for any other claim."""
        kind = self.kind
        return None if kind in ("limit", "sd", "exact") or self.metric == DIVERGENCE_RATE else kind

    @property
    def needs_direction(self) -> bool:
        """Return whether the claim depends on which direction of its metric is an improvement."""
        return self.difference_kind in ("not_worse", "better")

    def is_on_policy_loss(self, *, policy_gradient: bool) -> bool:
        """Return whether a direction is needed, but the metric is a loss that does not measure learning."""
        guessed = self.needs_direction and self.higher_is_better is None
        signs = (learning_sign(self.metric, policy_gradient=on_policy) for on_policy in (False, True))
        return guessed and policy_gradient and tuple(signs) == (-1, None)

    @property
    def is_one_sided(self) -> bool:
        """Return whether a pass does not say that the arms agree."""
        return is_one_sided(self.kind, self.metric)

    @property
    def better_direction(self) -> Better | None:
        """Return which direction is an improvement, as declared or by the metric's name; None if unknown."""
        if self.higher_is_better is not None:
            return "higher" if self.higher_is_better else "lower"
        return "lower" if self.metric == DIVERGENCE_RATE else better_direction(self.metric)

    @property
    def limit(self) -> tuple[float, bool] | None:
        """Return the limit's number and whether it limits the ratio to the baseline; None without a limit."""
        limit = next((limit for limit in (self.below, self.above, self.sd) if limit is not None), None)
        number, is_ratio, _ = _read_limit(limit)
        return None if limit is None else (float(number), is_ratio)

    @property
    def limits_level(self) -> bool:
        """Return whether the claim is on the level of one arm, so that it needs no other arm."""
        return self.limit is not None and not self.limit[1] and self.metric != FINAL_WEIGHTS

    @property
    def bound(self) -> str:
        """Return a description of the margin or limit for error messages."""
        kind = self.difference_kind
        return f"{CLAIM_NAMES[kind]} margin" if kind else f"a limit, {describe_claim(self)}"

    @property
    def is_limit_on_excess(self) -> bool:
        """Return whether the limit applies to the ratio of both arms' excesses over 1."""
        is_ratio = self.limit is not None and self.limit[1] and not self.sd
        return is_ratio and (self.transform or default_transform(self.metric)) == "log_excess"

    @property
    def declared_margin_in(self) -> tuple[float, Unit]:
        """Return the number and unit of the margin, of whichever kind; a percentage as a fraction."""
        declared_margin = self.declared_margin
        assert declared_margin is not None
        match = re.fullmatch(MARGIN_PATTERN, declared_margin) if isinstance(declared_margin, str) else None
        if match is None:
            return float(declared_margin), ""
        number = float(match["number"])
        if match["unit"] == " sigma":
            return number, "sigma"
        return number / 100, "climb" if "climb" in match["unit"] else "level"

    @property
    def margin_in(self) -> tuple[float, Unit]:
        """Return the margin as it is tested: on a logarithmic scale, a share of the level is a log ratio."""
        number, unit = self.declared_margin_in
        if unit != "level" or (self.transform or default_transform(self.metric)) == "identity":
            return number, unit
        is_increase = (self.kind == "not_worse") == (self.better_direction == "lower")
        return (math.log1p(number) if is_increase or self.kind == "within" else -math.log1p(-number)), ""

    @property
    def sigma_margin(self) -> float | None:
        """Return the margin in standard deviations over seeds; None if it has another unit."""
        number, unit = self.margin_in if self.difference_kind is not None else (None, "")
        return number if unit == "sigma" else None

    @property
    def declared_margin(self) -> float | str | None:
        """Return the margin of a claim on the difference as it is declared; None for any other claim."""
        margins = (self.margin, self.not_worse, self.better)
        return next((margin for margin in margins if margin is not None), None)

    def with_margin(self, margin: float) -> "Claim":
        """Return the claim with an absolute margin of the same kind."""
        kind = self.difference_kind
        assert kind is not None
        return self.model_copy(update={"margin" if kind == "within" else kind: margin})


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


class NoisePrior(Section):
    """Noise of paired differences in earlier experiments, which a launch fits to their history."""

    metric: str
    window: str
    transform: Transform
    recorded: bool = False  # pairs on recorded rollouts
    sd: Annotated[float, Field(gt=0, le=MAX_SD)]
    dof: Annotated[float, Field(gt=0, le=4)]
    experiments: Count
    sha256: str = ""  # of the records that it was fitted to


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
    # One-sided level of each test: the chance to pass arms at their margin, or to fail arms that keep it
    alpha: Annotated[float, Field(gt=0, le=0.2)] = 0.05
    # all: every claim must hold, each tested at alpha; any: one suffices, with Holm's correction
    require: Literal["all", "any"] = "all"
    # Of interim analyses; rising: in proportion to the pairs; obrien_fleming: most for the last. None: equal
    # if the first is at 2 or 3 pairs, else obrien_fleming
    alpha_spending: Spending | None = None
    # History of the noise over seeds: auto (noise.jsonl beside the experiments), none, or a file
    noise: Annotated[str, Field(min_length=1), AfterValidator(check_path)] = "auto"
    noise_priors: list[NoisePrior] = Field(default=[], max_length=1000)
    # File of abrun reference save; path relative to the working directory or the recipe's folder
    reference: PathText | None = None

    @property
    def spending(self) -> Spending:
        """Return how alpha is spent: O'Brien and Fleming's first level would decide nothing at 3 pairs."""
        return self.alpha_spending or ("equal" if min(self.interim, default=0) < 4 else "obrien_fleming")

    @rule
    def _check_pairs(self) -> None:
        exact = any(claim.exact for claim in self.claims)
        weights = any(claim.metric == FINAL_WEIGHTS for claim in self.claims)
        needing = "interim" if self.interim else "exact" if exact else FINAL_WEIGHTS if weights else ""
        if needing and not self.paired:
            raise FieldError(f"got paired: false with {needing}, which needs pairs; drop one of the two")

    @field_validator("step_one_tolerance", mode="before")
    @classmethod
    def _check_tolerances(cls, tolerance: Any) -> Any:
        if tolerance is None:
            return None
        by_metric: dict[str, Any] = tolerance if isinstance(tolerance, dict) else {"": tolerance}
        for metric, limit in by_metric.items():
            if by_metric is tolerance and metric not in STEP_ONE:
                got = f"got {shortened(metric)}, which the step-one check does not compare"
                raise FieldError(f"{got}; {suggest_name(metric, STEP_ONE)}")
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
                raise FieldError(
                    f"got {shortened(tolerance)}; allowed: a number above 0, or a number per "
                    "metric, such as {train/gen_kl_error: 0.05}"
                )
        return tolerance

    @field_validator("claims")
    @classmethod
    def _check_directions(cls, claims: list[Claim]) -> list[Claim]:
        for claim in claims:
            if claim.needs_direction and claim.better_direction is None:
                raise FieldError(
                    f"got {claim.kind} for {shortened(claim.metric)}, but whether higher is better is "
                    "unknown; add higher_is_better: true or false"
                )
        return claims

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


def find_prior(
    priors: Sequence[NoisePrior], claim: Claim, *, recorded: bool | None = None
) -> NoisePrior | None:
    """Return the noise of a claim's metric, window and scale; `recorded`: of pairs on recorded rollouts."""
    scale = claim.metric, claim.window, claim.transform or default_transform(claim.metric)
    candidates = (prior for prior in priors if (prior.metric, prior.window, prior.transform) == scale)
    return next((prior for prior in candidates if recorded in (None, prior.recorded)), None)


def is_one_sided(kind: ClaimKind, metric: str) -> bool:
    """Return whether a claim is a limit, non-inferiority or superiority; a limited distance is none."""
    return kind not in ("within", "exact") and metric != FINAL_WEIGHTS


def describe_claim(claim: Claim) -> str:
    """Return the claim without metric and window: `±0.02`, `at most 0.02 lower`, `level below 1.2`."""
    if claim.metric == DIVERGENCE_RATE:
        return _describe_rate(claim)
    if claim.sd is not None:
        return f"sd below {claim.sd} the baseline's"
    if kind := claim.difference_kind:
        margin = claim.declared_margin
        number = margin if isinstance(margin, str) else f"{margin:g}"
        return describe_margin(kind, f"±{number}", claim.better_direction)
    if claim.limit is None:
        return "exact"
    number, is_ratio = claim.limit
    side = "below" if claim.below is not None else "above"
    level = "" if is_ratio or claim.metric == FINAL_WEIGHTS else "level "
    text = f"{level}{side} {number:g}{'x the baseline' if is_ratio else ''}"
    return f"{text}'s excess over 1" if claim.is_limit_on_excess else text


def _describe_rate(claim: Claim) -> str:
    """Return a claim on the rate of divergence: `below 5 %`, `at most 10 points higher`."""
    if isinstance(claim.below, float | int):
        return f"below {100 * claim.below:g} %"
    points = f"{100 * claim.declared_margin_in[0]:g} points"
    if claim.kind == "not_worse":
        return f"at most {points} higher"
    return f"more than {points} lower" if claim.better else "lower"


def describe_margin(kind: DifferenceKind, margin: str, better: Better | None) -> str:
    """Return a margin `±0.02` as it is claimed: itself, `at most 0.02 lower`, `more than 0.02 higher`.

    `better` is the direction of an improvement, which a one-sided claim knows once it is tested.
    """
    if kind == "within":
        return margin
    size = margin.removeprefix("±")
    if kind == "not_worse":
        return f"at most {size} {'worse' if better is None else 'lower' if better == 'higher' else 'higher'}"
    amount = "" if re.match(r"0(\.0*)?($| )", size) else f"more than {size} "
    return f"{amount}{better or 'better'}"


def parse_claim(text: str) -> Claim:
    """Parse METRIC:WINDOW:MARGIN from the command line; the metric's name may contain colons.

    MARGIN is the margin of an equivalence (`0.02`, `within 0.02`), `not_worse 0.02`, `better 0.02`, `<1.2`
    (level below; `level <-1.2` if negative), `>0.65` (above), `<0.6x` (ratio to the baseline), `sd <1.5x`
    (ratio of spreads over seeds) or `exact`. It may end with `, higher is better` or `, lower is better`.
    `rate of divergence` has no window. Raises RecipeError.
    """
    text = re.sub(rf"^({DIVERGENCE_RATE}):([^:]*)$", r"\1:all:\2", text)
    metric, window, margin = ["", "", "", *text.rsplit(":", 2)][-3:]
    if not (metric and margin.strip()):
        raise RecipeError(
            f"--claim: got {shortened(text)}; allowed: METRIC:WINDOW:MARGIN, such as 'train/reward:last "
            "20%:0.05', 'train/reward:all:1.5 sigma' or 'memory:all:<0.6x'"
        )
    if window[:1] in ("<", ">"):
        raise RecipeError(
            f"--claim: got {shortened(text)}, a limit with a colon; write '<0.9x' for a ratio to the "
            "baseline, or '<0.9' for a level"
        )
    values: dict[str, Any] = {"metric": metric, "window": window}
    margin = margin.strip()
    for suffix, higher_is_better in DIRECTIONS.items():
        if margin.endswith(suffix):
            margin, values["higher_is_better"] = margin.removesuffix(suffix).strip(), higher_is_better
    if margin == "exact":
        return validated(Claim, {**values, "exact": True}, "--claim")
    match = re.fullmatch(BOUND_PATTERN, margin)
    assert match is not None  # every word of it is optional
    field = {None: "margin", "within": "margin", "<": "below", ">": "above"}
    word = match["word"] or match["sign"]
    bound = match["number"].removeprefix("<") if word == "sd" else match["number"]
    number = _parse_number(bound, is_level=bool(match["level"]))
    return validated(Claim, {**values, field.get(word, word): number}, "--claim")


def _parse_number(text: str, *, is_level: bool) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return f"level {number:f}".rstrip("0").rstrip(".") if is_level and number < 0 else number


def claim_option(claim: Claim) -> str:
    """Return the claim as text for `parse_claim`, without transform, climbs, sigma and correlation."""
    bound: object = "exact"
    if claim.sd is not None:
        bound = f"sd <{claim.sd}"
    elif claim.limit is not None:
        sign, limit = ("<", claim.below) if claim.below is not None else (">", claim.above)
        level = re.fullmatch(LEVEL_PATTERN, str(limit))
        bound = f"level {sign}{level['level']}" if level else f"{sign}{limit}"
    elif (kind := claim.kind) != "exact":
        bound = f"{'' if kind == 'within' else f'{kind} '}{claim.declared_margin}"
    suffix = next((text for text, is_it in DIRECTIONS.items() if is_it == claim.higher_is_better), "")
    return f"{claim.metric}:{claim.window}:{bound}{suffix}"
