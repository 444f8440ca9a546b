"""Completions that other trainers have kept: a file a step, read for their prompts, texts and rewards.

verl (`trainer.rollout_data_dir`, `validation_data_dir`): `<step>.jsonl`, an object a completion of `input`,
`output` and `score`. TRL (`log_completions`): `completions/[<mode>/]completions_<step>.parquet`, of columns
`prompt`, `completion`, a reward each function, `advantage`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.log import needs_package, printable, readable
from abrun.store import Sample

MOST_PROMPTS = 64  # of a step; of the completions of one prompt the first is kept
_NO_REWARD = ("step", "advantage", "mode")  # numbers of TRL's table that are none


def read_completions(folder: Path) -> dict[int, tuple[Sample, ...]]:
    """By step, ascending; of this folder, or else of the first below that has any; empty where none has.

    Raises StoreError where a file is corrupt or its reader is not installed.
    """
    for place in (folder, *(folder / one for one in ("completions/train", "completions", "rollout_data"))):
        files = dict(sorted(_files(place)))
        if files:
            return {step: samples for step, path in files.items() if (samples := _samples(path))}
    return {}


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    with readable(folder):
        for path in folder.iterdir() if folder.is_dir() else ():
            found = re.fullmatch(r"(\d{1,9})\.jsonl|completions_(\d{1,9})\.parquet", path.name, re.ASCII)
            if found and path.is_file() and (found[2] or _is_dump(path)):
                yield int(found[1] or found[2]), path


def _is_dump(path: Path) -> bool:
    """Whether a `0.jsonl` is completions: it may be the metrics of seed 0."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(1 << 22)
    return all(f'"{key}"' in first for key in ("input", "output", "score"))


def _samples(path: Path) -> tuple[Sample, ...]:
    kept: dict[str, Sample] = {}
    with readable(path):
        for sample in _of_trl(path) if path.suffix == ".parquet" else _of_verl(path):
            kept.setdefault(sample.prompt, sample)
            if len(kept) == MOST_PROMPTS:
                break
    return tuple(kept.values())


def _of_verl(path: Path) -> Iterator[Sample]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                texts = row["input"], row["output"]
            except (ValueError, TypeError, KeyError):
                where = f"{printable(str(path))}, line {number}"
                raise StoreError(f"{where}: no object with input and output, as verl writes them") from None
            yield _sample(*texts, row.get("score"))


def _of_trl(path: Path) -> Iterator[Sample]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise needs_package(path, "pyarrow", "'abrun[parquet]'") from None
    try:
        rows = pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise StoreError(f"{printable(str(path))}: cannot be read: {printable(str(error))}") from None
    for row in rows:
        if not {"prompt", "completion"} <= row.keys():
            raise StoreError(f"{printable(str(path))}: no columns prompt and completion, as TRL writes them")
        yield _sample(_text(row["prompt"]), _text(row["completion"]), _only_reward(row))


def _text(value: Any) -> str:
    """A text, or the messages of a conversation."""
    if isinstance(value, list):
        return "\n".join(str(one.get("content", "")) if isinstance(one, dict) else str(one) for one in value)
    return str(value)


def _only_reward(row: Mapping[str, Any]) -> float | None:
    """Of one reward function; of several the weights are not in the table."""
    rewards = [value for key, value in row.items() if key not in _NO_REWARD and type(value) in (int, float)]
    return float(rewards[0]) if len(rewards) == 1 else None


def _sample(prompt: Any, text: Any, reward: Any) -> Sample:
    known = float(reward) if type(reward) in (int, float) else None
    return Sample(
        prompt=str(prompt), text=str(text), reward=known, logprob_error=None, num_tokens=None, truncated=None
    )
