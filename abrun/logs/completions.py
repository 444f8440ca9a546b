"""Completions of runs step by step, of abrun's trainer or another: prompts, texts and rewards.

Other trainers write one file per step:

- verl (`trainer.rollout_data_dir`, `validation_data_dir`): `<step>.jsonl`, one object per completion with
  `input`, `output` and `score`.
- TRL (`log_completions`): `completions/[<mode>/]completions_<step>.parquet` with columns `prompt`,
  `completion`, one per reward function, and `advantage`.
- NeMo-RL: `train_data_step<step>.jsonl`, one object per completion whose values are lists of length one:
  `content` (the texts of a conversation) and `rewards` (absent in distillation).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.foreign.files import open_file, path_kind, read_lines, walk, wrap_exhaustion
from abrun.logs.foreign.values import as_number, parse_json
from abrun.logs.log import missing_package_error
from abrun.runs.lines import Sample
from abrun.runs.redaction import printable
from abrun.runs.rundir import RunDir

MAX_PROMPTS = 64  # per step, with the first completion of each prompt
_FILE = re.compile(
    r"(?P<verl>\d{1,9})\.jsonl|completions_(?P<trl>\d{1,9})\.parquet|train_data_step(?P<nemo>\d{1,9})\.jsonl",
    re.ASCII,
)
_NO_REWARD = ("step", "advantage", "mode")  # numeric columns of TRL's table that are not rewards


class CompletionFiles(Mapping[int, tuple[Sample, ...]]):
    """Completions by step, ascending. A step's file, which may be large, is read on access.

    Access raises StoreError if the file is corrupt or its reader is not installed.
    """

    def __init__(self, files: Mapping[int, Path]) -> None:
        self._files = dict(sorted(files.items()))

    def __getitem__(self, step: int) -> tuple[Sample, ...]:
        return _read_samples(self._files[step])

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_completions(folder: Path) -> CompletionFiles:
    """Return the completions in a folder, or else in the first usual subfolder that has any."""
    places = [folder, *(folder / name for name in ("completions/train", "completions", "rollout_data"))]
    files: dict[Path, dict[int, Path]] = {}
    for below in walk(folder) if path_kind(folder) == "folder" else ():
        below.folders[:] = [subfolder for subfolder in below.folders if subfolder in places]
        for path in below.files:
            match = _FILE.fullmatch(path.name)
            if match and (not match["verl"] or _has_completions(path)):
                files.setdefault(below.path, {})[int(next(filter(None, match.groups())))] = path
    return CompletionFiles(next((files[place] for place in places if files.get(place)), {}))


def _has_completions(path: Path) -> bool:
    """Return True if a file such as `0.jsonl` holds completions; it could be the metrics of seed 0."""
    with open_file(path) as file:
        first_line = file.readline(1 << 22)
    return all(key in first_line for key in (b'"input"', b'"output"', b'"score"'))


def _read_samples(path: Path) -> tuple[Sample, ...]:
    samples: dict[str, Sample] = {}
    with wrap_exhaustion(path):
        for sample in _read_file(path):
            samples.setdefault(sample.prompt, sample)
            if len(samples) == MAX_PROMPTS:
                break
    return tuple(samples.values())


def _read_file(path: Path) -> Iterator[Sample]:
    if path.suffix == ".parquet":
        return _read_trl(path)
    return _read_nemo_rl(path) if path.name.startswith("train_data_step") else _read_verl(path)


def _read_verl(path: Path) -> Iterator[Sample]:
    for where, row in _read_objects(path):
        if not {"input", "output"} <= row.keys():
            raise StoreError(f"{where}: expected an object with input and output, as verl writes")
        yield _make_sample(row["input"], row["output"], row.get("score"))


def _read_nemo_rl(path: Path) -> Iterator[Sample]:
    """Yield samples of NeMo-RL: the last text of a conversation is the completion, the rest the prompt."""
    for where, row in _read_objects(path):
        match row:
            case {"content": [[*prompt, text]]} if prompt:
                rewards = row.get("rewards")
                reward = rewards[0] if isinstance(rewards, list) and len(rewards) == 1 else None
                yield _make_sample("\n".join(map(str, prompt)), text, reward)
            case _:
                raise StoreError(f"{where}: expected content with prompt and completion, as NeMo-RL writes")


def _read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a description of each line's position, and its object (empty if it is not an object)."""
    for number, line in enumerate(read_lines(path), 1):
        row = parse_json(line)
        yield f"{printable(str(path))}, line {number}", row if isinstance(row, dict) else {}


def _read_trl(path: Path) -> Iterator[Sample]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_package_error(path, "pyarrow", "'abrun[parquet]'") from None
    with open_file(path) as file:
        try:
            rows = [row for batch in pq.ParquetFile(file).iter_batches() for row in batch.to_pylist()]
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise StoreError(f"{printable(str(path))}: cannot be read: {printable(str(error))}") from None
    for row in rows:
        if not {"prompt", "completion"} <= row.keys():
            raise StoreError(f"{printable(str(path))}: expected columns prompt and completion, as TRL writes")
        prompt, text = _conversation_text(row["prompt"]), _conversation_text(row["completion"])
        yield _make_sample(prompt, text, _single_reward(row))


def _conversation_text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(
            str(message.get("content", "")) if isinstance(message, dict) else str(message)
            for message in value
        )
    return str(value)


def _single_reward(row: Mapping[str, Any]) -> float | None:
    """Return the reward if there is one reward function; the weights of several are not in the table."""
    rewards = [value for key, value in row.items() if key not in _NO_REWARD and type(value) in (int, float)]
    return as_number(rewards[0]) if len(rewards) == 1 else None


def _make_sample(prompt: Any, text: Any, reward: Any) -> Sample:
    valid_reward = as_number(reward) if type(reward) in (int, float) else None
    return Sample(
        prompt=str(prompt),
        text=str(text),
        reward=valid_reward,
        logprob_error=None,
        num_tokens=None,
        truncated=None,
    )


# --- pairs of completions ---

SamplesByStep = Mapping[int, tuple[Sample, ...]]  # samples of one run


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePair:
    """Completions of two runs for one prompt; None if a run kept none."""

    step: int
    prompt: str
    left: Sample | None
    right: Sample | None


def read_run_samples(place: Path) -> SamplesByStep:
    """Return the samples in a run's folder, of abrun or of another trainer; empty for a single file."""
    if path_kind(place) != "folder":
        return {}
    return RunDir(place).samples() or read_completions(place)


def pair_samples(left: SamplesByStep, right: SamplesByStep, step: int | None = None) -> list[SamplePair]:
    """Return sample pairs by step, in the order of the left run's prompts, then those only the right run has.

    `step`: only this step. Raises StoreError if a file is damaged.
    """
    both = left, right
    steps = sorted(both[0].keys() | both[1].keys()) if step is None else [step]
    sample_pairs = []
    for current_step in steps:
        by_prompt = [{sample.prompt: sample for sample in samples.get(current_step, ())} for samples in both]
        sample_pairs += [
            SamplePair(
                step=current_step,
                prompt=prompt,
                left=by_prompt[0].get(prompt),
                right=by_prompt[1].get(prompt),
            )
            for prompt in dict.fromkeys([*by_prompt[0], *by_prompt[1]])
        ]
    return sample_pairs
