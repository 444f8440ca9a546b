"""Dumps of SGLang's dumper and of msprobe: their order, what is found in them, and what is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import StoreError
from abrun.runs.traces import TraceResult, read_trace
from abrun.tools.trace.dumps import main, read_dump

Dumper = Callable[..., Path]
LAYERS = ("layers.0", "layers.1", "layers.2")


def forward(fault: str | None = None, noise: int | None = None) -> dict[str, Tensor]:
    """Outputs of three layers inside a model, and gradients from the last back; with a fault in one layer.

    Computed in float64: `noise` alone, and not the processor, says how the float32 values are rounded.
    """
    draw = torch.Generator().manual_seed(0)
    states, values = torch.randn(6, 8, generator=draw).double(), dict[str, Tensor]()
    rounding = torch.Generator().manual_seed(noise or 0)
    for layer in LAYERS:
        states = torch.tanh(states @ torch.randn(8, 8, generator=draw).double())
        states = states * (1.01 if layer == fault else 1.0)
        if noise is not None:
            states = states * (1 + 1e-7 * torch.randn(states.shape, generator=rounding))
        values[layer] = states.float()
    values["grad"] = states.cos().float()
    return values


def dump_sglang(folder: Path, values: dict[str, Tensor], step: int = 3, rank: int = 0, **meta: Any) -> Path:
    """Files as DUMPER_ENABLE=1 writes them, in an order that names do not give."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, value) in enumerate(values.items(), start=9):
        layer = f"___layer_id={name[-1]}" if name in LAYERS else ""
        name = "layer_end__hidden_states" if layer else "grad__layer_end__hidden_states"
        tags = f"step={step}___rank={rank}___dump_index={index}___name={name}___recompute_status=disabled"
        torch.save({"value": value, "meta": {"step": step, **meta}}, folder / f"{tags}{layer}.pt")
    return folder


def dump_msprobe(folder: Path, values: dict[str, Tensor], suffix: str = ".pt") -> Path:
    """An L0 dump, in which the model around the layers begins first and ends last."""
    rank = folder / "step0" / "rank0"
    (rank / "dump_tensor_data").mkdir(parents=True)

    def saved(name: str, value: Tensor) -> list[dict[str, Any]]:
        path = rank / "dump_tensor_data" / f"{name}{suffix}"
        torch.save(value, path) if suffix == ".pt" else np.save(path, value.numpy())
        return [{"type": "torch.Tensor", "data_name": path.name}]

    top, data, tree = "Module.model.Model.forward.0", dict[str, Any](), dict[str, Any]()
    data[top] = {"input_args": [], "output": saved(f"{top}.output.0", values[LAYERS[-1]])}
    tree[top] = None
    for layer in LAYERS:
        name = f"Module.model.{layer}.Layer.forward.0"
        data[name] = {
            "input_args": [],
            "input_kwargs": {},
            "output": saved(f"{name}.output.0", values[layer]),
        }
        tree[name] = top
    name = "Module.model.layers.2.Layer.backward.0"
    data[name] = {"input": saved(f"{name}.input.0", values["grad"])}
    (rank / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L0", "data": data}))
    (rank / "construct.json").write_text(json.dumps(tree))
    return folder


DUMPERS: dict[str, Dumper] = {
    "sglang": dump_sglang,
    "msprobe": dump_msprobe,
    "msprobe npy": lambda folder, values: dump_msprobe(folder, values, ".npy"),
}
SECOND_LAYER = {
    "sglang": "activation:layer_end__hidden_states[layer_id=1]",
    "msprobe": "activation:Module.model.layers.1.Layer.forward.0.output.0",
    "msprobe npy": "activation:Module.model.layers.1.Layer.forward.0.output.0",
}


def traced(folder: Path, *dumps: Path) -> TraceResult:
    assert main(folder, [*dumps]) == 0
    result = read_trace(folder, TraceResult)
    assert result is not None
    return result


@pytest.mark.parametrize("kind", DUMPERS)
def test_the_first_faulty_layer_is_named(tmp_path: Path, kind: str) -> None:
    dump = DUMPERS[kind]
    baseline = dump(tmp_path / "a", forward())
    faulty = dump(tmp_path / "b", forward("layers.1", noise=50))
    repeats = [dump(tmp_path / f"again-{seed}", forward(noise=seed)) for seed in range(4)]
    result = traced(tmp_path, baseline, faulty, *repeats)
    assert result.first and result.first.name == SECOND_LAYER[kind]
    assert result.first.relative_error == pytest.approx(0.01, rel=0.01) and result.level == 0.2
    clean = traced(tmp_path, baseline, dump(tmp_path / "c", forward(noise=5)), *repeats)  # errs for one in 5
    assert clean.first is None


def test_without_a_repeat_nothing_is_judged(tmp_path: Path) -> None:
    baseline, other = (dump_msprobe(tmp_path / n, forward(noise=seed)) for n, seed in (("a", None), ("b", 1)))
    words = ["trace", str(baseline), str(other)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 4, done.output
    assert "no verdict: only a repeat" in done.output and "the arms" not in done.output
    assert CliRunner().invoke(app, ["trace", str(baseline), str(baseline)]).exit_code == 0


def test_one_repeat_gives_a_level_of_one_half(tmp_path: Path) -> None:
    baseline = dump_sglang(tmp_path / "a", forward())
    again = dump_sglang(tmp_path / "again", forward(noise=1))
    result = traced(tmp_path, baseline, dump_sglang(tmp_path / "b", forward("layers.2")), again)
    assert result.level == 0.5 and result.first
    assert result.first.name == "activation:layer_end__hidden_states[layer_id=2]"


def test_outputs_of_a_module_come_after_those_inside(tmp_path: Path) -> None:
    names = [tensor.module for tensor in read_dump(dump_msprobe(tmp_path / "a", forward())).tensors]
    layers = [f"Module.model.{layer}.Layer.forward.0.output.0" for layer in LAYERS]
    assert names == [
        *layers,
        "Module.model.Model.forward.0.output.0",
        "Module.model.layers.2.Layer.backward.0.input.0",
    ]


def test_ranks_later_steps_and_repeated_names_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "dump_1"
    for step, rank in ((3, 0), (3, 1), (4, 0)):
        dump_sglang(folder, forward(), step=step, rank=rank)
    values = torch.zeros(2, dtype=torch.int64)
    torch.save(values, folder / "forward_pass_id=3___rank=0___name=ids___dump_index=90.pt")  # of 2025
    torch.save(values, folder / "forward_pass_id=3___rank=0___name=ids___dump_index=91.pt")
    torch.save({"value": 7}, folder / "step=3___rank=0___dump_index=92___name=scalar.pt")
    dump = read_dump(tmp_path / "run")  # the folder of the only experiment
    modules = {tensor.module: tensor.dtype for tensor in dump.tensors}
    assert dump.step == 3 and len(modules) == len(dump.tensors) == 14
    assert modules["ids"] == modules["ids#2"] == "exact"
    assert {
        "grad__layer_end__hidden_states[rank=1]",
        "grad__layer_end__hidden_states[step=+1]",
    } <= modules.keys()


class Code:
    def __reduce__(self) -> Any:
        return print, ("code in a dump has run",)


def test_what_is_no_dump_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = dump_sglang(tmp_path / "good", forward())
    cases: dict[str, Path] = {"no such folder": tmp_path / "gone"}
    cases["no dump; give the folder of"] = tmp_path / "empty"
    cases["no dump; give the folder of"].mkdir()
    cases["holds objects other than tensors"] = dump_sglang(tmp_path / "code", forward(), extra=Code())
    torn = dump_sglang(tmp_path / "torn", forward())
    path = sorted(torn.glob("*.pt"))[0]
    path.write_bytes(path.read_bytes()[:300])
    cases["damaged; dump it again"] = torn
    cases["of step 5"] = dump_sglang(tmp_path / "later", forward(), step=5)
    cases["no tensor in common"] = tmp_path / "renamed"
    cases["no tensor in common"].mkdir()
    torch.save(torch.ones(2), cases["no tensor in common"] / "step=3___rank=0___dump_index=1___name=other.pt")
    statistics = dump_msprobe(tmp_path / "statistics", forward())
    index = statistics / "step0/rank0/dump.json"
    index.write_text(index.read_text().replace("data_name", "Max"))
    cases["dump with task: tensor"] = statistics
    outside = dump_msprobe(tmp_path / "outside", forward())
    index = outside / "step0/rank0/dump.json"
    index.write_text(
        index.read_text().replace('"Module.model.layers.0.Layer.forward.0.output.0.pt"', '"../x.pt"')
    )
    cases["names a file outside"] = outside
    lost = dump_msprobe(tmp_path / "lost", forward())
    (lost / "step0/rank0/dump_tensor_data/Module.model.layers.1.Layer.forward.0.output.0.pt").unlink()
    cases["layers.1.Layer.forward.0.output.0.pt"] = lost
    pipe = dump_msprobe(tmp_path / "pipe", forward()) / "step0/rank0/dump_tensor_data"
    first = sorted(pipe.iterdir())[0]
    first.unlink()
    os.mkfifo(first)
    cases["not a regular file"] = tmp_path / "pipe"
    deep = dump_msprobe(tmp_path / "deep", forward())
    (deep / "step0/rank0/construct.json").write_text('{"a":' * 100_000)
    cases["construct.json"] = deep
    several = tmp_path / "several"
    for name in ("dump_1", "dump_2"):
        dump_sglang(several / name, forward())
    cases["give the folder of one"] = several
    for problem, folder in cases.items():
        if folder.exists():
            assert main(tmp_path, [good, folder]) == 2
            error = capsys.readouterr().err
        else:
            done = CliRunner().invoke(app, ["trace", str(good), str(folder)])
            error = f"{done.exception}\n"
        assert problem in error and error.count("\n") == 1 and "code in a dump" not in error, (problem, error)
    done = CliRunner().invoke(app, ["trace", str(good), str(cases["damaged; dump it again"])])
    assert "damaged; dump it again" in str(done.exception)
    done = CliRunner().invoke(app, ["trace", str(good), str(good), "--arm", "b"])
    assert "--arm: given with dumps" in str(done.exception)


def test_values_keep_their_dtypes(tmp_path: Path) -> None:
    values = {
        name: torch.ones(3, dtype=getattr(torch, name)) for name in ("bfloat16", "float16", "float64", "bool")
    }
    dump = read_dump(dump_sglang(tmp_path / "a", values))
    assert [tensor.dtype for tensor in dump.tensors] == ["bfloat16", "float16", "float32", "exact"]
    assert dump.tensors[1].ulps(np.array([1.0, 1e-7])).tolist() == [2.0**-10, 2.0**-24]


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_torn_file_is_refused_wherever_it_ends(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "step=0___rank=0___dump_index=1___name=a.pt"
    torch.save({"value": torch.ones(4, 3)}, path, _use_new_zipfile_serialization=is_zip)
    whole = path.read_bytes()
    assert len(read_dump(tmp_path).tensors) == 1
    for length in (0, 1, 2, 10, *range(40, len(whole), 61), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="damaged") as raised:
            read_dump(tmp_path)
        assert "\n" not in str(raised.value)


def test_tensors_without_plain_values_are_left_out(tmp_path: Path) -> None:
    values = {
        "plain": torch.ones(2),
        "empty": torch.empty(0),
        "complex": torch.ones(2, dtype=torch.complex64),
        "sparse": torch.ones(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
    }
    dump = read_dump(dump_sglang(tmp_path, values))
    assert [tensor.shape for tensor in dump.tensors] == [(2,), (0,), (2, 2)]
    assert dump.read(dump.tensors[2]).tolist() == [[1, 0], [1, 0]]
