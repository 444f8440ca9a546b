"""What is compared, whichever source it came from: runs as arrays, paired by seed."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from abrun.errors import ComparisonError
from abrun.extras import is_imported
from abrun.logs.log import Recording, listed
from abrun.metric_names import FINAL_WEIGHTS, MEMORY_PEAK, STEP_ONE
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim, Compare
from abrun.recipe.faults import ONE_ULP, InjectedFault
from abrun.recorded.ledger import Ledger
from abrun.runs.layout import RunName
from abrun.runs.records import Status
from abrun.stats.series import EMPTY_SERIES, Array, Series, Steps, intersect_steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun(Recording):
    """One run as its source holds it."""

    name: RunName
    # unknown: the source does not say whether it finished
    status: Status | Literal["missing", "unreadable", "unknown"]
    forbidden: bool = False  # unreadable for want of permission: nothing need be damaged
    identity: Mapping[str, Any] | None = (
        None  # arm, seed, rerun as its own files state them; None: they do not
    )
    final_weights_hash: str | None = None  # None: the source does not say
    final_sketch: Callable[[], Mapping[str, Array]] = dict  # of the final weights, read when asked for
    initial_sketch: Callable[[], Mapping[str, Array]] = dict  # the same of the initial ones
    span_s: tuple[float, float] | None = None  # from its first start to its end; None: unknown
    device_s: float | None = None  # devices x seconds at work, all attempts; None: unknown
    wandb: str | None = None  # where its mirror in wandb is seen
    thinned: bool = False  # a reference: outside the windows of its claims not every step was kept
    # What reading it had to decide: a torn line left out, a step recorded twice, a seed that is not known
    notes: tuple[str | Reason, ...] = ()

    @property
    def finished(self) -> bool:
        return self.status in ("finished", "unknown")

    @property
    def begins_anew(self) -> bool:
        """True where the step counter begins anew, so that its first step may be a later one."""
        return repeated_steps(self.metrics) > 0

    @property
    def steps(self) -> Steps:
        """The steps of its training: where a reward, a loss or another metric of step one was recorded.

        Monitors, validations and counters of samples may have steps of their own. Without a metric of step
        one, the steps that most of its metrics share.
        """
        trained = [self.metrics[metric].steps for metric in STEP_ONE if metric in self.metrics]
        if any(map(len, trained)):
            return union(trained)
        by_axis: dict[bytes, list[Steps]] = {}
        for series in self.metrics.values():
            by_axis.setdefault(series.steps.tobytes(), []).append(series.steps)
        largest = max(
            by_axis.values(), key=lambda axis: (len(axis), len(axis[0])), default=[EMPTY_SERIES.steps]
        )
        return largest[0]

    def imports(self, package: str) -> bool:
        """False where abrun's trainer did without it: it may be installed, in whatever version."""
        config = self.config or {}
        return config.get("trainer.type") != "abrun" or is_imported(package, config)

    def series(self, metric: str) -> Series:
        """Empty where the metric was never recorded."""
        return self.metrics.get(metric, EMPTY_SERIES)

    def first_non_finite(self, metric: str, first: int = 0, last: int | None = None) -> int | None:
        """The first step, from `first` to `last`, at which a recorded metric is NaN or infinite."""
        series = self.series(metric)
        inside = (series.steps >= first) & ~np.isfinite(series.values)
        if last is not None:
            inside &= series.steps <= last
        return int(series.steps[inside][0]) if inside.any() else None

    def __str__(self) -> str:
        return str(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """The two runs of one seed, and that seed's same-seed repetitions of the baseline."""

    seed: int
    baseline: RecordedRun
    treatment: RecordedRun
    reruns: tuple[RecordedRun, ...]
    moved: tuple[RecordedRun, ...] = ()  # baselines whose initial weights were moved by one ULP

    @property
    def finished(self) -> bool:
        return self.baseline.finished and self.treatment.finished

    @property
    def begins_anew(self) -> bool:
        return self.baseline.begins_anew or self.treatment.begins_anew


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """The runs of both arms of one comparison: as pairs, place by place of one seed, or independent."""

    baselines: tuple[RecordedRun, ...]
    treatments: tuple[RecordedRun, ...]
    paired: bool

    @property
    def runs(self) -> tuple[RecordedRun, ...]:
        return *self.baselines, *self.treatments

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.baselines), len(self.treatments)

    @property
    def finished(self) -> "Sides":
        """The pairs of which both runs finished; of independent arms each run that did."""
        return self.of([run.finished for run in self.baselines], [run.finished for run in self.treatments])

    def of(self, left: Sequence[bool], right: Sequence[bool]) -> "Sides":
        """Those marked in both arms; where they are paired, a pair needs both marks."""
        if self.paired:
            left = right = [one and other for one, other in zip(left, right, strict=True)]
        return Sides(
            baselines=tuple(run for run, kept in zip(self.baselines, left, strict=True) if kept),
            treatments=tuple(run for run, kept in zip(self.treatments, right, strict=True) if kept),
            paired=self.paired,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """A frozen ensemble: runs of one arm, and the comparison whose windows it holds in full."""

    name: str
    compare: Compare
    runs: tuple[RecordedRun, ...]
    config: Mapping[str, Any] = field(default_factory=dict)  # what the configurations of its runs share
    environment: Mapping[str, Any] = field(default_factory=dict)  # likewise
    ledger: Ledger | None = None  # of changes accepted since; None: it was frozen without a budget
    declared_s: float | None = None  # when its claims were declared, in seconds since 1970; None: not known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experiment:
    """Arms to compare, and what was declared about them before they ran, if anything was."""

    name: str
    arms: tuple[str, ...]  # the baseline first
    compare: Compare
    runs: Mapping[RunName, RecordedRun]
    directory: Path | None = None  # of an experiment that abrun launched
    # Likewise; None: nothing was declared before the runs.
    treatment_diff: Mapping[str, Mapping[str, Sequence[Any]]] | None = (
        None  # arm -> key -> [baseline's, arm's]
    )
    launched_compare_sha256: str | None = None
    launched_pairs: int = 0
    decided: tuple[Reason, ...] = ()  # what the recipe left to its launch, a line each with the reason
    reference: Reference | None = None
    # Baselines in which something was injected: what by arm, and their runs, which no verdict is about.
    injected: Mapping[str, InjectedFault] = field(default_factory=dict)
    controls: Mapping[RunName, RecordedRun] = field(default_factory=dict)
    seeds_known: bool = True  # False: unpaired runs that were numbered
    guessed: tuple[
        Reason, ...
    ] = ()  # of runs that abrun did not launch: what names and columns were taken for
    renamed: Mapping[str, str] = field(default_factory=dict)  # a metric's name there -> its name here
    asked_sha256: str = ""  # of runs that abrun did not launch: of their sources and what was asked of them
    left_out: tuple[Reason, ...] = ()  # each run, or part of one, that does not count
    versions_differ: bool = False  # declared: the treatment is other versions of Python and packages
    regression: bool = False  # the baseline is the reference: other versions and devices are what is tested

    @property
    def baseline(self) -> str:
        return self.arms[0]

    @property
    def treatments(self) -> tuple[str, ...]:
        return self.arms[1:]

    def arm(self, arm: str) -> dict[int, RecordedRun]:
        """The runs of an arm by seed, without A/A reruns."""
        return {name.seed: run for name, run in self.runs.items() if name.arm == arm and not name.rerun}

    def sides(self, arm: str, num_pairs: int | None = None) -> Sides:
        """Both arms: the first pairs, or every run where they are not paired."""
        if self.compare.paired:
            pairs = self.pairs(arm)[:num_pairs]
            both = [pair.baseline for pair in pairs], [pair.treatment for pair in pairs]
        else:
            both = self.arm(self.baseline).values(), self.arm(arm).values()
        return Sides(baselines=tuple(both[0]), treatments=tuple(both[1]), paired=self.compare.paired)

    def pairs(self, arm: str) -> list[Pair]:
        """The seeds that both arms planned, in launch order; none where runs are not paired."""
        if not self.compare.paired:
            return []
        baselines, treatments = self.arm(self.baseline), self.arm(arm)
        reruns = [run for run in self.runs.values() if run.name.rerun]
        moved = [run for name, run in self.controls.items() if self.injected[name.arm].name == ONE_ULP]
        return [
            Pair(
                seed=seed,
                baseline=baseline,
                treatment=treatments[seed],
                reruns=tuple(run for run in reruns if run.name.seed == seed),
                moved=tuple(run for run in moved if run.name.seed == seed),
            )
            for seed, baseline in baselines.items()
            if seed in treatments
        ]

    def steps_of(self, metric: str) -> Steps:
        """Every step at which a finished run recorded a metric, of a reference up to its end.

        Windows of claims on it are read on these steps. A reference has left out steps before its claims'
        windows. Later runs hold them; without them "last 20%" of the steps would be fewer than it was. A
        metric without steps of its own, such as `memory` or `final_weights`, has those of the training.
        """
        finished = [run for run in self.runs.values() if run.finished]
        grids = [(run.thinned, run.series(metric).steps) for run in finished]
        if not any(len(steps) for _, steps in grids):
            grids = [(run.thinned, run.steps) for run in finished]
        steps = union(steps for _, steps in grids)
        ends = [int(its[-1]) for thinned, its in grids if thinned and len(its)]
        return steps[steps <= max(ends)] if self.regression and ends else steps

    def all_steps(self) -> Steps:
        """Every step of the training of any finished run."""
        return union(run.steps for run in self.runs.values() if run.finished)

    def faults_of_arms(self) -> list[str]:
        """The faults that arms have as part of them, each with its arms: `misgrouped in treatment`."""
        found: dict[str, dict[str, None]] = {}
        for run in self.runs.values():
            fault = (run.config or {}).get("injected_fault.name")
            if fault not in (None, ONE_ULP):
                found.setdefault(str(fault), {})[run.name.arm] = None
        return [f"{fault} in {' and '.join(arms)}" for fault, arms in found.items()]

    @property
    def has_recipe(self) -> bool:
        """Whether abrun launched it; in other trainers' logs there is nothing to set."""
        return self.directory is not None

    @property
    def can_inject(self) -> bool:
        """Whether `abrun sensitivity` can inject faults in the baseline."""
        configs = [run.config or {} for run in self.arm(self.baseline).values()]
        refused = any(
            one.get("trainer.type") == "command" or one.get("injected_fault.name") is not None
            for one in configs
        )
        return self.has_recipe and not (self.regression or refused)

    def metrics(self) -> list[str]:
        """Every metric that some run recorded, sorted."""
        return sorted({metric for run in self.runs.values() for metric in run.metrics})


def repeated_steps(metrics: Mapping[str, Series]) -> int:
    """Return how many steps a counter that begins anew gave twice, by the metrics of step one or else any."""
    of_step_one = [metrics[metric] for metric in STEP_ONE if metric in metrics]
    return max((series.recounted for series in of_step_one or metrics.values()), default=0)


def union(grids: Iterable[Steps]) -> Steps:
    distinct = {id(grid): grid for grid in grids if len(grid)}  # the metrics of a run often share their steps
    first, *others = distinct.values() or [np.empty(0, np.int64)]
    differing = [grid for grid in others if not np.array_equal(grid, first)]
    if not differing:
        return first
    steps = np.sort(np.concatenate([first, *differing]), kind="stable")  # np.unique is slow on whole numbers
    return steps[np.append(True, np.diff(steps) > 0)]


def no_shared_step(runs: Sequence[RecordedRun]) -> Reason | None:
    """Return that no step is in all of the runs; None where one is, or a run has none at all."""
    steps = [run.steps for run in runs]
    grids = {its.tobytes(): its for its in steps}.values()  # most often one
    if not (grids and all(map(len, grids))) or len(intersect_steps(*grids)):
        return None
    runs_of: dict[tuple[int, int, int], list[str]] = {}
    for run, its in zip(runs, steps, strict=True):
        runs_of.setdefault((len(its), int(its[0]), int(its[-1])), []).append(str(run))
    return Code.NO_SHARED_STEP(
        grids=[
            {"runs": of_grid, "num_steps": num_steps, "first": first, "last": last}
            for (num_steps, first, last), of_grid in runs_of.items()
        ]
    )


def stack(runs: Sequence[RecordedRun], metric: str) -> tuple[Steps, Array]:
    """The shared steps [S] of a metric and its values [R, S]: inner join, never interpolated."""
    series = [run.series(metric) for run in runs]
    if not series:
        return EMPTY_SERIES.steps, np.empty((0, 0))
    shared = intersect_steps(*(one.steps for one in series))
    rows = [one.values_at(shared) for one in series]
    return shared, np.array(rows).reshape(len(runs), len(shared))


def stack_pairs(pairs: Sequence[Pair], metric: str) -> tuple[Steps, Array, Array]:
    """Shared steps [S], baseline [P, S] and treatment [P, S] of a metric."""
    steps, values = stack([pair.baseline for pair in pairs] + [pair.treatment for pair in pairs], metric)
    return steps, values[: len(pairs)], values[len(pairs) :]


def claims_on_recorded(experiment: Experiment, claims: Sequence[Claim]) -> list[Claim]:
    """The claims, each on a metric that some run recorded: by its name, its trainer's name, or the end of it.

    Raises ComparisonError for any other, and for one given twice: by hand, that is a typing error.
    """
    known = experiment.metrics()
    found: list[Claim] = []
    for claim in claims:
        metric = experiment.renamed.get(claim.metric, claim.metric)
        ending = [name for name in known if f"/{name}".lower().endswith(f"/{metric}".lower())]
        if metric not in known and len(ending) == 1:
            metric = ending[0]
        recorded = claim.model_copy(update={"metric": metric}) if metric in known else claim
        if recorded in found:
            raise ComparisonError(Code.CLAIM_TWICE(metric=claim.metric))
        found.append(recorded)
        if known and metric not in (*known, MEMORY_PEAK, FINAL_WEIGHTS):
            unread = [run.unread[metric] for run in experiment.runs.values() if metric in run.unread]
            if unread:
                raise ComparisonError(Code.CLAIM_ON_TEXT(metric=claim.metric, unread=unread[0]))
            close = difflib.get_close_matches(claim.metric, known, n=1)
            raise ComparisonError(
                Code.CLAIM_NOT_RECORDED(
                    metric=claim.metric,
                    close=close[0] if close else None,
                    recorded=listed(list(known), 12),
                )
            )
    return found
