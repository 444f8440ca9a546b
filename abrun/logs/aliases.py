"""Names of abrun's metrics in other trainers.

The table is `aliases.toml`. Only metrics with the same definition and unit are in it, under the framework's
default settings: a probability difference is not `train/token_mult_prob_error`, a mean over sequences is not
one over tokens, and gigabytes are not bytes. docs/reference/metrics.md lists the differences that remain
under a shared name. Taken from the sources of TRL f2cd577, verl b178a3c, NeMo-RL 7ea279a, SkyRL a956457,
OpenRLHF 3c3be62, slime 624b824, prime-rl 559b447, open-instruct e6c3044, PipelineRL 58d3934, Fast-LLM
7d61a1b, torchtitan b5bcd76 and Megatron-LM d98e8a6, all of 2026; AReaL's from logs of its PPO examples, and
names of Fast-LLM's reward from its `docs/recipes/reinforcement-learning.md` (d3e3186). Trinity-RFT's trainer
has verl's names (agentscope-ai/Trinity-RFT, "Metrics Reference").
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import ComparisonError
from abrun.logs.words import WORDS
from abrun.messages.numbers import more_text
from abrun.runs.redaction import list_names, printable
from abrun.stats.series import Series

# abrun's name -> the trainer's name, by framework
FRAMEWORKS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# The first entry whose metrics are all present decides.
FRAMEWORK_MARKERS: list[tuple[str, list[str]]] = WORDS["frameworks"]["markers"]
_EVALUATION_NAME = r"(.*/)?(eval|evaluation|val|valid|validation|test)(-[^/]*)?([/_].*|$)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aliases:
    """Metric renamings, abrun's name -> the trainer's name."""

    explicit: Mapping[str, str]  # given by the user: some run has to have each
    presets: Mapping[str, str]


def recognise_metrics(metrics: Iterable[str]) -> tuple[str | None, dict[str, str]]:
    """Return the framework that logged a run, and its renamings, abrun's name -> the framework's name.

    A framework is recognised by metrics that only it logs. Metrics outside its table are recognised by common
    names of a reward, a loss, a gradient norm, an entropy or a learning rate; the shortest match wins. Names
    that the run already has are not guessed.
    """
    recorded = dict.fromkeys(metrics)
    framework = next(
        (name for name, markers in FRAMEWORK_MARKERS if all(marker in recorded for marker in markers)), None
    )
    table = FRAMEWORKS[framework] if framework else {}
    renames = {ours: theirs for ours, theirs in table.items() if theirs in recorded and ours not in recorded}
    unassigned = [name for name in recorded if name not in renames.values()]
    for ours, pattern in WORDS["frameworks"]["plain"].items():
        if ours not in recorded and ours not in renames:
            candidates = sorted(
                (name for name in unassigned if _has_plain_name(name, pattern)), key=lambda name: len(name)
            )
            if candidates and [len(candidate) for candidate in candidates].count(len(candidates[0])) == 1:
                renames[ours] = candidates[0]
    return framework, renames


def _has_plain_name(name: str, pattern: str) -> bool:
    normalized = name.lower().replace("-", "_").replace(" ", "_")
    folders = "" if pattern.startswith("(eval") else "(.*/)?"
    is_other_metric = not pattern.startswith("(eval") and (
        re.fullmatch(_EVALUATION_NAME, normalized) or re.search("critic|value|aux|std|ref_", normalized)
    )
    return not is_other_metric and re.fullmatch(folders + pattern, normalized) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamedRuns:
    """Metrics of runs under abrun's names."""

    metrics: list[dict[str, Series]]  # one mapping per run
    names: dict[str, str]  # the trainer's name -> abrun's name
    guessed: list[str]  # a note on each recognised framework


def parse_aliases(texts: Iterable[str]) -> Aliases:
    """Parse `--alias` options, preset names or NAME=LOG_NAME. Raises ComparisonError."""
    explicit: dict[str, str] = {}
    presets: dict[str, str] = {}
    for text in texts:
        ours, equals, theirs = text.partition("=")
        if not equals and text in FRAMEWORKS:
            presets.update(FRAMEWORKS[text])
        elif ours and theirs:
            if explicit.get(ours, theirs) != theirs:
                raise ComparisonError(f"--alias: got {ours!r} twice; remove one of them")
            explicit[ours] = theirs
        else:
            raise ComparisonError(
                f"--alias: got '{printable(text)}'; allowed: {', '.join(FRAMEWORKS)}, or NAME=LOG_NAME, "
                "such as train/reward=rewards/mean"
            )
    return Aliases(explicit=explicit, presets=presets)


def rename_metrics(metrics: Mapping[str, Series], aliases: Mapping[str, str]) -> dict[str, Series]:
    """Return the metrics under abrun's names; aliases of metrics that are missing are ignored.

    One metric may get several names. A renamed metric replaces one that already has the name.
    """
    renamed = {ours: metrics[theirs] for ours, theirs in aliases.items() if theirs in metrics}
    replaced = {theirs for theirs in aliases.values() if theirs in metrics}
    return {**{name: series for name, series in metrics.items() if name not in replaced}, **renamed}


def rename_all(
    runs: Sequence[Mapping[str, Series]], aliases: Aliases, *, may_recognise: bool = True
) -> RenamedRuns:
    """Return the metrics of every run under abrun's names.

    Explicit aliases and presets apply to all runs; a preset does not replace a metric that some run recorded
    under abrun's name. Without presets, `recognise_metrics` finds each run's names, if it may. Raises
    ComparisonError for an explicit alias whose metric no run has.
    """
    recorded = {name for metrics in runs for name in metrics}
    for ours, theirs in aliases.explicit.items():
        if recorded and theirs not in recorded:
            close_matches = difflib.get_close_matches(theirs, recorded, n=1)
            hint = f"; did you mean {printable(close_matches[0])!r}?" if close_matches else ""
            raise ComparisonError(
                f"--alias: got {ours}={printable(theirs)}, but no run recorded that metric; recorded: "
                f"{list_names(sorted(recorded), 8)}{hint}"
            )
    presets = {ours: theirs for ours, theirs in aliases.presets.items() if ours not in recorded}
    renamed, names, guesses = [], {}, {}
    for metrics in runs:
        framework, recognised = (None, {}) if presets or not may_recognise else recognise_metrics(metrics)
        recognised = {
            ours: theirs for ours, theirs in recognised.items() if theirs not in aliases.explicit.values()
        }
        renames = {**recognised, **presets, **aliases.explicit}
        renamed.append(rename_metrics(metrics, renames))
        names.update((theirs, ours) for ours, theirs in renames.items() if theirs in metrics)
        if recognised:
            examples = [f"{printable(theirs)} is {ours}" for ours, theirs in recognised.items()]
            names_text = f"metric names{f' of {framework}' if framework else ''}: {', '.join(examples[:4])}"
            guesses[f"{names_text}{more_text(len(examples) - 4)}"] = None
    return RenamedRuns(metrics=renamed, names=names, guessed=list(guesses))
