"""Supervised fine-tuning: the loss falls, and the final checkpoint is an ordinary Hugging Face one."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from abrun.errors import RecipeError
from abrun.recipe.policy import Model
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.data import Data, PrefetchedBatches, Texts, make_data
from abrun.trainer.loop.sft import SupervisedObjective
from abrun.trainer.models.text import load_text
from abrun.trainer.models.weights import load_network
from abrun.trainer.rl.batch import Sequences
from tests.snapshot import Snapshot
from tests.trainer.loop.runs import metrics_by_step, train_here
from tests.written_runs import make_run, run_config


def sft(*overrides: str):
    return run_config("algorithm={type: sft, batch_size: 16}", "steps=2", *overrides)


def test_loss_falls(warm_start: Path) -> None:
    rows = metrics_by_step(warm_start)
    loss = [row["train/loss"] for row in rows.values()]
    assert loss[0] == pytest.approx(math.log(99), rel=0.05)  # random weights: nearly uniform
    assert loss[-1] < 1.0 < loss[0]
    assert rows[1]["train/num_valid_samples"] == 32
    assert rows[1]["train/global_valid_toks"] == 64  # sums up to 6: a digit and the end token


def test_the_final_checkpoint_holds_the_trained_weights(warm_start: Path, warm_weights: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(warm_weights)
    trained = load_file(warm_start / "checkpoints" / "step-000045" / "rank-0.safetensors")
    parameters = dict(network.named_parameters())
    assert {f"weights/network.{name}" for name in parameters} == {
        k for k in trained if k.startswith("weights/")
    }
    for name, parameter in parameters.items():
        assert torch.equal(parameter, trained[f"weights/network.{name}"]), name
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_the_final_checkpoint_answers_through_transformers_alone(warm_weights: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(warm_weights)
    network: Any = AutoModelForCausalLM.from_pretrained(warm_weights)
    ours = load_text(Model(path=str(warm_weights)), weights=None)
    prompts = [f"{left}+{right}=" for left in range(4) for right in range(4)]
    num_right = 0
    for prompt in prompts:
        encoded = tokenizer(prompt, return_tensors="pt")
        assert encoded["input_ids"].tolist() == ours.encode_prompts([prompt])
        output = network.generate(**encoded, max_new_tokens=6, do_sample=False)[
            0, encoded["input_ids"].shape[1] :
        ]
        assert output[-1] == tokenizer.eos_token_id
        num_right += tokenizer.decode(output, skip_special_tokens=True) == str(eval(prompt[:-1]))
    assert num_right >= 8, f"{num_right} of {len(prompts)}"


def test_the_loss_is_the_mean_over_completion_tokens(tmp_path: Path, group: None) -> None:
    """Against the stock cross-entropy of transformers on the same examples."""
    from abrun.trainer.seeds import derive_seed
    from abrun.trainer.tasks import make_task

    config = sft("task.max_operand=99", "steps=1")
    directory = make_run(tmp_path / "run", config, seed=3)
    row = train_here(directory)[1]
    text = load_text(config.model, weights=None)
    network: Any = load_network(config.model, weights=None, seed=derive_seed(3, "init"))
    total, count = 0.0, 0
    for example in make_task(config.task).examples(derive_seed(3, "data"), 0, 16):
        (prompt,) = text.encode_prompts([example.prompt])
        (completion,) = text.encode_completions([example.completion])
        labels = torch.tensor([[-100] * len(prompt) + completion])
        with torch.no_grad():
            loss = network(torch.tensor([prompt + completion]), labels=labels).loss
        total, count = total + float(loss) * len(completion), count + len(completion)
    assert row["train/global_valid_toks"] == count
    assert row["train/loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_batch_without_a_token_to_learn_is_refused(tmp_path: Path, group: None, snapshot: Snapshot) -> None:
    """Empty completions, and a tokenizer that has no token to end them: the loss would be 0 / 0."""
    text = load_text(Model(preset="qwen2-tiny"), weights=None)
    text.tokenizer.eos_token = None
    data = make_data(sft(), text, make_ranks(torch.device("cpu"), {}), seed=0)
    assert data.encode([("1+2=", ""), ("1+2=", "3")]).token_mask.sum() == 1
    with pytest.raises(RecipeError) as refusal:
        data.encode([("1+2=", ""), ("2+2=", "")])
    snapshot(refusal.value)


def test_the_next_steps_batch_is_made_beside_a_step(monkeypatch: pytest.MonkeyPatch, group: None) -> None:
    text = load_text(Model(preset="qwen2-tiny"), weights=None)
    data = make_data(sft("steps=3"), text, make_ranks(torch.device("cpu"), {}), seed=0)
    made, collate_texts = list[tuple[bool, threading.Event]](), Data.collate_texts

    def noted(data: Data, texts: Texts) -> Sequences:
        here, done = threading.current_thread() is threading.main_thread(), threading.Event()
        made.append((here, done))
        try:
            return collate_texts(data, texts)
        finally:
            done.set()

    monkeypatch.setattr(Data, "collate_texts", noted)
    batches = PrefetchedBatches(
        data, lambda examples: [(one.prompt, one.completion) for one in examples], num_steps=3
    )
    for step in (1, 2, 3, 2):  # the last as after a failure, which nobody could foresee
        batch = batches.batch(step)
        if step < 3:
            assert made[-1][1].wait(10)  # while nobody asks for it
        whole = [(one.prompt, one.completion) for one in data.local_examples(step)]
        assert torch.equal(batch.token_ids, collate_texts(data, whole).token_ids)
    assert len(made) == 5 and not any(here for here, _ in made)


def test_the_objective_by_hand() -> None:
    """Two of four tokens of a global batch, and one under the mask."""
    for garbage in (-7.0, math.nan):
        batch = Sequences(
            token_ids=torch.zeros(1, 3, dtype=torch.int64), token_mask=torch.tensor([[True, False, True]])
        )
        logprobs = torch.tensor([[-1.0, garbage, -3.0]], requires_grad=True)
        objective = SupervisedObjective(num_tokens=4)
        losses = objective.losses(batch, logprobs, None)
        assert losses.shares.tolist() == [[0.25, 0.0, 0.75]]
        assert torch.autograd.grad(losses.shares.sum(), logprobs)[0].tolist() == [[-0.25, 0.0, -0.25]]
        sums = objective.metrics(batch, logprobs.detach(), None, losses).sums
        assert sums["train/loss"].item() == 1.0


def test_final_weights_only_where_asked(tmp_path: Path, group: None) -> None:
    directory = make_run(tmp_path / "run", sft())
    train_here(directory)
    assert not (directory / "checkpoints" / "final").exists()
