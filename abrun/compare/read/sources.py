"""Where runs to compare come from: an experiment of the store, or whatever any framework logged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from abrun.compare.read.experiment import Experiment, claims_on_recorded
from abrun.compare.read.foreign import load_foreign
from abrun.compare.read.selection import Selection
from abrun.compare.read.stored import load_experiment
from abrun.errors import ComparisonError
from abrun.recipe import Compare, Primary
from abrun.store import find_experiment, is_experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to find arms, seeds and metrics in runs that abrun did not launch; see abrun.logs."""

    runs_dir: Path = Path("runs")
    baseline: str | None = None
    pattern: str | None = None
    group: str | None = None
    aliases: tuple[str, ...] = ()
    step_column: str | None = None
    seeds: tuple[int, ...] | None = None  # of these runs alone; None: all
    exclude: tuple[str, ...] = ()  # patterns of the runs that are left out
    versions_differ: bool = False  # versions that follow the arm are the treatment
    unpaired: bool = False  # runs are independent, whatever their seeds
    may_unpair: bool = False  # where seeds are not known, or not shared, runs are independent
    looks: tuple[int, ...] = ()  # interim analyses, at these numbers of pairs
    alone: bool = False  # one arm is enough: its counterpart is a reference

    @property
    def given(self) -> dict[str, str]:
        """What was said of how runs are to be found, by option."""
        options = {
            "--baseline": self.baseline,
            "--pattern": self.pattern,
            "--group": self.group,
            "--alias": ",".join(self.aliases) or None,
            "--step-column": self.step_column,
            "--seeds": ",".join(map(str, self.seeds)) if self.seeds is not None else None,
            "--looks": ",".join(map(str, self.looks)) or None,
            "--exclude": ",".join(self.exclude) or None,
            "--versions-differ": "true" if self.versions_differ else None,
        }
        return {option: value for option, value in options.items() if value is not None}

    def refuse_for_stored(self, directory: Path) -> None:
        """An experiment of the store says all this itself: an option would be without effect."""
        for option, value in self.given.items():
            raise ComparisonError(
                f"{option}: got {value!r} for {directory}, an experiment, whose arms, seeds and metrics "
                "are recorded; drop it, or name the folders of the arms"
            )


def stored_in(sources: Sequence[str], runs_dir: Path) -> Path | None:
    """The directory of an experiment of the store, where that is what the sources name."""
    if len(sources) != 1 or ":" in sources[0] or "=" in sources[0]:
        return None
    directory = find_experiment(sources[0], runs_dir)
    return directory if is_experiment(directory) or not Path(sources[0]).exists() else None


def open_sources(
    sources: Sequence[str], reading: Reading, primaries: Sequence[Primary] | None = None
) -> Experiment:
    """The runs that sources name; `primaries` replace the declared claims.

    Raises StoreError or ComparisonError for what cannot be read or does not say which run is which.
    """
    directory = stored_in(sources, reading.runs_dir)
    if directory is not None:
        reading.refuse_for_stored(directory)
        experiment = load_experiment(directory)
    else:
        experiment = load_foreign(
            sources,
            compare=Compare(paired=not reading.unpaired),
            name=None,
            pattern=reading.pattern,
            group=reading.group,
            baseline=reading.baseline,
            aliases=reading.aliases,
            step_column=reading.step_column,
            selection=Selection(seeds=reading.seeds, exclude=reading.exclude),
            versions_differ=reading.versions_differ,
            alone=reading.alone,
            may_unpair=reading.may_unpair,
        )
        if reading.looks:
            experiment = _with_looks(experiment, reading)
    if primaries is None:
        return experiment
    primaries = claims_on_recorded(experiment, primaries)
    compare = experiment.compare.model_copy(update={"primary": primaries})
    return replace(experiment, compare=compare)


def _with_looks(experiment: Experiment, reading: Reading) -> Experiment:
    """The experiment with interim analyses. Raises ComparisonError where its runs do not fit them."""
    given, looks = reading.given["--looks"], reading.looks
    if len(looks) < 2 or looks[0] < 2 or any(later <= look for look, later in pairwise(looks)):
        raise ComparisonError(
            f"--looks: got {given}; allowed: two or more numbers of pairs going up from 2, as 3,5,8"
        )
    if reading.alone:
        raise ComparisonError(f"--looks: got {given} for a reference, which is compared once; drop it")
    if not experiment.compare.paired:
        raise ComparisonError(
            f"--looks: got {given} for runs that are not paired; give both arms the same seeds, or drop it"
        )
    num_pairs = max(len(experiment.pairs(arm)) for arm in experiment.treatments)
    if num_pairs < looks[0]:
        raise ComparisonError(
            f"--looks: got {given} for {num_pairs} pairs, of which none is taken; train more for the first"
        )
    if num_pairs > looks[-1]:
        raise ComparisonError(
            f"--looks: got {given} for {num_pairs} pairs; the last look takes all: choose pairs with --seeds"
        )
    compare = experiment.compare.model_copy(update={"looks": list(looks)})
    return replace(experiment, compare=compare)
