"""What a report says beside the verdict: when and where the runs were made, their levels, what to do next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from abrun.recorded.experiment import RecordedExperiment
from abrun.redaction import shown
from abrun.report.completions import Completions, completions
from abrun.report.evidence import Levels, levels
from abrun.report.injected import in_short
from abrun.report.next_step import NextStep, next_steps
from abrun.verdict.verdict_file import VerdictFile

SHOWN_VERSIONS = ("torch", "vllm", "megatron-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A function of the runs and of `command`: the same ones give the same report."""

    command: str  # that made the report
    ran: str | None  # from the first start of a run to the last end; None: unknown
    environment: str | None  # devices and the versions that matter most
    levels: list[Levels]
    next_steps: list[NextStep]
    completions: Completions | None
    has_recipe: bool  # in which what the report lacks can be asked for
    injected_faults: str | None  # in a few words; None: without a recipe there can be none


def context(experiment: RecordedExperiment, content: VerdictFile, command: str | None) -> Context:
    return Context(
        command=shown(command or f"abrun compare {experiment.name}"),
        ran=_ran(experiment),
        environment=_environment(experiment, content),
        levels=levels(content),
        next_steps=next_steps(experiment, content, command),
        completions=completions(experiment),
        has_recipe=experiment.has_recipe,
        injected_faults=in_short(experiment, content.sensitivity),
    )


def _ran(experiment: RecordedExperiment) -> str | None:
    spans = [run.span_s for run in experiment.runs.values() if run.span_s and run.span_s[0] > 0]
    if not spans:
        return None
    first, last = (
        datetime.fromtimestamp(one, UTC) for one in (min(s[0] for s in spans), max(s[1] for s in spans))
    )
    end = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
    return f"{first:%Y-%m-%d %H:%M} to {end} UTC"


def _environment(experiment: RecordedExperiment, content: VerdictFile) -> str | None:
    """Of the first runs that say it, and how many others read differently; the report has them all."""
    runs = experiment.runs.values()
    shown = [name for name in SHOWN_VERSIONS if any(run.uses_package(name) for run in runs)]
    found = dict.fromkeys(_machine(one.environment, shown) for one in content.environments)
    first, *others = [text for text in found if text] or [None]
    return f"{first}; {len(others)} more environment{'s' * (len(others) > 1)}" if others else first


def _machine(environment: Mapping[str, Any], packages: Sequence[str]) -> str:
    versions = environment.get("versions") or {}
    parts = [
        ", ".join(sorted(set(map(str, environment.get("devices") or [])))),
        *(f"{name} {versions[name]}" for name in packages if versions.get(name)),
        f"Python {environment['python']}" if environment.get("python") else "",
        f"code {', then '.join(environment['code'])}" if environment.get("code") else "",
    ]
    return ", ".join(filter(None, parts))
