"""DPO end to end: it learns, ranks and cuts and log-prob paths change only rounding, files, validation."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from abrun.recipe.algorithms import Dpo
from abrun.recipe.run import OwnRunConfig
from abrun.runs.rundir import RunDir
from abrun.trainer.loop.dpo import PreferenceObjective
from abrun.trainer.loop.sft import SupervisedObjective
from abrun.trainer.rl.batch import Pairs
from tests.spawn import run_ranks
from tests.trainer.backends.policies import gradients, make_backend, plain_logprobs, rows, some_batch, tiny
from tests.trainer.loop.runs import Trainer, metrics_by_step, run_to_end, train_here
from tests.written_runs import make_run, metric_values, run_config

SETTINGS = Dpo(type="dpo", beta=0.5, sft_coefficient=0.2)
PATHS: dict[str, dict[str, Any]] = {  # settings of a policy; a microbatch has a pair or more
    "logits": {"micro_batch_size": 2},
    "unevenly": {"micro_batch_size": 6},
    "chunked": {"logprobs": {"impl": "chunked", "chunk_size": 40}, "micro_batch_size": 2},
    "one-pass": {"logprobs": {"impl": "chunked", "one_pass": True}, "micro_batch_size": 2},
    "packed": {"packing": True, "micro_batch_tokens": 50},
}


def dpo(*overrides: str) -> OwnRunConfig:
    algorithm = "algorithm={type: dpo, batch_size: 8, sft_coefficient: 0.1}"
    return run_config(algorithm, "steps=3", "task.max_operand=99", *overrides)


# --- the trainer's own arithmetic, on one rank and on two ---


def pairs_of_a_batch() -> Pairs:
    """Four pairs of different lengths; the reference is somewhere else."""
    batch = some_batch()
    draw = torch.Generator().manual_seed(3)
    reference = -4.6 + torch.randn(batch.token_ids.shape, generator=draw)
    return replace(batch, rows_per_sample=2).with_fields(Pairs, reference_logprobs=reference)


def objectives(batch: Pairs) -> dict[str, Any]:
    num_tokens = float(batch.token_mask.sum())
    preference = PreferenceObjective(
        settings=SETTINGS,
        num_pairs=len(batch) / 2,
        num_tokens=num_tokens,
        num_chosen_tokens=float(batch.token_mask[::2].sum()),
    )
    return {"dpo": preference, "sft": SupervisedObjective(num_tokens=num_tokens)}


def plain_losses(network: Any, batch: Pairs) -> dict[str, Tensor]:
    """Both losses by loops over the stock model's log-probs."""
    logprobs, _ = plain_logprobs(network, batch)
    log_ratios = [
        torch.stack([c - r for c, r, m in zip(*row, strict=True) if m]).sum()
        for row in zip(logprobs, batch.reference_logprobs, batch.token_mask, strict=True)
    ]
    preferences = [
        -torch.log(torch.sigmoid(SETTINGS.beta * (chosen - rejected)))
        for chosen, rejected in zip(log_ratios[::2], log_ratios[1::2], strict=True)
    ]
    imitation = -logprobs[::2][batch.token_mask[::2]].mean()
    return {
        "dpo": torch.stack(preferences).mean() + SETTINGS.sft_coefficient * imitation,
        "sft": -logprobs[batch.token_mask].mean(),
    }


def gradients_and_metrics(rank: int, world_size: int) -> dict[Any, Any]:
    """Of every algorithm and log-prob path, on this rank's pairs."""
    batch, found = pairs_of_a_batch(), {}
    size = len(batch) // world_size
    share = rows(batch, rank * size, (rank + 1) * size)
    for name, objective in objectives(batch).items():
        for path, policy in PATHS.items():
            if (name, path) != ("dpo", "one-pass"):
                backend = make_backend(**policy)
                parts = backend.forward_backward(share, objective)
                sums = {key: float(value) for key, value in parts.sums.items()}
                found[name, path] = gradients(backend), sums
    return found


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_path_has_the_gradients_of_plain_autograd(num_ranks: int, group: None) -> None:
    batch, network = pairs_of_a_batch(), tiny()
    by_rank = run_ranks(gradients_and_metrics, 2) if num_ranks == 2 else [gradients_and_metrics(0, 1)]
    for name, loss in plain_losses(network, batch).items():
        expected = dict(
            zip(
                dict(network.named_parameters()),
                torch.autograd.grad(loss, list(network.parameters()), retain_graph=True),
                strict=True,
            )
        )
        for path in PATHS:
            if (name, path) == ("dpo", "one-pass"):
                continue
            found = by_rank[0][name, path][0]
            for key, gradient in expected.items():
                torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)
                assert all(torch.equal(found[key], each[name, path][0][key]) for each in by_rank)
            sums = summed([each[name, path][1] for each in by_rank])
            assert sums["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
            assert sums == pytest.approx(summed([each[name, "logits"][1] for each in by_rank]), rel=1e-5)


def summed(parts: list[dict[str, float]]) -> dict[str, float]:
    return {key: sum(part[key] for part in parts) for key in parts[0]}


# --- whole runs ---


def test_the_first_step_is_at_the_reference(tmp_path: Path, warm_weights: Path, group: None) -> None:
    config = dpo("steps=2", "algorithm.sft_coefficient=0", "policy.optimizer.warmup_steps=0")
    first, second = train_here(make_run(tmp_path / "run", config, initial_weights=warm_weights)).values()
    assert first["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["train/rewards/margin"] == pytest.approx(0, abs=1e-6)
    assert first["train/num_valid_samples"] == 8 and first["train/global_valid_toks"] > 16
    assert first["train/logprobs/chosen"] < 0 and first["train/grad_norm"] > 0
    assert second["train/rewards/margin"] != 0
    assert second["train/rewards/margin"] == pytest.approx(
        second["train/rewards/chosen"] - second["train/rewards/rejected"], rel=1e-9
    )


@pytest.mark.slow
def test_two_ranks_change_only_rounding(tmp_path: Path, warm_weights: Path) -> None:
    validation = "validation={every: 3, num_prompts: 4}"
    for ranks in (1, 2):
        path = preference_file(tmp_path / "pairs.jsonl")
        config = dpo(f"cluster.cpu_ranks={ranks}", f"task={{type: preferences, path: {path}}}", validation)
        directory = make_run(tmp_path / str(ranks), config, initial_weights=warm_weights)
        run_to_end(directory, ranks=ranks)
    one, two = (metrics_by_step(tmp_path / name) for name in "12")
    for step in (1, 2, 3):
        for key in ("train/loss", "train/grad_norm", "train/logprobs/chosen"):
            assert two[step][key] == pytest.approx(one[step][key], rel=1e-3)
    assert two[3]["validation/loss"] == pytest.approx(one[3]["validation/loss"], rel=1e-3)


@pytest.mark.slow
def test_it_learns_and_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, warm_weights: Path) -> None:
    overrides = "algorithm={type: dpo, batch_size: 16}", "policy.optimizer.warmup_steps=0"
    config = run_config(*overrides, "steps=36")
    whole = make_run(tmp_path / "whole", config, initial_weights=warm_weights)
    run_to_end(whole)
    rows_of_steps = metrics_by_step(whole)
    assert sum(rows_of_steps[step]["train/rewards/accuracy"] for step in range(31, 37)) / 6 > 0.9
    assert rows_of_steps[36]["train/loss"] < 0.5 < rows_of_steps[1]["train/loss"]
    directory = make_run(tmp_path / "killed", config, initial_weights=warm_weights)
    trainer = Trainer(directory)
    trainer.wait_for_step(10)
    for process in trainer.processes:
        process.kill()
    trainer.wait()
    run_to_end(directory)
    assert metric_values(directory) == metric_values(whole)


# --- files, and validation without a verifier ---


def preference_file(path: Path) -> Path:
    """Sums, chosen right and rejected one off; 20 of them."""
    sums = [(i % 4, i) for i in range(20)]
    lines = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def of_files(tmp_path: Path) -> tuple[str, str]:
    """Overrides: a task of the preferences, and validation on its last four."""
    task = f"task={{type: preferences, path: {preference_file(tmp_path / 'pairs.jsonl')}}}"
    return task, "validation={every: 2, num_prompts: 4}"


def test_dpo_is_validated_by_loss_and_accuracy_on_held_out_pairs(
    tmp_path: Path, warm_weights: Path, group: None, of_files: tuple[str, str]
) -> None:
    config = run_config(
        "algorithm={type: dpo, batch_size: 8}", "policy.optimizer.warmup_steps=0", *of_files, "steps=3"
    )
    directory = make_run(tmp_path / "run", config, initial_weights=warm_weights)
    metrics, found = train_here(directory), RunDir(directory).validations()
    assert [step for step, row in metrics.items() if "validation/loss" in row] == [0, 2, 3] == list(found)
    assert (metrics[0]["validation/loss"], metrics[0]["validation/accuracy"]) == (math.log(2), 0.0)
    assert not found[0].rewards.any() and found[0].lengths.tolist() == [3.0] * 4  # two digits and the end
    for step in (2, 3):
        margins = torch.tensor(found[step].rewards)
        assert metrics[step]["validation/loss"] == pytest.approx(-F.logsigmoid(margins).mean().item())
        assert metrics[step]["validation/accuracy"] == (margins > 0).double().mean() and margins.any()
        assert "timing/validation/total_s" in metrics[step]


def test_sft_is_validated_by_its_loss_on_held_out_completions(
    tmp_path: Path, warm_weights: Path, group: None, of_files: tuple[str, str]
) -> None:
    """On preferences, of the chosen completion; the loss is that of transformers on the same texts."""
    from abrun.recipe.policy import Model
    from abrun.trainer.models.text import load_text
    from abrun.trainer.models.weights import load_network

    config = run_config("algorithm={type: sft, batch_size: 8}", *of_files, "steps=1")
    directory = make_run(tmp_path / "run", config, initial_weights=warm_weights)
    metrics, found = train_here(directory), RunDir(directory).validations()
    model = Model(path=str(warm_weights))
    text = load_text(model, weights=None)
    network: Any = load_network(model, weights=None, seed=0)
    losses = []
    for i in range(16, 20):
        (prompt,) = text.encode_prompts([f"{i % 4}+{i}="])
        (completion,) = text.encode_completions([str(i % 4 + i)])
        labels = torch.tensor([[-100] * len(prompt) + completion])
        with torch.no_grad():
            losses.append(network(torch.tensor([prompt + completion]), labels=labels).loss.item())
    assert found[0].rewards.tolist() == pytest.approx([-loss for loss in losses], rel=1e-4)
    assert metrics[0]["validation/loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)  # of equal lengths
    assert metrics[1]["validation/loss"] < metrics[0]["validation/loss"]
    assert "validation/accuracy" not in metrics[0]


def test_validation_by_the_loss_is_not_felt_by_training(
    tmp_path: Path, warm_weights: Path, group: None, of_files: tuple[str, str]
) -> None:
    task, validation = of_files
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "7+7=", "chosen": "14", "rejected": "15"}\n' * 4)
    values = {}
    for name, extra in (("with", [validation, f"validation.path={held_out}"]), ("without", [])):
        config = run_config("algorithm={type: dpo, batch_size: 4}", "steps=3", task, *extra)
        directory = make_run(tmp_path / name, config, initial_weights=warm_weights)
        train_here(directory)
        # Not the memory: FSDP keeps the root's weights gathered after a forward pass without a backward.
        volatile = ("validation/", "memory/")
        values[name] = {k: v for k, v in metric_values(directory).items() if not k.startswith(volatile)}
    assert values["with"] == values["without"]


def test_pairs_longer_than_the_model_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1", "chosen": "1", "rejected": "2" * 1030}) + "\n")
    config = run_config("algorithm={type: dpo, batch_size: 2}", f"task={{type: preferences, path: {path}}}")
    trainer = Trainer(make_run(tmp_path / "run", config))
    assert trainer.wait() == 2
    assert trainer.stderr.startswith(f"error: task: {path}, line 1: ") and trainer.stderr.count("\n") == 1
    assert "1032 tokens" in trainer.stderr and "allows 1024" in trainer.stderr
