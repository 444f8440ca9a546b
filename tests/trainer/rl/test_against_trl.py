"""The same tensors through TRL's own `_compute_loss` (trl 1.16.0) and through abrun's losses, in float64.

Slow, as importing trl is: `pip install -e '.[test,trl]'`, then `pytest -m slow -k against_trl`.

| what | TRL | abrun | agreement |
|---|---|---|---|
| GRPO | loss_type grpo | clipped, sequence_mean | 1e-12 |
| DAPO | loss_type dapo | clipped, token_mean | 1e-12 |
| BNPO | loss_type bnpo | clipped, token_mean | 1e-12 on one microbatch (1) |
| Dr.GRPO | loss_type dr_grpo | clipped, sequence_sum_constant | 1e-12 |
| GSPO | grpo, importance_sampling_level sequence | gspo, sequence_mean | 1e-12 |
| CISPO | cispo, epsilon_high e | cispo, clip_low 1, clip_high e - 1 | 1e-12 (2) |
| dual clip | delta | dual_clip | 1e-12 for delta >= 1 + epsilon_high (3) |
| KL in the loss | beta | kl_coefficient, k3 | 1e-12 within abrun's clamps (4) |
| KL in the reward | RLOO's beta | kl_in reward, k1 | same formula, read (5) |
| entropy bonus | entropy_coef | entropy_coefficient | 1e-12 under token_mean (6) |
| importance | token_truncate, token_mask | truncated, icepop | 1e-12 |
| importance | sequence_mask | sequence_mask | differs (7) |
| RLOO | RLOOTrainer | reinforce, leave_one_out | gradient at ratio 1, 1e-12 (8) |
| advantages | scale_rewards group, batch | normalize_over group, batch | 1e-4 / std, relative (9) |
| DPO | loss_type sigmoid | logprob_reduction sum | 1e-12 |
| DPO | loss_type sigmoid_norm | logprob_reduction mean | 1e-12, its metrics differ (10) |
| DPO with SFT | loss_type sigmoid, sft with loss_weights | sft_coefficient | 1e-12 on one microbatch (11) |

Values and gradients, relative. Why definitions differ:
1. TRL divides by the microbatch's own tokens, so its loss changes with the cut; abrun's does not.
2. TRL's epsilon_high is the bound itself, and there is no lower one.
3. TRL bounds the ratio whatever A is, so a lower delta also lowers the upper clip of A > 0.
4. abrun clamps the log-ratio to 20 and the penalty to 10; TRL does not.
5. rloo_trainer.py: k1 of the old policy summed over the sequence; no function of its own to call.
6. TRL adds the mean over the microbatch's tokens to every loss; abrun's is part of the reduction.
7. TRL bounds the product of a sequence's ratios and weighs by it; abrun bounds their geometric mean, which
   does not depend on the length, and weighs each token by its own.
8. TRL's ratio is of whole sequences, and clipped: one loss a sequence, where abrun's tokens have theirs.
9. TRL adds 1e-4 to the standard deviation, abrun 1e-6.
10. TRL's rewards and logps are always sums; abrun's are what its loss is made of.
11. TRL's mean is over the chosen tokens of the microbatch; abrun's over those of the global batch.

Not in abrun: SAPO, VESPO, LUSPO, off-policy sequence masking, a quantile of high-entropy tokens; of DPO,
other losses, divergences and weightings.
"""

import contextlib
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.trainer.rl.advantages import group_advantages
from abrun.trainer.rl.losses import (
    cispo_loss,
    clipped_policy_loss,
    dpo_loss,
    gspo_loss,
    importance_weights,
    kl_penalty,
    loss_weights,
    reinforce_loss,
    spread_over_tokens,
    weighted_losses,
)
from abrun.trainer.rl.metrics import preference_metrics

pytestmark = pytest.mark.slow
MAX_TOKENS = 9


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl.trainer.grpo_trainer", reason="needs trl: pip install -e '.[trl]'")


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    """Eight completions of up to seven tokens, with ratios on both sides of the bounds."""
    draw = torch.Generator().manual_seed(23)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    old = -0.5 - normal(8, 7).abs()
    lengths = torch.tensor([7, 3, 1, 5, 6, 2, 7, 4])
    return {
        "trainer": old + 0.25 * normal(8, 7) + 0.2 * normal(8, 1),
        "old": old,
        "inference": old + 0.3 * normal(8, 7),
        "reference": old + 0.3 * normal(8, 7),
        "entropy": normal(8, 7).abs(),
        "advantages": normal(8),
        "mask": torch.arange(7) < lengths[:, None],
    }


def of_trl(
    trl: Any, batch: dict[str, Tensor], *, weights: Tensor | None = None, **changes: Any
) -> tuple[float, Tensor]:
    """Loss and gradient of a trainer that is nothing but its settings."""
    trainer, entropy = (batch[name].clone().requires_grad_() for name in ("trainer", "entropy"))
    settings: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
        "beta": 0.0,
        "delta": None,
        "entropy_coef": 0.0,
    } | changes
    args = {"delta": settings["delta"], "use_bias_correction_kl": False, "steps_per_generation": 1}
    same = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    fake: Any = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**args),
        accelerator=same,
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (trainer, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        _entropy_bonus_enabled=settings["entropy_coef"] > 0,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )
    mask = batch["mask"].double()
    inputs = {
        "prompt_ids": torch.zeros(8, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(8, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(8, 7, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(fake, None, inputs)
    gradients = torch.autograd.grad(loss, (trainer, entropy), allow_unused=True)
    return loss.item(), torch.stack([torch.zeros_like(trainer) if g is None else g for g in gradients])


def of_abrun(
    batch: dict[str, Tensor],
    function: Any,
    reduction: Any,
    *,
    weights: Tensor | None = None,
    beta: float = 0.0,
    entropy_coefficient: float = 0.0,
    **bounds: Any,
) -> tuple[float, Tensor]:
    trainer, entropy = (batch[name].clone().requires_grad_() for name in ("trainer", "entropy"))
    mask = batch["mask"]
    losses = function(trainer, batch["old"], batch["advantages"][:, None].expand(8, 7), mask, **bounds).loss
    losses = losses if weights is None else losses * weights
    losses = losses + beta * kl_penalty(trainer, batch["reference"], mask, estimator="k3")
    counted = loss_weights(
        mask,
        loss_reduction=reduction,
        num_tokens=float(mask.sum()),
        num_sequences=8,
        max_completion_tokens=MAX_TOKENS,
    )
    loss = weighted_losses(losses - entropy_coefficient * entropy, counted).sum()
    return loss.item(), torch.stack(torch.autograd.grad(loss, (trainer, entropy)))


def assert_agree(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=1e-15)
    assert one[1].any()


CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
CISPO: dict[str, Any] = {"clip_low": 1.0, "clip_high": 0.2}
GSPO: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.15}
# TRL's settings; abrun's function, reduction and settings
SAME: dict[str, tuple[dict[str, Any], Any, str, dict[str, Any]]] = {
    "grpo": ({}, clipped_policy_loss, "sequence_mean", CLIP),
    "dapo": ({"loss_type": "dapo"}, clipped_policy_loss, "token_mean", CLIP),
    "bnpo": ({"loss_type": "bnpo"}, clipped_policy_loss, "token_mean", CLIP),
    "dr_grpo": ({"loss_type": "dr_grpo"}, clipped_policy_loss, "sequence_sum_constant", CLIP),
    "gspo": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
        gspo_loss,
        "sequence_mean",
        GSPO,
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, cispo_loss, "token_mean", CISPO),
    "dual clip": ({"delta": 1.5}, clipped_policy_loss, "sequence_mean", CLIP | {"dual_clip": 1.5}),
    "dual clip at the bound": (
        {"delta": 1.3},
        clipped_policy_loss,
        "sequence_mean",
        CLIP | {"dual_clip": 1.3},
    ),
    "kl, grpo": ({"beta": 0.1}, clipped_policy_loss, "sequence_mean", CLIP | {"beta": 0.1}),
    "kl, dapo": (
        {"loss_type": "dapo", "beta": 0.1},
        clipped_policy_loss,
        "token_mean",
        CLIP | {"beta": 0.1},
    ),
    "kl, cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.1},
        cispo_loss,
        "token_mean",
        CISPO | {"beta": 0.1},
    ),
    "entropy bonus": (
        {"loss_type": "dapo", "entropy_coef": 0.3},
        clipped_policy_loss,
        "token_mean",
        CLIP | {"entropy_coefficient": 0.3},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_losses_with_their_gradients(trl: Any, batch: dict[str, Tensor], case: str) -> None:
    theirs, function, reduction, settings = SAME[case]
    found = of_abrun(batch, function, reduction, **settings)
    assert_agree(found, of_trl(trl, batch, **theirs))
    assert "dual" not in case or found[0] != of_trl(trl, batch)[0]


def test_where_definitions_differ(trl: Any, batch: dict[str, Tensor]) -> None:
    """A dual clip below the upper bound, a penalty beyond its clamp, an entropy bonus under another mean."""
    found = of_abrun(batch, clipped_policy_loss, "sequence_mean", **CLIP, dual_clip=1.1)
    assert abs(found[0] - of_trl(trl, batch, delta=1.1)[0]) > 1e-3
    far = batch | {"reference": batch["reference"] + 3.0}  # exp(3) - 1 - 3 is above 10
    found = of_abrun(far, clipped_policy_loss, "sequence_mean", beta=0.1, **CLIP)
    assert found[0] < of_trl(trl, far, beta=0.1)[0] - 0.1
    found = of_abrun(batch, clipped_policy_loss, "sequence_mean", entropy_coefficient=0.3, **CLIP)
    assert abs(found[0] - of_trl(trl, batch, entropy_coef=0.3)[0]) > 1e-4


@pytest.mark.parametrize("correction", ["truncated", "icepop"])
def test_importance_weights_of_tokens(trl: Any, batch: dict[str, Tensor], correction: Any) -> None:
    """grpo_trainer.py, _generate_and_score_completions: clamp, or zero outside."""
    mask = batch["mask"]
    weights = importance_weights(
        batch["old"], batch["inference"], mask, correction=correction, low=0.8, high=1.2
    )
    ratio = ((batch["old"] - batch["inference"]) * mask).exp()
    theirs = (
        ratio.clamp(min=0.8, max=1.2)
        if correction == "truncated"
        else ratio.masked_fill((ratio < 0.8) | (ratio > 1.2), 0.0)
    )
    torch.testing.assert_close(weights[mask], theirs[mask], rtol=1e-14, atol=0)
    expected = of_trl(trl, batch, loss_type="dapo", weights=theirs, beta=0.1)
    found = of_abrun(batch, clipped_policy_loss, "token_mean", weights=weights, beta=0.1, **CLIP)
    assert_agree(found, expected)


def test_rloo_has_the_gradient_of_reinforce_at_ratio_one(trl: Any, batch: dict[str, Tensor]) -> None:
    from trl.trainer.rloo_trainer import RLOOTrainer  # pyright: ignore[reportMissingImports]

    trainer = batch["old"].clone().requires_grad_()
    mask = batch["mask"]
    fake: Any = SimpleNamespace(
        epsilon_low=0.2,
        epsilon_high=0.2,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (trainer, batch["entropy"], None),
    )
    inputs = {
        "prompt_ids": torch.zeros(8, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(8, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(8, 7, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": batch["advantages"],
        "old_logps": (batch["old"] * mask).sum(1),
    }
    (theirs,) = torch.autograd.grad(RLOOTrainer._compute_loss(fake, None, inputs), trainer)
    losses = reinforce_loss(trainer, batch["old"], batch["advantages"][:, None].expand(8, 7), mask).loss
    (ours,) = torch.autograd.grad(losses.sum() / 8, trainer)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
    assert ours.any()


@pytest.mark.parametrize("over", ["group", "batch"])
def test_advantages_up_to_the_epsilon(trl: Any, over: Any) -> None:
    """grpo_trainer.py: (rewards - mean_grouped_rewards) / (std_rewards + 1e-4), with its own nanstd."""
    rewards = torch.randn(20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grouped = rewards.view(-1, 5)
    std = trl.nanstd(grouped, dim=1)[:, None] if over == "group" else trl.nanstd(rewards)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    theirs = (centred / (std + 1e-4)).flatten()
    ours = group_advantages(rewards, 5, baseline="group_mean", normalize=True, normalize_over=over)
    smallest = std.min().item()
    torch.testing.assert_close(ours, theirs, rtol=1e-4 / smallest, atol=0)
    # The n / (n - 1) in nanstd, of two integers, is a float32: exact for 5, rounded for 20.
    torch.testing.assert_close(ours, (centred / (std + 1e-6)).flatten(), rtol=1e-7, atol=0)
    assert math.isfinite(smallest) and not torch.allclose(ours, theirs, rtol=1e-6, atol=0)


# --- preferences ---

DPO_METRICS = {
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/margin": "rewards/margins",
    "rewards/accuracy": "rewards/accuracies",
    "logprobs/chosen": "logps/chosen",
    "logprobs/rejected": "logps/rejected",
}


@pytest.fixture
def dpo_trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("trl.trainer.dpo_trainer", reason="needs trl: pip install -e '.[trl]'")
    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: contextlib.nullcontext())
    return module


def dpo_of_trl(
    dpo_trainer: Any, batch: dict[str, Tensor], **settings: Any
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of a trainer that is nothing but its settings, with models that know all.

    TRL's rows are all chosen completions, then all rejected ones; its log-probs have no first token, and are
    0 outside of the completions.
    """
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    trainer = batch["trainer"].clone().requires_grad_()

    def model_of(logprobs: Tensor) -> Any:
        outputs = SimpleNamespace(
            log_probs=torch.where(batch["mask"], logprobs, 0.0)[order],
            entropy=batch["entropy"],
            mean_logits=batch["entropy"],
            is_top1=batch["mask"],
        )
        return lambda **_: outputs

    metrics: dict[str, Any] = {"train": defaultdict(list)}
    fake: Any = SimpleNamespace(
        **{"loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.3} | settings,
        model=SimpleNamespace(training=True),
        ref_model=model_of(batch["reference"]),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=metrics,
    )
    inputs = {
        "input_ids": torch.zeros(8, 8, dtype=torch.int64),
        "attention_mask": torch.ones(8, 8, dtype=torch.int64),
        "completion_mask": torch.nn.functional.pad(batch["mask"].long(), (1, 0))[order],
    }
    loss = dpo_trainer.DPOTrainer._compute_loss(fake, model_of(trainer), inputs, False)
    (gradient,) = torch.autograd.grad(loss, trainer)
    return loss.item(), gradient, {ours: metrics["train"][theirs][0] for ours, theirs in DPO_METRICS.items()}


def dpo_of_abrun(
    batch: dict[str, Tensor], reduction: Any, sft_coefficient: float
) -> tuple[float, Tensor, dict[str, float]]:
    trainer, mask = batch["trainer"].clone().requires_grad_(), batch["mask"]
    found = dpo_loss(trainer, batch["reference"], mask, beta=0.3, logprob_reduction=reduction)
    chosen = mask & (torch.arange(8) % 2 == 0)[:, None]
    imitation = weighted_losses(-trainer, chosen.double() / chosen.sum()).sum()
    loss = spread_over_tokens(found.loss / 4, mask).sum() + sft_coefficient * imitation
    (gradient,) = torch.autograd.grad(loss, trainer)
    sums = preference_metrics(found, num_pairs=4).sums
    return loss.item(), gradient, {key: sums[f"train/{key}"].item() for key in DPO_METRICS}


@pytest.mark.parametrize(
    ("reduction", "sft_coefficient", "settings"),
    [
        ("sum", 0.0, {}),
        ("mean", 0.0, {"loss_types": ["sigmoid_norm"]}),
        ("sum", 0.25, {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.25]}),
    ],
)
def test_dpo(
    dpo_trainer: Any,
    batch: dict[str, Tensor],
    reduction: str,
    sft_coefficient: float,
    settings: dict[str, Any],
) -> None:
    offsets = torch.tensor([-1.0, 0, 1, 0, -1, 0, 1, 0], dtype=torch.float64)
    batch = batch | {"reference": batch["reference"] + offsets[:, None]}
    theirs = dpo_of_trl(dpo_trainer, batch, **settings)
    ours = dpo_of_abrun(batch, reduction, sft_coefficient)
    assert_agree(ours[:2], theirs[:2])
    same = ours[2] == pytest.approx(theirs[2], rel=1e-12)
    assert same if reduction == "sum" else not same
    assert 0 < ours[2]["rewards/accuracy"] < 1  # the example should have right and wrong pairs
