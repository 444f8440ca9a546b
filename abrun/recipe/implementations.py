"""Registry of backends, rollout engines and launchers by their names in recipes and on the command line.

One line here adds an implementation. A value is `module:object` and is imported on demand, so this module
and the control plane depend on none of them. A launcher starts processes; a scheduler queues jobs.
"""

import importlib
from typing import Any

BACKENDS = {
    "dtensor": "abrun.trainer.backends.dtensor:DtensorBackend",
    "megatron": "abrun.trainer.backends.megatron:make_backend",
}
ENGINES = {
    "torch": "abrun.trainer.rollout.torch_engine:make_engine",
    "vllm": "abrun.trainer.rollout.vllm:make_engine",
    "recorded": "abrun.trainer.rollout.recorded:make_engine",
}
LOCAL_LAUNCHERS = {"local": "abrun.launch.local:LocalEngine"}
SCHEDULERS = {
    "slurm": "abrun.launch.slurm.launcher:SlurmCluster",
    "ray": "abrun.launch.ray.launcher:RayCluster",
}


def load_implementation(implementation: str) -> Any:
    """Import and return the object named by `module:object`."""
    module, _, name = implementation.partition(":")
    return getattr(importlib.import_module(module), name)
