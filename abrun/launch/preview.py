"""What a launch would do, as tables: `abrun launch --dry-run`. Writes nothing."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.experiment.plan import ExperimentPlan, describe_decisions
from abrun.experiment.preflight.checks import find_problems, refuse_unset_variables
from abrun.experiment.preflight.machine import Machine, this_machine
from abrun.launch.cluster import Cluster
from abrun.launch.local import runs_at_once
from abrun.launch.notes import notes
from abrun.messages import sentence, sentences
from abrun.messages.numbers import units
from abrun.messages.records import coded
from abrun.present.tables import Table, columns
from abrun.reasons import Reason
from abrun.recipe.claims import Compare, describe_claim
from abrun.recipe.command import CommandRunConfig, build_invocation
from abrun.recipe.experiment import BASELINE
from abrun.recipe.run import OwnRunConfig, RunConfig, compare_precisions
from abrun.redaction import REFERENCE, in_yaml, printable

MOST_ROWS = 200  # of a table: more are laid out in minutes, and read by nobody
MOST_COMMANDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """What a launch would be refused for, on this machine or by a scheduler."""

    machine: Machine | None  # None: a scheduler's
    refusals: list[Reason]
    is_refused: bool  # for good: no other machine would run the plan, or the scheduler does not take it


def feasibility(
    plan: ExperimentPlan, num_jobs: int | None = None, cluster: Cluster | None = None
) -> Feasibility:
    """Check a plan as its launch would. Raises LaunchError for an unset variable of a run's `env`."""
    refuse_unset_variables(plan.runs)
    if cluster:
        reasons = cluster.refusals(plan)
        return Feasibility(machine=None, refusals=reasons, is_refused=bool(reasons))
    problems = find_problems(plan, machine := this_machine(), num_jobs)
    is_refused = any(problem.is_final for problem in problems)
    return Feasibility(
        machine=machine, refusals=[problem.reason for problem in problems], is_refused=is_refused
    )


def preview(plan: ExperimentPlan, feasible: Feasibility, num_jobs: int | None = None) -> RenderableType:
    """Runs in launch order, the exact treatment diff, the expected power, and what this machine can do of it.

    The last line says which: a plan for other machines is a plan, but must not look like one for this.
    """
    return Group(*_plan(plan), *_devices(plan, feasible, num_jobs))


def preview_of_jobs(plan: ExperimentPlan, feasible: Feasibility, cluster: Cluster) -> RenderableType:
    """The same, with the jobs that a cluster would get in place of this machine."""
    if reasons := feasible.refusals:
        return Group(*_plan(plan), _heading("Why it cannot run there"), *_listed(sentences(reasons)))
    texts = cluster.scripts(plan, compare=True)
    jobs = [part for name, text in texts.items() for part in (_heading(f"Job {name}"), Text(text))]
    return Group(*_plan(plan), *jobs)


def preview_json(plan: ExperimentPlan, feasible: Feasibility, num_jobs: int | None) -> dict[str, Any]:
    """The same for machines. `refusals` are the reasons why it cannot run here, or by the scheduler."""
    inert, machine, reasons = notes(plan), feasible.machine, feasible.refusals
    return {
        "recipe": plan.recipe.name,
        "arms": list(plan.recipe.arms),
        "seeds": plan.recipe.seeds,
        "runs": [
            {
                "run": str(run.name),
                "steps": run.config.steps,
                "nodes": run.config.cluster.nodes,
                "devices_per_node": run.config.devices_per_node,
                "device": "GPU" if run.config.cluster.gpus_per_node else "CPU core",
                "warm_start": run.warm_start,
            }
            for run in plan.runs
        ],
        "warm_starts": {key: config.steps for key, config in plan.warm_starts.items()},
        "treatment_diff": plan.treatment_diff,
        "notes": sentences(inert),
        "note_codes": coded(inert),
        "decided": plan.decided,
        "machine": str(machine) if machine else None,
        "runs_at_once": _at_once(plan, machine, num_jobs) if machine and not reasons else None,
        "refusals": sentences(reasons),
        "refusal_codes": coded(reasons),
    }


def _plan(plan: ExperimentPlan) -> list[RenderableType]:
    recipe = plan.recipe
    title = f"{recipe.name}: {len(plan.runs)} runs, {len(recipe.arms)} arms x {_count(recipe.seeds, 'seed')}"
    if recipe.controls.aa_reruns:
        title += f" + {recipe.controls.aa_reruns} A/A"
    num_controls, inert = sum(run.is_control for run in plan.runs), notes(plan)
    title += f" + {num_controls} of controls" if num_controls else ""
    return [
        Text(title, style="bold"),
        *_runs(plan),
        *_commands(plan),
        _heading("What differs from the baseline, resolved"),
        *_diff(plan),
        *([_heading("Settings without effect"), *_listed(sentences(inert))] if inert else []),
        *(
            [_heading("Left open by the recipe"), *map(Text, describe_decisions(plan.decided))]
            if plan.decided
            else []
        ),
        _heading("Expected power of the comparison"),
        _power(recipe.compare, len(recipe.seeds)),
        *_looks(recipe.compare),
    ]


def _runs(plan: ExperimentPlan) -> list[RenderableType]:
    rows = [
        ("", f"warm start {key[:8]}", str(config.steps), _occupies(config), _start(config))
        for key, config in plan.warm_starts.items()
    ]
    for number, run in enumerate(plan.runs[:MOST_ROWS], 1):
        begins = _start(run.config, run.warm_start)
        rows.append((str(number), str(run.name), str(run.config.steps), _occupies(run.config), begins))
    num_rows = len(plan.warm_starts) + len(plan.runs)
    return _table(["", "run", "steps", "devices", "starts from"], rows, num_rows)


def _start(config: RunConfig, warm_start: str | None = None) -> str:
    if isinstance(config, OwnRunConfig):
        if config.checkpoint.start_from is not None:
            return f"checkpoint {config.checkpoint.start_from}"
        if warm_start is not None:
            return f"warm start {warm_start[:8]}"
        return f"preset {config.model.preset}" if config.model.preset else str(config.model.path)
    return "its own command"


def _commands(plan: ExperimentPlan) -> list[RenderableType]:
    """The command line of each foreign arm, at its first seed."""
    parts: list[RenderableType] = []
    shown: set[str] = set()
    for run in plan.runs:
        if isinstance(run.config, CommandRunConfig) and run.name.arm not in shown:
            shown.add(run.name.arm)
            if len(shown) > MOST_COMMANDS:
                return [*parts, Text("\n... and the commands of other arms")]
            filled = build_invocation(
                run.config,
                experiment=plan.recipe.name,
                arm=run.name.arm,
                seed=run.name.seed,
                rerun=run.name.rerun,
                run_dir="RUN_DIR",
            )
            variables = "".join(f"{name}={_quoted(value)} " for name, value in filled.env.items())
            parts.append(_heading(f"The command of {run.name}, with metrics in {filled.metrics_path}"))
            parts.append(Text(printable(variables + shlex.join(filled.argv))))
    return parts


def _quoted(value: str) -> str:
    """For a shell, in which `${NAME}` stays a reference."""
    return f'"{value}"' if REFERENCE.fullmatch(value) else shlex.quote(value)


def _occupies(config: RunConfig) -> str:
    cluster, engines = config.cluster, config.engine_devices
    kind = "GPU" if cluster.gpus_per_node else "CPU core"
    devices = f"{config.devices_per_node} {kind}{'' if config.devices_per_node == 1 else 's'}"
    devices += f" ({cluster.ranks_per_node} + {engines} of vllm)" if engines else ""
    return devices if cluster.nodes == 1 else f"{cluster.nodes} nodes x {devices}"


def _devices(plan: ExperimentPlan, feasible: Feasibility, num_jobs: int | None) -> list[RenderableType]:
    machine, reasons = feasible.machine, feasible.refusals
    assert machine is not None, "a scheduler's jobs are shown instead"
    if reasons:
        return [
            _heading(f"What this machine ({machine}) lacks"),
            *_listed(sentences(reasons)),
            Text(f"This machine cannot run {plan.recipe.name}: {_count(reasons, 'reason')}, listed above."),
        ]
    return [Text(f"\nThis machine ({machine}) runs {_at_once(plan, machine, num_jobs)} at once.")]


def _at_once(plan: ExperimentPlan, machine: Machine, num_jobs: int | None) -> int:
    return runs_at_once(machine, num_jobs, (run.config for run in plan.runs))


def _diff(plan: ExperimentPlan) -> list[RenderableType]:
    rows = [
        (arm, key, in_yaml(has), in_yaml(wants))
        for arm, changes in plan.treatment_diff.items()
        for key, (has, wants) in changes.items()
    ]
    return [
        *_table(["arm", "key", "baseline", "arm's"], rows, len(rows)),
        *(Text(sentence(reason)) for reason in precision_differences(plan)),
    ]


def precision_differences(plan: ExperimentPlan) -> list[Reason]:
    """Return each arm whose LM head or logits have another precision than the baseline's."""
    precision = {
        run.name.arm: run.config.head_precision for run in plan.runs if isinstance(run.config, OwnRunConfig)
    }
    baseline = precision.pop(BASELINE, {})
    differences = (compare_precisions(arm, baseline, precision[arm]) for arm in precision)
    return [difference for difference in differences if difference]


def _power(compare: Compare, num_pairs: int) -> RenderableType:
    """P(MATCH) of each claim if the arms are truly equal; the verdict needs all of them."""
    if not compare.claims:
        return Text("No claim declared (compare.claims): only step one and the guards can be judged.")
    from abrun.experiment.power import assumed_spread, plan_claim_power
    from abrun.stats.equivalence import ALPHA
    from abrun.stats.sequential import interim_levels  # scipy: half a second

    level = (interim_levels(compare.interim, spending=compare.alpha_spending) or [ALPHA])[-1]
    counted = units(paired=compare.paired)
    headings = [
        "metric",
        "window",
        "margin",
        "sigma",
        "correlation",
        f"power, {num_pairs} {counted}",
        "80 % needs",
    ]
    rows = []
    for index, claim in enumerate(compare.claims):
        spread = assumed_spread(claim, compare.reference is not None, paired=compare.paired)
        chances = plan_claim_power(claim, compare, spread, level)
        if claim.margin is None:
            rows.append(
                (claim.metric, claim.window, describe_claim(claim), "", "", "no equivalence: no power", "")
            )
            continue
        if chances is None:
            assume = f", or set compare.claims.{index}.sigma" if spread is None else ""
            expected, needed = f"unknown: see abrun plan --from EXPERIMENT{assume}", ""
        else:
            expected, pairs = f"{chances.power(num_pairs):.0%}", chances.pairs_needed
            needed = f"{pairs} {counted}" if pairs else f"over 1000 {counted}"
        margin = claim.margin if isinstance(claim.margin, str) else f"{claim.margin:g}"
        sigma = "" if claim.sigma is None else f"{claim.sigma:g}"
        correlation = f"{spread.correlation:g}" if spread else ""
        rows.append((claim.metric, claim.window, f"±{margin}", sigma, correlation, expected, needed))
    return Group(*_table(headings, rows, len(rows)))


def _looks(compare: Compare) -> list[RenderableType]:
    counts = ", ".join(map(str, compare.interim))
    return [Text(f"Interim analyses after {counts} pairs; the first that decides stands.")] if counts else []


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_rows: int) -> list[RenderableType]:
    """The first of `num_rows` rows, with a line on the rest."""
    table = Table(columns(*headings, fold=True), rows[:MOST_ROWS])
    more = num_rows - MOST_ROWS
    return [table, Text(f"... and {more} more")] if more > 0 else [table]


def _listed(lines: Sequence[str]) -> list[Text]:
    return [Text(f"- {printable(line)}") for line in lines]


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _count(things: list[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
