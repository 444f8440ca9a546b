"""The context of a verdict: when and where the runs were made, levels of the arms, next steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.numbers import counted
from abrun.report.completions import ReportedCompletions, collect_completions
from abrun.report.evidence import Levels, claim_levels
from abrun.report.injected import sensitivity_summary
from abrun.report.next_step import NextStep, next_steps
from abrun.runs.redaction import display_safe
from abrun.verdict.verdict_file import VerdictFile

SHOWN_VERSIONS = ("torch", "vllm", "megatron-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts about the runs. The same runs and `command` give the same context."""

    command: str  # the command that made the report
    time_range: str | None  # from the first start to the last end of a run; None if unknown
    environment: str | None  # devices and main versions
    levels: list[Levels]
    next_steps: list[NextStep]
    completions: ReportedCompletions | None
    has_recipe: bool  # if so, the page names the recipe keys of missing controls
    injected_faults: str | None  # a short summary; None without a recipe


def verdict_qualifiers(content: VerdictFile) -> list[str]:
    """Return what narrows the verdict: a late declaration, its units, a broken claim beside it."""
    holds = content.verdict in ("MATCH", "PASS")
    qualifiers = {
        "post hoc": content.post_hoc,
        "unpaired": bool(content.arms) and not content.paired,
        "these two checkpoints": any(claim.claim.unit == "prompt" for claim in content.claims),
        "although a claim is broken": holds and any(claim.result == "different" for claim in content.claims),
    }
    return [qualifier for qualifier, applies in qualifiers.items() if applies]


def make_context(experiment: RecordedExperiment, content: VerdictFile, command: str | None) -> Context:
    return Context(
        command=display_safe(command or f"abrun compare {experiment.name}"),
        time_range=_time_range(experiment),
        environment=_describe_environments(experiment, content),
        levels=claim_levels(content),
        next_steps=next_steps(experiment, content, command),
        completions=collect_completions(experiment),
        has_recipe=experiment.has_recipe,
        injected_faults=sensitivity_summary(experiment, content.select("injected fault")),
    )


def _time_range(experiment: RecordedExperiment) -> str | None:
    spans = [run.span_s for run in experiment.runs.values() if run.span_s and run.span_s[0] > 0]
    if not spans:
        return None
    start = datetime.fromtimestamp(min(span[0] for span in spans), UTC)
    finish = datetime.fromtimestamp(max(span[1] for span in spans), UTC)
    end = f"{finish:%H:%M}" if start.date() == finish.date() else f"{finish:%Y-%m-%d %H:%M}"
    return f"{start:%Y-%m-%d %H:%M} to {end} UTC"


def _describe_environments(experiment: RecordedExperiment, content: VerdictFile) -> str | None:
    """Describe the first known environment, and count the others; the page lists them all."""
    runs = experiment.runs.values()
    packages = [name for name in SHOWN_VERSIONS if any(run.uses_package(name) for run in runs)]
    machines = (_describe_machine(group.environment, packages) for group in content.environments)
    description, *further = [text for text in dict.fromkeys(machines) if text] or [None]
    most_shared = max(runs, key=lambda run: run.runs_per_gpu)
    if description and most_shared.runs_per_gpu > 1:
        description += f", {most_shared.runs_per_gpu} runs on each GPU{' (MPS)' * most_shared.mps}"
    return f"{description}; {counted(further, 'more environment')}" if further else description


def _describe_machine(environment: Mapping[str, Any], packages: Sequence[str]) -> str:
    versions = environment.get("versions") or {}
    fields = [
        ", ".join(sorted(set(map(str, environment.get("devices") or [])))),
        *(f"{name} {versions[name]}" for name in packages if versions.get(name)),
        f"Python {environment['python']}" if environment.get("python") else "",
        f"code {', then '.join(environment['code'])}" if environment.get("code") else "",
    ]
    return ", ".join(filter(None, fields))
