"""A plan for Kubernetes: a JobSet per pair, with a Job per arm and a pod per node.

The pods of a run find each other by the host names of the JobSet's headless service. If a run fails, its
pair restarts from the newest checkpoints. The loss of a drained or preempted node does not count as a retry.
"""

import re
from collections.abc import Sequence
from typing import Any

from abrun.launch.export.manifest import RECIPE_VARIABLE, ExportedPlan, dns_label
from abrun.reasons import Code, Reason
from abrun.recipe.launcher import JobSet
from abrun.recipe.run import RunConfig

# A pod's name has at most 63 characters, which include indices and a suffix of 6.
MAX_NAME_LENGTH, MAX_ARM_LENGTH = 30, 16
NODE = '"$JOB_COMPLETION_INDEX"'
DISRUPTED = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
NOT_COUNTED = {
    "name": "disrupted",
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": ["PodFailurePolicy"],
}


def find_problems(export: ExportedPlan) -> list[Reason]:
    settings: JobSet = export.settings
    missing = [] if settings.claim else [Code.LAUNCHER_CLAIM_MISSING()]
    return missing if settings.image else [Code.LAUNCHER_IMAGE_MISSING(), *missing]


def make_manifests(export: ExportedPlan, *, compare: bool) -> dict[str, Any]:
    """Return the manifests by file, in the order in which they are applied."""
    documents: dict[str, Any] = {}
    for file, run, config in export.warm_starts():
        documents[file] = _make_jobset(export, file, [("run", run, config)])
    for file, runs in export.run_groups():
        documents[file] = _make_jobset(export, file, runs)
    if compare:
        job = _make_job(export, "compare", export.compare_script(), nodes=1, resources={})
        documents["compare"] = _make_manifest(export, _manifest_name(export, "compare"), [job], retries=0)
    return documents


def submit_lines(export: ExportedPlan, documents: dict[str, Any]) -> list[str]:
    """Return the shell lines that apply the manifests in order."""
    namespace = f" -n {export.settings.namespace}" if export.settings.namespace else ""
    kubectl = f"kubectl{namespace}"
    state = f"{kubectl} get jobset \"$name\" -o 'jsonpath={{.status.terminalState}}'"
    lines = [
        "ended() {  # waits for JobSets, however they end",
        '    for name in "$@"; do',
        f'        until [ -n "$({state})" ]; do',
        "            sleep 10",
        "        done",
        "    done",
        "}",
    ]
    stages: dict[str, list[str]] = {}
    for file in documents:
        stages.setdefault(file.partition("-")[0].replace("rerun", "pair"), []).append(file)
    for files in stages.values():
        lines += [f"{kubectl} apply -f {file}.yaml" for file in files]
        lines.append(f"ended {' '.join(documents[file]['metadata']['name'] for file in files)}")
    return lines


def _make_jobset(
    export: ExportedPlan, file: str, runs: Sequence[tuple[str, str, RunConfig]]
) -> dict[str, Any]:
    name, settings = _manifest_name(export, file), export.settings
    jobs = []
    for arm, run, config in runs:
        label = dns_label(arm, MAX_ARM_LENGTH)
        script = export.node_script(run, config, node=NODE, first_host=f"{name}-{label}-0-0.{name}")
        cpus = str(config.devices_per_node * settings.cpus_per_rank)
        gpus = {settings.gpu: str(config.devices_per_node)} if config.cluster.gpus_per_node else {}
        memory = {"memory": settings.memory} if settings.memory else {}
        pod_resources: dict[str, Any] = {"requests": {"cpu": cpus, **memory, **gpus}}
        pod_resources |= {"limits": {**memory, **gpus}} if memory or gpus else {}
        jobs.append(_make_job(export, label, script, nodes=config.cluster.nodes, resources=pod_resources))
    return _make_manifest(export, name, jobs, retries=max(config.limits.retries for _, _, config in runs))


def _make_manifest(export: ExportedPlan, name: str, jobs: list[Any], *, retries: int) -> dict[str, Any]:
    settings: JobSet = export.settings
    metadata: dict[str, Any] = {"name": name}
    metadata |= {"namespace": settings.namespace} if settings.namespace else {}
    metadata |= {"labels": {"kueue.x-k8s.io/queue-name": settings.queue}} if settings.queue else {}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": retries, "rules": [NOT_COUNTED]},
            "replicatedJobs": jobs,
        },
    }


def _make_job(
    export: ExportedPlan, name: str, script: str, *, nodes: int, resources: dict[str, Any]
) -> dict[str, Any]:
    settings: JobSet = export.settings
    container: dict[str, Any] = {
        "name": "node",
        "image": settings.image,
        "command": ["sh", "-ec", escape(script)],
        "env": [{"name": RECIPE_VARIABLE, "value": escape(export.recipe)}],
        "resources": resources,
        "volumeMounts": [
            {"name": "runs", "mountPath": settings.runs_dir},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if settings.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in settings.secrets]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.save_s,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    pod |= {"nodeSelector": settings.node_selector} if settings.node_selector else {}
    return {
        "name": name,
        "template": {
            "spec": {
                "parallelism": nodes,
                "completions": nodes,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": [DISRUPTED]},
                "template": {"spec": pod},
            }
        },
    }


def escape(text: str) -> str:
    """Return a text that Kubernetes expands to `text` in `command` and `env`, whatever variables there are.

    Kubernetes expands `$(NAME)` and `$$`, and breaks a non-ASCII character after `$`
    (third_party/forked/golang/expansion/expand.go). `$` before anything else stays as it is.
    """
    return re.sub(r"\$\$+|\$(?=\(|[^\x00-\x7f])", lambda match: match[0] * 2, text)


def _manifest_name(export: ExportedPlan, file: str) -> str:
    return dns_label(f"{export.name}-{file}", MAX_NAME_LENGTH)
