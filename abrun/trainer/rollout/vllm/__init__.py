"""vLLM as rollout engine: on the training devices, in the ranks or in engine hosts, or on its own devices."""

import os

from abrun.processes import ENGINE_HOST_VARIABLE
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import Backend
from abrun.trainer.models import Text
from abrun.trainer.rollout import RolloutEngine


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    """See abrun.trainer.rollout.make_engine. Collective."""
    if config.rollout.devices:
        from abrun.trainer.rollout.vllm.engines import SeparateEngine

        return SeparateEngine(config, backend, text)
    if os.environ.get(ENGINE_HOST_VARIABLE):
        from abrun.trainer.rollout.vllm.engines import HostedEngine

        return HostedEngine(config, backend, text, lambda: _make_colocated(config, backend, text))
    return _make_colocated(config, backend, text)


def _make_colocated(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    from abrun.trainer.rollout.vllm.engines import ColocatedEngine

    return ColocatedEngine(config, backend, text)
