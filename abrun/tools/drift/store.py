"""The store of a gate: one line for its start, then one for each answer, appended under a lock.

The state is replayed from the lines. A line is one write, so a killed gate leaves all of its answer or none.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from abrun.errors import ComparisonError, StoreError
from abrun.logs.recorded.experiment import RecordedRun, Reference
from abrun.logs.recorded.ledger import sha256_of
from abrun.recipe.claims import Claim
from abrun.runs.files import PUBLIC_MODE
from abrun.runs.layout import RunName
from abrun.runs.lines import LineWriter, read_json_lines
from abrun.runs.lock import file_lock
from abrun.runs.metric_names import Transform, find_metric, is_learned
from abrun.runs.schemas import Count, Items, Seconds, Texts, checked
from abrun.stats.online import MAX_SEEDS, Noise, Sample, lord_level
from abrun.stats.series import Series
from abrun.verdict.machines import SOFTWARE_KEYS

Outcome = Literal["BETTER", "WORSE", "ALIKE", "OPEN", "INCUMBENT"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Level = Annotated[float, Field(ge=0, lt=1)]

NUM_POINTS = 50  # kept of a curve
MIN_DISTINCT = 10  # numbers; two runs of a coarse metric share fewer by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """One run: its name, and a curve that no other run has; none if it recorded too few numbers for one.

    That curve is some points of the claimed metric. If the metric is coarse or diverged, it is the bytes of a
    hash of all that the run learned, which only exact copies share.
    """

    name: str
    seed: Count
    steps: Items[Count] = ()
    values: Items[Number] = ()

    def restore(self, arm: str, metric: str) -> RecordedRun:
        """Return the run with that curve as its log of the metric, under the arm's name in the ledger."""
        curve = Series(np.array(self.steps, np.int64), np.array(self.values))
        name = RunName(arm=arm, seed=self.seed)
        return RecordedRun(name=name, place=self.name, status="finished", metrics={metric: curve})


def remember_run(run: RecordedRun, metric: str) -> KnownRun:
    """Return what recognises a run later. Values have seven digits: more do not survive every log."""
    curve = run.series(metric)
    indices = np.unique(np.linspace(0, len(curve) - 1, min(NUM_POINTS, len(curve))).astype(int))
    steps, values = curve.steps[indices], curve.values[indices]
    if len(np.unique(values)) < MIN_DISTINCT or not np.isfinite(values).all():
        values = _hash_learned_numbers(run)
        steps = np.arange(len(values))
    known_values = tuple(float(f"{value:.7g}") for value in values)
    return KnownRun(name=str(run), seed=run.name.seed, steps=tuple(steps.tolist()), values=known_values)


def _hash_learned_numbers(run: RecordedRun) -> bytes:
    """Return a hash of all metrics that depend on the run; empty if they have too few distinct numbers."""
    learned = {name: series for name, series in sorted(run.metrics.items()) if _depends_on_run(name, series)}
    if sum(len(np.unique(series.values)) for series in learned.values()) < MIN_DISTINCT:
        return b""
    numbers = hashlib.sha256()
    for name, series in learned.items():
        arrays = series.steps.tobytes() + series.values.tobytes()
        numbers.update(name.encode("utf-8", "surrogateescape") + arrays)
    return numbers.digest()


def _depends_on_run(metric: str, series: Series) -> bool:
    """Return False for times, memory, configured schedules and counters, which only rise or fall."""
    definition, changes = find_metric(metric), np.diff(series.values)
    is_configured = definition is not None and "configured" in definition.roles
    is_counter = len(changes) > 1 and bool((changes >= 0).all() or (changes <= 0).all())
    return is_learned(metric) and not is_configured and not is_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of one arm as the claim reads them."""

    name: str
    values: Items[Number]  # one a run, in the claim's transformed unit
    num_diverged: Count = 0  # further runs, which are NaN or infinite in the window
    failed: Texts = ()  # names of further runs, which have no value
    runs: Items[KnownRun] = ()  # all of these; none in a ledger of an earlier version
    left_out: Texts = ()  # names of the source's other runs, by --seeds and --exclude
    # End of the oldest run; None: unknown. Hash of package versions and devices; None: unknown or several
    oldest_s: Seconds | None = None
    environment_sha256: str | None = None

    @property
    def num_runs(self) -> int:
        return len(self.values) + self.num_diverged + len(self.failed)

    def restore(self, metric: str) -> tuple[RecordedRun, ...]:
        """Return the runs that can be recognised, each with its known curve as its log of the metric."""
        return tuple(run.restore(self.name, metric) for run in self.runs if run.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first line: what is claimed of every candidate, and the first incumbent."""

    kind: Literal["start"] = "start"
    version: Literal[1] = 1
    time_s: Seconds
    metric: str
    window: str
    first_step: Count
    last_step: Count
    transform: Transform
    higher_is_better: bool
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # BETTER is an improvement above this
    worth: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # improvement that ALIKE rules out
    worth_in_sds: bool  # in pooled standard deviations of a run instead of the metric's unit
    alpha: Annotated[float, Field(gt=0, lt=0.5)]  # false discovery rate
    max_seeds: Annotated[int, Field(ge=3, le=100)] = MAX_SEEDS
    incumbent: Runs

    def claim(self) -> Claim:
        return Claim(
            metric=self.metric,
            window=self.window,
            transform=self.transform,
            higher_is_better=self.higher_is_better,
            better=self.margin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A later line: what the gate answered about a candidate."""

    kind: Literal["answer"] = "answer"
    number: Annotated[int, Field(ge=1)]  # of the line, without the first
    time_s: Seconds
    outcome: Outcome
    candidate: Runs
    incumbent: str
    num_incumbent_runs: Count
    level: Level  # of the candidate, over all its readings
    reading_level: Level = 0.0  # share of it that this reading had
    p: Annotated[float, Field(ge=0, le=1)] = 1.0  # one-sided, of no improvement above the margin
    improvement: Number = 0.0  # positive is better
    interval: tuple[Number, Number] = (0.0, 0.0)  # 90 %, of this reading alone
    upper: Number = 0.0  # upper bound of the improvement that ALIKE uses
    worth: Number = 0.0  # in the claim's unit
    sd: Number = 0.0  # of one run, pooled
    seeds_to_add: Count = 0


@dataclass(slots=True, kw_only=True)
class State:
    """Incumbent, candidates and discoveries after some lines."""

    start: Start
    incumbent: Runs
    candidates: dict[str, Answer] = field(default_factory=dict)  # last answer, in the order of their levels
    discoveries: list[int] = field(default_factory=list)  # number of candidates with a level at each keep
    superseded: dict[str, Runs] = field(default_factory=dict)  # earlier incumbents
    num_answers: int = 0

    def add(self, answer: Answer) -> None:
        self.num_answers += 1
        if answer.outcome != "INCUMBENT":
            self.candidates[answer.candidate.name] = answer
        if answer.outcome == "BETTER":
            self.superseded[self.incumbent.name] = self.incumbent
            self.discoveries.append(len(self.candidates))
        if answer.outcome in ("BETTER", "INCUMBENT"):
            self.incumbent = answer.candidate

    @property
    def next_level(self) -> float:
        return lord_level(len(self.candidates) + 1, self.discoveries, self.start.alpha)

    def level(self, name: str) -> float:
        """Return a candidate's level: the one that it got first, or the next of the procedure."""
        return self.candidates[name].level if name in self.candidates else self.next_level

    @property
    def runs_by_name(self) -> dict[str, Runs]:
        judged = {name: answer.candidate for name, answer in self.candidates.items()}
        return judged | self.superseded | {self.incumbent.name: self.incumbent}

    def noise(self, candidate: str) -> Noise:
        """Return the noise of all runs except the incumbent's and this candidate's."""
        left_out = candidate, self.incumbent.name
        other_runs = [runs.values for name, runs in self.runs_by_name.items() if name not in left_out]
        samples = [Sample.of(values) for values in other_runs if values]
        return Noise(
            squares=float(sum(sample.squares for sample in samples)),
            dof=float(sum(sample.count - 1 for sample in samples)),
        )


def create_ledger(path: Path, start: Start) -> None:
    """Write the first line. Raises StoreError if the file exists or cannot be written."""
    taken = StoreError(f"--start: {path} already exists; drop --start to ask it, or choose another file")
    with suppress(FileNotFoundError):
        if path.lstat().st_size:
            raise taken
    with closing(LineWriter(path, PUBLIC_MODE)) as writer, file_lock(path):
        if read_json_lines(path):  # another gate was faster
            raise taken
        writer.write(asdict(start))
        writer.sync()


def read_state(path: Path) -> State:
    """Return the state of a gate. Raises StoreError if there is no such file, or if a line is damaged."""
    if not path.is_file():
        raise StoreError(
            f"--against: {path} is not a file; start a ledger: abrun gate INCUMBENT --start --against {path} "
            "--claim 'train/reward:last 20%:better 0'"
        )
    rows = read_json_lines(path)
    if not rows or rows[0].get("kind") != "start":
        raise StoreError(f"--against: {path} is not a ledger of abrun gate; start one with --start")
    start = checked(Start, rows[0], path)
    try:
        start.claim()
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise StoreError(f"{path}: window: {problem}; restore the file, or remove it") from None
    state = State(start=start, incumbent=start.incumbent)
    for row in read_json_lines(path, has_checksums=True)[1:]:
        answer = checked(Answer, row, path)
        expected = state.num_answers + 1
        if answer.number != expected:
            raise StoreError(
                f"--against: {path}: answer {answer.number} stands where answer {expected} should; restore "
                "the file"
            )
        state.add(answer)
    return state


@contextmanager
def locked_state(path: Path) -> Iterator[tuple[State, LineWriter]]:
    """Yield the state of a file that is a ledger, and a writer for its next answer; other gates wait."""
    with file_lock(path):
        state = read_state(path)  # first: opening a writer cuts a torn last line, also of another file
        with closing(LineWriter(path)) as writer:
            yield state, writer


def refuse_changed_runs(earlier: Runs, runs: Runs) -> None:
    """Raise ComparisonError unless the runs contain all runs of the earlier answer."""
    num_missing = (Counter(earlier.values) - Counter(runs.values)).total()
    num_missing += max(0, earlier.num_diverged - runs.num_diverged)
    num_missing += len({*earlier.failed} - {run.name for run in runs.runs})
    if num_missing:
        raise ComparisonError(
            f"{runs.name}: {num_missing} of the {earlier.num_runs} runs that were judged are missing or "
            "changed; give all earlier runs with the new ones, or another --name"
        )


def environment_sha256(runs: Sequence[RecordedRun | Reference]) -> str:
    """Return a hash of the runs' package versions and devices, or of the hashes if they differ."""
    environments, keys = [run.environment or {} for run in runs], (*SOFTWARE_KEYS, "devices")
    hashes = {sha256_of({key: values.get(key) for key in keys}) for values in environments}
    return hashes.pop() if len(hashes) == 1 else sha256_of({"several": sorted(hashes)})
