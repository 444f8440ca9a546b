"""The file of a gate: one line for its start, then one for each answer, appended under a lock.

The state is replayed from the lines. A line is one write, so a killed gate leaves all of its answer or none.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from abrun.errors import ComparisonError, StoreError
from abrun.metric_names import Transform
from abrun.reasons import Code
from abrun.runs.lines import LineWriter, read_json_lines
from abrun.runs.lock import file_lock
from abrun.runs.schemas import Count, Items, Seconds, checked
from abrun.stats.online import MAX_SEEDS, Noise, Sample, lord_level

VERSION = 1
Outcome = Literal["BETTER", "WORSE", "ALIKE", "OPEN", "INCUMBENT"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Level = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of one arm as the claim reads them."""

    name: str
    values: Items[Number]  # one a run, in the claim's transformed unit
    num_diverged: Count = 0  # further runs, which are NaN or infinite in the window
    # End of the oldest run; None: unknown. Hash of package versions and devices; None: unknown or several
    oldest_s: Seconds | None = None
    environment_sha256: str | None = None

    @property
    def num_runs(self) -> int:
        return len(self.values) + self.num_diverged


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first line: what is claimed of every candidate, and the first incumbent."""

    kind: Literal["start"] = "start"
    version: Literal[1] = VERSION
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
        name = answer.candidate.name
        self.num_answers += 1
        if answer.outcome == "INCUMBENT":
            self.incumbent = answer.candidate
            return
        self.candidates[name] = answer
        if answer.outcome == "BETTER":
            self.superseded[self.incumbent.name] = self.incumbent
            self.incumbent = answer.candidate
            self.discoveries.append(len(self.candidates))

    def level(self, name: str) -> float:
        """Return a candidate's level: the one that it got first, or the next of the procedure."""
        if name in self.candidates:
            return self.candidates[name].level
        return lord_level(len(self.candidates) + 1, self.discoveries, self.start.alpha)

    def noise(self, candidate: str) -> Noise:
        """Return the noise of all runs except the incumbent's and this candidate's."""
        others = {name: answer.candidate for name, answer in self.candidates.items()} | self.superseded
        samples = [
            Sample.of(runs.values)
            for name, runs in others.items()
            if runs.values and name not in (candidate, self.incumbent.name)
        ]
        return Noise(
            squares=float(sum(sample.squares for sample in samples)),
            dof=float(sum(sample.count - 1 for sample in samples)),
        )


def create_ledger(path: Path, start: Start) -> None:
    """Write the first line. Raises StoreError if the file exists or cannot be written."""
    with suppress(FileNotFoundError):
        if path.lstat().st_size:
            raise StoreError(Code.GATE_LEDGER_EXISTS(path=path))
    writer = LineWriter(path)
    try:
        with file_lock(path):
            if read_json_lines(path):  # another gate was faster
                raise StoreError(Code.GATE_LEDGER_EXISTS(path=path))
            writer.write(asdict(start))
            writer.sync()
    finally:
        writer.close()


def read_state(path: Path) -> State:
    """Return the state of a gate. Raises StoreError if there is no such file, or if a line is damaged."""
    if not path.is_file():
        raise StoreError(Code.GATE_LEDGER_MISSING(path=path))
    rows = read_json_lines(path)
    if not rows or rows[0].get("kind") != "start":
        raise StoreError(Code.GATE_LEDGER_INVALID(path=path))
    start = checked(Start, rows[0], path)
    state = State(start=start, incumbent=start.incumbent)
    for row in rows[1:]:
        answer = checked(Answer, row, path)
        if answer.number != state.num_answers + 1:
            raise StoreError(
                Code.GATE_LINE_LOST(path=path, number=answer.number, expected=state.num_answers + 1)
            )
        state.add(answer)
    return state


@contextmanager
def locked_state(path: Path) -> Iterator[tuple[State, LineWriter]]:
    """Yield a gate's state and a writer for its next answer; other gates wait meanwhile."""
    read_state(path)  # refuse another file before a writer drops its torn last line
    with file_lock(path):
        writer = LineWriter(path)
        try:
            yield read_state(path), writer
        finally:
            writer.close()


def write_answer(writer: LineWriter, answer: Answer) -> None:
    writer.write(asdict(answer))
    writer.sync()


def refuse_changed_runs(earlier: Runs, runs: Runs) -> None:
    """Raise ComparisonError unless the runs contain all runs of the earlier answer."""
    num_missing = sum((Counter(earlier.values) - Counter(runs.values)).values())
    num_missing += max(0, earlier.num_diverged - runs.num_diverged)
    if num_missing:
        raise ComparisonError(
            Code.GATE_RUNS_CHANGED(candidate=runs.name, num_missing=num_missing, num_earlier=earlier.num_runs)
        )


def as_json(answer: Answer, state: State) -> dict[str, Any]:
    """Return an answer for `--json`, with the levels that the ledger has assigned."""
    content = asdict(answer)
    candidate = content.pop("candidate")
    return {
        "answer": content.pop("outcome"),
        "candidate": candidate["name"],
        "num_seeds": answer.candidate.num_runs,
        **{key: value for key, value in content.items() if key not in ("kind", "number", "time_s")},
        "metric": state.start.metric,
        "num_candidates": len(state.candidates),
        "num_discoveries": len(state.discoveries),
    }
