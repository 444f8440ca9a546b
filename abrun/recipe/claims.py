"""What a comparison claims, declared before the runs: primaries with margins, guards, controls."""

import math
import re
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from abrun.errors import RecipeError
from abrun.recipe.faults import ONE_ULP, PlantedFault, named
from abrun.recipe.refusals import shortened, validated
from abrun.recipe.section import Count, Positive, Section

WINDOW = r"all|last [1-9]\d?%|last 100%|steps [1-9]\d{0,9}-[1-9]\d{0,9}"
SIGMAS = r"\d+(\.\d+)? sigma"


class Primary(Section):
    """One declared claim: arms agree on `metric` over `window` within `margin`.

    `margin` is absolute, in units of the transformed metric, or `"1.5 sigma"`: in standard deviations over
    seeds, those of `Compare.reference` where one is named, else the runs' own by an exact test. `sigma` (over
    seeds) and `correlation` (between paired arms) are assumptions that only the power shown before launch
    depends on.
    """

    metric: str
    window: str = "last 20%"
    margin: float | str
    transform: Literal["identity", "log", "log_excess"] | None = None  # None: by the metric's name
    sigma: Positive | None = None
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0

    @field_validator("window")
    @classmethod
    def _window_is_readable(cls, window: str) -> str:
        if not re.fullmatch(WINDOW, window):
            raise ValueError(f"got {shortened(window)}; allowed: 'last 20%', 'steps 10-50' or 'all'")
        if window.startswith("steps") and int(window[6:].split("-")[0]) > int(window.split("-")[1]):
            raise ValueError(f"got {window!r}, which ends before it begins; write the smaller step first")
        return window

    @field_validator("margin", mode="before")
    @classmethod
    def _margin_is_readable(cls, margin: Any) -> Any:
        in_sigmas = isinstance(margin, str) and re.fullmatch(SIGMAS, margin)
        number: Any = float(margin.split()[0]) if in_sigmas else margin
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise ValueError(f"got {shortened(margin)}; allowed: a number above 0, or such as '1.5 sigma'")
        return margin

    @property
    def sigmas(self) -> float | None:
        """A margin in standard deviations over seeds; None where it is absolute."""
        return float(self.margin.split()[0]) if isinstance(self.margin, str) else None


class Guards(Section):
    """One-sided limits that a treatment must keep, over all steps, besides to finish and to stay finite."""

    # Of train/token_mult_prob_error: the worst run's median, and the share of steps that lie above it.
    token_mult_prob_error_median: Annotated[float, Field(gt=1)] = 1.05
    token_mult_prob_error_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    step_time_ratio: Positive | None = None  # treatment / baseline, geometric mean over pairs; None: no limit
    peak_memory_ratio: Positive | None = None  # likewise


class Compare(Section):
    """The comparison, declared before the runs and hashed into the experiment at launch."""

    primary: list[Primary] = Field(default=[], max_length=100)
    guards: Guards = Guards()
    step_one: bool = True  # False: the first step follows an update, or rollouts do not repeat
    step_one_tolerance: Positive | None = None  # relative; None: 3x the A/A deviation or the dtype's rounding
    looks: list[Count] = Field(default=[])  # numbers of pairs at which a verdict may be taken; the last: all
    reference: str | None = None  # a frozen reference ensemble (abrun freeze)

    @field_validator("looks")
    @classmethod
    def _looks_go_up(cls, looks: list[int]) -> list[int]:
        if looks and (len(looks) < 2 or looks[0] < 2 or any(b <= a for a, b in pairwise(looks))):
            raise ValueError(f"got {looks}; allowed: two or more numbers of pairs going up from 2, as [4, 8]")
        return looks


class Controls(Section):
    """Runs of the baseline beside the arms, which no verdict is about: what others are held against."""

    aa_reruns: Annotated[int, Field(ge=0, le=1000)] = (
        0  # with their own seed again: the machine's noise floor
    )
    # With initial weights moved by one ULP of policy.dtype: what so small a difference grows into
    ulp_reruns: Annotated[int, Field(ge=0, le=1000)] = 0
    # Each planted at every seed: what the comparison would have caught. Names of docs/faults.md, or sections
    faults: list[Annotated[PlantedFault, BeforeValidator(named)]] = Field(default=[], max_length=100)

    @field_validator("faults")
    @classmethod
    def _faults_differ(cls, faults: list[PlantedFault]) -> list[PlantedFault]:
        arms = [fault.arm for fault in faults]
        twice = next((arm for arm in arms if arms.count(arm) > 1), None)
        if twice:
            raise ValueError(f"got {twice.removeprefix('fault-')!r} twice; every fault and size once")
        if any(fault.name == ONE_ULP for fault in faults):
            raise ValueError(f"got {ONE_ULP!r}, which is no fault; use controls.ulp_reruns")
        return faults

    def arms(self, num_seeds: int) -> dict[str, PlantedFault]:
        """What is planted in each arm of a control."""
        rounds = range(-(-self.ulp_reruns // num_seeds))
        moved = {f"one-ulp{f'-{i + 1}' if i else ''}": PlantedFault(name=ONE_ULP, draw=i) for i in rounds}
        return moved | {fault.arm: fault for fault in self.faults}


def parse_primary(text: str) -> Primary:
    """A claim given as METRIC:WINDOW:MARGIN on the command line; a metric's name may hold colons."""
    metric, window, margin = ["", "", "", *text.rsplit(":", 2)][-3:]
    if not (metric and margin):
        raise RecipeError(
            f"--primary: got {shortened(text)}; allowed: METRIC:WINDOW:MARGIN, such as "
            "'train/reward:last 20%:0.05' or 'train/reward:all:1.5 sigma'"
        )
    try:
        number = float(margin)
    except ValueError:
        number = margin
    return validated(Primary, {"metric": metric, "window": window, "margin": number}, "--primary")
