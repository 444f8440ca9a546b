"""A capture against plain forward hooks, autograd and AdamW on the stock network, one sequence at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from abrun.runs.captures import Capture
from abrun.tools.trace.command import read_replicas
from abrun.tools.trace.judge import judge_trace
from abrun.trainer.models.weights import open_network
from abrun.trainer.seeds import derive_seed
from tests.tools.trace.captured import capture, config

PARTS = ("embed_tokens", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "norm")


def values_of(captured: Capture) -> dict[str, np.ndarray]:
    return {tensor.name: captured.read(tensor) for tensor in captured.tensors}


def sequences_of(values: dict[str, np.ndarray]) -> list[slice]:
    """Where the kept sequences start and end: each ends after its last completion token."""
    mask = values["activation:batch.token_mask"].astype(bool)
    ends = [index + 1 for index in np.flatnonzero(mask) if index + 1 == len(mask) or not mask[index + 1]]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def run_plain(network: Any, values: dict[str, np.ndarray]) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Every module's outputs by sequence, and a loss with the captured gradients by log-prob and entropy."""
    seen: dict[str, list[Tensor]] = {}
    for name, module in network.named_modules():
        if name.endswith(PARTS) or name.rpartition(".")[0].endswith("layers"):

            def hook(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                states = output[0] if isinstance(output, tuple) else output
                seen.setdefault(name, []).append(states[0].detach())

            module.register_forward_hook(hook)
    total = torch.zeros(())
    for sequence in sequences_of(values):
        token_ids = torch.tensor(values["activation:batch.token_ids"][sequence]).long()
        logprobs = network(token_ids[None]).logits[0, :-1].log_softmax(dim=-1)
        chosen = logprobs.gather(1, token_ids[1:, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        for output, name in ((chosen, "logprobs"), (entropy, "entropy")):
            total = total + (torch.tensor(values[f"gradient:loss.{name}"][sequence][1:]) * output).sum()
            seen.setdefault(f"lm_head.{name}", []).append(nn.functional.pad(output.detach(), (1, 0)))
    return seen, total


def test_a_capture_equals_plain_hooks_autograd_and_adamw(tmp_path: Path) -> None:
    run = config({"policy": {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.01}}})
    values = values_of(capture(tmp_path, run, "baseline", records=True))
    network: Any = open_network(run.model, weights=None, seed=derive_seed(0, "init"), decodes=False)
    seen, loss = run_plain(network, values)
    mask = values["activation:batch.token_mask"].astype(bool)
    for name, outputs in seen.items():
        expected = torch.cat(outputs).numpy()
        found = values[f"activation:{name}"]
        if name.startswith("lm_head"):
            expected, found = expected[mask], found[mask]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    modules = [name for name in values if name.startswith("activation:model.")]
    assert {name.removeprefix("activation:") for name in modules} == {
        name for name in seen if name.startswith("model.")
    }
    loss.backward()
    settings, parameters = run.policy.optimizer, dict(network.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        found = values[f"gradient:{name}"]
        np.testing.assert_allclose(found, parameter.grad, rtol=1e-3, atol=1e-6, err_msg=name)
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_grad_norm)
    assert norm > settings.max_grad_norm, "nothing is clipped"
    np.testing.assert_allclose(values["gradient:optimizer.grad_norm"], norm, rtol=1e-4)
    torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": settings.weight_decay if p.ndim > 1 else 0.0}
            for p in parameters.values()
        ],
        lr=float(values["update:optimizer.learning_rate"]),
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    ).step()
    for name, parameter in parameters.items():
        is_moved = parameter.grad.abs() > 1e-6  # below, rounding decides the sign of AdamW's first update
        expected = (parameter.detach() - before[name])[is_moved].numpy()
        np.testing.assert_allclose(
            values[f"update:{name}"][is_moved.numpy()], expected, rtol=2e-2, atol=1e-6, err_msg=name
        )


def test_activations_are_of_the_first_whole_sequences_that_fit(tmp_path: Path) -> None:
    full = values_of(capture(tmp_path, config(), "baseline", records=True))
    some = values_of(capture(tmp_path, config(), "some", max_tokens=30))
    kept = len(some["activation:batch.token_ids"])
    assert 10 < kept <= 30 and kept in {sequence.stop for sequence in sequences_of(full)}
    for name, values in some.items():
        expected = full[name]
        if name.startswith("activation:") or name.startswith("gradient:loss."):
            expected = expected[:kept]
        np.testing.assert_array_equal(values, expected, err_msg=name)


def test_replicas_move_every_output_and_train_on_the_same_rollouts(tmp_path: Path) -> None:
    captured = capture(tmp_path, config(), "baseline", records=True, replicas=2)
    baseline = values_of(captured)
    for replica in read_replicas(tmp_path):
        assert set(replica) == set(baseline)
        assert replica["activation:batch.token_ids"].largest == 0
        for name, error in replica.items():
            if name.startswith("activation:model."):
                size = np.sqrt(np.mean(baseline[name].astype(np.float64) ** 2))
                assert 1e-8 < error.root_mean_square / size < 1e-5, name
    first, second = read_replicas(tmp_path)
    assert first != second
    again = values_of(capture(tmp_path, config(), "again"))
    for name in baseline:
        np.testing.assert_array_equal(again[name], baseline[name], err_msg=name)


def test_a_changed_mask_is_named_although_the_other_tensors_end_with_it(tmp_path: Path) -> None:
    baseline = capture(tmp_path, config(), "baseline", records=True, replicas=2)
    filtered = capture(tmp_path, config({"algorithm": {"overlong_filtering": True}}), "filtered")
    result = judge_trace(baseline, filtered, read_replicas(tmp_path))
    first = next(tensor for tensor in result.tensors if tensor.ulps)
    assert first.name == "activation:batch.token_mask"
    assert {tensor.name for tensor in result.tensors if tensor.ulps} > {"activation:batch.token_ids"}
