"""The completions of a step, recorded by one arm and replayed to the other.

Recordings of whole runs (abrun.train.recordings) hold groups after rewards and filters. A trace replays the
engine alone, with the support of each token, so that faults of verifiers, filters and grouping stay visible.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abrun.backends.ranks import Ranks
from abrun.errors import RecipeError
from abrun.rollout import Completion, RolloutEngine
from abrun.rollout.draws import Draws
from abrun.runs.access import PUBLIC_MODE
from abrun.runs.files import read_json, write_json
from abrun.train.sampler import Sampler

FILE = "completions.json"


class Recording:
    """Completions of one step by row, each with its prompt."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._rows: dict[str, dict[str, Any]] = {}

    def add(self, prompts: list[list[int]], draws: Draws, completions: list[Completion]) -> None:
        for row, prompt, completion in zip(draws.rows, prompts, completions, strict=True):
            self._rows[str(row)] = {
                "prompt": prompt,
                "token_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "support": None if completion.support is None else completion.support.tolist(),
                "truncated": completion.truncated,
            }

    def completions(self, prompts: list[list[int]], draws: Draws) -> list[Completion]:
        """Return the recorded completions. Raises RecipeError if there are none for these prompts."""
        return [self._completion(str(row), prompt) for row, prompt in zip(draws.rows, prompts, strict=True)]

    def _completion(self, key: str, prompt: list[int]) -> Completion:
        row = self._rows.get(key)
        if row is None or row["prompt"] != prompt:
            raise RecipeError(
                f"step {self.step}: this arm trains on other prompts than the baseline recorded; trace arms "
                "with the same task, seed, prompts_per_step and group_size"
            )
        support = row["support"]
        return Completion(
            token_ids=row["token_ids"],
            logprobs=row["logprobs"],
            support=None if support is None else torch.tensor(support, dtype=torch.uint8),
            truncated=row["truncated"],
        )

    def write(self, folder: Path, ranks: Ranks) -> None:
        """Write the completions of all ranks. Collective."""
        by_rank = ranks.all_gather_world(self._rows)
        if ranks.is_first:
            rows = {key: row for rows in by_rank for key, row in rows.items()}
            write_json(folder / FILE, {"step": self.step, "rows": rows}, mode=PUBLIC_MODE)

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        content = read_json(folder / FILE, max_bytes=2**40)
        recording = cls(content["step"])
        recording._rows = content["rows"]
        return recording


class RecordingEngine:
    """A run's engine, of which a step's completions are recorded; once recorded they are replayed."""

    def __init__(self, engine: RolloutEngine, recording: Recording) -> None:
        self._engine, self._recording = engine, recording
        self.is_recorded = False

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        if draws.step != self._recording.step:
            return self._engine.generate(prompts, draws, temperature=temperature)
        if self.is_recorded:
            return self._recording.completions(prompts, draws)
        completions = self._engine.generate(prompts, draws, temperature=temperature)
        self._recording.add(prompts, draws, completions)
        return completions

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if not self.is_recorded:
            self._engine.sync(weights)

    def sleep(self) -> int:
        return self._engine.sleep()

    def wake(self) -> bool:
        return self._engine.wake()

    def close(self, *, finished: bool = False) -> None:
        self._engine.close(finished=finished)


class ReplayEngine:
    """An engine without a model, which returns what the baseline's engine sampled."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        return self._recording.completions(prompts, draws)

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None: ...

    def sleep(self) -> int:
        return 0

    def wake(self) -> bool:
        return False

    def close(self, *, finished: bool = False) -> None: ...


def record_with(sampler: Sampler, recording: Recording) -> list[RecordingEngine]:
    """Let a sampler record a step. The list holds its engine once that is made."""
    engines: list[RecordingEngine] = []
    make_engine = sampler._make_engine

    def make() -> RolloutEngine:
        engines.append(RecordingEngine(make_engine(), recording))
        return engines[0]

    sampler._make_engine = make
    return engines


def replay_with(sampler: Sampler, recording: Recording) -> None:
    """Let a sampler replay a recorded step instead of sampling it."""
    sampler._make_engine = lambda: ReplayEngine(recording)
