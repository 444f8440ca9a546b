"""What a comparison claims, declared before the runs: primaries with margins, guards, controls."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from abrun.errors import RecipeError
from abrun.recipe.models import Positive, Section
from abrun.recipe.reading import shortened, validated

WINDOW = r"all|last [1-9]\d?%|last 100%|steps [1-9]\d*-[1-9]\d*"


class Primary(Section):
    """One declared claim: arms agree on `metric` over `window` within `margin` (verdict.md's T3).

    `margin` is absolute, in units of the transformed metric. `sigma` (over seeds) and `correlation` (between
    paired arms) are assumptions that only the power shown before launch depends on.
    """

    metric: str
    window: str = "last 20%"
    margin: Positive
    transform: Literal["identity", "log", "log_excess"] | None = None  # None: by the metric's name
    sigma: Positive | None = None
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0

    @field_validator("window")
    @classmethod
    def _window_is_readable(cls, window: str) -> str:
        if not re.fullmatch(WINDOW, window):
            raise ValueError(f"got {window!r}; allowed: 'last 20%', 'steps 10-50' or 'all'")
        if window.startswith("steps") and int(window[6:].split("-")[0]) > int(window.split("-")[1]):
            raise ValueError(f"got {window!r}, which ends before it begins; write the smaller step first")
        return window


class Guards(Section):
    """One-sided limits that a treatment must keep; see verdict.md, rule 5."""

    token_mult_prob_error_median: Annotated[float, Field(gt=1)] = 1.05
    token_mult_prob_error_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    step_time_ratio: Positive | None = None
    peak_memory_ratio: Positive | None = None


class Compare(Section):
    """The comparison, declared before the runs and hashed into the experiment at launch."""

    primary: list[Primary] = Field(default=[])
    guards: Guards = Guards()
    step_one_tolerance: Positive | None = None  # relative; None: 3x the A/A deviation or the dtype's rounding


class Controls(Section):
    """`aa_reruns`: baseline runs repeated with their own seed, the noise floor of the machine."""

    aa_reruns: Annotated[int, Field(ge=0, le=1000)] = 0


def parse_primary(text: str) -> Primary:
    """A claim given as METRIC:WINDOW:MARGIN on the command line."""
    metric, _, rest = text.partition(":")
    window, colon, margin = rest.partition(":")
    try:
        number = float(margin)
    except ValueError:
        number = None
    if not metric or not colon or number is None:
        raise RecipeError(
            f"--primary: got {shortened(text)}; allowed: METRIC:WINDOW:MARGIN, "
            "such as 'train/reward:last 20%:0.05'"
        )
    return validated(Primary, {"metric": metric, "window": window, "margin": number}, "--primary")
