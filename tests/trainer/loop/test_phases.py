"""Live tensors are counted by their storages, exactly; phases keep their peaks and times apart."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.loop.phases import LiveTensors, Phases
from tests.memory_events import peak_bytes

CPU = torch.device("cpu")
ROWS, COLUMNS = 500, 400


def test_a_known_allocation_pattern_is_counted_exactly() -> None:
    tracker = LiveTensors()
    with tracker:
        first = torch.zeros(1000)  # 4,000 bytes
        second = torch.zeros(500, dtype=torch.float64)  # 4,000
        third = first + 1  # 4,000: the peak, 12,000
        del first, second
        fourth = torch.zeros(100, dtype=torch.int8)  # 100
    assert tracker.peak_bytes == 12_000
    assert tracker.live_bytes == 4_100
    tracker.reset_peak()
    assert tracker.peak_bytes == 4_100
    del third, fourth
    assert tracker.live_bytes == 0


def test_views_and_in_place_results_do_not_count_twice() -> None:
    tracker = LiveTensors()
    with tracker:
        whole = torch.zeros(10, 100)
        row, turned, flat = whole[3], whole.T, whole.view(-1)
        whole.add_(1)
        row.mul_(2)
        torch.add(whole, 1, out=whole)
    assert tracker.live_bytes == tracker.peak_bytes == 4_000
    del whole, turned, flat
    assert tracker.live_bytes == 4_000  # a view keeps the whole storage alive
    del row
    assert tracker.live_bytes == 0


def test_tensors_made_outside_count_once_they_are_followed() -> None:
    weight = torch.nn.Parameter(torch.zeros(250))
    tracker = LiveTensors()
    tracker.follow([weight, weight.detach()])
    assert tracker.live_bytes == 1_000
    with tracker:
        product = weight * 2
    assert tracker.peak_bytes == 2_000
    del weight, product
    assert tracker.live_bytes == 0


class ScattersItself(torch.autograd.Function):
    """Its backward pass, in Python, calls an operator that autograd's own code would have run in place."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return values.gather(1, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ROWS, COLUMNS).scatter_add(1, index, gradient), None


def first_column(values: Tensor) -> Tensor:
    return torch.zeros(len(values), 1, dtype=torch.long)


def same_gradient_twice(values: Tensor) -> Tensor:
    doubled, tripled = values * 2, values * 3
    return ((doubled + tripled) * values).sum() + (doubled * tripled).sum()  # which the sum's operands share


def expanded_gradients(values: Tensor) -> Tensor:
    doubled = values * 2
    return doubled.sum() + doubled.sum() + (doubled * values).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "gradients of three uses are added": lambda x: (x.exp() * x).sum() + (x * 3).sum() + x.sin().sum(),
    "gradients that two tensors share": same_gradient_twice,
    "expanded gradients": expanded_gradients,
    "gather": lambda x: x.gather(1, first_column(x)).sum(),
    "gather of log_softmax": lambda x: x.log_softmax(1).gather(1, first_column(x)).sum(),
    "max": lambda x: x.max(1).values.sum(),
    "sort": lambda x: (x.sort(1).values * x).sum(),
    "topk": lambda x: x.topk(2).values.sum(),
    "index": lambda x: x[torch.tensor([0, 1])].sum(),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 0, 1])).sum(),
    "take": lambda x: x.take(torch.tensor([3, 4])).sum(),
    "trace": lambda x: x.trace(),
    "masked_select": lambda x: (x * x.masked_select(x > 2.5).sum()).sum(),
    "scatter": lambda x: x.scatter(1, first_column(x), 0.0).sin().sum(),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), torch.zeros(1)).sin().sum(),
    "split": lambda x: torch.stack([part.sum() for part in x.split(100)]).sum(),
    "a function in Python": lambda x: ScattersItself.apply(x, first_column(x)).sum(),  # pyright: ignore
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_peak_is_that_of_a_pass_that_nobody_watches(name: str) -> None:
    """Autograd works in place only while no dispatch mode is entered. The oracle is torch's allocator."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))

    def run() -> Tensor:
        values = (weight + 0).requires_grad_()
        LOSSES[name](values).backward()
        assert values.grad is not None
        return values.grad

    expected = run()
    allocated = peak_bytes(run)
    tracker = LiveTensors()
    with tracker:
        gradient = run()
    assert torch.equal(gradient, expected)
    assert tracker.peak_bytes == pytest.approx(allocated, rel=0.02)
    del gradient
    assert tracker.live_bytes == 0


def test_a_result_that_is_waited_for_is_in_the_history_once() -> None:
    weight, changes = torch.randn(ROWS, COLUMNS, requires_grad=True), list[int]()
    tracker = LiveTensors()
    tracker.on_change = lambda storage, num_bytes: changes.append(num_bytes)
    with tracker:
        ((weight * 2).gather(1, first_column(weight)).sum() + (weight * 3).sum()).backward()
    live = [sum(changes[: count + 1]) for count in range(len(changes))]
    assert max(live) == tracker.peak_bytes and live[-1] == tracker.live_bytes == weight.nbytes


@pytest.mark.slow
def test_what_compiled_code_takes_is_followed_and_counts_as_it_is() -> None:
    """Three operators in one kernel write one storage of 50 x 1,000; eager has two at a time."""
    rows, weight = torch.randn(50, 1000), torch.randn(1000, 4)

    def chain() -> torch.Tensor:
        return ((rows * 2).sin() + 1) @ weight

    compiled, peaks = torch.compile(chain), {}
    for name, run in (("eager", chain), ("compiled", compiled), ("again", compiled)):
        tracker = LiveTensors()
        with tracker:
            product = run()
        assert tracker.live_bytes == product.nbytes == 800
        peaks[name] = tracker.peak_bytes
    assert peaks == {"eager": 2 * 200_000, "compiled": 200_000 + 800, "again": 200_000 + 800}


def test_storages_emptied_and_refilled_by_hand_as_fsdp_does() -> None:
    tracker = LiveTensors()
    with tracker:
        gathered = torch.zeros(1000)
    storage = gathered.untyped_storage()
    storage.resize_(0)
    tracker.reset_peak()
    assert tracker.live_bytes == tracker.peak_bytes == 0
    storage.resize_(4000)
    source = torch.ones(1000)
    with tracker:
        torch.ops.aten.split_with_sizes_copy.out(source, [1000], out=[gathered])
    assert tracker.live_bytes == tracker.peak_bytes == 4_000
    with tracker:
        storage.resize_(0)
        taken = torch.zeros(1000)
        assert tracker.live_bytes == 4_000  # FSDP empties it in the middle of a phase, too
    assert tracker.peak_bytes == 4_000
    del gathered, storage, taken
    assert tracker.live_bytes == 0
    assert "resize_" not in vars(torch.UntypedStorage)  # nothing is left behind


def test_phases_keep_their_own_peaks_and_times() -> None:
    resident = [torch.zeros(1000)]
    phases = Phases(CPU, lambda: resident)
    kept = []
    with phases("logprobs"):
        kept.append(torch.zeros(500))
    with phases("logprobs"):
        kept.append(torch.zeros(2000))
        kept.pop()
    with phases("reward", memory=False):
        time.sleep(0.02)
        kept.append(torch.zeros(100_000))
    with phases("optimizer"):
        resident.append(torch.zeros(1000))  # made in the phase: counted by the tracker, and only once
    with phases("optimizer"):
        pass
    seconds, peaks = phases.collect()
    assert peaks == {
        "memory/logprobs/peak_live_tensor_bytes": 4_000 + 2_000 + 8_000,
        "memory/optimizer/peak_live_tensor_bytes": 4_000 + 2_000 + 4_000,
    }
    assert set(seconds) == {
        f"timing/train/{key}_s" for key in ("logprobs", "reward", "optimizer", "total_step_time")
    }
    assert 0.02 <= seconds["timing/train/reward_s"] < seconds["timing/train/total_step_time_s"] < 10
    assert phases.collect()[1] == {}


def test_state_that_appears_between_phases_counts_from_the_next_phase() -> None:
    resident: list[torch.Tensor] = []
    phases = Phases(CPU, lambda: resident)
    with phases("optimizer"):
        pass
    resident.append(torch.zeros(1000))  # what a restored checkpoint does
    with phases("optimizer"):
        pass
    assert phases.collect()[1] == {"memory/optimizer/peak_live_tensor_bytes": 4_000}


def test_a_phase_that_ends_in_an_error_keeps_its_peak_and_is_named() -> None:
    """Of nested phases the innermost: that is where memory ran out."""
    phases = Phases(CPU)
    with pytest.raises(torch.OutOfMemoryError), phases("policy_training", memory=False):
        with phases("forward_backward"):
            pass
        with phases("optimizer"):
            _moments = torch.zeros(1000)
            raise torch.OutOfMemoryError("no more")
    seconds, peaks = phases.collect()
    assert phases.interrupted == "optimizer"
    assert peaks["memory/optimizer/peak_live_tensor_bytes"] == 4_000
    assert {"timing/train/optimizer_s", "timing/train/policy_training_s"} <= seconds.keys()


@pytest.mark.gpu
def test_phases_on_cuda_report_the_allocators_own_peaks() -> None:
    device = torch.device("cuda")
    phases = Phases(device)
    base = torch.cuda.memory_allocated()
    with phases("logprobs"):
        large = torch.zeros(1 << 20, device=device)
        del large
    peaks = phases.collect()[1]
    assert set(peaks) == {
        "memory/logprobs/peak_allocated_bytes",
        "memory/logprobs/peak_reserved_bytes",
        "memory/allocator_retries",
        "memory/inactive_bytes",
    }
    assert peaks["memory/allocator_retries"] == 0 <= peaks["memory/inactive_bytes"]
    assert peaks["memory/logprobs/peak_allocated_bytes"] == base + (4 << 20)
    assert peaks["memory/logprobs/peak_reserved_bytes"] >= 4 << 20


def test_what_a_sleeping_engine_has_given_away_is_in_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 50,
        "max_memory_reserved": 60,
        "memory_stats": {"num_alloc_retries": 0, "inactive_split_bytes.all.current": 3},
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    phases = Phases(torch.device("cuda"))
    with phases("generation"):
        pass
    phases.absent_bytes = 42
    with phases("logprobs"):
        pass
    peaks = phases.collect()[1]
    assert [peaks[f"memory/{phase}/peak_allocated_bytes"] for phase in ("generation", "logprobs")] == [50, 8]
    assert peaks["memory/logprobs/peak_reserved_bytes"] == 18


def test_seconds_of_the_compiler_are_counted_inside_their_phase() -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    phases = Phases(CPU, compiles=True)
    with (
        phases("forward_backward", memory=False),
        callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"),
        callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"),  # inside the other: once
    ):
        time.sleep(0.02)
    seconds, _ = phases.collect()
    compiled = seconds["timing/train/compile_s"]
    assert 0.02 <= compiled <= seconds["timing/train/forward_backward_s"]
    assert phases.collect()[0]["timing/train/compile_s"] == 0  # every step of every rank has it
    assert "timing/train/compile_s" not in Phases(CPU).collect()[0]


def test_parts_of_a_phase_keep_their_own_peaks_and_the_one_that_an_error_ends_is_known() -> None:
    phases = Phases(CPU)
    told: list[str] = []
    phases.on_memory_label = told.append
    with phases("forward_backward"):
        first = torch.zeros(100)
        for _ in range(2):
            phases.label_memory("forward")
            kept = torch.zeros(1000)
            phases.label_memory("backward")
            second = kept + 1
            del kept, second
    assert phases.collect()[1] == {
        "memory/forward_backward/peak_live_tensor_bytes": 400,
        "memory/forward/peak_live_tensor_bytes": 4_400,
        "memory/backward/peak_live_tensor_bytes": 8_400,
    }
    assert told == ["forward_backward", *["forward", "backward"] * 2] and len(first) == 100
    with pytest.raises(MemoryError), phases("forward_backward"):
        phases.label_memory("forward")
        raise MemoryError
    assert phases.interrupted == "forward"


def test_what_else_lives_between_steps_counts_from_a_phase_s_start() -> None:
    phases, reference = Phases(CPU, lambda: [torch.empty(0)]), [torch.zeros(1000)]
    phases.add_resident(lambda: reference)
    with phases("logprobs"):
        pass
    assert phases.collect()[1] == {"memory/logprobs/peak_live_tensor_bytes": 4_000}
