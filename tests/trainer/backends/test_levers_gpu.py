"""What makes a step fast changes nothing but rounding, and no microbatch makes the CPU wait for the GPU."""

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.llama import modeling_llama

from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Policy
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.microbatches import Microbatches
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.ppo import PpoValueObjective
from tests.trainer.backends.policies import WeightedLoss, gradients, make_backend, tiny
from tests.trainer.backends.test_levers import GROUPS, policy_step
from tests.trainer.backends.test_packing import of_prompts

pytestmark = pytest.mark.gpu
PACKED = {"packing": True, "micro_batch_tokens": 100}
KEPT = {"backend": {"keep_gathered": True}}
TRITON = {"impl": "triton", "one_pass": True}
EVERYTHING = PACKED | KEPT | {"compile": True, "share_prompts": True, "logprobs": TRITON}
LEVERS = {
    "packed": PACKED,
    "compiled": PACKED | {"compile": True},
    "selective": PACKED | {"compile": True, "activation_checkpointing": "selective"},
    "full": PACKED | {"compile": True, "activation_checkpointing": "full"},
    "gathered": PACKED | KEPT | {"compile": True},
    "one pass": PACKED | KEPT | {"compile": True, "logprobs": TRITON},
    "prompts": PACKED | {"share_prompts": True},
    "prompts, compiled": PACKED | KEPT | {"compile": True, "share_prompts": True},
    "everything": EVERYTHING,
    "everything, selective": EVERYTHING | {"activation_checkpointing": "selective"},
    "Liger": PACKED | KEPT | {"liger": True, "share_prompts": True},
}
NEEDS_LIGER = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"
)
EACH = [pytest.param(name, marks=NEEDS_LIGER if name == "Liger" else ()) for name in LEVERS]


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
@pytest.mark.parametrize("name", EACH)
def test_levers_are_no_worse_than_none(name: str, gpu: torch.device, patched: None) -> None:
    batch = of_prompts(GROUPS)
    exact, loss = make_backend(), WeightedLoss(float(batch.token_mask.sum()))
    expected_loss = float(exact.forward_backward(batch, loss).sums["loss"])
    expected, logprobs = gradients(exact), exact.compute_logprobs(batch)

    def errors(**policy: Any) -> tuple[float, float, float]:
        """Absolute for log-probs and loss; relative, the worst, for gradients."""
        backend = backend_of(gpu, **policy)
        found = backend.compute_logprobs(batch.to(gpu)).cpu()
        found_loss = float(backend.forward_backward(batch.to(gpu), loss).sums["loss"])
        of_weights = [
            float((gradient.cpu() - expected[key]).norm() / expected[key].norm())
            for key, gradient in gradients(backend).items()
        ]
        return float((found - logprobs).abs().mean()), max(of_weights), abs(found_loss - expected_loss)

    plain, found = errors(), errors(**LEVERS[name])
    print(f"{name}: {found}; without any: {plain}")
    assert found[0] <= 1.2 * plain[0] + 1e-5 and found[1] <= 1.2 * plain[1] + 1e-5
    # A mean over tokens of advantages, 1 in square, times such errors of log-probs, and 0.1 of an entropy's.
    assert found[2] <= 2 * plain[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EACH)
def test_no_microbatch_waits_for_the_gpu(
    name: str, gpu: torch.device, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the policy's nor the value model's; to make microbatches takes copies to the GPU, as many for
    any rows, and lengths come back once."""
    batch, of_policy = policy_step()
    batch, backend = batch.to(gpu), backend_of(gpu, **LEVERS[name])
    critic = backend.make_value_model(Ppo.model_validate({"type": "ppo"}), seed=3)
    of_values = PpoValueObjective(clip_range=0.2, num_tokens=of_policy.num_tokens)
    updates: list[tuple[Any, Any]] = [(critic, of_values), (backend, of_policy)]
    for _ in range(2):  # compiles, and tries kernels out
        for model, objective in updates:
            model.forward_backward(batch, objective)
            model.optimizer_step(1e-6)
    torch.cuda.synchronize()
    with waits() as to_make:
        made = Microbatches(batch, backend.settings, backend.ranks)
    assert len(made) >= 3 and len(to_make) <= 3 + 9 * len(made), to_make
    monkeypatch.setattr("abrun.trainer.backends.policy.Microbatches", lambda *_: made)
    for model, objective in updates:
        with waits() as in_the_loop:
            model.forward_backward(batch, objective)
        with waits() as at_its_end:
            model.optimizer_step(1e-6)
        assert not in_the_loop
        assert len(at_its_end) <= 1, at_its_end  # the gradient's norm, as a number


@NEEDS_LIGER
@pytest.mark.timeout(600)
@pytest.mark.parametrize("packing", [{}, PACKED, LEVERS["prompts"]], ids=["rows", "packed", "shared"])
def test_further_models_of_a_process_load_with_liger_and_compute_the_same(
    packing: dict[str, Any], gpu: torch.device, patched: None
) -> None:
    """A policy, its reference and a value model; then a policy without Liger, checked on stock modules."""
    batch, _ = policy_step()
    policy, reference = (backend_of(gpu, **packing, liger=True) for _ in range(2))
    expected = policy.compute_logprobs(batch.to(gpu))
    assert torch.equal(reference.compute_logprobs(batch.to(gpu)), expected)
    critic = policy.make_value_model(Ppo.model_validate({"type": "ppo"}), seed=3)
    assert critic.compute_values(batch.to(gpu)).isfinite().all()
    assert torch.equal(policy.compute_logprobs(batch.to(gpu)), expected)
    for model in (policy, reference):
        assert {"LigerRMSNorm", "LigerSwiGLUMLP"} <= {part._get_name() for part in model.module.modules()}
    assert backend_of(gpu, **packing).compute_logprobs(batch.to(gpu)).isfinite().all()


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Where the CPU waits for the GPU."""
    found: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [f"{one.filename}:{one.lineno}" for one in caught if "synchron" in str(one.message)]
