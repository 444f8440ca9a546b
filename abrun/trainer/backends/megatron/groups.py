"""megatron-core's process groups, global to the process and separate from those of `Ranks`."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from abrun.recipe.policy import Megatron
from abrun.trainer.backends.ranks import COLLECTIVE_TIMEOUT, Ranks

_joined: tuple[Any, Megatron] | None = None  # the world group and settings that the groups were made of


def join_groups(ranks: Ranks, settings: Megatron) -> None:
    """Make megatron-core's process groups for the recipe's layout, unless they exist. Collective.

    megatron-core refuses context parallelism without Transformer Engine. So it is told that the ranks of a
    context are data-parallel replicas: it sums gradients and shards the optimizer's state over them.
    """
    global _joined
    if _joined == (dist.group.WORLD, settings) and parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_parallel,
        pipeline_model_parallel_size=settings.pipeline_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        expert_tensor_parallel_size=1,  # tensor parallelism does not shard experts
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    if ranks.device.type == "cuda":  # megatron-core swaps CUDA generators around dropout
        model_parallel_cuda_manual_seed(0)
    replica = ranks.weight_mesh.get_local_rank()
    assert parallel_state.get_data_parallel_rank() == replica, (
        "megatron-core numbers data-parallel ranks differently"
    )
    assert parallel_state.get_tensor_model_parallel_rank() == (ranks.tensor.rank() if ranks.tensor else 0)
    assert parallel_state.get_pipeline_model_parallel_rank() == (
        ranks.pipeline.rank() if ranks.pipeline else 0
    )
    _joined = dist.group.WORLD, settings


def is_last_stage() -> bool:
    """Return whether this rank's pipeline stage is the last, which computes log-probs and values."""
    return parallel_state.is_pipeline_last_stage()


def tensor_group() -> dist.ProcessGroup:
    group: Any = parallel_state.get_tensor_model_parallel_group()
    return group


def expert_group() -> dist.ProcessGroup:
    group: Any = parallel_state.get_expert_model_parallel_group()
    return group
