"""Comparison of dumps of other frameworks. Started as `python -m abrun.tools.trace.dumps FOLDER DUMPS`.

The first dump is the baseline's, the second the other arm's, all others are repeats of the baseline. The
result goes to FOLDER/trace.json.

SGLang's dumper (python/sglang/srt/debug_utils/dumper.py) writes a file for each tensor, named after its tags,
with the tensor or `{"value": tensor, "meta": ...}`:

    step=0___rank=0___dump_index=3___name=NAME___recompute_status=disabled___layer_id=0.pt

msprobe (Ascend/msprobe) writes `stepN/rankM/dump.json`, whose entries name files in `dump_tensor_data/`. If
`construct.json` names the module around each module, outputs come after those of the modules inside.
"""

import pickle
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abrun.errors import AbrunError, StoreError
from abrun.experiment.probe import report_refusal
from abrun.processes import run_to_end
from abrun.runs.captures import EXACT, MANTISSA_BITS, CapturedTensor, Kind
from abrun.runs.files import exists, is_file, read_json, read_json_or_empty, wrap_read_errors
from abrun.runs.redaction import display_safe
from abrun.runs.traces import write_trace
from abrun.tools.trace.judge import judge_trace, measure_errors

STEP_TAGS = ("step", "forward_pass_id", "curr_step")  # of SGLang's dumper, by version
POSITION_TAGS = (*STEP_TAGS, "name", "rank", "dump_index", "recompute_status")
INDEX, TREE, TENSORS = "dump.json", "construct.json", "dump_tensor_data"  # of msprobe
MAX_JSON_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A dumped tensor's file and place; the dump's tensors are in the order of `order`."""

    order: tuple[Any, ...]
    step: int
    rank: int
    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A dump as an abrun.tools.trace.judge.Captured."""

    folder: Path
    step: int
    model: str
    tensors: tuple[CapturedTensor, ...]
    paths: Mapping[str, Path]  # by name

    def read(self, tensor: CapturedTensor) -> np.ndarray:
        loaded = _load(self.paths[tensor.name])
        assert loaded is not None
        return loaded.float().numpy()


def read_dump(folder: Path) -> Dump:
    """Read a dump, without its values. Raises StoreError if it is none, or holds more than tensors."""
    with wrap_read_errors(folder):
        places = list(_find_msprobe(folder)) or list(_find_sglang(folder))
    if not places:
        raise StoreError(
            f"{folder}: no dump; give the folder of SGLang's dumper (step=..___name=..pt) or of msprobe "
            f"({INDEX}, with task: tensor)"
        )
    first_step = min(place.step for place in places)
    counts: Counter[str] = Counter()
    tensors: list[CapturedTensor] = []
    paths: dict[str, Path] = {}
    for place in sorted(places, key=lambda place: place.order):
        values = _load(place.path)
        if values is None:
            continue
        labels = {"step": f"+{place.step - first_step}" * (place.step > first_step), "rank": place.rank or ""}
        marks = ",".join(f"{key}={value}" for key, value in labels.items() if value)
        module = display_safe(place.name) + f"[{marks}]" * bool(marks)
        counts[module] += 1
        module += f"#{counts[module]}" * (counts[module] > 1)
        tensor = CapturedTensor(
            index=len(tensors),
            kind=_kind(place.name),
            module=module,
            shape=tuple(values.shape),
            dtype=_dtype(values),
        )
        tensors.append(tensor)
        paths[tensor.name] = place.path
    return Dump(folder=folder, step=first_step, model="", tensors=tuple(tensors), paths=paths)


def _kind(name: str) -> Kind:
    if name.startswith("grad__") or ".backward." in name or ".parameters_grad" in name:
        return "gradient"
    return "parameter" if name.startswith("param__") or ".parameters." in name else "activation"


def _dtype(values: Tensor) -> str:
    name = "float32" if values.dtype == torch.float64 else str(values.dtype).removeprefix("torch.")
    return name if name in MANTISSA_BITS else EXACT


def _load(path: Path) -> Tensor | None:
    """Return a file's tensor; None if it holds none. Raises StoreError if it is torn or holds code."""
    with wrap_read_errors(path):
        if exists(path) and not is_file(path):
            raise StoreError(f"{path}: not a regular file; dump it again")
        try:
            if path.suffix == ".npy":
                content: Any = torch.from_numpy(np.load(path, allow_pickle=False))
            else:
                mmap = zipfile.is_zipfile(path)
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            raise StoreError(
                f"{path}: damaged, or holds objects other than tensors, which could run code; dump tensors "
                "alone"
            ) from error
        except (RuntimeError, ValueError, EOFError, TypeError, LookupError, AttributeError) as error:
            raise StoreError(f"{path}: damaged; dump it again") from error
    value = content.get("value") if isinstance(content, dict) else content
    if not isinstance(value, Tensor) or not _has_plain_values(value):
        return None
    value = value.detach()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _has_plain_values(tensor: Tensor) -> bool:
    is_special = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return not is_special and tensor.layout == torch.strided


# --- SGLang's dumper ---


def _find_sglang(folder: Path) -> Iterator[Place]:
    for path in sorted(folder.glob("*.pt")) or _only_experiment(folder):
        tags = _read_tags(path.stem)
        if "name" not in tags or tags.get("recompute_status") == "recompute":
            continue
        step = next((_number(tags[tag]) for tag in STEP_TAGS if tag in tags), 0)
        rank = _number(tags.get("rank", "0"))
        index = _number(tags.get("dump_index", "0"))
        others = [f"{key}={value}" for key, value in tags.items() if key not in POSITION_TAGS]
        name = tags["name"] + f"[{','.join(others)}]" * bool(others)
        yield Place(order=(step, index, rank, path.name), step=step, rank=rank, name=name, path=path)


def _only_experiment(folder: Path) -> list[Path]:
    """Return the files of the dumper's only experiment. Raises StoreError if there are several."""
    experiments = sorted({path.parent for path in folder.glob("*/*.pt") if "name" in _read_tags(path.stem)})
    if len(experiments) > 1:
        names = ", ".join(path.name for path in experiments[:4])
        raise StoreError(f"{folder}: {len(experiments)} dumps ({names} ...); give the folder of one")
    return sorted(experiments[0].glob("*.pt")) if experiments else []


def _read_tags(stem: str) -> dict[str, str]:
    """Return the tags in a file's name; a value may contain the separator."""
    tags: dict[str, str] = {}
    for part in stem.split("___"):
        key, separator, value = part.partition("=")
        if separator and key.isidentifier():
            tags[key] = value
        elif tags:
            tags[[*tags][-1]] += f"___{part}"
    return tags


def _number(text: str) -> int:
    match = re.search(r"\d+", text)
    return int(match[0]) if match and len(match[0]) < 16 else 0


# --- msprobe ---


def _find_msprobe(folder: Path) -> Iterator[Place]:
    patterns = (INDEX, f"rank*/{INDEX}", f"proc*/{INDEX}", f"step*/*/{INDEX}")
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        below = path.relative_to(folder).parts[:-1]
        step = next((_number(part) for part in below if part.startswith("step")), 0)
        rank = next((_number(part) for part in below if part.startswith("rank")), 0)
        yield from _find_in_index(path, step, rank)


def _find_in_index(path: Path, step: int, rank: int) -> Iterator[Place]:
    entries = read_json(path, max_bytes=MAX_JSON_BYTES).get("data")
    if not isinstance(entries, Mapping):
        raise StoreError(f"{path}: without data; dump it again")
    last = _last_inside(path.with_name(TREE), [*entries])
    num_tensors = 0
    for index, (name, entry) in enumerate(entries.items()):
        for category, values in entry.items() if isinstance(entry, Mapping) else ():
            for data_name in _data_names(values):
                num_tensors += 1
                if Path(data_name).name != data_name:
                    raise StoreError(f"{path}: {name} names a file outside {TENSORS}; dump it again")
                order = (step, *(last[name] if category == "output" else (index, 0, 0)), rank, num_tensors)
                file = path.with_name(TENSORS) / data_name
                yield Place(order=order, step=step, rank=rank, name=Path(data_name).stem, path=file)
    if entries and not num_tensors:
        raise StoreError(f"{path}: statistics without tensors; dump with task: tensor")


def _data_names(values: Any) -> Iterator[str]:
    """Yield the file names in an entry of the index."""
    if isinstance(values, Mapping):
        if isinstance(values.get("data_name"), str):
            yield values["data_name"]
        else:
            for value in values.values():
                yield from _data_names(value)
    elif isinstance(values, list):
        for value in values:
            yield from _data_names(value)


def _last_inside(tree: Path, names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Return, by entry, the place of its outputs: after those of all modules inside it, innermost first."""
    above = read_json_or_empty(tree, MAX_JSON_BYTES)
    last = {name: index for index, name in enumerate(names)}
    depths: dict[str, int] = {}
    for index, name in enumerate(names):
        outer, chain = above.get(name), [name]
        while isinstance(outer, str) and outer in last and outer not in chain:
            last[outer] = max(last[outer], index)
            chain.append(outer)
            outer = above.get(outer)
        depths[name] = len(chain)
    return {name: (last[name], 1, -depths[name]) for name in names}


def main(folder: Path, paths: list[Path]) -> int:
    try:
        baseline, treatment, *repeats = map(read_dump, paths)
        errors = [measure_errors(baseline, repeat) for repeat in repeats]
        write_trace(folder, judge_trace(baseline, treatment, errors))
    except AbrunError as error:
        return report_refusal(error)
    return 0


if __name__ == "__main__":
    run_to_end(lambda: sys.exit(main(Path(sys.argv[1]), [*map(Path, sys.argv[2:])])))
