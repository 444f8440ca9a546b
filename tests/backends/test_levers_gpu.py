"""What makes a step fast changes nothing but rounding, and no microbatch makes the CPU wait for the GPU."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.llama import modeling_llama

from abrun.backends import dtensor
from abrun.backends.dtensor import DtensorBackend
from abrun.backends.microbatches import Microbatches
from abrun.backends.ranks import make_ranks
from abrun.recipe import Grpo, Policy
from abrun.rl.batch import PolicyBatch
from abrun.train.policy_gradient import PolicyObjective
from tests.backends.policies import WeightedLoss, gradients, make_backend, tiny
from tests.backends.test_packing import of_prompts

pytestmark = pytest.mark.gpu
PACKED = {"packing": True, "micro_batch_tokens": 100}
GROUPS = [(1 + 5 * row % 7, [1 + (3 * row + each) % 9 for each in range(4)]) for row in range(9)]
KEPT = {"backend": {"keep_gathered": True}}
LEVERS = {
    "packed": PACKED,
    "compiled": PACKED | {"compile": True},
    "selective": PACKED | {"compile": True, "activation_checkpointing": "selective"},
    "full": PACKED | {"compile": True, "activation_checkpointing": "full"},
    "gathered": PACKED | KEPT | {"compile": True},
    "one pass": PACKED | KEPT | {"compile": True, "logprobs": {"impl": "triton", "one_pass": True}},
    "prompts": PACKED | {"share_prompts": True},
    "prompts, compiled": PACKED | KEPT | {"compile": True, "share_prompts": True},
    "Liger": PACKED | {"liger": True},
}


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


def backend_of(device: torch.device, **policy: Any) -> DtensorBackend:
    settings = {"dtype": "bfloat16", "logprobs": {"impl": "triton"}} | policy
    return DtensorBackend(tiny, Policy.model_validate(settings), make_ranks(device, {}))


@pytest.fixture
def patched() -> Iterator[None]:
    """Liger puts its kernels into transformers' module: for the whole process, which here goes on without."""
    before = dict(vars(modeling_llama))
    yield
    for name, value in before.items():
        setattr(modeling_llama, name, value)


@pytest.mark.timeout(600)
def test_levers_are_no_worse_than_none(gpu: torch.device, patched: None) -> None:
    batch = of_prompts(GROUPS)
    exact, loss = make_backend(), WeightedLoss(float(batch.token_mask.sum()))
    exact.forward_backward(batch, loss)
    expected, logprobs = gradients(exact), exact.logprobs(batch)

    def errors(**policy: Any) -> tuple[float, float]:
        """Of log-probs, absolute; of a parameter's gradient, relative, the worst."""
        backend = backend_of(gpu, **policy)
        found = backend.logprobs(batch.to(gpu)).cpu()
        backend.forward_backward(batch.to(gpu), loss)
        of_weights = [
            float((gradient.cpu() - expected[key]).norm() / expected[key].norm())
            for key, gradient in gradients(backend).items()
        ]
        return float((found - logprobs).abs().mean()), max(of_weights)

    plain = errors()
    for name, policy in LEVERS.items():
        if name == "Liger":
            pytest.importorskip("liger_kernel")
        found = errors(**policy)
        print(f"{name}: {found[0]:.2e}, {found[1]:.2e}; without any: {plain[0]:.2e}, {plain[1]:.2e}")
        assert found[0] <= 1.2 * plain[0] + 1e-5 and found[1] <= 1.2 * plain[1] + 1e-5, name


@pytest.mark.parametrize("name", ["packed", "gathered", "prompts, compiled"])
def test_no_microbatch_waits_for_the_gpu(
    name: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, backend = of_prompts(GROUPS).to(gpu), backend_of(gpu, **LEVERS[name])
    mask = sequences.token_mask
    batch = sequences.at(
        PolicyBatch,
        inference_logprobs=torch.where(mask, -2.0, 0.0),
        old_logprobs=None,
        reference_logprobs=None,
        importance_weights=None,
        loss_weights=mask / mask.sum(dtype=torch.float64),
        advantages=torch.where(mask, 1.0, 0.0),
    )
    settings = Grpo.model_validate({"type": "grpo", "prompts_per_step": len(GROUPS), "group_size": 4})
    loss = PolicyObjective(settings=settings, num_tokens=float(mask.sum()), num_sequences=float(len(mask)))
    for _ in range(2):  # compiles, and tries kernels out
        backend.forward_backward(batch, loss)
        backend.optimizer_step(1e-6)
    made = Microbatches(batch, backend.settings, backend.ranks)
    assert len(made) >= 3
    monkeypatch.setattr(dtensor, "Microbatches", lambda *_: made)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backend.forward_backward(batch, loss)
            in_the_loop = {f"{one.filename}:{one.lineno}" for one in caught if "synchron" in str(one.message)}
            caught.clear()
            backend.optimizer_step(1e-6)
            at_its_end = [f"{one.filename}:{one.lineno}" for one in caught if "synchron" in str(one.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not in_the_loop
    assert len(at_its_end) <= 1, at_its_end  # the gradient's norm, as a number
