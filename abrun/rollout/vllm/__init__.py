"""vLLM as rollout engine: in the processes of the ranks, on the devices that train, or on its own devices."""

from abrun.backends import Backend
from abrun.models import Text
from abrun.recipe.run import OwnRunConfig
from abrun.rollout import RolloutEngine


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    """See abrun.rollout.make_engine. Collective."""
    if config.rollout.devices:
        from abrun.rollout.vllm.separate import Separate

        return Separate(config, backend, text)
    from abrun.rollout.vllm.colocated import Colocated

    return Colocated(config, backend, text)
