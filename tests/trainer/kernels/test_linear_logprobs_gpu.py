"""linear_logprobs and linear_policy_loss on CUDA: their answers, and what they hold of memory."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from abrun.trainer.kernels import linear_logprobs
from tests.spawn import run_ranks
from tests.trainer.kernels.test_linear_logprobs import (
    DTYPES,
    Answer,
    Problem,
    check,
    kernel_answer,
    largest,
    make_problem,
    one_pass_answer,
    plain_answer,
    rounding,
)
from tests.trainer.pairwise import few

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TILED = ["chunked", "triton"]
IMPLS = ["logits", *TILED]
ANSWERS = [kernel_answer, one_pass_answer]
SIZES = [(1, 151), (7, 32003), (513, 32003), (513, 151936)]
LIMITS = [(4096, 512), (4096, 128), (65536, 256)]  # tokens, and MiB for them


def on_gpu(problem: Problem) -> Problem:
    tensors = ("hidden", "weight", "target", "grad_logprobs", "grad_entropies")
    return replace(problem, **{name: getattr(problem, name).cuda() for name in tensors})


@pytest.mark.parametrize("size, dtypes, impl, answer", few(SIZES, list(DTYPES), IMPLS, ANSWERS))
def test_agrees_with_the_oracle(
    answer: Callable[..., Answer], impl: str, dtypes: str, size: tuple[int, int]
) -> None:
    num_tokens, num_vocabulary = size
    settings = {"temperature": 0.7, "logit_softcap": 8.0, "vocab_size": num_vocabulary - 2}
    problem = on_gpu(make_problem(num_tokens, num_vocabulary, dtypes, hidden_size=64, **settings))
    oracle, naive = plain_answer(problem, exact=True), plain_answer(problem, exact=False)
    # One unit of bfloat16 at the largest gradient: where a sum ends beside a rounding boundary, the last
    # digit of the kernel and of the naive code may fall on either side of it.
    slack = {part: 2**-8 * largest(getattr(oracle, part)) for part in ("d_hidden", "d_weight")}
    check(answer(problem, impl), oracle, naive, slack)


@pytest.mark.parametrize("hidden_size", [1, 7, 8, 72, 100])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.7, "logit_scale": 0.3}, {"logit_softcap": 2.0}])
def test_any_hidden_size(hidden_size: int, settings: dict[str, float]) -> None:
    """Those that are no multiple of 8 take another way through the kernels."""
    problem = on_gpu(make_problem(130, 515, "bfloat16", hidden_size=hidden_size, **settings))
    oracle, naive = plain_answer(problem, exact=True), plain_answer(problem, exact=False)
    for answer in (kernel_answer, one_pass_answer):
        check(answer(problem, "triton"), oracle, naive, rounding("triton", problem, oracle))


@pytest.mark.parametrize("answer", [kernel_answer, one_pass_answer])
@pytest.mark.parametrize("impl", TILED)
def test_float32_logprobs_from_bfloat16_inputs(answer: Callable[..., Answer], impl: str) -> None:
    problem = on_gpu(make_problem(513, 32003, "bfloat16", hidden_size=256))
    oracle, naive = plain_answer(problem, exact=True), plain_answer(problem, exact=False)
    error = (answer(problem, impl).logprobs - oracle.logprobs).abs().max()
    assert error < 1e-4
    assert error < (naive.logprobs - oracle.logprobs).abs().max() / 100


@pytest.mark.parametrize("answer", [kernel_answer, one_pass_answer])
@pytest.mark.parametrize("impl", TILED)
def test_logprob_of_the_largest_logit_is_never_above_0(answer: Callable[..., Answer], impl: str) -> None:
    problem = on_gpu(make_problem(4096, 2000, "bfloat16", hidden_size=512))
    best = (problem.hidden.float() @ problem.weight.float().T).argmax(1)
    result = answer(replace(problem, target=best), impl)
    assert (result.logprobs <= 0).all() and (result.logprobs > -1e-3).any()
    assert result.d_hidden.isfinite().all() and result.d_weight.isfinite().all()


def test_tokens_that_are_nearly_certain_have_an_exact_gradient() -> None:
    """g * (1 - p) of a p near 1 must not be the difference of two rounded numbers."""
    hidden = torch.zeros(256, 64, device="cuda", dtype=torch.bfloat16)
    hidden[:, 0] = 1
    weight = torch.zeros(1000, 64, device="cuda", dtype=torch.bfloat16)
    weight[3, 0] = 14.0
    problem = Problem(
        hidden=hidden,
        weight=weight,
        target=torch.full((256,), 3, device="cuda"),
        grad_logprobs=torch.ones(256, device="cuda"),
        grad_entropies=torch.zeros(256, device="cuda"),
    )
    rest = 999 * math.exp(-14) / (1 + 999 * math.exp(-14))
    for answer in (kernel_answer, one_pass_answer):
        assert answer(problem, "triton").d_weight[3, 0].item() == pytest.approx(256 * rest, rel=1e-2)


# Memory


def peak_bytes(run: Callable[[], Answer]) -> int:
    """Above what is held before, for the forward and the backward pass.

    As asked of the allocator, which may give blocks that are up to 1 MiB larger, depending on what was freed.
    A first call is not measured: cuBLAS takes its workspaces there, once a process.
    """
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    answer = run()
    torch.cuda.synchronize()
    del answer
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize(
    "limits, dtypes, impl, answer", few(LIMITS, ["bfloat16", "mixed", "float32_head"], TILED, ANSWERS)
)
def test_stays_within_its_memory_budget(
    answer: Callable[..., Answer], impl: str, dtypes: str, limits: tuple[int, int]
) -> None:
    num_tokens, budget_mib = limits
    problem = on_gpu(make_problem(num_tokens, 151936, dtypes, hidden_size=512))
    copies = problem.hidden.nbytes + problem.weight.nbytes  # the clones of the inputs
    results = 4 * num_tokens * 4  # log-probs and entropies, and their copies without gradient
    budget_bytes = budget_mib * 2**20
    peak = peak_bytes(lambda: answer(problem, impl, memory_budget_bytes=budget_bytes))
    assert peak <= 2 * copies + results + budget_bytes


def test_dense_path_is_what_the_budget_saves() -> None:
    problem = on_gpu(make_problem(4096, 151936, "bfloat16", hidden_size=512))
    assert peak_bytes(lambda: kernel_answer(problem, "logits")) > 2 * 4 * 4096 * 151936


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16"])
def test_more_logits_than_32_bits_can_count(dtypes: str) -> None:
    """16,385 x 151,936 is beyond 2^31, in one tile where the budget allows."""
    problem = on_gpu(make_problem(16385, 151936, dtypes, hidden_size=32))
    small = kernel_answer(problem, "triton", memory_budget_bytes=2**28)
    for answer in (kernel_answer, one_pass_answer):
        whole = answer(problem, "triton", memory_budget_bytes=2**35)
        torch.testing.assert_close(whole.logprobs, small.logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole.entropies, small.entropies, rtol=1e-5, atol=1e-5)
        for part in ("d_hidden", "d_weight"):
            exact = getattr(small, part).double()
            assert (getattr(whole, part).double() - exact).norm() <= 0.02 * exact.norm()


# What surrounds the call


def test_gradients_under_activation_checkpointing_and_with_one_weight_used_twice() -> None:
    problem = on_gpu(make_problem(300, 1000, "bfloat16", hidden_size=64))

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        hidden = hidden + torch.nn.functional.embedding(problem.target.clamp(0, 999), weight)  # tied
        logprobs, entropies = linear_logprobs(hidden, weight, problem.target, impl="triton", entropy=True)
        assert entropies is not None
        return (logprobs * problem.grad_logprobs + entropies * problem.grad_entropies).sum()

    def gradients(checkpointed: bool) -> tuple[Tensor, ...]:
        leaves = [values.clone().requires_grad_() for values in (problem.hidden, problem.weight)]
        total = checkpoint(loss, *leaves, use_reentrant=False) if checkpointed else loss(*leaves)
        return torch.autograd.grad(total, leaves)

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert plain.abs().sum() > 0 and torch.equal(plain, recomputed)


@pytest.mark.parametrize("impl", TILED)
def test_capture_in_a_cuda_graph(impl: str) -> None:
    problem = on_gpu(make_problem(300, 1000, "bfloat16", hidden_size=64))
    hidden, weight = (values.clone().requires_grad_() for values in (problem.hidden, problem.weight))

    def step() -> tuple[Tensor, ...]:
        logprobs, entropies = linear_logprobs(hidden, weight, problem.target, impl=impl, entropy=True)
        assert entropies is not None
        upstream = [problem.grad_logprobs, problem.grad_entropies]
        return logprobs, *torch.autograd.grad([logprobs, entropies], [hidden, weight], upstream)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, fresh in zip(captured, step(), strict=True):
        assert torch.equal(replayed, fresh)


def test_triton_needs_a_gpu() -> None:
    problem = make_problem(7, 151)
    with pytest.raises(ValueError, match=r"'triton' needs a CUDA device, got 'cpu'"):
        kernel_answer(problem, "triton")


# Vocabulary shards over nccl


def _shard_answers(rank: int, world_size: int) -> dict[tuple[str, str], Answer]:
    torch.cuda.set_device(rank)
    group = dist.new_group(list(range(world_size)), backend="nccl")
    answers = {}
    for dtypes in ("bfloat16", "float32"):
        problem = on_gpu(make_problem(513, 32000, dtypes, hidden_size=64, vocab_size=31990, temperature=0.7))
        shard = replace(problem, weight=problem.weight.chunk(world_size)[rank].contiguous())
        for impl in IMPLS:
            for name, answer in (("two-pass", kernel_answer), ("one-pass", one_pass_answer)):
                result = answer(shard, impl, group=group)
                answers[f"{dtypes} {name}", impl] = Answer(
                    *(getattr(result, part).cpu() for part in Answer.__dataclass_fields__)
                )
    return answers


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_shards_agree_with_the_oracle_over_nccl(num_shards: int) -> None:
    if torch.cuda.device_count() < num_shards:
        pytest.skip(f"needs {num_shards} GPUs")
    ranks: list[dict[tuple[str, str], Any]] = run_ranks(_shard_answers, num_shards)
    for dtypes in ("bfloat16", "float32"):
        problem = make_problem(513, 32000, dtypes, hidden_size=64, vocab_size=31990, temperature=0.7)
        oracle, naive = plain_answer(problem, exact=True), plain_answer(problem, exact=False)
        slack = {part: 2**-7 * largest(getattr(oracle, part)) for part in ("d_hidden", "d_weight")}
        for name in ("two-pass", "one-pass"):
            for impl in IMPLS:
                shards = [answers[f"{dtypes} {name}", impl] for answers in ranks]
                joined = replace(
                    shards[0],
                    d_hidden=torch.stack([shard.d_hidden.double() for shard in shards]).sum(0),
                    d_weight=torch.cat([shard.d_weight for shard in shards]),
                )
                check(joined, oracle, naive, slack if dtypes == "bfloat16" else {})
                assert all(torch.equal(shard.logprobs, joined.logprobs) for shard in shards)
                if num_shards > 1:  # each rank has a part of d_hidden alone
                    with pytest.raises(AssertionError, match="d_hidden: error"):
                        check(replace(joined, d_hidden=shards[0].d_hidden), oracle, naive, slack)
