"""What a launch would do, as tables: `abrun launch --dry-run`. Writes nothing."""

import shlex
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from abrun.launch.devices import Machine, Slots, refusals, this_machine
from abrun.plan import Plan
from abrun.recipe import Cluster, CommandRun, Compare, Run, RunConfig, invocation


def preview(plan: Plan, num_jobs: int | None = None) -> RenderableType:
    """Runs in launch order, devices, the exact treatment diff, and the expected power of the comparison."""
    machine = this_machine()
    recipe = plan.recipe
    title = f"{recipe.name}: {len(plan.runs)} runs, {len(recipe.arms)} arms x {_count(recipe.seeds, 'seed')}"
    if recipe.controls.aa_reruns:
        title += f" + {recipe.controls.aa_reruns} A/A"
    return Group(
        Text(title, style="bold"),
        _runs(plan),
        Text(_devices(plan, machine, num_jobs)),
        *_commands(plan),
        _heading("What differs from the baseline, resolved"),
        _diff(plan),
        _heading("Expected power of the comparison"),
        _power(recipe.compare, len(recipe.seeds)),
    )


def _runs(plan: Plan) -> Table:
    table = _table("", "run", "steps", "devices", "starts from")
    for key, config in plan.warm_starts.items():
        table.add_row(
            "", f"warm start {key[:8]}", str(config.steps), _occupies(config.cluster), _start(config)
        )
    for number, run in enumerate(plan.runs, 1):
        begins = f"warm start {run.warm_start[:8]}" if run.warm_start else _start(run.config)
        table.add_row(
            str(number), str(run.name), str(run.config.steps), _occupies(run.config.cluster), begins
        )
    return table


def _start(config: Run) -> str:
    if isinstance(config, RunConfig):
        return f"preset {config.model.preset}" if config.model.preset else str(config.model.path)
    return "its own command"


def _commands(plan: Plan) -> list[RenderableType]:
    """The command line of each foreign arm, at its first seed."""
    parts: list[RenderableType] = []
    shown: set[str] = set()
    for run in plan.runs:
        if isinstance(run.config, CommandRun) and run.name.arm not in shown:
            shown.add(run.name.arm)
            filled = invocation(
                run.config,
                experiment=plan.recipe.name,
                arm=run.name.arm,
                seed=run.name.seed,
                rerun=run.name.rerun,
                run_dir="RUN_DIR",
            )
            variables = "".join(f"{name}={shlex.quote(value)} " for name, value in filled.env.items())
            parts.append(_heading(f"The command of {run.name}, with metrics in {filled.metrics_path}"))
            parts.append(Text(variables + shlex.join(filled.argv)))
    return parts


def _occupies(cluster: Cluster) -> str:
    devices = f"{cluster.gpus_per_node} GPU" if cluster.gpus_per_node else f"{cluster.cpu_ranks} CPU core"
    devices += "" if cluster.ranks_per_node == 1 else "s"
    return devices if cluster.nodes == 1 else f"{cluster.nodes} nodes x {devices}"


def _devices(plan: Plan, machine: Machine, num_jobs: int | None) -> str:
    lines = refusals(plan, machine, num_jobs)
    if lines:
        return "\n- ".join([f"This machine ({machine}) cannot run it:", *lines])
    slots = Slots(machine, num_jobs)
    at_once = 0
    while at_once < len(plan.runs) and slots.take(plan.runs[at_once].config.cluster):
        at_once += 1
    return f"This machine ({machine}) runs {at_once} at once."


def _diff(plan: Plan) -> Table:
    table = _table("arm", "key", "baseline", "arm's")
    for arm, changes in plan.treatment_diff.items():
        for key, (has, wants) in changes.items():
            table.add_row(arm, key, _value(has), _value(wants))
    return table


def _value(value: Any) -> str:
    return "-" if value is None else str(value)


def _power(compare: Compare, num_pairs: int) -> RenderableType:
    """P(MATCH) of each claim if the arms are truly equal; the verdict needs all of them."""
    if not compare.primary:
        return Text("No claim declared (compare.primary): only step one and the guards can be judged.")
    from abrun.equivalence import ALPHA  # scipy: half a second
    from abrun.power import assumed_spread, claim_power

    table = _table(
        "metric", "window", "margin", "sigma", "correlation", f"power, {num_pairs} pairs", "80 % needs"
    )
    for index, claim in enumerate(compare.primary):
        spread = assumed_spread(claim, compare.reference is not None)
        alpha = ALPHA / max(1, len(compare.looks))
        chances = claim_power(claim, compare, spread, alpha)
        if chances is None:
            expected, needed = f"sigma unknown: set compare.primary.{index}.sigma", ""
        else:
            expected, pairs = f"{chances.power(num_pairs):.0%}", chances.pairs_needed
            needed = f"{pairs} pairs" if pairs else "over 1000 pairs"
        margin = claim.margin if isinstance(claim.margin, str) else f"{claim.margin:g}"
        sigma = "" if claim.sigma is None else f"{claim.sigma:g}"
        correlation = f"{claim.correlation:g}" if spread else ""
        table.add_row(claim.metric, claim.window, f"±{margin}", sigma, correlation, expected, needed)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _count(things: list[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
