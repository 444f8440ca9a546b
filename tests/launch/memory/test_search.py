"""The search for the largest size that trains: few tries, and never a wrong answer."""

import pytest

from abrun.launch.memory.profile import RESOLUTION, Cell, Point, search_size_limit


def cell(size: int, num_bytes: float, capacity: int | None) -> Cell:
    fits = capacity is None or num_bytes <= capacity
    return Cell(
        arm="baseline",
        point=Point(length=size),
        by_phase={"backward": int(num_bytes)},
        total_bytes=capacity,
        out_of_memory=None if fits else "backward",
    )


@pytest.mark.parametrize(
    ("memory", "most_tries"),
    [
        (lambda size: 23e9 + 2.2e6 * size, 5),  # a straight line: dense logits
        (lambda size: 23e9 + 0.3e6 * size, 5),
        (lambda size: 120e9 + 1e6 * size, 5),
        (lambda size: 23e9 + 1e6 * size + 8 * size**2, 9),  # attention that keeps its scores
        (lambda size: max(40e9, 20e9 + 1e6 * size), 10),  # flat at first: the optimizer's peak
        (lambda size: 23e9 + 1e6 * size * (1.2 if size > 50_000 else 1.0), 9),
    ],
)
@pytest.mark.parametrize("first", [[1024], [1024, 4096]])
def test_the_answer_is_right_to_one_part_in_thirty_after_few_tries(memory, most_tries, first) -> None:
    capacity, tried = 140_000_000_000, []

    def one_more(size: int) -> Cell:
        tried.append(size)
        return cell(size, memory(size), capacity)

    measured = [cell(size, memory(size), capacity) for size in first]
    found = search_size_limit(measured, "length", one_more)
    assert found.fits and found.fails and found.failed_in == "backward"
    assert memory(found.fits) <= capacity < memory(found.fails)
    assert found.fails - found.fits <= found.fits // RESOLUTION
    assert len(tried) == len(set(tried)) <= most_tries + 7 * (len(first) == 1), tried


def test_each_phase_has_its_own_line() -> None:
    """Short sequences peak in the optimizer, and the phase that will run out of memory grows below that."""
    capacity, tried = 140_000_000_000, []

    def one_more(size: int) -> Cell:
        tried.append(size)
        peaks = {"optimizer": 26e9, "forward": 20e9 + 5e5 * size, "backward": 19e9 + 3e5 * size}
        fits = max(peaks.values()) <= capacity
        return Cell(
            arm="baseline",
            point=Point(length=size),
            by_phase={phase: int(peak) for phase, peak in peaks.items()},
            total_bytes=capacity,
            out_of_memory=None if fits else "forward",
        )

    found = search_size_limit([one_more(1024), one_more(2048)], "length", one_more)
    assert found.fits and found.fails and found.fits <= 240_000 < found.fails and len(tried) <= 2 + 4, tried


def test_the_model_s_positions_end_the_search() -> None:
    tried: list[int] = []

    def one_more(size: int) -> Cell:
        tried.append(size)
        return cell(size, size, 10**12)

    found = search_size_limit(
        [cell(1024, 1024, 10**12), cell(2048, 2048, 10**12)], "length", one_more, max_size=40_960
    )
    assert (found.fits, found.fails, tried) == (40_960, None, [40_960])


def test_pairs_stay_whole_and_nothing_may_fit() -> None:
    tried: list[int] = []

    def one_more(size: int) -> Cell:
        tried.append(size)
        return Cell(**{**fields(cell(64, size, 13)), "point": Point(length=64, num_sequences=size)})

    def fields(one: Cell) -> dict:
        return {name: getattr(one, name) for name in ("arm", "by_phase", "total_bytes", "out_of_memory")}

    first = Cell(**fields(cell(64, 2, 13)), point=Point(length=64, num_sequences=2))
    found = search_size_limit([first], "num_sequences", one_more, unit=2)
    assert (found.fits, found.fails) == (12, 14) and all(size % 2 == 0 for size in tried)
    nothing = search_size_limit([cell(512, 999, 13)], "length", lambda size: cell(size, 999, 13))
    assert nothing.fits is None and nothing.fails is not None
