"""Rollouts that other frameworks have dumped, read as recorded rollouts.

One file a step in a folder `seed-N`. The formats were read in each framework's code that writes them:

    slime     `--save-debug-rollout-data`, a template such as `DIR/{rollout_id}.pt`: token ids, sampler's
              log-probs unless it kept none, status, group (slime/ray/rollout.py, slime/utils/types.py)
    NeMo RL   `train_data_step1.jsonl` in the log folder: since it logs `token_ids`, also the loss mask and
              the sampler's log-probs; each value in a list of one (nemo_rl/algorithms/grpo.py)
    verl      `trainer.rollout_data_dir`, `1.jsonl`: texts alone, without special tokens
              (verl/trainer/ppo/ray_trainer.py)

Texts become tokens by the run's tokenizer, if these decode to the same text. What verl has dropped stays
lost: the special tokens of a chat template, and how the sampler had cut a text into tokens. A completion
shorter than rollout.max_new_tokens gets the end token. TRL logs texts without the total reward, so it is
refused.
"""

import hashlib
import itertools
import json
import math
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from abrun.errors import StoreError
from abrun.models import Text
from abrun.reasons import Code
from abrun.redaction import printable
from abrun.regular_files import is_directory, iter_lines, open_regular
from abrun.runs.files import wrap_read_errors
from abrun.runs.rollouts import MAX_BYTES, Origin, RecordedCompletion, RecordedGroup, RecordedStep

LOWEST = -3e38  # log-probs become float32
FILE_NAMES = {
    "slime": re.compile(r"(?!.*eval_\d+\.pt$).*?(\d+)\.pt"),
    "nemo-rl": re.compile(r"train_data_step(\d+)\.jsonl"),
    "verl": re.compile(r"(\d+)\.jsonl"),
    "trl": re.compile(r"completions_(\d+)\.parquet"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A completion and the prompt that it answers."""

    group: Any  # equal for the completions of a prompt
    prompt: list[int]
    completion: RecordedCompletion


class ForeignRollouts:
    """The dumps of one run of another framework. Its first dump is step 1."""

    def __init__(self, folder: Path, framework: str, paths: Sequence[Path]) -> None:
        self.folder, self.framework, self._paths = folder, framework, paths

    @property
    def num_steps(self) -> int:
        return len(self._paths)

    def hash_steps(self, num_steps: int) -> str:
        """Return a hash of the dumps of steps 1 to `num_steps`."""
        digest = hashlib.sha256()
        for path in self._paths[:num_steps]:
            with wrap_read_errors(path), open_regular(path) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def read_step(self, step: int, text: Text, *, group_size: int, max_new_tokens: int) -> RecordedStep:
        """Read the dump of a step. Raises StoreError if it is damaged or lacks what training needs.

        `group_size`: largest number of completions of a prompt in a group. `max_new_tokens`: length at which
        a completion known only by its text was truncated.
        """
        path = self._paths[step - 1]
        with wrap_read_errors(path):
            size = path.stat().st_size
        try:
            if size > MAX_BYTES:
                raise ValueError(f"{size} bytes, more than {MAX_BYTES}")
            if self.framework == "slime":
                samples = _read_slime(path)
            elif self.framework == "nemo-rl":
                samples = [_nemo_sample(row, text) for row in _read_rows(path)]
            else:
                samples = [_verl_sample(row, text, max_new_tokens) for row in _read_rows(path)]
            if not samples:
                raise ValueError("no completions")
            groups = _make_groups(samples, group_size)
        except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
            problem = f"without {error}" if isinstance(error, KeyError) else printable(str(error))
            raise StoreError(
                Code.ROLLOUTS_DAMAGED(path=path, problem=f"as a dump of {self.framework}: {problem:.300}")
            ) from error
        return RecordedStep(step=step, groups=groups, origin=Origin(framework=self.framework))


def find_foreign_rollouts(source: str, run_path: Path, seed: int) -> ForeignRollouts | None:
    """Return the dumps of another framework in the folder `seed-N` of `source`; None if there are none.

    `source` may also be an arm of the experiment of the run at `run_path`, which has none. Raises StoreError
    if they are of several frameworks, of TRL, lack a step, or lie in `source` itself, which would give every
    seed the same rollouts.
    """
    if "/" not in source and is_directory(run_path.parent.parent / source):
        return None
    base = Path(source).expanduser()
    folder = base / f"seed-{seed}"
    dumps = _list_dumps(folder)
    if not dumps:
        if outside := _list_dumps(base):
            problem = f"dumps of {' and '.join(outside)} lie in it, which does not say their seed"
            raise _unfit(base, problem, f"move those of one run to {folder.name}/")
        return None
    if len(dumps) > 1:
        raise _unfit(folder, f"it holds dumps of {' and '.join(dumps)}", "keep those of one run")
    [(framework, paths)] = dumps.items()
    if framework == "trl":
        problem = "TRL logs texts without token ids and without the total reward of a completion"
        raise _unfit(folder, problem, "give dumps of slime, NeMo RL or verl")
    numbers = [number for number, _ in paths]
    for before, number in itertools.pairwise(numbers):
        if number == before:
            raise _unfit(folder, f"it holds two dumps of step {number}", "keep those of one run")
        if number != before + 1:
            raise _unfit(folder, f"it lacks the dump of step {before + 1}", "give all steps of the run")
    return ForeignRollouts(folder, framework, [path for _, path in paths])


def _list_dumps(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return the numbered dumps in a folder by framework, in order."""
    with wrap_read_errors(folder):
        names = sorted(path.name for path in folder.iterdir()) if is_directory(folder) else []
    dumps: dict[str, list[tuple[int, Path]]] = {}
    for name in names:
        for framework, pattern in FILE_NAMES.items():
            if match := pattern.fullmatch(name):
                dumps.setdefault(framework, []).append((int(match[1]), folder / name))
    return {framework: sorted(paths) for framework, paths in dumps.items()}


def _unfit(folder: Path, problem: str, remedy: str) -> StoreError:
    return StoreError(Code.ROLLOUTS_UNFIT(path=folder, problem=problem, remedy=remedy))


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file. Raises ValueError for a torn line."""
    with wrap_read_errors(path), open_regular(path) as file:
        for number, line in enumerate(iter_lines(file), 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is torn or no JSON") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no object")
            yield row


def _read_slime(path: Path) -> list[_Sample]:
    """Load a file of torch.save without running the code that a pickle can hold."""
    try:
        with wrap_read_errors(path), open_regular(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "it holds Python objects, which are not loaded because they can run code; save lists and numbers"
        ) from error
    except (RuntimeError, EOFError, ArithmeticError, AssertionError, AttributeError, LookupError) as error:
        raise ValueError("torn, or not written by torch.save") from error
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise ValueError("no list 'samples'")
    return [_slime_sample(sample) for sample in content["samples"]]


def _slime_sample(sample: dict[str, Any]) -> _Sample:
    status, length = sample["status"], sample["response_length"]
    if status not in ("completed", "truncated"):
        raise ValueError(f"a sample with status {status!r}; only completed and truncated ones can be trained")
    if sample.get("remove_sample"):
        raise ValueError("a sample that slime left out of the loss (remove_sample)")
    if sample.get("multimodal_inputs"):
        raise ValueError("a sample with multimodal_inputs; only text can be trained")
    token_ids = _token_ids(sample["tokens"])
    _require_length("response_length", length, len(token_ids))
    if mask := sample.get("loss_mask"):
        _require_whole_mask(mask, length)
    prompt = token_ids[: len(token_ids) - length]
    group = sample.get("group_index")
    return _Sample(
        group=tuple(prompt) if group is None else group,
        prompt=prompt,
        completion=_make_completion(
            token_ids[len(prompt) :],
            sample.get("rollout_log_probs"),
            sample["reward"],
            truncated=status == "truncated",
        ),
    )


def _nemo_sample(row: dict[str, Any], text: Text) -> _Sample:
    # With dynamic sampling, `rewards` are those before the filter.
    rewards = "filtered_rewards" if "filtered_rewards" in row else "rewards"
    length = _only_value(row, "input_lengths")
    _require_length("input_lengths", length, len(_token_ids(_only_value(row, "token_ids"))))
    if not _only_value(row, "sample_loss_mask"):
        raise ValueError("a sample that NeMo RL left out of the loss (sample_loss_mask)")
    token_ids = _token_ids(_only_value(row, "token_ids")[:length])
    mask = _only_value(row, "token_loss_mask")[:length]
    start = mask.index(1) if 1 in mask else length
    _require_whole_mask(mask[start:], length - start)
    prompt, completion = token_ids[:start], token_ids[start:]
    return _Sample(
        group=tuple(prompt),
        prompt=prompt,
        completion=_make_completion(
            completion,
            _only_value(row, "generation_logprobs")[start:length],
            _only_value(row, rewards),
            truncated=bool(completion) and completion[-1] not in text.end_ids,
        ),
    )


def _only_value(row: dict[str, Any], key: str) -> Any:
    """Return the value of a sample, which NeMo RL writes as a batch of one."""
    values = row[key]
    if not isinstance(values, list) or len(values) != 1:
        raise ValueError(f"{key} is no list of one value")
    return values[0]


def _verl_sample(row: dict[str, Any], text: Text, max_new_tokens: int) -> _Sample:
    prompt, completion = (_tokenize(row[key], text) for key in ("input", "output"))
    truncated = len(completion) >= max_new_tokens or text.end_id is None
    if not truncated:
        completion = [*completion, int(text.end_id or 0)]
    return _Sample(
        group=tuple(prompt),
        prompt=prompt,
        completion=_make_completion(completion, None, row["score"], truncated=truncated),
    )


def _tokenize(content: Any, text: Text) -> list[int]:
    """Return the tokens of a text. Raises ValueError if they do not decode to it."""
    if not isinstance(content, str):
        raise TypeError("a prompt or completion that is no text")
    token_ids = text.encode_text(content)
    if text.decode([token_ids]) != [content]:
        raise ValueError(f"the run's tokenizer does not reproduce the text {content[:40]!r}")
    return token_ids


def _token_ids(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError("token ids that are no list of integers from 0")
    return values


def _require_length(name: str, length: Any, num_tokens: int) -> None:
    if type(length) is not int or not 0 < length <= num_tokens:
        raise ValueError(f"{name} {str(length)[:40]} of {num_tokens} tokens")


def _require_whole_mask(mask: Sequence[Any], num_tokens: int) -> None:
    if any(value != 1 for value in mask):
        raise ValueError("a completion with tokens masked out of the loss, such as answers of a tool")
    if len(mask) != num_tokens:
        raise ValueError(f"a loss mask of {len(mask)} values for {num_tokens} tokens")


def _make_completion(
    token_ids: list[int], logprobs: Any, reward: Any, *, truncated: bool
) -> RecordedCompletion:
    if type(reward) not in (int, float) or not math.isfinite(reward):
        raise ValueError(f"a reward of {str(reward)[:40]}, which is no finite number")
    if logprobs is not None:
        if not isinstance(logprobs, list):
            raise TypeError("log-probs that are no list of numbers")
        if len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} log-probs of {len(token_ids)} tokens")
        if not all(type(value) in (int, float) and LOWEST < value <= 1e-3 for value in logprobs):
            raise ValueError("a log-prob that is positive or not finite")
    return RecordedCompletion(
        token_ids=token_ids, logprobs=logprobs, reward=float(reward), truncated=truncated
    )


def _make_groups(samples: Sequence[_Sample], group_size: int) -> list[RecordedGroup]:
    """Return groups in the order of their first completions, which a framework may have spread over ranks."""
    by_group: dict[Any, list[_Sample]] = {}
    for sample in samples:
        if not sample.prompt or not sample.completion.token_ids:
            raise ValueError("a prompt or completion without tokens")
        by_group.setdefault(sample.group, []).append(sample)
    groups = []
    for members in by_group.values():
        if any(sample.prompt != members[0].prompt for sample in members):
            raise ValueError("a group with several prompts")
        for start in range(0, len(members), group_size):  # a prompt can be drawn twice
            chosen = [sample.completion for sample in members[start : start + group_size]]
            groups.append(RecordedGroup(prompt=members[0].prompt, completions=chosen))
    return groups
