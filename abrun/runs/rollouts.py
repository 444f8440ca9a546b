"""Recorded rollouts: the completions that a run trained on, one file a step, for other runs to train on.

`rollouts/step-000001.safetensors` in a run directory, or in a folder `seed-N` of recordings from elsewhere.
G groups, each of a prompt and its completions, N completions in all, T tokens in all completions:

    fetch, prompt_lengths, group_sizes  [G] int64
    prompt_ids                          [sum of prompt_lengths] int64
    completion_lengths                  [N] int64
    completion_ids                      [T] int64
    inference_logprobs                  [T] float32; absent if the sampler's log-probs are unknown
    rewards                             [N] float64
    truncated                           [N] bool

The order is that of the global batch, so the number of ranks has no effect. The header holds the rest.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from abrun.errors import StoreError
from abrun.runs import layout
from abrun.runs.files import is_directory, is_file, open_regular, wrap_read_errors
from abrun.runs.redaction import printable

FORMAT = 1
MAX_BYTES = 1 << 34  # of a file
MAX_PROBLEM = 200  # characters
LOGPROBS = "inference_logprobs"
DTYPES = {
    "fetch": "int64",
    "prompt_lengths": "int64",
    "group_sizes": "int64",
    "prompt_ids": "int64",
    "completion_lengths": "int64",
    "completion_ids": "int64",
    LOGPROBS: "float32",
    "rewards": "float64",
    "truncated": "bool",
}
HEADER_TYPES = {"seed": int, "model": str, "tokenizer": str, "temperature": (int, float), "framework": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The sampler of a recording. None: unknown, as in a recording from elsewhere."""

    seed: int | None = None
    model: str | None = None  # hash of the model's shape
    tokenizer: str | None = None  # hash of the vocabulary
    temperature: float | None = None
    framework: str = "abrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCompletion:
    """A completion with its reward."""

    token_ids: Sequence[int]  # includes the end token, if there is one
    logprobs: Sequence[float] | None  # of the sampler, one for each token; None: unknown
    reward: float
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """The completions of one prompt. `fetch`: by which of the step's requests the prompt was drawn."""

    prompt: Sequence[int]
    completions: Sequence[RecordedCompletion]
    fetch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """All completions of a step, in the order of the global batch."""

    step: int
    groups: Sequence[RecordedGroup]
    origin: Origin = field(default_factory=Origin)

    def encode(self) -> bytes:
        """Return the content of the step's file."""
        completions = [completion for group in self.groups for completion in group.completions]
        logprobs = [completion.logprobs for completion in completions]
        arrays = {
            "fetch": _integers(group.fetch for group in self.groups),
            "prompt_lengths": _integers(len(group.prompt) for group in self.groups),
            "group_sizes": _integers(len(group.completions) for group in self.groups),
            "prompt_ids": _integers(token for group in self.groups for token in group.prompt),
            "completion_lengths": _integers(len(completion.token_ids) for completion in completions),
            "completion_ids": _integers(
                token for completion in completions for token in completion.token_ids
            ),
            "rewards": np.array([completion.reward for completion in completions], np.float64),
            "truncated": np.array([completion.truncated for completion in completions], bool),
        }
        if None not in logprobs:
            values = itertools.chain.from_iterable(row or () for row in logprobs)
            arrays[LOGPROBS] = np.fromiter(values, np.float32)
        header = {"format": FORMAT, "step": self.step, "sha256": _digest(arrays), **asdict(self.origin)}
        return save(arrays, {"abrun": json.dumps(header)})


def _integers(values: Iterator[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + arrays[name].dtype.str.encode() + arrays[name].tobytes())
    return digest.hexdigest()


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def read_step(folder: Path, step: int) -> RecordedStep:
    """Read the rollouts of a step. Raises StoreError if they are missing, damaged or of another step."""
    path = step_path(folder, step)
    header, arrays = _read(path)
    problem = _find_problem(header, arrays, step)
    if problem:
        raise _damaged(path, problem)
    prompts = _split(arrays["prompt_ids"], arrays["prompt_lengths"])
    tokens = _split(arrays["completion_ids"], arrays["completion_lengths"])
    logprobs: list[list[Any]] | list[None] = [None] * len(tokens)
    if LOGPROBS in arrays:
        logprobs = _split(arrays[LOGPROBS], arrays["completion_lengths"])
    completions = iter(
        RecordedCompletion(token_ids=row, logprobs=row_logprobs, reward=reward, truncated=truncated)
        for row, row_logprobs, reward, truncated in zip(
            tokens, logprobs, arrays["rewards"].tolist(), arrays["truncated"].tolist(), strict=True
        )
    )
    sizes, fetches = arrays["group_sizes"].tolist(), arrays["fetch"].tolist()
    groups = [
        RecordedGroup(prompt=prompt, completions=list(itertools.islice(completions, size)), fetch=fetch)
        for prompt, size, fetch in zip(prompts, sizes, fetches, strict=True)
    ]
    origin = Origin(**{name: header[name] for name in Origin.__slots__ if name in header})
    return RecordedStep(step=step, groups=groups, origin=origin)


def hash_steps(folder: Path, num_steps: int) -> str:
    """Return a hash of the rollouts of steps 1 to `num_steps`. Raises StoreError if one is missing."""
    hashes = [_read_header(step_path(folder, step)).get("sha256") for step in range(1, num_steps + 1)]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def find_rollouts(source: str, run_path: Path, seed: int) -> Path:
    """Return the folder of the rollouts that the run at `run_path` shall train on.

    `source` is an arm of the run's experiment, or the path of an arm's folder, of an experiment (its
    baseline, or the only arm that recorded), of a run, or of a folder with a folder `seed-N` for each seed.
    Raises StoreError if there are no rollouts.
    """
    sibling = run_path.parent.parent / source
    base = sibling if "/" not in source and is_directory(sibling) else Path(source).expanduser()
    seed_name = f"seed-{seed}"
    recorders = list(base.glob(f"*/{seed_name}/{layout.ROLLOUTS}"))
    folders = [
        base / seed_name / layout.ROLLOUTS,
        base / "baseline" / seed_name / layout.ROLLOUTS,
        base / layout.ROLLOUTS,
        base / seed_name,
        *(recorders if len(recorders) == 1 else ()),
    ]
    for folder in folders:
        with wrap_read_errors(folder):
            if is_file(step_path(folder, 1)):
                return folder
    raise StoreError(
        f"rollout.from: {base} has no recorded rollouts of seed {seed}; give a run, an experiment or an arm "
        f"that has trained with rollout.record: true, or a folder with seed-{seed}/"
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    header = _read_header(path)
    with _reading(path), safe_open(path, framework="numpy") as file:
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _read_header(path: Path) -> dict[str, Any]:
    with _reading(path):
        with open_regular(path) as regular:
            size = os.fstat(regular.fileno()).st_size
        if size > MAX_BYTES:
            raise _damaged(path, f"{size} bytes, more than {MAX_BYTES}")
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("abrun", "null"))
    if not isinstance(header, dict):
        raise _damaged(path, "no header of abrun")
    if header.get("format") != FORMAT:
        raise _damaged(path, f"this version reads format {FORMAT}, not {header.get('format')!r}")
    return header


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into StoreError."""
    try:
        with wrap_read_errors(path):
            yield
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, problem: str) -> StoreError:
    return StoreError(f"{path}: unusable rollouts: {printable(problem[:MAX_PROBLEM])}; record them again")


def _find_problem(header: dict[str, Any], arrays: dict[str, np.ndarray], step: int) -> str | None:
    """Return what is wrong with the content of a file; None if nothing is."""
    missing = DTYPES.keys() - {LOGPROBS} - arrays.keys()
    if missing:
        return f"without {', '.join(sorted(missing))}"
    for name in DTYPES.keys() & arrays.keys():
        dtype, shape = arrays[name].dtype, arrays[name].shape
        if (dtype, len(shape)) != (DTYPES[name], 1):
            return f"{name} is {dtype} of shape {list(shape)}, not a list of {DTYPES[name]}"
    if header.get("sha256") != _digest(arrays):
        return "its checksum does not match its content"
    if header.get("step") != step:
        return f"it holds step {header.get('step')!r}"
    for name, allowed in HEADER_TYPES.items():
        if header.get(name) is not None and not isinstance(header[name], allowed):
            return f"its header has {name} {header[name]!r}"
    sums = [
        ("prompt_lengths", _total(arrays["prompt_lengths"]), len(arrays["prompt_ids"])),
        ("group_sizes", _total(arrays["group_sizes"]), len(arrays["rewards"])),
        ("group_sizes", _total(arrays["group_sizes"]), len(arrays["completion_lengths"])),
        ("completion_lengths", _total(arrays["completion_lengths"]), len(arrays["completion_ids"])),
        ("fetch", len(arrays["fetch"]), len(arrays["prompt_lengths"])),
        ("group_sizes", len(arrays["group_sizes"]), len(arrays["prompt_lengths"])),
        ("truncated", len(arrays["truncated"]), len(arrays["rewards"])),
        (LOGPROBS, len(arrays.get(LOGPROBS, arrays["completion_ids"])), len(arrays["completion_ids"])),
    ]
    for name, got, expected in sums:
        if got != expected:
            return f"{name} is of {got} values, but {expected} are there"
    lengths = arrays["prompt_lengths"], arrays["completion_lengths"], arrays["group_sizes"]
    if not all(len(values) and values.min() >= 1 for values in lengths):
        return "a prompt, completion or group is empty"
    if min(arrays["prompt_ids"].min(), arrays["completion_ids"].min()) < 0:
        return "a negative token id"
    if not np.isfinite(arrays["rewards"]).all():
        return "a reward that is not finite"
    if LOGPROBS in arrays and not (np.isfinite(arrays[LOGPROBS]).all() and arrays[LOGPROBS].max() <= 1e-3):
        return "a log-prob that is positive or not finite"
    return None


def _total(lengths: np.ndarray) -> int:
    """Return a sum that does not overflow."""
    return sum(lengths.tolist())


def _split(values: np.ndarray, lengths: np.ndarray) -> list[list[Any]]:
    return [row.tolist() for row in np.split(values, np.cumsum(lengths)[:-1])]
