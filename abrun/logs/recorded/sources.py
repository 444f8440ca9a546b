"""Sources of runs to compare: an experiment of the store, or logs of any framework."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, resolve_claims
from abrun.logs.recorded.foreign import Sources, build_foreign_experiment, read_foreign
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.stored import choose_baseline, load_experiment
from abrun.recipe.claims import Claim, is_interim_schedule
from abrun.runs.experiment import find_experiment, is_experiment
from abrun.runs.regular_files import exists


def find_stored_experiment(sources: Sequence[str], runs_dir: Path) -> Path | None:
    """Return the directory of a stored experiment if the sources name one, else None."""
    if len(sources) != 1 or ":" in sources[0] or "=" in sources[0]:
        return None
    directory = find_experiment(sources[0], runs_dir)
    return directory if is_experiment(directory) or not exists(Path(sources[0])) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContents:
    """Content of sources, read once and used by any number of comparisons."""

    sources: Sequence[str]
    reading: ReadingOptions
    directory: Path | None  # None: the source is not an experiment that abrun launched
    recorded: RecordedExperiment | Sources

    def experiment(self, **changes: Any) -> RecordedExperiment:
        """Return the experiment; `changes` replace fields of `reading` that do not affect reading the logs.

        Raises ComparisonError if arms or seeds cannot be determined.
        """
        if isinstance(self.recorded, RecordedExperiment):
            return self.recorded
        reading = replace(self.reading, **changes)
        experiment = build_foreign_experiment(self.recorded, reading)
        return _add_interim(experiment, reading) if reading.interim else experiment


def read_sources(sources: Sequence[str], reading: ReadingOptions) -> SourceContents:
    """Read the runs of sources. Raises StoreError or ComparisonError if that fails."""
    directory = find_stored_experiment(sources, reading.runs_dir)
    if directory is None:
        recorded: RecordedExperiment | Sources = read_foreign(sources, reading)
    else:
        reading.refuse_reading_options(directory)
        recorded = load_experiment(directory)
        if reading.baseline is not None:
            recorded = choose_baseline(recorded, reading.baseline)
    return SourceContents(sources=sources, reading=reading, directory=directory, recorded=recorded)


def open_sources(
    sources: Sequence[str], reading: ReadingOptions, claims: Sequence[Claim] | None = None
) -> RecordedExperiment:
    """Return the runs of sources as an experiment; `claims` replace the declared claims.

    Raises StoreError or ComparisonError if runs cannot be read, or if arms or seeds cannot be determined.
    """
    experiment = read_sources(sources, reading).experiment()
    if claims is None:
        return experiment
    claims = resolve_claims(experiment, claims)
    compare = experiment.compare.model_copy(update={"claims": claims})
    return replace(experiment, compare=compare)


def _add_interim(experiment: RecordedExperiment, reading: ReadingOptions) -> RecordedExperiment:
    """Return the experiment with interim analyses. Raises ComparisonError if its runs do not fit them."""
    option, counts = reading.given_options["--interim"], reading.interim
    if not is_interim_schedule(counts):
        raise ComparisonError(
            f"--interim: got {option}; allowed: two or more increasing numbers of pairs, from 2 up, such as "
            "3,5,8"
        )
    if reading.allows_one_arm:
        raise ComparisonError(
            f"--interim: got {option} with a reference, which allows no interim analyses; drop it"
        )
    if not experiment.compare.paired:
        raise ComparisonError(
            f"--interim: got {option} with unpaired runs; give both arms the same seeds, or drop it"
        )
    num_pairs = max((len(experiment.pairs(arm)) for arm in experiment.treatments), default=0)
    if num_pairs < counts[0]:
        raise ComparisonError(
            f"--interim: got {option}, but there are only {num_pairs} pairs; train more for the first "
            "analysis"
        )
    if num_pairs > counts[-1]:
        raise ComparisonError(
            f"--interim: got {option}, but there are {num_pairs} pairs, and the last analysis takes all; "
            "choose pairs with --seeds"
        )
    compare = experiment.compare.model_copy(update={"interim": list(counts)})
    return replace(experiment, compare=compare)
