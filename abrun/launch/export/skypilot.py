"""A plan for SkyPilot: a task per run, whose nodes find each other by the addresses that SkyPilot sets.

Managed jobs (`sky jobs launch`) restart a task when its nodes are lost, and up to `limits.retries` times when
it fails. A run resumes from its newest checkpoint.
"""

import shlex
from typing import Any

from abrun.launch.export.manifest import RECIPE_VARIABLE, ExportedPlan, dns_label
from abrun.reasons import Code, Reason
from abrun.recipe.launcher import SkyPilot
from abrun.recipe.run import RunConfig

MAX_NAME_LENGTH = 50
NODE, FIRST = '"$SKYPILOT_NODE_RANK"', "${SKYPILOT_NODE_IPS%%[[:space:]]*}"


def find_problems(export: ExportedPlan) -> list[Reason]:
    if export.settings.accelerator:
        return []
    gpus = {run.name.arm: run.config.cluster.gpus_per_node for run in export.plan.runs}
    return [Code.LAUNCHER_ACCELERATOR_MISSING(arm=arm, gpus=count) for arm, count in gpus.items() if count]


def make_manifests(export: ExportedPlan, *, compare: bool) -> dict[str, Any]:
    """Return the manifests by file, in the order in which they are launched."""
    documents: dict[str, Any] = {}
    for file, run, config in export.warm_starts():
        documents[file] = _make_task(
            export, file, export.node_script(run, config, node=NODE, first_host=FIRST), config
        )
    for planned in export.plan.runs:
        name = planned.name
        file = f"run-{name.arm}-seed-{name.seed}" + (f"-aa{name.rerun}" if name.rerun else "")
        script = export.node_script(str(name), planned.config, node=NODE, first_host=FIRST)
        documents[file] = _make_task(export, file, script, planned.config)
    if compare:
        documents["compare"] = _make_task(export, "compare", export.compare_script(), None)
    return documents


def submit_lines(export: ExportedPlan, documents: dict[str, Any]) -> list[str]:
    """Return the shell lines that launch the tasks in order, each as a managed job followed to its end."""
    launch = shlex.join(
        ["sky", "jobs", "launch", "--yes", *(f"--secret={name}" for name in export.settings.secrets)]
    )
    lines = []
    for file in documents:
        in_parallel = file.startswith("run-")
        if file == "compare":
            lines.append("wait")
        lines.append(f"{launch} {shlex.quote(f'{file}.yaml')}{' &' if in_parallel else ''}")
    return lines if "compare" in documents else [*lines, "wait"]


def _make_task(export: ExportedPlan, file: str, script: str, config: RunConfig | None) -> dict[str, Any]:
    settings: SkyPilot = export.settings
    count = config.devices_per_node if config else 1
    resources: dict[str, Any] = {"cpus": f"{count * settings.cpus_per_rank}+", **settings.resources}
    if config and config.cluster.gpus_per_node:
        resources["accelerators"] = f"{settings.accelerator}:{count}"
    if settings.image:
        resources["image_id"] = f"docker:{settings.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": config.limits.retries if config else 0}
    task: dict[str, Any] = {
        "name": dns_label(f"{export.name}-{file}", MAX_NAME_LENGTH),
        "num_nodes": config.cluster.nodes if config else 1,
        "resources": resources,
    }
    task |= {"volumes": {settings.runs_dir: settings.volume}} if settings.volume else {}
    task["envs"] = {RECIPE_VARIABLE: export.recipe}
    task |= {"secrets": dict.fromkeys(settings.secrets)} if settings.secrets else {}
    return {**task, "run": script}
