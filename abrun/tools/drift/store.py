"""The store of a gate: all runs that it was ever shown, and its answers, as hash-chained lines of one file.

The first line counts the others and holds the hash of the last. Each answer rewrites the file atomically
under a lock, so a killed gate leaves all of it or none, and a file with fewer lines than it counts was
shortened. The state is replayed from the lines.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from abrun.errors import ComparisonError, StoreError
from abrun.logs.recorded.experiment import RecordedRun, Reference
from abrun.logs.recorded.ledger import hash_entry, sha256_of
from abrun.recipe.claims import Claim
from abrun.recipe.run import can_change_numbers
from abrun.runs.files import write_file
from abrun.runs.layout import RunName
from abrun.runs.lines import LineParser, damaged_line_error, json_line
from abrun.runs.lock import file_lock
from abrun.runs.metric_names import Transform, find_metric, is_learned
from abrun.runs.schemas import Count, Items, Seconds, Texts, checked
from abrun.stats.online import MAX_SEEDS, NUM_OLD, Memory, Noise, estimate_environment, lord_level
from abrun.stats.series import Series
from abrun.verdict.machines import SOFTWARE_KEYS

Outcome = Literal["BETTER", "WORSE", "ALIKE", "OPEN", "INCUMBENT"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Level = Annotated[float, Field(ge=0, lt=1)]

_VERSION = 2
_NUM_POINTS = 50  # kept of a curve
_MIN_DISTINCT = 10  # numbers; two runs of a coarse metric share fewer by chance
_NUM_ROUNDS = 16  # last ones, of which the variance of the environment is estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """One run: its value by the claim, and a curve that no other run has, if it recorded enough for one.

    That curve is some points of the claimed metric. If the metric is coarse or diverged, it is the bytes of a
    hash of all that the run learned, which only exact copies share.
    """

    name: str
    seed: Count
    value: Number | None  # in the claim's transformed unit; None: it failed or diverged
    failed: bool = False
    steps: Items[Count] = ()
    points: Items[Number] = ()
    end_s: Seconds | None = None  # None: unknown
    environment_sha256: str | None = None  # of package versions and devices
    settings_sha256: str | None = None  # of those that change numbers; None: abrun did not launch the run

    def restore(self, arm: str, metric: str) -> RecordedRun:
        """Return the run with its curve as the log of the metric, under the arm's name in the store."""
        curve = Series(np.array(self.steps, np.int64), np.array(self.points))
        name = RunName(arm=arm, seed=self.seed)
        return RecordedRun(name=name, place=self.name, status="finished", metrics={metric: curve})


def remember_run(run: RecordedRun, metric: str, value: float | None) -> KnownRun:
    """Return what recognises a run later. Numbers have seven digits: more do not survive every log."""
    curve = run.series(metric)
    indices = np.unique(np.linspace(0, len(curve) - 1, min(_NUM_POINTS, len(curve))).astype(int))
    steps, points = curve.steps[indices], curve.values[indices]
    if len(np.unique(points)) < _MIN_DISTINCT or not np.isfinite(points).all():
        points = _hash_learned_numbers(run)
        steps = np.arange(len(points))
    return KnownRun(
        name=str(run),
        seed=run.name.seed,
        value=value if value is not None and np.isfinite(value) else None,
        failed=run.status == "failed",
        steps=tuple(steps.tolist()),
        points=tuple(float(f"{point:.7g}") for point in points),
        end_s=run.span_s[1] if run.span_s else None,
        environment_sha256=environment_sha256([run]) if run.environment else None,
        settings_sha256=_settings_sha256(run.config or {}),
    )


def _settings_sha256(config: Mapping[str, Any]) -> str | None:
    settings = {key: value for key, value in config.items() if can_change_numbers(key)}
    return sha256_of(settings) if "trainer.type" in config else None


def _hash_learned_numbers(run: RecordedRun) -> bytes:
    """Return a hash of all metrics that depend on the run; empty if they have too few distinct numbers."""
    learned = {name: series for name, series in sorted(run.metrics.items()) if _depends_on_run(name, series)}
    if sum(len(np.unique(series.values)) for series in learned.values()) < _MIN_DISTINCT:
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
    """Runs of one arm in the order in which they were shown."""

    name: str
    runs: Items[KnownRun] = ()
    left_out: Texts = ()  # names of the source's other runs, by --seeds and --exclude

    @property
    def values(self) -> list[float]:
        return [run.value for run in self.runs if run.value is not None]

    @property
    def failed(self) -> list[str]:
        return [run.name for run in self.runs if run.failed]

    @property
    def num_diverged(self) -> int:
        return len(self.runs) - len(self.values) - len(self.failed)

    def restore(self, metric: str) -> tuple[RecordedRun, ...]:
        """Return the runs that can be recognised."""
        return tuple(run.restore(self.name, metric) for run in self.runs if run.points)

    def with_new(self, new_runs: "Runs") -> "Runs":
        """Return these runs and those that are shown for the first time. No run is taken back.

        A failed run may have been run again. Raises ComparisonError for a run with another value.
        """
        runs_by_name = {run.name: run for run in self.runs}
        for run in new_runs.runs:
            earlier = runs_by_name.get(run.name, run)
            if earlier.value != run.value and not earlier.failed:
                raise ComparisonError(
                    f"{self.name}: {run.name} was judged with another value; give the runs as they were, or "
                    "the new ones under another --name"
                )
            runs_by_name[run.name] = run
        left_out = dict.fromkeys([*self.left_out, *new_runs.left_out])
        return replace(self, runs=tuple(runs_by_name.values()), left_out=tuple(left_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The second line: what is claimed of every candidate, and the first incumbent."""

    kind: Literal["start"] = "start"
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
    max_seeds: Annotated[int, Field(ge=3, le=MAX_SEEDS)]
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
    time_s: Seconds
    outcome: Outcome
    candidate: Runs
    controls: Runs  # fresh runs of the incumbent, of the candidate's seeds; none: old runs alone
    incumbent: str
    num_old: Count  # of the incumbent's earlier runs
    num_read: Count = 0  # of the candidate's seeds, the first ones; later ones were not needed
    level: Level  # of the candidate, over all its readings
    spent: Level = 0.0  # of it, up to and with this reading
    reading_level: Level = 0.0
    p: Annotated[float, Field(ge=0, le=1)] = 1.0  # one-sided, of no improvement above the margin
    improvement: Number = 0.0  # positive is better
    interval: tuple[Number, Number] = (0.0, 0.0)  # 90 %, of this reading alone
    upper: Number = 0.0  # upper bound of the improvement that ALIKE uses
    worth: Number = 0.0  # in the claim's unit
    sd: Number = 0.0  # of one run, pooled
    environment: Number | None = None  # what this round says about its variance, in variances of a run
    seeds_to_add: Count = 0


@dataclass(slots=True, kw_only=True)
class State:
    """Incumbent, candidates and discoveries after some lines."""

    start: Start
    incumbent: Runs  # with the controls of all candidates since
    candidates: dict[str, Answer] = field(default_factory=dict)  # last answer, in the order of their levels
    discoveries: list[int] = field(default_factory=list)  # number of candidates with a level at each keep
    superseded: dict[str, Runs] = field(default_factory=dict)  # earlier incumbents
    sha256: str = ""  # of the last line

    def add(self, answer: Answer) -> None:
        if answer.outcome != "INCUMBENT":
            self.candidates[answer.candidate.name] = answer
        if answer.outcome == "BETTER":
            self.superseded[self.incumbent.name] = self.incumbent.with_new(answer.controls)
            self.discoveries.append(len(self.candidates))
        if answer.outcome in ("BETTER", "INCUMBENT"):
            self.incumbent = answer.candidate
        else:
            self.incumbent = self.incumbent.with_new(answer.controls)

    @property
    def next_level(self) -> float:
        return lord_level(len(self.candidates) + 1, self.discoveries, self.start.alpha)

    def level(self, name: str) -> float:
        """Return a candidate's level: the one that it got first, or the next of the procedure."""
        return self.candidates[name].level if name in self.candidates else self.next_level

    def known_runs(self) -> Iterator[Runs]:
        """Yield every run that was shown, by candidates and incumbents."""
        yield from (answer.candidate for answer in self.candidates.values())
        yield from self.superseded.values()
        yield self.incumbent

    def memory(self, candidate: str, controls: Runs) -> Memory:
        """Return what all other runs say, oriented so that higher is better."""
        fresh = {run.name for run in controls.runs}
        earlier = [
            run.value for run in self.incumbent.runs if run.name not in fresh and run.value is not None
        ]
        old = self.sign * np.array(earlier[-NUM_OLD:])
        other_answers = [answer for name, answer in self.candidates.items() if name != candidate]
        runs = Noise.of(self.start.incumbent.values)
        pairs = Noise(squares=2 * runs.squares, dof=runs.dof)  # a pair is at least as alike as two seeds
        for answer in other_answers:
            differences = paired_differences(answer.candidate, answer.controls)
            values = answer.controls.values or answer.candidate.values
            runs = runs + Noise.of(values) if values else runs
            pairs = pairs + Noise.of(differences) if len(differences) else pairs
        excesses = [
            np.nan if answer.environment is None else answer.environment
            for answer in other_answers[-_NUM_ROUNDS:]
        ]
        return Memory(
            old_mean=old.mean() if len(old) else 0.0,
            num_old=len(old),
            runs=runs,
            pairs=pairs,
            environment=estimate_environment(excesses),
        )

    @property
    def sign(self) -> float:
        return 1.0 if self.start.higher_is_better else -1.0


def paired_differences(candidate: Runs, controls: Runs) -> np.ndarray:
    """Return candidate - control of the seeds that both have a value of, in the candidate's order."""
    control_values = {run.seed: run.value for run in controls.runs if run.value is not None}
    return np.array(
        [
            run.value - control_values[run.seed]
            for run in candidate.runs
            if run.value is not None and run.seed in control_values
        ]
    )


def create_store(path: Path, start: Start) -> None:
    """Write the first lines. Raises StoreError if the file exists or cannot be written."""
    try:
        with path.open("xb") as file:
            file.write(_lines_of([_linked(asdict(start), "")]))
    except FileExistsError:
        raise StoreError(
            f"--start: {path} already exists; drop --start to ask it, or choose another file"
        ) from None
    except OSError as error:
        raise StoreError(f"--start: {path} cannot be written: {error.strerror}; choose another") from None


def _linked(row: Mapping[str, Any], previous: str) -> dict[str, Any]:
    """Return a row with the hash of the row before it, and its own."""
    linked = json.loads(json_line({**row, "previous": previous}))
    linked.pop("crc32")
    return {**linked, "sha256": hash_entry(linked)}


def _lines_of(rows: Sequence[Mapping[str, Any]]) -> bytes:
    head = {"kind": "store", "version": _VERSION, "lines": len(rows), "sha256": rows[-1]["sha256"]}
    return b"".join(map(json_line, [head, *rows]))


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows without the first. Raises StoreError for another file, or a damaged or shorter one."""
    if not path.is_file():
        raise StoreError(
            f"--against: {path} is not a file; start a store: abrun gate INCUMBENT --start --against {path} "
            "--claim 'train/reward:last 20%:better 0'"
        )
    content = path.read_bytes()  # at once: another gate may replace the file
    parser, rows = LineParser(), []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            rows.append(parser.parse(line[:-1]))
        except ValueError as error:
            raise damaged_line_error(path, f"line {number}", line, error) from None
    head, *rows = rows or [{}]
    if head.get("kind") == "start":
        raise StoreError(
            f"--against: {path} is of an earlier abrun, without controls; start a new store with --start"
        )
    if head.get("kind") != "store" or head.get("version") != _VERSION:
        raise StoreError(f"--against: {path} is not a store of abrun gate; start one with --start")
    if len(rows) != head.get("lines"):
        problem = (
            "its last line is torn"
            if not content.endswith(b"\n")
            else "it was shortened, or joined with another"
        )
        raise StoreError(
            f"--against: {path} has {len(rows)} of {head.get('lines')} lines: {problem}; restore the file"
        )
    previous = ""
    for number, row in enumerate(rows, 2):
        if row.get("previous") != previous or row.get("sha256") != hash_entry(row):
            raise StoreError(
                f"--against: {path}, line {number} was edited, or does not follow line {number - 1}; "
                "restore the file"
            )
        previous = row["sha256"]
    if not rows or previous != head.get("sha256"):
        raise StoreError(
            f"--against: {path}: its last line is not the one that was written; restore the file"
        )
    return rows


def read_state(path: Path) -> State:
    """Return the state of a gate. Raises StoreError if there is no such file, or if a line is damaged."""
    return _replay(path, _read_rows(path))


def _replay(path: Path, rows: Sequence[Mapping[str, Any]]) -> State:
    contents = [{key: row[key] for key in row if key not in ("previous", "sha256")} for row in rows]
    start = checked(Start, contents[0], path)
    try:
        start.claim()
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise StoreError(f"{path}: window: {problem}; restore the file, or remove it") from None
    state = State(start=start, incumbent=start.incumbent, sha256=rows[-1]["sha256"])
    for content in contents[1:]:
        state.add(checked(Answer, content, path))
    return state


@contextmanager
def locked_store(path: Path) -> Iterator[tuple[State, Callable[[Answer], None]]]:
    """Yield the state of a store, and a function that appends one answer to both; other gates wait."""
    _read_rows(path)  # raise for other files before waiting for a lock
    with file_lock(path):
        rows = _read_rows(path)
        state = _replay(path, rows)

        def append(answer: Answer) -> None:
            row = _linked(asdict(answer), rows[-1]["sha256"])
            write_file(path, _lines_of([*rows, row]), mode=path.stat().st_mode & 0o777)
            state.add(answer)

        yield state, append


def environment_sha256(runs: Sequence[RecordedRun | Reference]) -> str:
    """Return a hash of the runs' package versions and devices, or of the hashes if they differ."""
    environments, keys = [run.environment or {} for run in runs], (*SOFTWARE_KEYS, "devices")
    hashes = {sha256_of({key: values.get(key) for key in keys}) for values in environments}
    return hashes.pop() if len(hashes) == 1 else sha256_of({"several": sorted(hashes)})
