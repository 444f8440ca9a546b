"""The prompts of a run: epochs over the fetches of its steps, and streams that no seed shares."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from abrun.recipe.tasks import Arithmetic, Jsonl
from abrun.runs.experiment import WARM_START
from abrun.trainer.loop.data import Data
from abrun.trainer.tasks import TrainingTask, make_task


def file_task(folder: Path, size: int) -> TrainingTask:
    path = folder / "problems.jsonl"
    path.write_text("".join(f"{json.dumps({'prompt': f'q{i}=', 'answer': '1'})}\n" for i in range(size)))
    return make_task(Jsonl(type="jsonl", path=str(path)))


def data(task: TrainingTask, *, batch_size: int, fetches: int = 1, seed: int = 3) -> Data:
    unused: Any = None
    return Data(
        task=task,
        text=unused,
        ranks=unused,
        seed=seed,
        batch_size=batch_size,
        fetches_per_step=fetches,
        held_out=[],
    )


def prompts(data: Data, step: int, *fetches: int) -> list[str]:
    return [example.prompt for fetch in fetches for example in data.examples(step, fetch)]


@pytest.mark.parametrize(("batch_size", "fetches"), [(8, 1), (8, 5), (7, 3), (40, 1)])
def test_the_fetches_of_all_steps_visit_every_problem_once_an_epoch(
    tmp_path: Path, batch_size: int, fetches: int
) -> None:
    run = data(file_task(tmp_path, 200), batch_size=batch_size, fetches=fetches)
    drawn = [prompt for step in range(1, 61) for prompt in prompts(run, step, *range(fetches))]
    for start in range(0, len(drawn) - 200, 200):
        assert Counter(drawn[start : start + 200]) == Counter(f"q{i}=" for i in range(200))
    assert [example.prompt for example in run.examples_of_steps(range(1, 61))] == drawn
    assert not run.examples_of_steps(range(61, 61))


def test_as_many_prompts_a_step_are_the_same_prompts_in_one_fetch_or_several(tmp_path: Path) -> None:
    task = file_task(tmp_path, 200)
    whole, cut = data(task, batch_size=32), data(task, batch_size=8, fetches=4)
    for step in (1, 2, 9):
        assert prompts(whole, step, 0) == prompts(cut, step, *range(4))


def test_redraws_repeat_no_prompt_of_their_step_and_no_other_step(tmp_path: Path) -> None:
    """10 tries of 8 among 600 problems; steps 1 to 75 are an epoch."""
    run = data(file_task(tmp_path, 600), batch_size=8)
    for step in range(1, 76):
        drawn = prompts(run, step, *range(10))
        assert len(set(drawn)) == 80, step
        assert not set(drawn) & set(prompts(run, step + 1, 0)) or step == 75
    for fetch in range(10):
        epoch = [prompt for step in range(1, 76) for prompt in prompts(run, step, fetch)]
        assert len(set(epoch)) == 600


def test_redraws_of_a_generated_task_are_new_and_the_same_at_every_call() -> None:
    run = data(make_task(Arithmetic(type="arithmetic", max_operand=10**6)), batch_size=8)
    drawn = prompts(run, 4, *range(5))
    assert len(set(drawn)) == 40 and drawn == prompts(run, 4, *range(5))
    assert not set(drawn) & set(prompts(run, 5, *range(5)))


def test_no_seed_trains_on_the_batches_of_the_warm_start(tmp_path: Path) -> None:
    """Chance: 120 of 600 prompts in common, with a standard deviation of 8.8 (hypergeometric)."""
    task = file_task(tmp_path, 3000)
    warm_start = data(task, batch_size=30, seed=WARM_START.seed).examples_of_steps(range(1, 21))
    seen = {example.prompt for example in warm_start}
    for seed in (*range(20), 2**31 - 1):
        run = data(task, batch_size=30, seed=seed).examples_of_steps(range(1, 101))
        for step in range(0, 100, 20):
            common = len(seen & {example.prompt for example in run[step * 30 : (step + 20) * 30]})
            assert abs(common - 120) < 5 * 8.8, (seed, step, common)
        assert sum(a.prompt == b.prompt for a, b in zip(run, warm_start, strict=False)) < 6
