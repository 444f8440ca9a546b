"""linear_logprobs on CUDA in bfloat16: the answers of both impls, and what chunked saves of memory."""

import pytest
import torch

from abrun.kernels import chunked
from tests.kernels.test_linear_logprobs import (
    IMPLS,
    Problem,
    check,
    kernel_answer,
    largest,
    make_problem,
    plain_answer,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(problem: Problem) -> Problem:
    return Problem(
        hidden=problem.hidden.cuda(),
        weight=problem.weight.cuda(),
        target=problem.target.cuda(),
        grad_logprobs=problem.grad_logprobs.cuda(),
        grad_entropies=problem.grad_entropies.cuda(),
        head_dtype=problem.head_dtype,
        settings=problem.settings,
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtypes", ["bfloat16", "mixed", "float32_head"])
@pytest.mark.parametrize("num_tokens, num_vocabulary", [(1, 151), (7, 32003), (513, 32003)])
def test_agrees_with_the_oracle(impl: str, dtypes: str, num_tokens: int, num_vocabulary: int) -> None:
    settings = {"temperature": 0.7, "logit_softcap": 8.0, "vocab_size": num_vocabulary - 2}
    problem = on_gpu(make_problem(num_tokens, num_vocabulary, dtypes, hidden_size=64, **settings))
    oracle, naive = plain_answer(problem, exact=True), plain_answer(problem, exact=False)
    # One unit of bfloat16 at the largest gradient: where a sum ends beside a rounding boundary, the last
    # digit of the kernel and of the naive code may fall on either side of it.
    slack = {part: 2**-8 * largest(getattr(oracle, part)) for part in ("d_hidden", "d_weight")}
    check(kernel_answer(problem, impl), oracle, naive, slack)


def test_chunked_has_float32_logprobs_from_bfloat16_inputs() -> None:
    problem = on_gpu(make_problem(513, 32003, "bfloat16", hidden_size=256))
    oracle, naive = plain_answer(problem, exact=True), plain_answer(problem, exact=False)
    error = (kernel_answer(problem, "chunked").logprobs - oracle.logprobs).abs().max()
    assert error < 1e-4
    assert error < (naive.logprobs - oracle.logprobs).abs().max() / 100


def test_chunked_stays_within_its_memory_budget() -> None:
    num_tokens, hidden_size, vocabulary = 8192, 1024, 151936
    problem = on_gpu(make_problem(num_tokens, vocabulary, "bfloat16", hidden_size=hidden_size))

    def peak_bytes(impl: str) -> int:
        """Above the inputs, for the forward and the backward pass, the gradients included."""
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answer = kernel_answer(problem, impl)
        peak = torch.cuda.max_memory_allocated() - before
        del answer
        return peak

    copies_of_the_inputs = (
        2 * 2 * (num_tokens + vocabulary) * hidden_size
    )  # kernel_answer's clones; the gradients
    d_hidden = 2 * 4 * num_tokens * hidden_size  # its float32 sum, and a product to be added to it
    d_rows = 2 * 4 * chunked.PREFERRED_CHUNK * hidden_size
    allowed = copies_of_the_inputs + d_hidden + d_rows + 3 * chunked.TILE_BUDGET_BYTES
    assert peak_bytes("chunked") <= allowed
    assert peak_bytes("logits") > allowed + 2 * 4 * num_tokens * vocabulary
