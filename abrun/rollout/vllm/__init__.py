"""vLLM as rollout engine: colocated with the ranks on the training devices, or on its own devices."""

from abrun.backends import Backend
from abrun.models import Text
from abrun.recipe.run import OwnRunConfig
from abrun.rollout import RolloutEngine


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> RolloutEngine:
    """See abrun.rollout.make_engine. Collective."""
    if config.rollout.devices:
        from abrun.rollout.vllm.separate import SeparateEngine

        return SeparateEngine(config, backend, text)
    from abrun.rollout.vllm.colocated import ColocatedEngine

    return ColocatedEngine(config, backend, text)
