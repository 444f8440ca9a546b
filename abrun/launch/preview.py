"""Preview of a launch as tables (`abrun launch --dry-run`). Writes nothing."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.experiment.plan import ExperimentPlan, describe_decisions
from abrun.experiment.preflight.checks import find_problems, refuse_unset_variables
from abrun.experiment.preflight.machine import Machine, this_machine
from abrun.launch.cluster import ClusterJobs
from abrun.launch.local import count_parallel_runs
from abrun.launch.prepare import find_ineffective_settings
from abrun.messages import sentences
from abrun.messages.codes import Reason
from abrun.messages.numbers import count_text, percent_text, sample_unit
from abrun.recipe.claims import Compare, describe_claim
from abrun.recipe.command import CommandRunConfig, build_invocation
from abrun.recipe.run import OwnRunConfig, RunConfig, compare_precisions
from abrun.report.present.tables import Table, columns
from abrun.runs.redaction import REFERENCE, printable, yaml_text

MAX_ROWS = 200  # per table: the layout of more takes minutes
MAX_COMMANDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """Problems that would stop a launch on this machine or on a cluster."""

    machine: Machine | None  # None on a cluster
    problems: list[str]
    is_refused: bool  # no other machine could run the plan, or the cluster's scheduler refuses it


def check_feasibility(
    plan: ExperimentPlan, num_jobs: int | None = None, cluster: ClusterJobs | None = None
) -> Feasibility:
    """Check a plan as a launch would. Raises LaunchError for an unset variable in a run's `env`."""
    refuse_unset_variables(plan.runs)
    if cluster:
        reasons = cluster.find_problems(plan)
        return Feasibility(machine=None, problems=reasons, is_refused=bool(reasons))
    problems = find_problems(plan, machine := this_machine(), num_jobs)
    is_refused, texts = any(problem.is_final for problem in problems), [problem.text for problem in problems]
    return Feasibility(machine=machine, problems=texts, is_refused=is_refused)


def render_preview(
    plan: ExperimentPlan, feasible: Feasibility, num_jobs: int | None = None, *, is_staged: bool = False
) -> RenderableType:
    """Return runs in launch order, treatment differences, expected power, and this machine's capacity.

    The last line says whether this machine can run the plan. `is_staged`: it stops once it is decided.
    """
    described = _render_plan(plan, can_stage=True, is_staged=is_staged)
    machine, reasons = feasible.machine, feasible.problems
    assert machine is not None, "a scheduler's jobs are shown instead"
    if not reasons:
        count = _count_parallel(plan, machine, num_jobs)
        return Group(*described, Text(f"\nThis machine ({machine}) runs {count} at once."))
    problems = _bullet_list(f"Problems on this machine ({machine})", reasons)
    count = count_text(len(reasons), "reason")
    conclusion = Text(f"This machine cannot run {plan.recipe.name}: {count}, listed above.")
    return Group(*described, *problems, conclusion)


def render_jobs_preview(plan: ExperimentPlan, feasible: Feasibility, cluster: ClusterJobs) -> RenderableType:
    """Return the preview with the jobs that a cluster would get, in place of this machine's capacity."""
    if reasons := feasible.problems:
        return Group(*_render_plan(plan), *_bullet_list("Why it cannot run on the cluster", reasons))
    renderables = _render_plan(plan)
    for name, text in cluster.render_scripts(plan, compare=True).items():
        renderables += [_heading(f"Job {name}"), Text(text)]
    return Group(*renderables)


def preview_as_json(plan: ExperimentPlan, feasible: Feasibility, num_jobs: int | None) -> dict[str, Any]:
    """Return the preview as JSON. `refusals` are the reasons why the plan cannot run here or there."""
    machine, reasons = feasible.machine, feasible.problems
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
        "notes": find_ineffective_settings(plan),
        "decided": plan.decided,
        "machine": str(machine) if machine else None,
        "runs_at_once": _count_parallel(plan, machine, num_jobs) if machine and not reasons else None,
        "refusals": reasons,
    }


def _render_plan(
    plan: ExperimentPlan, *, can_stage: bool = False, is_staged: bool = False
) -> list[RenderableType]:
    recipe = plan.recipe
    arms, seeds = count_text(len(recipe.arms), "arm"), count_text(len(recipe.seeds), "seed")
    title = f"{recipe.name}: {len(plan.runs)} runs, {arms} x {seeds}"
    if recipe.controls.aa_reruns:
        title += f" + {recipe.controls.aa_reruns} A/A"
    num_controls, inert = sum(run.is_control for run in plan.runs), find_ineffective_settings(plan)
    title += f" + {num_controls} control runs" if num_controls else ""
    differences = [
        (arm, key, yaml_text(baseline_value), yaml_text(arm_value))
        for arm, changes in plan.treatment_diff.items()
        for key, (baseline_value, arm_value) in changes.items()
    ]
    return [
        Text(title, style="bold"),
        *_render_runs(plan),
        *_render_commands(plan),
        _heading("Resolved differences from the baseline"),
        *_render_table(["arm", "key", "baseline", "arm's"], differences, len(differences)),
        *map(Text, sentences(precision_differences(plan))),
        *(_bullet_list("Settings without effect", inert) if inert else []),
        *([_heading("Values chosen for auto")] if plan.decided else []),
        *map(Text, describe_decisions(plan.decided)),
        _heading("Expected power of the comparison"),
        _render_power(recipe.compare, len(recipe.seeds)),
        *_render_interim(plan, can_stage=can_stage, is_staged=is_staged),
    ]


def _render_runs(plan: ExperimentPlan) -> list[RenderableType]:
    warm_starts = [("", f"warm start {key[:8]}", config, None) for key, config in plan.warm_starts.items()]
    runs = [(str(n), str(run.name), run.config, run.warm_start) for n, run in enumerate(plan.runs, 1)]
    rows = [
        (number, name, str(config.steps), _describe_devices(config), _describe_start(config, warm_start))
        for number, name, config, warm_start in (warm_starts + runs)[: MAX_ROWS + 1]
    ]
    return _render_table(["", "run", "steps", "devices", "starts from"], rows, len(warm_starts + runs))


def _describe_start(config: RunConfig, warm_start: str | None) -> str:
    if not isinstance(config, OwnRunConfig):
        return "its own command"
    if config.checkpoint.start_from is not None:
        return f"checkpoint {config.checkpoint.start_from}"
    if warm_start is not None:
        return f"warm start {warm_start[:8]}"
    return f"preset {config.model.preset}" if config.model.preset else str(config.model.path)


def _render_commands(plan: ExperimentPlan) -> list[RenderableType]:
    """Return the command line of each foreign arm at its first seed."""
    renderables: list[RenderableType] = []
    shown_arms: set[str] = set()
    for run in plan.runs:
        if isinstance(run.config, CommandRunConfig) and run.name.arm not in shown_arms:
            shown_arms.add(run.name.arm)
            if len(shown_arms) > MAX_COMMANDS:
                return [*renderables, Text("\n... and the commands of other arms")]
            call = build_invocation(
                run.config,
                experiment=plan.recipe.name,
                arm=run.name.arm,
                seed=run.name.seed,
                rerun=run.name.rerun,
                run_dir="RUN_DIR",
            )
            variables = ""
            for name, value in call.env.items():  # `${NAME}` stays a reference
                quoted = f'"{value}"' if REFERENCE.fullmatch(value) else shlex.quote(value)
                variables += f"{name}={quoted} "
            where = f", with metrics in {call.metrics_path}"
            nodes, trainer = run.config.cluster.nodes, run.config.trainer
            if nodes > 1 and trainer.start == "every_node":
                where = f" on each of {nodes} nodes, NODE_RANK 0 to {nodes - 1}{where}"
            elif nodes > 1:
                where = f" on the first of {nodes} nodes{where}"
            if trainer.ray:
                where += f"; first, Ray of {call.python} starts on {count_text(nodes, 'node')}"
            renderables.append(_heading(f"The command of {run.name}{where}"))
            renderables.append(Text(printable(variables + shlex.join(call.argv))))
    return renderables


def _describe_devices(config: RunConfig) -> str:
    cluster, engines = config.cluster, config.engine_devices
    kind = "GPU" if cluster.gpus_per_node else "CPU core"
    devices = count_text(config.devices_per_node, kind)
    devices += f" ({cluster.ranks_per_node} + {engines} of vllm)" if engines else ""
    return devices if cluster.nodes == 1 else f"{cluster.nodes} nodes x {devices}"


def _count_parallel(plan: ExperimentPlan, machine: Machine, num_jobs: int | None) -> int:
    return count_parallel_runs(machine, num_jobs, (run.config for run in plan.runs))


def precision_differences(plan: ExperimentPlan) -> list[Reason]:
    """Return a reason for each arm whose LM head or logits have another precision than the baseline's."""
    precision = {
        run.name.arm: run.config.head_precision for run in plan.runs if isinstance(run.config, OwnRunConfig)
    }
    baseline = precision.pop(plan.recipe.baseline, {})
    differences = (compare_precisions(arm, baseline, precision[arm]) for arm in precision)
    return [difference for difference in differences if difference]


def _render_power(compare: Compare, num_pairs: int) -> RenderableType:
    """Return the power of each claim (see abrun.experiment.power). The verdict needs all of them."""
    if not compare.claims and compare.reference is not None:
        return Text("The claims are those of the reference.")
    if not compare.claims:
        return Text("No claim declared (compare.claims): only step one and the guards can be judged.")
    from abrun.experiment.power import assumed_spread, plan_claim_power
    from abrun.stats.sequential import interim_levels  # scipy: half a second

    levels = interim_levels(compare.interim, compare.alpha, compare.spending)
    level = (levels or [compare.alpha])[-1]
    counted = sample_unit(paired=compare.paired)
    headings = ["metric", "window", "margin", "sigma", "correlation"]
    headings += [f"power, {num_pairs} {counted}", "80 % needs"]
    rows, missing_keys, is_unknown = [], list[str](), False
    for index, claim in enumerate(compare.claims):
        spread = assumed_spread(
            claim, compare.reference is not None, paired=compare.paired, priors=compare.noise_priors
        )
        chances = plan_claim_power(claim, compare, spread, level)
        if claim.difference_kind is None:
            power = "exact: no power" if claim.exact else "a limit: no power"
            rows.append((claim.metric, claim.window, describe_claim(claim), "", "", power, ""))
            continue
        if chances is None:
            lacks_gain = claim.better == 0 and claim.improvement is None
            if key := "improvement" if lacks_gain else "sigma" if spread is None else None:
                missing_keys.append(f"compare.claims.{index}.{key}")
            expected, needed, is_unknown = "unknown", "", True
        else:
            expected, pairs = percent_text(chances.power(num_pairs)), chances.pairs_needed
            needed = f"{pairs} {counted}" if pairs else f"over 1000 {counted}"
        sigma = "" if claim.sigma is None else f"{claim.sigma:g}"
        correlation = f"{spread.correlation:g}" if spread else ""
        rows.append((claim.metric, claim.window, describe_claim(claim), sigma, correlation, expected, needed))
    advice = f", or set {', '.join(missing_keys)}" if missing_keys else ""
    notes = [Text(f"unknown: see abrun power --from EXPERIMENT{advice}")] if is_unknown else []
    return Group(*_render_table(headings, rows, len(rows)), *notes)


def _render_interim(plan: ExperimentPlan, *, can_stage: bool, is_staged: bool) -> list[RenderableType]:
    """Return a line on declared interim analyses, and one that recommends them if they save pairs."""
    compare, seeds = plan.recipe.compare, plan.recipe.seeds
    counts, lines = ", ".join(map(str, compare.interim)), list[RenderableType]()
    if counts:
        lines.append(Text(f"Interim analyses after {counts} pairs; the first that decides stands."))
    if not can_stage or is_staged or not compare.claims:
        return lines
    from abrun.experiment.power import (  # scipy
        assumed_spread,
        design_reason,
        plan_claim_power,
        propose_designs,
    )

    powers = [
        plan_claim_power(
            claim, compare, assumed_spread(claim, bool(compare.reference), priors=compare.noise_priors)
        )
        for claim in compare.claims
    ]
    designs = propose_designs(compare, len(seeds), powers, len(plan.recipe.arms) - 1)
    if designs and designs.saved_pairs > 0 and designs.pairs_if_equal < len(seeds):
        lines.append(Text(design_reason(compare, seeds, designs)))
    return lines


def _render_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], num_rows: int
) -> list[RenderableType]:
    """Return the first MAX_ROWS rows of a table, and a line with the number of other rows."""
    table = Table(columns(*headings, fold=True), rows[:MAX_ROWS])
    num_hidden = num_rows - MAX_ROWS
    return [table, Text(f"... and {num_hidden} more")] if num_hidden > 0 else [table]


def _bullet_list(heading: str, lines: Sequence[str]) -> list[Text]:
    return [_heading(heading), *(Text(f"- {printable(line)}") for line in lines)]


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")
