"""A capture is the same in every layout, but for rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from abrun.runs.captures import Capture, read_capture
from tests.tools.trace.captured import capture, config, differences

DTENSOR: dict[str, Any] = {"type": "dtensor"}
MEGATRON: dict[str, Any] = {"type": "megatron"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "packed": (1, {"packing": True, "micro_batch_size": None, "micro_batch_tokens": 40}),
    "packed data": (2, {"packing": True, "micro_batch_size": None, "micro_batch_tokens": 40}),
    "shared prompts": (1, {"packing": True, "share_prompts": True}),
    "fused": (1, {"logprobs": {"impl": "chunked", "chunk_size": 32}}),
    "checkpointed": (1, {"activation_checkpointing": "full"}),
    "context": (2, {"backend": {**DTENSOR, "context_parallel": 2}}),
    "tensor": (2, {"backend": {**DTENSOR, "tensor_parallel": 2}}),
    "sequence": (2, {"backend": {**DTENSOR, "tensor_parallel": 2, "sequence_parallel": True}}),
    "megatron": (1, {"backend": MEGATRON}),
    "megatron tensor": (2, {"backend": {**MEGATRON, "tensor_parallel": 2, "sequence_parallel": True}}),
    "megatron pipeline": (3, {"backend": {**MEGATRON, "pipeline_parallel": 3}}),
    "megatron context": (2, {"backend": {**MEGATRON, "context_parallel": 2}}),
    "megatron data": (2, {"backend": MEGATRON}),
}


EXPERTS = {"model": {"preset": "qwen3-moe-tiny"}}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert": (2, {"backend": {**DTENSOR, "expert_parallel": 2}}),
    "expert tensor": (2, {"backend": {**DTENSOR, "tensor_parallel": 2, "sequence_parallel": True}}),
    "megatron expert": (2, {"backend": {**MEGATRON, "expert_parallel": 2}}),
}
ROUNDING = 2e-5  # of a tensor's norm, in float32


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the capture of a single rank, by model and step."""
    folders = {}
    for name, changes, step in (("dense", {}, 1), ("experts", EXPERTS, 1), ("later", {}, 2)):
        folders[name] = tmp_path_factory.mktemp(name)
        capture(folders[name], config(changes), "baseline", step=step, records=True)
    return folders


def beyond_rounding(folder: Path, other: Capture) -> dict[str, float]:
    """What differs in activations and gradients; AdamW's first update amplifies the smallest gradients."""
    found = differences(read_capture(folder / "baseline"), other)
    return {name: d for name, d in found.items() if not d <= ROUNDING and not name.startswith("update:")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_a_capture_by_rounding_alone(recorded: dict[str, Path], layout: str) -> None:
    ranks, policy = LAYOUTS[layout]
    other = capture(recorded["dense"], config({"policy": policy}, ranks=ranks), layout.replace(" ", "-"))
    assert beyond_rounding(recorded["dense"], other) == {}


@pytest.mark.slow
def test_compiled_layers_are_observed_from_outside(recorded: dict[str, Path]) -> None:
    other = capture(recorded["dense"], config({"policy": {"compile": True}}), "compiled", timeout_s=600)
    baseline = read_capture(recorded["dense"] / "baseline")
    by_name = {tensor.name: tensor for tensor in other.tensors}
    inside = {tensor.name for tensor in baseline.tensors} - by_name.keys()
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    assert inside == {f"activation:model.layers.{layer}.{part}" for layer in range(3) for part in parts}
    outside = replace(baseline, tensors=tuple(t for t in baseline.tensors if t.name in by_name))
    found = differences(outside, replace(other, tensors=tuple(by_name[t.name] for t in outside.tensors)))
    assert not {name for name, d in found.items() if not (d <= ROUNDING or name.startswith("update:"))}


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_change_a_capture_by_rounding_alone(recorded: dict[str, Path], layout: str) -> None:
    ranks, policy = EXPERT_LAYOUTS[layout]
    run = config(EXPERTS, {"policy": policy}, ranks=ranks)
    other = capture(recorded["experts"], run, layout.replace(" ", "-"))
    assert beyond_rounding(recorded["experts"], other) == {}


@pytest.mark.parametrize("layout", ["fused", "sequence", "megatron", "megatron data"])
def test_a_later_step_starts_from_the_baselines_state(recorded: dict[str, Path], layout: str) -> None:
    ranks, policy = LAYOUTS[layout]
    run = config({"policy": policy}, ranks=ranks)
    other = capture(recorded["later"], run, layout.replace(" ", "-"), step=2)
    assert beyond_rounding(recorded["later"], other) == {}
    largest = max(d for d in differences(read_capture(recorded["later"] / "baseline"), other).values())
    assert largest < 0.02  # with moments of step one, an update does not amplify the smallest gradients
