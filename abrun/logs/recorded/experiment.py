"""Experiments to compare, from any source: runs as arrays, paired by seed."""

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from abrun.errors import ComparisonError
from abrun.logs.log import Axis, RunRecording
from abrun.logs.recorded.ledger import Ledger
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import listed
from abrun.recipe.claims import Claim, Compare
from abrun.recipe.extras import is_imported
from abrun.recipe.faults import ONE_ULP, InjectedFault
from abrun.runs.layout import RunName
from abrun.runs.metric_names import OF_RUNS, REWARD, STEP_ONE
from abrun.runs.records import Status
from abrun.runs.redaction import list_names
from abrun.runs.traces import StoredTrace
from abrun.stats.series import EMPTY_SERIES, Array, Series, Steps, intersect_steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun(RunRecording):
    """One run as recorded by its source."""

    name: RunName
    # unknown: the source does not record whether it finished
    status: Status | Literal["missing", "unreadable", "unknown"]
    # Arm, seed and rerun as recorded in the run's own files; None: not recorded
    identity: Mapping[str, Any] | None = None
    final_weights_hash: str | None = None  # None: unknown
    rollouts_sha256: str | None = None  # of the recorded rollouts that it wrote or trained on
    final_sketch: Callable[[], Mapping[str, Array]] = dict  # of the final weights, read on demand
    initial_sketch: Callable[[], Mapping[str, Array]] = dict  # of the initial weights, read on demand
    span_s: tuple[float, float] | None = None  # times of its first start and its end; None: unknown
    runs_per_gpu: int = 1  # maximum number of runs that shared its GPUs, itself included
    mps: bool = False  # they shared them through CUDA's multi-process service
    wandb: str | None = None  # URL of its mirror in wandb
    thinned: bool = False  # a reference, which keeps every step only inside the windows of its claims
    # Decisions while reading: a torn line left out, a step recorded twice, an unknown seed
    notes: tuple[str | Reason, ...] = ()

    @property
    def finished(self) -> bool:
        return self.status in ("finished", "unknown")

    @property
    def trains_on_recording(self) -> bool:
        """True if it trained on recorded rollouts instead of sampling."""
        return (self.config or {}).get("rollout.engine") == "recorded"

    @property
    def has_restarted_counter(self) -> bool:
        """True if the step counter restarts, so that the first recorded step may be a later one."""
        return count_repeated_steps(self.metrics) > 0

    @property
    def steps(self) -> Steps:
        """The training steps: those at which a step-one metric such as the reward or loss was recorded.

        Monitors, validations and sample counters may use other steps. Without a step-one metric, these are
        the steps that most metrics share.
        """
        training_steps = [self.metrics[metric].steps for metric in STEP_ONE if metric in self.metrics]
        if any(map(len, training_steps)):
            return union_steps(training_steps)
        by_axis: dict[bytes, list[Steps]] = {}
        for series in self.metrics.values():
            by_axis.setdefault(series.steps.tobytes(), []).append(series.steps)
        largest = max(
            by_axis.values(), key=lambda axis: (len(axis), len(axis[0])), default=[EMPTY_SERIES.steps]
        )
        return largest[0]

    def uses_package(self, package: str) -> bool:
        """Return False if abrun's trainer did not import a package, so that its version does not matter."""
        config = self.config or {}
        return config.get("trainer.type") != "abrun" or is_imported(package, config)

    def series(self, metric: str) -> Series:
        """Return the series of a metric; empty if it was never recorded."""
        return self.metrics.get(metric, EMPTY_SERIES)

    def first_non_finite(self, metric: str, start: int = 0, end: int | None = None) -> int | None:
        """Return the first step, from `start` to `end`, at which a metric is NaN or infinite, or None."""
        series = self.series(metric)
        matches = (series.steps >= start) & ~np.isfinite(series.values)
        if end is not None:
            matches &= series.steps <= end
        return int(series.steps[matches][0]) if matches.any() else None

    def __str__(self) -> str:
        return str(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """The two runs of one seed, and the baseline's A/A reruns of that seed."""

    seed: int
    baseline: RecordedRun
    treatment: RecordedRun
    reruns: tuple[RecordedRun, ...]
    moved: tuple[RecordedRun, ...] = ()  # baselines with initial weights perturbed by one ULP

    @property
    def runs(self) -> tuple[RecordedRun, RecordedRun]:
        return self.baseline, self.treatment

    @property
    def finished(self) -> bool:
        return self.baseline.finished and self.treatment.finished

    @property
    def has_restarted_counter(self) -> bool:
        return self.baseline.has_restarted_counter or self.treatment.has_restarted_counter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """The runs of both arms of a comparison: paired by position and seed, or independent."""

    baselines: tuple[RecordedRun, ...]
    treatments: tuple[RecordedRun, ...]
    paired: bool

    @property
    def arms(self) -> tuple[tuple[RecordedRun, ...], tuple[RecordedRun, ...]]:
        return self.baselines, self.treatments

    @property
    def runs(self) -> tuple[RecordedRun, ...]:
        return *self.baselines, *self.treatments

    @property
    def axis(self) -> Axis:
        """Unit of the positions of the runs' series: steps, prompts, or one final score."""
        return self.runs[0].axis if self.runs else "steps"

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.baselines), len(self.treatments)

    @property
    def share_rollouts(self) -> bool:
        """True if the pairs see the same rollouts at each step, recorded by their baselines."""
        return self.paired and all(run.trains_on_recording for run in self.treatments)

    @property
    def finished(self) -> "Sides":
        """The pairs whose runs both finished; for independent arms, every finished run."""
        return self.select(
            [run.finished for run in self.baselines], [run.finished for run in self.treatments]
        )

    def select(self, baseline_mask: Sequence[bool], treatment_mask: Sequence[bool]) -> "Sides":
        """Return the runs selected by a mask per arm; a pair is kept only if both masks select it."""
        if self.paired:
            baseline_mask = treatment_mask = [*map(operator.and_, baseline_mask, treatment_mask)]
        return Sides(
            baselines=tuple(compress(self.baselines, baseline_mask)),
            treatments=tuple(compress(self.treatments, treatment_mask)),
            paired=self.paired,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """A frozen ensemble: runs of one arm, and the claims whose windows it holds in full."""

    name: str
    compare: Compare
    runs: tuple[RecordedRun, ...]
    config: Mapping[str, Any] = field(default_factory=dict)  # values shared by the configurations of its runs
    environment: Mapping[str, Any] = field(default_factory=dict)  # likewise
    ledger: Ledger | None = None  # of changes accepted since; None: frozen without a budget
    declared_s: float | None = None  # time of the claims' declaration, seconds since 1970; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedExperiment:
    """Arms to compare, and what was declared about them before they ran."""

    name: str
    arms: tuple[str, ...]  # the baseline first
    compare: Compare
    runs: Mapping[RunName, RecordedRun] = field(repr=False)
    directory: Path | None = None  # None: abrun did not launch the experiment
    # arm -> key -> [baseline's value, arm's value]; None: abrun did not launch the experiment
    treatment_diff: Mapping[str, Mapping[str, Sequence[Any]]] | None = None
    launched_compare_sha256: str | None = None
    launched_pairs: int = 0
    launched_baseline: str | None = None  # if another arm was chosen as the baseline after the launch
    decided: tuple[Reason, ...] = ()  # values that the recipe left to the launch, each with the reason
    reference: Reference | None = None
    # Control arms: baselines with an injected fault, and their runs. They have no verdict of their own.
    injected: Mapping[str, InjectedFault] = field(default_factory=dict)
    controls: Mapping[RunName, RecordedRun] = field(default_factory=dict)
    seeds_known: bool = True  # False: unpaired runs that were numbered
    guessed: tuple[Reason, ...] = ()  # what names and columns of other trainers' runs were taken for
    renamed: Mapping[str, str] = field(default_factory=dict)  # the trainer's metric name -> abrun's name
    left_out: tuple[Reason, ...] = ()  # runs, or parts of runs, that do not count
    unselected: tuple[str, ...] = ()  # names of the runs that --seeds and --exclude leave out
    versions_differ: bool = False  # declared: the treatment is a change of Python or package versions
    regression: bool = False  # the baseline is a reference; versions and devices may differ
    trace: StoredTrace | Reason | None = None  # of `abrun trace`; a reason: why it says nothing of these arms

    @property
    def baseline(self) -> str:
        return self.arms[0]

    def choose_arm(self, arm: str | None, arms: Sequence[str]) -> str:
        """Return the arm of `--arm`, or the only one of `arms`. Raises ComparisonError."""
        if arm is None and len(arms) != 1:
            raise ComparisonError(
                f"--arm: missing; {self.name} has {f'{listed(arms)}' if arms else 'no treatment'}"
            )
        arm = arm or arms[0]
        if arm not in arms:
            raise ComparisonError(f"--arm: got {arm!r}; allowed: {listed(arms)}")
        return arm

    @property
    def treatments(self) -> tuple[str, ...]:
        return self.arms[1:]

    @property
    def axis(self) -> Axis:
        """Unit of the positions of the runs' series: steps, prompts, or one final score."""
        for run in self.runs.values():
            return run.axis
        return "steps"

    def arm(self, arm: str) -> dict[int, RecordedRun]:
        """Return the runs of an arm by seed, without A/A reruns."""
        return {name.seed: run for name, run in self.runs.items() if name.arm == arm and not name.rerun}

    def sides(self, arm: str, num_pairs: int | None = None) -> Sides:
        """Return the runs of both arms: the first `num_pairs` pairs, or every run if unpaired.

        The baseline has no other arm to be compared with: all of its runs, unpaired.
        """
        if arm == self.baseline:
            return Sides(baselines=(), treatments=tuple(self.arm(arm).values()), paired=False)
        if self.compare.paired:
            pairs = self.pairs(arm)[:num_pairs]
            both = [pair.baseline for pair in pairs], [pair.treatment for pair in pairs]
        else:
            both = self.arm(self.baseline).values(), self.arm(arm).values()
        return Sides(baselines=tuple(both[0]), treatments=tuple(both[1]), paired=self.compare.paired)

    def pairs(self, arm: str) -> list[Pair]:
        """Return a pair for every seed in both arms, in launch order; none if runs are not paired."""
        if not self.compare.paired:
            return []
        baselines, treatments = self.arm(self.baseline), self.arm(arm)
        reruns = [run for name, run in self.runs.items() if name.rerun and name.arm == self.baseline]
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

    def metric_steps(self, metric: str) -> Steps:
        """Return the steps [S] at which any finished run recorded a metric.

        Compared with a reference, only those up to the reference's last step.

        Windows of claims on the metric are resolved on these steps. A reference keeps few steps outside its
        claims' windows; without the steps of the newer runs, "last 20%" would cover fewer steps than when
        the reference was made.
        A metric without its own steps, such as `memory` or `final_weights`, uses the training steps.
        """
        finished = [run for run in self.runs.values() if run.finished]
        grids = [(run.thinned, run.series(metric).steps) for run in finished]
        if not any(len(steps) for _, steps in grids):
            grids = [(run.thinned, run.steps) for run in finished]
        steps = union_steps(steps for _, steps in grids)
        ends = [int(grid[-1]) for thinned, grid in grids if thinned and len(grid)]
        return steps[steps <= max(ends)] if self.regression and ends else steps

    def all_steps(self) -> Steps:
        """Return the training steps of all finished runs."""
        return union_steps(run.steps for run in self.runs.values() if run.finished)

    def describe_arm_faults(self) -> list[str]:
        """Return a description of each fault that arms contain: `misgrouped in treatment`."""
        arms_by_fault: dict[str, dict[str, None]] = {}
        for run in self.runs.values():
            fault = (run.config or {}).get("injected_fault.name")
            if fault not in (None, ONE_ULP):
                arms_by_fault.setdefault(str(fault), {})[run.name.arm] = None
        return [f"{fault} in {' and '.join(arms)}" for fault, arms in arms_by_fault.items()]

    @property
    def has_recipe(self) -> bool:
        """True if abrun launched the experiment; other trainers' logs come without a recipe."""
        return self.directory is not None

    @property
    def can_inject(self) -> bool:
        """True if `abrun faults run` can inject faults into the baseline."""
        configs = [run.config or {} for run in self.arm(self.baseline).values()]
        refused = any(
            config.get("trainer.type") == "command" or config.get("injected_fault.name") is not None
            for config in configs
        )
        return self.has_recipe and not (self.regression or refused)

    def metrics(self) -> list[str]:
        """Return every metric that some run recorded, sorted."""
        return sorted({metric for run in self.runs.values() for metric in run.metrics})


def count_repeated_steps(metrics: Mapping[str, Series]) -> int:
    """Return how many steps a restarted counter gave twice, by the step-one metrics or else any metric."""
    step_one_metrics = [metrics[metric] for metric in STEP_ONE if metric in metrics]
    return max((series.recounted for series in step_one_metrics or metrics.values()), default=0)


def refuse_mixed_axes(runs: Iterable[tuple[Axis, str]]) -> None:
    """Raise ComparisonError if some runs have curves and others only scores; each run with its place."""
    kinds = {"steps": "training steps", "final": "final scores", "prompts": "scores per prompt"}
    places: dict[Axis, str] = {}
    for axis, place in runs:
        places.setdefault(axis, place)
    if len(places) > 1:
        axis_names = " and ".join(f"{kinds[axis]} ({place})" for axis, place in places.items())
        raise ComparisonError(
            f"sources: got {axis_names}, which have no values in common; compare runs of one kind"
        )


def union_steps(grids: Iterable[Steps]) -> Steps:
    distinct = {id(grid): grid for grid in grids if len(grid)}  # the metrics of a run often share their steps
    first_grid, *other_grids = distinct.values() or [np.empty(0, np.int64)]
    differing_grids = [grid for grid in other_grids if not np.array_equal(grid, first_grid)]
    if not differing_grids:
        return first_grid
    # np.unique is slow on integers
    steps = np.sort(np.concatenate([first_grid, *differing_grids]), kind="stable")
    return steps[np.append(True, np.diff(steps) > 0)]


def no_shared_step_reason(runs: Sequence[RecordedRun]) -> Reason | None:
    """Return a reason if the runs share no step; None if they do, or if a run has no steps at all."""
    steps = [run.steps for run in runs]
    grids = {run_steps.tobytes(): run_steps for run_steps in steps}.values()  # most often one
    if not (grids and all(map(len, grids))) or len(intersect_steps(*grids)):
        return None
    runs_of: dict[tuple[int, int, int], list[str]] = {}
    for run, run_steps in zip(runs, steps, strict=True):
        runs_of.setdefault((len(run_steps), int(run_steps[0]), int(run_steps[-1])), []).append(str(run))
    return Code.NO_SHARED_STEP(
        grids=[
            {"runs": grid_runs, "num_steps": num_steps, "first": first_step, "last": last_step}
            for (num_steps, first_step, last_step), grid_runs in runs_of.items()
        ]
    )


def stack_runs(runs: Sequence[RecordedRun], metric: str) -> tuple[Steps, Array]:
    """Return the shared steps [S] of a metric and its values [R, S]: an inner join without interpolation."""
    series = [run.series(metric) for run in runs]
    if not series:
        return EMPTY_SERIES.steps, np.empty((0, 0))
    shared = intersect_steps(*(run_series.steps for run_series in series))
    rows = [run_series.values_at(shared) for run_series in series]
    return shared, np.array(rows).reshape(len(runs), len(shared))


def stack_pairs(pairs: Sequence[Pair], metric: str) -> tuple[Steps, Array, Array]:
    """Return the shared steps [S], baseline values [P, S] and treatment values [P, S] of a metric."""
    steps, values = stack_runs([pair.baseline for pair in pairs] + [pair.treatment for pair in pairs], metric)
    return steps, values[: len(pairs)], values[len(pairs) :]


# --- prompts as the units of a test ---
#
# With several runs of an arm the seed is the unit: each run's mean over the shared prompts is one
# observation. With one run of each arm the prompt is the unit, and the result covers these two runs only.
# Differences are taken prompt by prompt, and the samples of a prompt were averaged before, which is the
# clustered error of equally weighted prompts (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640,
# sections 2.2 and 4).


def has_prompts_as_units(sides: Sides) -> bool:
    """Return True for one run of each arm, or of the only arm, scored per prompt."""
    return sides.sizes in ((1, 1), (0, 1)) and sides.axis == "prompts"


def select_units(sides: Sides, metric: str) -> Sides:
    """Return the observations of a claim on a metric: the runs, or the prompts of one run of each arm.

    Each prompt becomes a run with one score, at the first prompt's step.
    """
    if not has_prompts_as_units(sides):
        return sides
    shared = reduce(np.intersect1d, [run.series(metric).steps for run in sides.runs])
    baselines, treatments = (
        tuple(prompt_run for run in runs for prompt_run in _make_prompt_runs(run, metric, shared))
        for runs in sides.arms
    )
    return Sides(baselines=baselines, treatments=treatments, paired=sides.paired or bool(baselines))


def _make_prompt_runs(run: RecordedRun, metric: str, prompts: Steps) -> Iterator[RecordedRun]:
    for prompt, score in zip(prompts.tolist(), run.series(metric).values_at(prompts), strict=True):
        yield RecordedRun(
            name=RunName(arm=run.name.arm, seed=prompt, rerun=run.name.rerun),
            place=run.place,
            status=run.status,
            metrics={metric: Series(prompts[:1], np.array([score]))},
            axis="prompts",
        )


# --- claims ---


def resolve_claims(experiment: RecordedExperiment, claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims with recorded metric names; a claim may use the trainer's name or its last part.

    Raises ComparisonError for a metric that no run recorded, and for a duplicate claim.
    """
    recorded_metrics = experiment.metrics()
    resolved: list[Claim] = []
    for claim in claims:
        metric = experiment.renamed.get(claim.metric, claim.metric)
        matching_metrics = [
            name for name in recorded_metrics if f"/{name}".lower().endswith(f"/{metric}".lower())
        ]
        if metric not in recorded_metrics and len(matching_metrics) == 1:
            metric = matching_metrics[0]
        resolved_claim = claim.model_copy(update={"metric": metric}) if metric in recorded_metrics else claim
        if experiment.axis != "steps":  # neither windows nor learning
            resolved_claim = resolved_claim.model_copy(update={"window": "all", "climbs": False})
        if resolved_claim in resolved:
            raise ComparisonError(f"--claim: got {claim.metric!r} twice; give every claim once")
        if resolved_claim.needs_direction and not resolved_claim.better_direction:
            raise ComparisonError(
                f"{claim.metric}: {claim.kind}: whether higher is better is unknown; add ', higher is "
                "better' or ', lower is better' to --claim, or higher_is_better to the recipe's claim"
            )
        if resolved_claim.is_on_policy_loss(policy_gradient=REWARD in recorded_metrics):
            raise ComparisonError(
                f"{claim.metric}: {claim.kind}: the loss of a policy gradient does not measure learning; "
                "claim a reward, or add ', lower is better' to --claim"
            )
        resolved.append(resolved_claim)
        if recorded_metrics and metric not in (*recorded_metrics, *OF_RUNS):
            unread = [run.unread[metric] for run in experiment.runs.values() if metric in run.unread]
            if unread:
                raise ComparisonError(
                    f"--claim: metric {claim.metric!r} is not recorded as numbers in any run: {unread[0]}"
                )
            close_matches = difflib.get_close_matches(claim.metric, recorded_metrics, n=1)
            close_text = f"did you mean {close_matches[0]!r}? " if close_matches else ""
            raise ComparisonError(
                f"--claim: metric {claim.metric!r} is not recorded in any run; {close_text}recorded: "
                f"{list_names(list(recorded_metrics), 12)}"
            )
    return resolved
