"""linear_logprobs against a float64 oracle: it may err no more than naive code in the same dtypes, plus
rounding.

The oracle shares no code with the package: plain autograd, one log_softmax over all logits, targets picked in
a loop.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from abrun.trainer.kernels import linear_logprobs, linear_policy_loss
from tests.conftest import TRITON_ON_CPU
from tests.memory_events import peak_bytes
from tests.spawn import run_ranks
from tests.trainer.pairwise import pairwise

TILED = ["chunked", "triton"] if TRITON_ON_CPU else ["chunked"]
IMPLS = ["logits", *TILED]
IGNORE = -100
DTYPES = {  # hidden, weight, head_dtype
    "float32": (torch.float32, torch.float32, None),
    "bfloat16": (torch.bfloat16, torch.bfloat16, None),
    "mixed": (torch.float32, torch.bfloat16, None),
    "float32_head": (torch.bfloat16, torch.bfloat16, torch.float32),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "logit_scale": {"logit_scale": 0.25},
    "logit_softcap": {"logit_softcap": 3.0},
    "vocab_size": {"vocab_size": 140},
    "all": {"temperature": 1.6, "logit_scale": 0.5, "logit_softcap": 2.0, "vocab_size": 140},
}
EPSILON = torch.finfo(torch.float32).eps
SLOW = pytest.mark.slow
SIZES = ((513, 151), (1, 151), (7, 151), (1, 32003), (7, 32003))
SLOW_DTYPES = ("mixed", "float32_head")  # in the interpreter, of the most tokens
SIZES_AND_DTYPES = pairwise(
    SIZES,
    list(DTYPES),
    IMPLS,
    slow=lambda size, dtypes, impl: size[0] == 513 and dtypes in SLOW_DTYPES,
)


@dataclass(frozen=True)
class Problem:
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    target: Tensor  # [N]
    grad_logprobs: Tensor  # [N]
    grad_entropies: Tensor  # [N]
    head_dtype: torch.dtype | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    logprobs: Tensor  # [N]
    entropies: Tensor  # [N]
    d_hidden: Tensor  # [N, H]
    d_weight: Tensor  # [V, H]


def make_problem(
    num_tokens: int, num_vocabulary: int, dtypes: str = "float32", *, hidden_size: int = 8, **settings: Any
) -> Problem:
    """Random but for a few targets: the first and last id, one ignored, one beyond the vocabulary, one
    negative."""
    generator = torch.Generator().manual_seed(1000 * num_tokens + num_vocabulary)
    normal = partial(torch.randn, generator=generator)
    hidden_dtype, weight_dtype, head_dtype = DTYPES[dtypes]
    vocab_size = settings.get("vocab_size", num_vocabulary)
    target = torch.randint(vocab_size, (num_tokens,), generator=generator)
    for row, special in enumerate([vocab_size - 1, IGNORE, vocab_size, 0, -7]):
        if num_tokens > 1 and row < num_tokens:
            target[row] = special
    return Problem(
        hidden=normal(num_tokens, hidden_size).to(hidden_dtype),
        weight=normal(num_vocabulary, hidden_size).to(weight_dtype),
        target=target,
        grad_logprobs=normal(num_tokens),
        grad_entropies=normal(num_tokens),
        head_dtype=head_dtype,
        settings=settings,
    )


def plain_answer(problem: Problem, *, exact: bool) -> Answer:
    """The definition, written down; in float64 the oracle, otherwise naive code in the problem's own dtypes.

    Both start from the hidden as the projection gets it: rounded to the weight's dtype, where that is lower.
    """
    widen = (lambda values: values.double()) if exact else (lambda values: values)
    hidden = problem.hidden.clone().requires_grad_()
    weight = widen(problem.weight).clone().requires_grad_()
    projection = problem.head_dtype or problem.weight.dtype
    if exact:
        hidden = problem.hidden.to(projection).double().requires_grad_()
        projection = torch.float64
    settings = problem.settings
    logits = hidden.to(projection) @ weight[: settings.get("vocab_size")].to(projection).T
    logits = logits if exact else logits.float()
    logits = logits * settings.get("logit_scale", 1.0)
    if "logit_softcap" in settings:
        logits = torch.tanh(logits / settings["logit_softcap"]) * settings["logit_softcap"]
    logits = logits / settings.get("temperature", 1.0)
    log_softmax = torch.log_softmax(logits, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    columns, has_logprob, has_gradient = [], [], []
    for token in problem.target.tolist():
        in_vocabulary = 0 <= token < logits.shape[1]
        columns.append(token if in_vocabulary else 0)
        has_logprob.append(in_vocabulary)
        has_gradient.append(token != IGNORE)
    column = torch.tensor(columns, dtype=torch.int64, device=logits.device)
    inside = torch.tensor(has_logprob, dtype=torch.bool, device=logits.device)
    live = torch.tensor(has_gradient, dtype=torch.bool, device=logits.device)
    picked = log_softmax.gather(1, column[:, None]).squeeze(1)
    # Outside the vocabulary the gradient is that of minus the log of the softmax's denominator.
    minus_log_denominator = log_softmax[:, 0] - logits[:, 0]
    source = torch.where(inside, picked, minus_log_denominator)
    grad_logprobs, grad_entropies = widen(problem.grad_logprobs) * live, widen(problem.grad_entropies) * live
    d_hidden, d_weight = torch.autograd.grad(
        (grad_logprobs * source + grad_entropies * entropy).sum(), (hidden, weight)
    )
    return Answer(
        logprobs=picked.detach() * inside,
        entropies=entropy.detach() * live,
        d_hidden=d_hidden,
        d_weight=d_weight,
    )


@cache
def expected(
    num_tokens: int, num_vocabulary: int, dtypes: str, name: str = "all"
) -> tuple[Problem, Answer, Answer]:
    problem = make_problem(num_tokens, num_vocabulary, dtypes, **SETTINGS[name])
    return problem, plain_answer(problem, exact=True), plain_answer(problem, exact=False)


def accurate(problem: Problem, impl: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call: float32 logits where the dense path rounds them, unless a test says otherwise."""
    projection = problem.head_dtype or problem.weight.dtype
    keeps = impl != "logits" and projection != torch.float64
    return {"logits_dtype": torch.float32 if keeps else None, **problem.settings, **options}


def kernel_answer(problem: Problem, impl: str, **options: Any) -> Answer:
    hidden = problem.hidden.clone().requires_grad_()
    weight = problem.weight.clone().requires_grad_()
    logprobs, entropies = linear_logprobs(
        hidden,
        weight,
        problem.target,
        impl=impl,
        entropy=True,
        head_dtype=problem.head_dtype,
        **accurate(problem, impl, options),
    )
    assert entropies is not None
    grads = torch.autograd.grad(
        [logprobs, entropies],
        [hidden, weight],
        [problem.grad_logprobs.to(logprobs.dtype), problem.grad_entropies.to(logprobs.dtype)],
    )
    return Answer(logprobs.detach(), entropies.detach(), *grads)


def rounding(impl: str, problem: Problem, oracle: Answer) -> dict[str, float]:
    """Slack for what rounding the gradient of the logits to 16 bits may cost a fused path.

    The naive code may happen to lose nothing: one unit at the largest gradient, or two in the interpreter,
    which truncates.
    """
    if impl == "logits" or torch.bfloat16 != (problem.head_dtype or problem.weight.dtype):
        return {}
    unit = 2**-7 if impl == "triton" and not problem.weight.is_cuda else 2**-8
    return {part: unit * largest(getattr(oracle, part)) for part in ("d_hidden", "d_weight")}


def check(
    answer: Answer, oracle: Answer, naive: Answer, slack: Mapping[str, float] = MappingProxyType({})
) -> None:
    """|answer - oracle| <= |naive - oracle| + 4e-6 of the largest value, for all four parts.

    That is 32 units of float32 rounding: two float32 sums over 32,003 rows in different orders differ by 10.
    `slack` allows a part more, in its own units.
    """
    assert (answer.logprobs <= 0).all(), "a log-prob exceeds 0"
    for part in ("logprobs", "entropies", "d_hidden", "d_weight"):
        exact = getattr(oracle, part)
        error = largest(getattr(answer, part).double() - exact)
        allowed = largest(getattr(naive, part).double() - exact)
        tolerance = 32 * EPSILON * max(largest(exact), 1.0) + slack.get(part, 0.0)
        assert error <= allowed + tolerance, (
            f"{part}: error {error:.3g}, naive {allowed:.3g} + {tolerance:.3g}"
        )


def summing(problem: Problem) -> float:
    """Bound of what sums in float32, in any order, cost a log-prob: twice that of a logit's n products.

    n / 2 * EPSILON * sum of their sizes (Higham 2002, Accuracy and Stability of Numerical Algorithms, 3.1).
    """
    hidden, weight = problem.hidden.double().abs(), problem.weight.double().abs()
    return hidden.shape[1] * EPSILON * largest(hidden @ weight.T)


def on_grid(problem: Problem) -> Problem:
    """Return a problem of multiples of 1/32, whose products float32 adds exactly, in any order.

    Its logits then round to bfloat16 alike on every processor.
    """
    hidden, weight = ((32 * values).round() / 32 for values in (problem.hidden, problem.weight))
    return replace(problem, hidden=hidden, weight=weight)


def largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


# Agreement


def one_pass_answer(problem: Problem, impl: str, **options: Any) -> Answer:
    """With the problem's upstream gradients: the loss that has them is linear in log-probs and entropies."""

    def token_loss(logprobs: Tensor, entropies: Tensor | None, tokens: slice) -> Tensor:
        assert entropies is not None
        g, h = problem.grad_logprobs.reshape(-1)[tokens], problem.grad_entropies.reshape(-1)[tokens]
        return g * logprobs + h * entropies

    hidden, weight = (values.clone().requires_grad_() for values in (problem.hidden, problem.weight))
    loss, logprobs, entropies = linear_policy_loss(
        hidden,
        weight,
        problem.target,
        token_loss,
        impl=impl,
        entropy=True,
        head_dtype=problem.head_dtype,
        **accurate(problem, impl, options),
    )
    assert entropies is not None
    return Answer(logprobs, entropies, *torch.autograd.grad(loss, [hidden, weight]))


ANSWERS = (kernel_answer, one_pass_answer)


@pytest.mark.parametrize("answer_of", ANSWERS)
@pytest.mark.parametrize("size, dtypes, impl", SIZES_AND_DTYPES)
def test_agrees_with_the_oracle(answer_of: Any, impl: str, size: tuple[int, int], dtypes: str) -> None:
    problem, oracle, naive = expected(*size, dtypes)
    answer = answer_of(problem, impl)
    check(answer, oracle, naive, rounding(impl, problem, oracle))
    assert answer.logprobs.dtype == answer.entropies.dtype == torch.float32
    assert answer.d_hidden.dtype == problem.hidden.dtype
    assert answer.d_weight.dtype == problem.weight.dtype


@pytest.mark.parametrize(
    "name, dtypes, impl, answer_of", pairwise(list(SETTINGS), list(DTYPES), IMPLS, ANSWERS)
)
def test_agrees_under_each_setting(answer_of: Any, impl: str, dtypes: str, name: str) -> None:
    problem, oracle, naive = expected(7, 151, dtypes, name)
    check(answer_of(problem, impl), oracle, naive, rounding(impl, problem, oracle))


CUTS = [(None, 8 * 2**10), (13, 8 * 2**10), (64, 1), (140, 2**29), (1000, 2**29)]  # chunk size, budget


@pytest.mark.parametrize(
    "cut, impl", pairwise(CUTS, TILED, slow=lambda cut, impl: impl == "triton" and cut == (64, 1))
)
def test_answer_does_not_depend_on_chunks_and_tiles(impl: str, cut: tuple[int | None, int]) -> None:
    chunk_size, budget_bytes = cut
    for dtypes in ("float32", "bfloat16", *(("mixed",) if chunk_size is None else ())):
        answer = partial(kernel_answer, chunk_size=chunk_size, memory_budget_bytes=budget_bytes)
        check_tiles(answer, impl, dtypes)


@pytest.mark.parametrize(
    "budget_bytes, impl",
    pairwise([3 * 2**10, 12 * 2**10], TILED, slow=lambda size, impl: impl == "triton" and size < 2**12),
)
def test_one_pass_does_not_depend_on_the_budget(impl: str, budget_bytes: int) -> None:
    others = ("mixed", "float32_head") if budget_bytes > 2**13 else ()  # fewer, larger slices take less time
    for dtypes in ("float32", "bfloat16", *others):
        check_tiles(partial(one_pass_answer, memory_budget_bytes=budget_bytes), impl, dtypes)


def check_tiles(answer_of: Callable[..., Answer], impl: str, dtypes: str) -> None:
    """Each of up to 7 tiles of tokens rounds d_weight once."""
    problem, oracle, naive = expected(7, 151, dtypes)
    slack = {"d_weight": 7 * 2**-9 * largest(oracle.d_weight)} if dtypes != "float32" else {}
    check(answer_of(problem, impl), oracle, naive, slack | rounding(impl, problem, oracle))


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_of_bfloat16_inputs_may_stay_float32(impl: str) -> None:
    problem, oracle, naive = expected(513, 151, "bfloat16", "plain")
    answer = kernel_answer(problem, impl, logits_dtype=torch.float32)
    assert (answer.logprobs - oracle.logprobs).abs().max() < summing(problem) < 3e-5
    assert (naive.logprobs - oracle.logprobs).abs().max() > 3e-3
    slack = {part: 2**-7 * largest(getattr(oracle, part)) for part in ("d_hidden", "d_weight")}
    check(answer, oracle, naive, slack)


@pytest.mark.parametrize(
    "name, dtypes, impl",
    pairwise(
        list(SETTINGS),
        ["bfloat16", "mixed"],
        TILED,
        slow=lambda name, dtypes, impl: name != "all" and (dtypes == "mixed" or impl == "triton"),
    ),
)
def test_rounded_logits_are_those_of_the_stock_path(impl: str, name: str, dtypes: str) -> None:
    """By default every route rounds as the stock path does, and so they agree far below that rounding."""
    problem = on_grid(make_problem(513, 151, dtypes, **SETTINGS[name]))
    naive, answer = plain_answer(problem, exact=False), kernel_answer(problem, impl, logits_dtype=None)
    assert largest(answer.logprobs - naive.logprobs) < 4e-6
    assert largest(answer.entropies - naive.entropies) < 4e-6
    unit = 2**-6 if impl == "triton" else 2**-8  # what rounding a gradient costs; the interpreter truncates
    for part in ("d_hidden", "d_weight"):
        exact = getattr(naive, part).double()
        assert largest(getattr(answer, part).double() - exact) <= unit * largest(exact), part


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_columns", [1, 300])
def test_a_logit_of_minus_infinity_adds_nothing_to_the_entropy(impl: str, num_columns: int) -> None:
    problem = make_problem(3, 400)
    hidden, weight = problem.hidden.abs(), problem.weight.clone()
    weight[60 : 60 + num_columns] = -math.inf
    target = torch.tensor([0, 30, 399])
    logprobs, entropies = linear_logprobs(hidden, weight, target, impl=impl, entropy=True, chunk_size=50)
    exact = torch.distributions.Categorical(logits=(hidden @ weight.T).double())
    torch.testing.assert_close(logprobs.double(), exact.log_prob(target), rtol=1e-5, atol=1e-5)
    assert entropies is not None
    torch.testing.assert_close(entropies.double(), exact.entropy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("one_pass", [False, True])
def test_a_logit_of_minus_infinity_leaves_the_gradients_numbers(
    impl: str, dtype: torch.dtype, one_pass: bool
) -> None:
    problem = make_problem(3, 400)
    weight = problem.weight.to(dtype)
    weight[60] = -math.inf
    weight.requires_grad_()
    hidden, target = problem.hidden.abs().to(dtype), torch.tensor([0, 30, 60])
    if one_pass:
        loss, *_ = linear_policy_loss(
            hidden,
            weight,
            target,
            lambda logprobs, entropies, _: logprobs + entropies,
            impl=impl,
            entropy=True,
        )
    else:
        logprobs, entropies = linear_logprobs(hidden, weight, target, impl=impl, entropy=True)
        assert entropies is not None
        loss = (logprobs + entropies).sum()
    loss.backward()
    logits = (hidden @ weight.detach().T).double()
    exponents, probs = logits.log_softmax(1).clamp(min=-1e30), logits.softmax(1)
    entropy = -(probs * exponents).sum(1, keepdim=True)
    d_logits = torch.nn.functional.one_hot(target, 400) - probs - probs * (exponents + entropy)
    exact = d_logits.T @ hidden.double()
    assert weight.grad is not None
    assert largest(weight.grad - exact) <= (2**-6 if dtype == torch.bfloat16 else 1e-5) * largest(exact)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_logit_that_is_no_number_shows(impl: str, dtype: torch.dtype) -> None:
    problem = make_problem(3, 400)
    weight = problem.weight.to(dtype)
    weight[300] = math.nan
    hidden, target = problem.hidden.to(dtype), torch.tensor([0, 30, 399])
    logprobs, entropies = linear_logprobs(hidden, weight, target, impl=impl, entropy=True)
    assert entropies is not None
    assert logprobs.isnan().all() and entropies.isnan().all()


@pytest.mark.parametrize("impl", ["logits", "chunked"])
def test_float64_stays_float64(impl: str) -> None:
    problem, oracle, _ = expected(7, 151, "float32")
    wide = replace(problem, hidden=problem.hidden.double(), weight=problem.weight.double())
    answer = kernel_answer(wide, impl)
    assert answer.logprobs.dtype == answer.entropies.dtype == torch.float64
    for part in ("logprobs", "entropies", "d_hidden", "d_weight"):
        torch.testing.assert_close(getattr(answer, part), getattr(oracle, part), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("impl", ["logits", "chunked"])
def test_gradients_by_finite_differences(impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([9, IGNORE, 0])

    def answer(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropies = linear_logprobs(
            hidden,
            weight,
            target,
            impl=impl,
            entropy=True,
            temperature=0.7,
            logit_scale=1.3,
            logit_softcap=2.0,
            vocab_size=10,
            chunk_size=4,
        )
        assert entropies is not None
        return logprobs, entropies

    assert torch.autograd.gradcheck(answer, (hidden, weight))


# Examples small enough to know


@pytest.mark.parametrize("impl", IMPLS)
def test_three_tokens_by_hand(impl: str) -> None:
    # With the identity for weight the logits are the hidden: probabilities 1/6, 2/6, 3/6 of every token.
    hidden = torch.tensor([[0.0, math.log(2), math.log(3)]]).expand(3, 3).clone().requires_grad_()
    logprobs, entropies = linear_logprobs(
        hidden, torch.eye(3), torch.tensor([0, 2, 1]), impl=impl, entropy=True, chunk_size=2
    )
    torch.testing.assert_close(logprobs, torch.tensor([1 / 6, 3 / 6, 2 / 6]).log())
    assert entropies is not None
    entropy = math.log(6) - (2 * math.log(2) + 3 * math.log(3)) / 6
    torch.testing.assert_close(entropies, torch.full((3,), entropy))
    (d_hidden,) = torch.autograd.grad(logprobs[1], hidden)  # onehot - p, on one row only
    torch.testing.assert_close(d_hidden, torch.tensor([[0, 0, 0], [-1 / 6, -2 / 6, 3 / 6], [0, 0, 0]]))


@pytest.mark.parametrize("impl", IMPLS)
def test_ignored_target_is_silent(impl: str) -> None:
    problem = make_problem(7, 151)
    answer = kernel_answer(problem, impl)
    others = problem.target != IGNORE
    # A loss over garbage at that token has a NaN gradient there, which must end at the log-prob.
    garbage = replace(
        problem,
        grad_logprobs=problem.grad_logprobs.masked_fill(~others, math.nan),
        grad_entropies=problem.grad_entropies.masked_fill(~others, math.inf),
    )
    torch.testing.assert_close(kernel_answer(garbage, impl).d_weight, answer.d_weight)
    # The ignored id may be one that the vocabulary has, such as a padding token's.
    logprobs, _ = linear_logprobs(
        problem.hidden, problem.weight, problem.target.clamp(0, 150), impl=impl, ignore_index=150
    )
    assert logprobs[0] == 0 and logprobs[2] == 0 and logprobs[3] < 0


@pytest.mark.parametrize("impl", IMPLS)
def test_padded_rows_take_no_probability_and_no_gradient(impl: str) -> None:
    problem = make_problem(7, 151, vocab_size=140)
    tall = problem.weight.clone()
    tall[140:] = math.nan  # never read
    answer, clean = kernel_answer(replace(problem, weight=tall), impl), kernel_answer(problem, impl)
    assert torch.equal(answer.logprobs, clean.logprobs) and torch.equal(answer.entropies, clean.entropies)
    assert torch.equal(answer.d_hidden, clean.d_hidden)
    assert (answer.d_weight[140:] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16"])
def test_large_logits(impl: str, dtypes: str) -> None:
    """Logits of exactly +-80: exp(80) does not fit float32 twice, and the entropy is a difference of
    eighties."""
    problem = make_problem(16, 151, dtypes)
    signs = torch.randn(151, 8, generator=torch.Generator().manual_seed(3)).sign()
    hidden = torch.zeros(16, 8)
    hidden[torch.arange(16), torch.arange(16) % 8] = 80.0 * torch.tensor([1.0, -1.0]).repeat(8)
    problem = replace(problem, hidden=hidden.to(problem.hidden.dtype), weight=signs.to(problem.weight.dtype))
    answer = kernel_answer(problem, impl, chunk_size=10)
    oracle = plain_answer(problem, exact=True)
    check(answer, oracle, plain_answer(problem, exact=False), rounding(impl, problem, oracle))
    assert (answer.entropies >= 0).all()
    assert all(getattr(answer, part).isfinite().all() for part in ("logprobs", "d_hidden", "d_weight"))


def low_temperature_problem(**settings: Any) -> Problem:
    """Logits near 64, multiples of a thousandth that float32 products give exactly: over temperature 0.013
    they are near 5,000, where float32 has steps of a two-thousandth."""
    generator = torch.Generator().manual_seed(4)
    integers = partial(torch.randint, generator=generator)
    hidden, weight = integers(-8, 9, (12, 8)) / 32, integers(-8, 9, (151, 8)) / 32
    hidden[:, 0], weight[:, 0] = 8.0, 8.0
    problem = make_problem(12, 151, temperature=0.013, **settings)
    return replace(problem, hidden=hidden, weight=weight)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("settings", [{}, {"logit_scale": 0.7}])
def test_a_low_temperature_keeps_the_digits(impl: str, settings: dict[str, Any]) -> None:
    """The largest logit is taken off before what is left is scaled: rounding is that of the differences."""
    problem = low_temperature_problem(**settings)
    exact = plain_answer(problem, exact=True)
    answer = kernel_answer(problem, impl, **({} if impl == "logits" else {"chunk_size": 50}))
    for part in ("logprobs", "entropies", "d_hidden", "d_weight"):
        expected_part = getattr(exact, part)
        error = largest(getattr(answer, part).double() - expected_part) / max(largest(expected_part), 1.0)
        assert error <= 2e-6, f"{part}: error {error:.3g}"


# Shapes, gradients that nobody asked for, memory


@pytest.mark.parametrize("impl", IMPLS)
def test_any_leading_shape(impl: str) -> None:
    problem = make_problem(24, 151)
    flat = kernel_answer(problem, impl)
    shape = (2, 3, 4)
    folded = replace(
        problem,
        hidden=problem.hidden.view(*shape, 8),
        target=problem.target.view(shape),
        grad_logprobs=problem.grad_logprobs.view(shape),
        grad_entropies=problem.grad_entropies.view(shape),
    )
    answer = kernel_answer(folded, impl)
    assert torch.equal(answer.logprobs, flat.logprobs.view(shape))
    assert torch.equal(answer.entropies, flat.entropies.view(shape))
    assert torch.equal(answer.d_hidden, flat.d_hidden.view(*shape, 8))
    assert torch.equal(answer.d_weight, flat.d_weight)
    single, _ = linear_logprobs(problem.hidden[0], problem.weight, problem.target[0], impl=impl)
    torch.testing.assert_close(single, flat.logprobs[0])
    # Not contiguous, as hidden[:, :-1] is.
    strided = replace(folded, hidden=folded.hidden.transpose(0, 1).contiguous().transpose(0, 1))
    torch.testing.assert_close(kernel_answer(strided, impl).d_weight, flat.d_weight)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16"])
def test_any_layout_in_memory(impl: str, dtypes: str) -> None:
    """A transposed weight and hidden, every second target, and one upstream gradient for all tokens."""
    problem = replace(make_problem(7, 151, dtypes), grad_logprobs=torch.ones(7), grad_entropies=torch.ones(7))
    scattered = replace(
        problem,
        hidden=problem.hidden.t().contiguous().t(),
        weight=problem.weight.t().contiguous().t(),
        target=problem.target.repeat_interleave(2)[::2],
    )
    hidden, weight = (values.detach().requires_grad_() for values in (scattered.hidden, scattered.weight))
    assert not hidden.is_contiguous() and not scattered.target.is_contiguous()
    logprobs, entropies = linear_logprobs(hidden, weight, scattered.target, impl=impl, entropy=True)
    assert entropies is not None
    (logprobs.sum() + entropies.sum()).backward()
    plain = kernel_answer(problem, impl, logits_dtype=None)
    torch.testing.assert_close(logprobs.detach(), plain.logprobs)
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad, plain.d_hidden)
    torch.testing.assert_close(weight.grad, plain.d_weight)


@pytest.mark.parametrize("tiled", TILED)
def test_tiles_of_one_token_with_any_stride(tiled: str) -> None:
    """One row is contiguous to torch whatever its stride, but not to a kernel that addresses rows."""
    problem = replace(make_problem(2, 40, "bfloat16", hidden_size=16), head_dtype=torch.float16)
    apart = {name: getattr(problem, name).t().contiguous().t() for name in ("hidden", "weight")}
    small = {"memory_budget_bytes": 1, "chunk_size": 20}
    answer, plain = (kernel_answer(each, tiled, **small) for each in (replace(problem, **apart), problem))
    for part in ("logprobs", "entropies", "d_hidden", "d_weight"):
        torch.testing.assert_close(getattr(answer, part), getattr(plain, part))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty_batch(impl: str, shape: tuple[int, ...]) -> None:
    empty = replace(
        make_problem(1, 151),
        hidden=torch.zeros(*shape, 8),
        target=torch.zeros(shape, dtype=torch.int64),
        grad_logprobs=torch.zeros(shape),
        grad_entropies=torch.zeros(shape),
    )
    answer = kernel_answer(empty, impl)
    assert answer.logprobs.shape == answer.entropies.shape == shape
    assert (answer.d_weight == 0).all()  # zeros of the weight's shape, not None and not garbage


@pytest.mark.parametrize("impl", IMPLS)
def test_only_the_gradients_that_are_needed(impl: str) -> None:
    problem = make_problem(7, 151, "mixed")
    both = kernel_answer(problem, impl, logits_dtype=None)
    num_products = {}
    for frozen in ("neither", "hidden", "weight"):
        hidden = problem.hidden.clone().requires_grad_(frozen != "hidden")
        weight = problem.weight.clone().requires_grad_(frozen != "weight")
        with _Tensors() as seen:
            logprobs, entropies = linear_logprobs(
                hidden, weight, problem.target, impl=impl, entropy=True, chunk_size=40
            )
            assert entropies is not None
            torch.autograd.backward([logprobs, entropies], [problem.grad_logprobs, problem.grad_entropies])
        num_products[frozen] = seen.num_products
        assert (hidden.grad is None) == (frozen == "hidden")
        assert (weight.grad is None) == (frozen == "weight")
        if hidden.grad is not None:
            torch.testing.assert_close(hidden.grad, both.d_hidden)
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, both.d_weight)
    chunks = 1 if impl == "logits" else 4
    assert num_products["neither"] - num_products["hidden"] == chunks
    assert num_products["neither"] - num_products["weight"] == chunks


@pytest.mark.parametrize("impl", IMPLS)
def test_without_entropy(impl: str) -> None:
    problem = make_problem(7, 151)
    with_entropy = kernel_answer(replace(problem, grad_entropies=torch.zeros(7)), impl)
    hidden = problem.hidden.clone().requires_grad_()
    logprobs, entropies = linear_logprobs(hidden, problem.weight, problem.target, impl=impl)
    assert entropies is None
    torch.testing.assert_close(logprobs.detach(), with_entropy.logprobs)
    (d_hidden,) = torch.autograd.grad(logprobs, hidden, problem.grad_logprobs)
    torch.testing.assert_close(d_hidden, with_entropy.d_hidden)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16"])
def test_an_entropy_without_gradient(impl: str, dtypes: str) -> None:
    problem = make_problem(70, 151, dtypes, temperature=0.7)
    with_gradient = kernel_answer(replace(problem, grad_entropies=torch.zeros(70)), impl, logits_dtype=None)
    hidden, weight = (values.clone().requires_grad_() for values in (problem.hidden, problem.weight))
    logprobs, entropies = linear_logprobs(
        hidden, weight, problem.target, impl=impl, entropy=True, entropy_gradient=False, temperature=0.7
    )
    assert entropies is not None and not entropies.requires_grad
    torch.testing.assert_close(entropies, with_gradient.entropies)
    logprobs.backward(problem.grad_logprobs)
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad, with_gradient.d_hidden)
    torch.testing.assert_close(weight.grad, with_gradient.d_weight)


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float32_head"])
@pytest.mark.parametrize("entropy, copies", [(None, 3.1), (False, 3.1), (True, 4.1)])
def test_copies_of_the_logits_that_the_dense_path_holds(
    dtypes: str, entropy: bool | None, copies: float
) -> None:
    """By the allocator's own reports. The stock path, log_softmax and gather, holds three."""
    problem = make_problem(512, 4096, dtypes)
    assert peak_copies(problem, entropy) <= copies
    assert peak_copies(problem, entropy) > copies - 0.2  # so the watch does see them


def peak_copies(problem: Problem, entropy: bool | None) -> float:
    """Peak of a forward and a backward pass in float32 copies of the logits; `entropy`: with a gradient?"""
    hidden, weight = (values.clone().requires_grad_() for values in (problem.hidden, problem.weight))

    def step() -> None:
        results = linear_logprobs(
            hidden,
            weight,
            problem.target,
            impl="logits",
            entropy=entropy is not None,
            entropy_gradient=bool(entropy),
            head_dtype=problem.head_dtype,
        )
        torch.stack([each for each in results if each is not None and each.requires_grad]).sum().backward()

    return peak_bytes(step) / (4 * len(hidden) * len(weight))


@pytest.mark.parametrize("tiled", TILED)
def test_second_derivatives_are_refused(tiled: str) -> None:
    """A gradient penalty would otherwise lose its gradient without a word."""
    problem = make_problem(7, 151)
    hidden = problem.hidden.clone().requires_grad_()
    for impl in ("logits", tiled):
        logprobs, _ = linear_logprobs(hidden, problem.weight, problem.target, impl=impl)
        if impl == tiled:
            with pytest.raises(RuntimeError, match="no second derivatives; use impl 'logits'"):
                torch.autograd.grad(logprobs.sum(), hidden, create_graph=True)
        else:
            (gradient,) = torch.autograd.grad(logprobs.sum(), hidden, create_graph=True)
            assert gradient.requires_grad


@pytest.mark.parametrize("tiled", TILED)
def test_saves_no_logits_and_without_gradients_nothing(tiled: str) -> None:
    problem = make_problem(64, 300)

    def saved_numels(impl: str, needs_grad: bool, grad_mode: bool) -> list[int]:
        numels: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            numels.append(tensor.numel())
            return tensor

        hidden, weight = (
            values.clone().requires_grad_(needs_grad) for values in (problem.hidden, problem.weight)
        )
        with (
            torch.set_grad_enabled(grad_mode),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            logprobs, _ = linear_logprobs(hidden, weight, problem.target, impl=impl, entropy=True)
        assert logprobs.requires_grad == (needs_grad and grad_mode)
        return numels

    assert saved_numels(tiled, needs_grad=True, grad_mode=False) == []
    assert saved_numels(tiled, needs_grad=False, grad_mode=True) == []
    assert 0 < max(saved_numels(tiled, needs_grad=True, grad_mode=True)) <= 300 * 8
    assert max(saved_numels("logits", needs_grad=True, grad_mode=True)) == 64 * 300


class _Tensors(TorchDispatchMode):
    """Watches every operation: the largest tensor that one returned, and how many products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, Tensor):
                self.largest_bytes = max(self.largest_bytes, value.nbytes)
        return result


@pytest.mark.parametrize(
    "impl, dtypes, num_vocabulary",
    [
        *(("chunked", dtypes, size) for dtypes in DTYPES for size in (151, 3000)),
        *((impl, "float32", 151) for impl in TILED if impl == "triton"),
        *(pytest.param(impl, "float32", 3000, marks=SLOW) for impl in TILED if impl == "triton"),
    ],
)
def test_holds_no_tensor_beyond_the_budget(impl: str, dtypes: str, num_vocabulary: int) -> None:
    # "triton" with bfloat16 is watched on a GPU: here the products widen what it wrote.
    problem = make_problem(64, num_vocabulary, dtypes, logit_softcap=5.0, temperature=0.9)
    logits_bytes = 4 * 64 * num_vocabulary
    with _Tensors() as seen:
        kernel_answer(problem, impl, memory_budget_bytes=logits_bytes // 2)
    assert 0 < seen.largest_bytes <= logits_bytes // 2
    with _Tensors() as seen:
        kernel_answer(problem, "logits")
    assert seen.largest_bytes == logits_bytes  # so the watch does see logits


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_nothing(impl: str) -> None:
    problem = make_problem(7, 151)
    plain = kernel_answer(problem, impl)
    weight = problem.weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, entropies = linear_logprobs(problem.hidden, weight, problem.target, impl=impl, entropy=True)
    assert torch.equal(plain.logprobs, logprobs) and entropies is not None
    # A backward pass under autocast is a user's mistake that plain autograd lets through, and the others not.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=impl != "logits"):
        torch.autograd.backward([logprobs, entropies], [problem.grad_logprobs, problem.grad_entropies])
    assert weight.grad is not None and torch.equal(plain.d_weight, weight.grad)


# Refusals


@pytest.mark.parametrize(
    "change, message",
    [
        ({"impl": "liger"}, "impl: got 'liger'; use one of"),
        ({"chunk_size": 0}, "chunk_size: got 0"),
        ({"memory_budget_bytes": 0}, "memory_budget_bytes: got 0"),
        ({"logit_scale": 0.0}, "logit_scale: got 0.0"),
        ({"temperature": 0.0}, "temperature: got 0.0"),
        ({"logit_softcap": -1.0}, "logit_softcap: got -1.0"),
        ({"vocab_size": 152}, "vocab_size: got 152"),
        ({"head_dtype": torch.int32}, "head_dtype: got torch.int32; use a floating-point dtype"),
        ({"logits_dtype": torch.bfloat16}, "logits_dtype: got torch.bfloat16 with .* torch.float32; allowed"),
        ({"target": torch.zeros(6, dtype=torch.int64)}, r"target: got shape \[6\]; need \[7\]"),
        ({"target": torch.zeros(7, dtype=torch.int32)}, "target: got torch.int32"),
        ({"weight": torch.zeros(151, 9)}, r"hidden, weight: got \[7, 8\] and \[151, 9\]"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    problem = make_problem(7, 151)
    arguments = {
        "hidden": problem.hidden,
        "weight": problem.weight,
        "target": problem.target,
        "impl": "logits",
    }
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**{**arguments, **change})


# Vocabulary shards: one set of four processes computes everything, as 4 shards and as 2 x 2

SHARD_CASES: dict[str, Callable[[], Problem]] = {
    "float32": lambda: make_problem(7, 152, "float32", **SETTINGS["all"]),
    "bfloat16": lambda: make_problem(7, 152, "bfloat16", **SETTINGS["all"]),
    "mixed": lambda: make_problem(130, 152, "mixed"),
    "large": lambda: make_problem(7, 32004, "float32", vocab_size=32003),
    "one_shard_all_padding": lambda: make_problem(7, 8, "float32", vocab_size=5),
    "empty": lambda: make_problem(0, 152, "float32"),
    "one pass": lambda: make_problem(70, 152, "float32", vocab_size=141),  # tiles that shards cut alike
}


SHARDED = pairwise(list(SHARD_CASES), IMPLS, [2, 4])


def _shard_answers(
    rank: int, world_size: int, wanted: set[tuple[str, str, int]]
) -> dict[tuple[str, str, int], Answer]:
    answers = {}
    for num_shards in (2, 4):
        groups = [
            dist.new_group(list(range(start, start + num_shards)))
            for start in range(0, world_size, num_shards)
        ]
        group = groups[rank // num_shards]
        for name, make in SHARD_CASES.items():
            for impl in (impl for impl in IMPLS if (name, impl, num_shards) in wanted):
                problem = _shard(make(), rank % num_shards, num_shards)
                answer_of = partial(one_pass_answer, memory_budget_bytes=20 * 2**10)
                answer_of = answer_of if name == "one pass" else kernel_answer
                answers[name, impl, num_shards] = answer_of(problem, impl, group=group)
    answers |= {("unlike", "", 4): _refusals(rank)}
    return answers


UNLIKE: dict[str, tuple[Callable[[int], Problem], str]] = {  # of a rank of four
    "a shorter last shard": (
        lambda rank: replace(make_problem(7, 151), weight=make_problem(7, 151).weight[38 * rank :][:38]),
        "weight: got 38, 38, 38, 37 rows on the ranks of the vocabulary group; need equal, consecutive",
    ),
    "a rank with no rows": (
        lambda rank: replace(make_problem(7, 10), weight=make_problem(7, 10).weight[: 10 * rank]),
        "weight: got 0, 10, 10, 10 rows",
    ),
    "other tokens": (lambda rank: make_problem(7 + rank, 38), "target: got 7, 8, 9, 10 tokens"),
    "another vocabulary": (
        lambda rank: make_problem(7, 38, vocab_size=150 + rank),
        "vocab_size: got 150, 151, 152, 153 on the ranks",
    ),
}


def _refusals(rank: int) -> dict[tuple[str, str], str]:
    refusals = {}
    for name, (make, _) in UNLIKE.items():
        for impl in IMPLS:
            with pytest.raises(ValueError) as raised:
                kernel_answer(make(rank), impl, group=dist.group.WORLD)
            refusals[name, impl] = str(raised.value)
    return refusals


def _shard(problem: Problem, shard: int, num_shards: int) -> Problem:
    return replace(problem, weight=problem.weight.chunk(num_shards)[shard])


@pytest.fixture(scope="module")
def shard_answers(request: pytest.FixtureRequest) -> list[dict[tuple[str, str, int], Answer]]:
    """Of the combinations that are among the tests of this session."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    keys = ("name", "impl", "num_shards")
    wanted = {
        tuple(one.params[key] for key in keys) for one in params if one and {*keys} <= one.params.keys()
    }
    return run_ranks(_shard_answers, 4, wanted)


def _joined(answers: list[Answer], *, reduce_d_hidden: bool = True) -> Answer:
    d_hidden = torch.stack([answer.d_hidden.double() for answer in answers])
    return replace(
        answers[0],
        d_hidden=d_hidden.sum(0) if reduce_d_hidden else d_hidden[0],
        d_weight=torch.cat([answer.d_weight for answer in answers]),
    )


@pytest.mark.parametrize("name, impl, num_shards", SHARDED)
def test_shards_agree_with_the_oracle(shard_answers: Any, impl: str, num_shards: int, name: str) -> None:
    problem = SHARD_CASES[name]()
    oracle, naive = plain_answer(problem, exact=True), plain_answer(problem, exact=False)
    answers = [ranks[name, impl, num_shards] for ranks in shard_answers]
    for start in range(0, 4, num_shards):
        shards = answers[start : start + num_shards]
        # Each rank's partial sum is rounded to the dtype of the projection, as that of any sharded linear is.
        unit = torch.finfo(problem.weight.dtype).eps / 2
        slack = rounding(impl, problem, oracle)
        partial_sums = sum(unit * largest(shard.d_hidden) for shard in shards)
        slack["d_hidden"] = slack.get("d_hidden", 0.0) + partial_sums
        check(_joined(shards), oracle, naive, slack)
    assert all(torch.equal(answer.logprobs, answers[0].logprobs) for answer in answers)
    assert all(torch.equal(answer.entropies, answers[0].entropies) for answer in answers)


@pytest.mark.parametrize("name", UNLIKE)
def test_shards_that_are_not_alike_are_refused_on_every_rank(shard_answers: Any, name: str) -> None:
    for impl in IMPLS:
        messages = {ranks["unlike", "", 4][name, impl] for ranks in shard_answers}
        assert len(messages) == 1, messages
        message = messages.pop()
        assert message.startswith(UNLIKE[name][1]) and "\n" not in message
