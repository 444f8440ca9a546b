"""vLLM starts in the trainer's process and leaves its state alone, or says in a line why it does not."""

from tests.trainer.loop.runs import single_rank
from tests.trainer.rollout.vllm_sampling import Sampling, config_of, global_state, needs_vllm

pytestmark = needs_vllm


def test_the_trainers_state_is_as_before() -> None:
    with single_rank():
        before = global_state()
        sampling = Sampling(config_of())
        assert global_state() == before
        sampling.sync(config_of())
        sampling.generate()
        sampling.engine.close()
        assert global_state() == before
