"""Options that find and select runs, and the list of runs left out of a comparison."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from abrun.errors import ComparisonError
from abrun.logs import Log
from abrun.logs.recorded.experiment import count_repeated_steps
from abrun.logs.starts import merge_starts
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import listed
from abrun.runs.layout import RunName
from abrun.runs.metric_names import STEP_ONE
from abrun.runs.redaction import list_names, printable

MAX_SEEDS_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """Options for finding arms, seeds and metrics in runs that abrun did not launch; see abrun.logs."""

    runs_dir: Path = Path("runs")
    baseline: str | None = None
    pattern: str | None = None
    arms_by: str | None = None  # setting that holds the arm
    seeds_by: str | None = None  # setting that holds the seed
    group: str | None = None
    aliases: tuple[str, ...] = ()
    step_column: str | None = None
    seeds: tuple[int, ...] | None = None  # only runs of these seeds; None: all
    exclude: tuple[str, ...] = ()  # patterns of runs to leave out
    versions_differ: bool = False  # version differences between the arms are the treatment
    unpaired: bool = False  # treat runs as independent, whatever their seeds
    may_unpair: bool = False  # treat runs as independent if seeds are unknown or not shared
    interim: tuple[int, ...] = ()  # numbers of pairs at the interim analyses
    allows_one_arm: bool = False  # one arm is enough, because it is compared with a reference
    may_be_one_arm: bool = False  # a source whose runs differ only by seed is one arm, to be described

    @property
    def selection(self) -> "Selection":
        return Selection(seeds=self.seeds, exclude=self.exclude)

    @property
    def given_options(self) -> dict[str, str]:
        """Return the options that differ from their defaults, with their values."""
        options = {
            "--baseline": self.baseline,
            "--pattern": self.pattern,
            "--arms-by": self.arms_by,
            "--seeds-by": self.seeds_by,
            "--group": self.group,
            "--alias": ",".join(self.aliases) or None,
            "--step-column": self.step_column,
            "--seeds": ",".join(map(str, self.seeds)) if self.seeds is not None else None,
            "--interim": ",".join(map(str, self.interim)) or None,
            "--exclude": ",".join(self.exclude) or None,
            "--versions-differ": "true" if self.versions_differ else None,
        }
        return {option: value for option, value in options.items() if value is not None}

    def to_words(self) -> list[str]:
        """Return these options as words of a command line."""
        values: dict[str, tuple[str, ...]] = {option: (text,) for option, text in self.given_options.items()}
        values |= {"--alias": self.aliases, "--exclude": self.exclude, "--versions-differ": ()}
        words = [word for option, texts in values.items() for text in texts for word in (option, text)]
        flags = {"--versions-differ": self.versions_differ, "--unpaired": self.unpaired}
        return [*words, *(flag for flag, is_given in flags.items() if is_given)]

    def refuse_reading_options(self, directory: Path) -> None:
        """Raise ComparisonError for any of these options but the baseline: an experiment has the others."""
        for option, value in replace(self, baseline=None).given_options.items():
            raise ComparisonError(
                f"{option}: got {value!r}, but {directory} is an experiment that already records its arms, "
                "seeds and metrics; drop the option, or give the folders of the arms"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The runs to compare: those of `seeds` (None: all), without those matched by a pattern in `exclude`."""

    seeds: Sequence[int] | None = None
    exclude: Sequence[str] = ()

    def includes(self, run: RunName) -> bool:
        in_seeds = self.seeds is None or run.seed in self.seeds
        return in_seeds and not any(fnmatchcase(str(run), pattern) for pattern in self.exclude)

    def excludes(self, log: Log) -> bool:
        """Return True for a log whose name, wandb id or place matches a pattern in `exclude`."""
        names = [name for name in (log.name, log.run_id, log.place) if name]
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.exclude)

    def without_excluded(self, logs_of: Sequence[Sequence[Log]]) -> tuple[list[list[Log]], list[Log]]:
        """Return the logs of each source that match no pattern in `exclude`, and those that do."""
        excluded = [log for logs in logs_of for log in logs if self.excludes(log)]
        rest = [[log for log in logs if not self.excludes(log)] for logs in logs_of]
        if not any(rest):
            self.refuse_empty_selection([])
        return rest, excluded

    def select(
        self, named: Sequence[tuple[RunName, Log]], excluded: Sequence[Log], *, paired: bool
    ) -> tuple[dict[RunName, Log], list[Reason]]:
        """Return the selected runs, with their starts merged, and reasons for everything left out.

        If runs are paired, excluding a run also excludes the other runs of its seed. `excluded`: logs that
        were left out before they were named. Raises ComparisonError if nothing is left.
        """
        self._refuse_unmatched([run for run, _ in named], excluded)
        logs_of: dict[RunName, list[Log]] = {}
        for run, log in named:
            logs_of.setdefault(run, []).append(log)
        selected = {run: logs for run, logs in logs_of.items() if self.includes(run)}
        excluded_names = [run for run in logs_of if not self.includes(run) and self._in_seeds(run)]
        partners: list[RunName] = []
        if paired:
            arms = {run.arm for run in selected}
            seeds = {run.seed for run in excluded_names if run.arm in arms and not run.rerun}
            partners = [run for run in selected if run.seed in seeds]
            selected = {run: logs for run, logs in selected.items() if run.seed not in seeds}
        if not selected:
            self.refuse_empty_selection(logs_of.keys())
        runs = {run: _merge_run_starts(run, logs) for run, logs in selected.items()}
        end = max(map(last_step, [*runs.values(), *(log for _, log in named)]), default=0)
        left_out = self._left_out_by_seeds(logs_of, end)
        excluded_runs = []
        for log in excluded:
            name = f"{log.name} ({log.run_id})" if log.run_id else log.name
            excluded_runs.append(f"{printable(name)}{_describe_ending(log, end)}")
        excluded_runs += [
            f"{run}{_describe_ending(_merge_run_starts(run, logs_of[run]), end)}" for run in excluded_names
        ]
        if excluded_runs:
            left_out.append(Code.EXCLUDED(runs=excluded_runs, partners=[str(run) for run in partners]))
        left_out += [reason for log in runs.values() for reason in log.left_out]
        return runs, left_out

    def refuse_empty_selection(self, runs: Collection[RunName]) -> NoReturn:
        """Raise ComparisonError because the options select none of these runs."""
        if any(map(self._in_seeds, runs)) or self.seeds is None or not runs:
            raise ComparisonError(
                f"--exclude: {list_names(list(self.exclude))} leaves no run to compare; drop one"
            )
        seeds = sorted({run.seed for run in runs})[:MAX_SEEDS_LISTED]
        raise ComparisonError(f"--seeds: there is no run of {listed(self.seeds)}; there are {listed(seeds)}")

    def _in_seeds(self, run: RunName) -> bool:
        return self.seeds is None or run.seed in self.seeds

    def _left_out_by_seeds(self, logs_of: Mapping[RunName, Sequence[Log]], end: int) -> list[Reason]:
        seeds = sorted({run.seed for run in logs_of if not self._in_seeds(run)})
        if not seeds:
            return []
        broken = [
            f"{run}{text}"
            for run, logs in logs_of.items()
            if not self._in_seeds(run) and (text := _describe_ending(_merge_run_starts(run, logs), end))
        ]
        return [Code.SEEDS_LEFT_OUT(seeds=seeds, broken=broken)]

    def _refuse_unmatched(self, runs: Sequence[RunName], excluded: Sequence[Log]) -> None:
        for pattern in self.exclude:
            single = Selection(exclude=(pattern,))
            if not any(map(single.excludes, excluded)) and all(map(single.includes, runs)):
                names = list_names(list(dict.fromkeys(map(str, runs))), 8)
                raise ComparisonError(f"--exclude: '{printable(pattern)}' matches no run; there are {names}")


def restarted_counter_reasons(runs: Mapping[RunName, Log]) -> list[Reason]:
    """Return a reason that names the runs with a restarted step counter, or an empty list."""
    restarted = [
        (run, log, count) for run, log in runs.items() if (count := count_repeated_steps(log.metrics))
    ]
    if not restarted:
        return []
    _, log, count = restarted[0]
    steps = max(len(series) for series in log.metrics.values() if series.recounted == count)
    run_names = [str(run) for run, _, _ in restarted]
    return [Code.COUNTER_RESTARTED(runs=run_names, num_repeated=count, num_steps=steps)]


def _merge_run_starts(run: RunName, logs: Sequence[Log]) -> Log:
    return merge_starts(logs, str(run)) or logs[-1]


def last_step(log: Log) -> int:
    """Return the last training step; timers may use other steps."""
    trained = [log.metrics[metric] for metric in STEP_ONE if metric in log.metrics]
    longest = max(trained or log.metrics.values(), key=len, default=None)
    return int(longest.steps[-1]) if longest is not None and len(longest) else 0


def _describe_ending(log: Log, end: int) -> str:
    """Return a description of a run that ended early, failed or cannot be read, else an empty text."""
    if log.status == "unreadable":
        return " cannot be read"
    run_end = last_step(log)
    early = f" ends at step {run_end} of {end}" if run_end < end else ""
    failed = f" failed: {log.failure}" if log.status == "failed" else ""
    return printable(f"{early},{failed}" if early and failed else f"{early}{failed}")
