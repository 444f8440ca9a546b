"""What stands behind each seam, by the name that a recipe or the command line gives it.

One line here adds a backend, a rollout engine or a launcher: one that starts processes, or a cluster that
queues jobs. A value is `module:object`, imported when it is asked for, so that this module, and with it the
control plane, needs none of them.
"""

import importlib
from typing import Any

BACKENDS = {
    "dtensor": "abrun.backends.dtensor:DtensorBackend",
    "megatron": "abrun.backends.megatron:make_backend",
}
ENGINES = {
    "torch": "abrun.rollout.torch_engine:make_engine",
    "vllm": "abrun.rollout.vllm:make_engine",
}
LAUNCHERS = {"local": "abrun.launch.local:LocalEngine"}
SCHEDULERS = {
    "slurm": "abrun.launch.slurm.launcher:SlurmCluster",
    "ray": "abrun.launch.ray.launcher:RayCluster",
}


def load(implementation: str) -> Any:
    """The object that `module:object` names."""
    module, _, name = implementation.partition(":")
    return getattr(importlib.import_module(module), name)
