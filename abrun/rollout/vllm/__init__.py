"""vLLM as rollout engine: in the processes of the ranks, on the devices that train."""

from abrun.backends import Backend
from abrun.models import Text
from abrun.recipe import OwnRunConfig
from abrun.rollout import RolloutEngine


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    """See abrun.rollout.make_engine. Collective."""
    from abrun.rollout.vllm.colocated import Colocated

    return Colocated(config, backend, text)
