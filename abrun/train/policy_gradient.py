"""One step of GRPO: sample groups of completions, judge them, and update the policy once.

Left out: several updates on one batch of rollouts, so the importance ratio of a step starts at 1 and clipping
acts only through rounding; the ratio, the clipping and their metrics are there all the same.

A completion that was truncated at `rollout.max_new_tokens` counts in every metric and in the loss like any
other, with the reward that the verifier gives to its text; `train/truncation_rate` says how many there were.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from abrun.backends.dtensor import DtensorBackend
from abrun.recipe import Grpo
from abrun.rl.advantages import group_advantages
from abrun.rl.batch import Batch, collate
from abrun.rl.losses import PolicyLoss, clipped_policy_loss, kl_penalty, loss_weights, weighted
from abrun.rl.metrics import MetricParts, policy_metrics
from abrun.rollout import Completion, RolloutEngine
from abrun.rollout.torch_engine import TorchEngine
from abrun.train.seeds import sampling_uniforms
from abrun.train.setup import Setup, check_length


class PolicyGradient:
    """The algorithm of a recipe with `algorithm: {type: grpo}`."""

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.config.algorithm, Grpo)
        self._setup = setup
        self._settings = setup.config.algorithm
        assert isinstance(setup.backend, DtensorBackend)  # whose modules the embedded engine runs
        self._engine: RolloutEngine = TorchEngine(setup.backend, setup.model, setup.config.rollout)
        self._reference = setup.make_reference() if self._settings.kl_coefficient > 0 else None

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        batch, rollout_metrics = self._rollout(step)
        return {**rollout_metrics, **self.update(batch, step)}

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Everything after the rollouts: log-probs of this rank's `batch`, gradients, one optimizer step."""
        setup, phases = self._setup, self._setup.phases
        micro_batch_size = setup.config.policy.micro_batch_size
        with phases("logprobs"):
            batch = batch.having(old_logprobs=setup.backend.logprobs(batch, micro_batch_size))
        if self._reference is not None:
            with phases("reference_logprobs"):
                reference = self._reference.logprobs(batch, micro_batch_size)
            batch = batch.having(reference_logprobs=reference)
        num_tokens, num_sequences = setup.total(float(batch.token_mask.sum()), len(batch))
        weights = loss_weights(
            batch.token_mask,
            loss_reduction=self._settings.loss_reduction,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_completion_tokens=setup.config.rollout.max_new_tokens,
        )
        objective = GrpoObjective(settings=self._settings, num_tokens=num_tokens, num_sequences=num_sequences)
        return setup.train_on(batch.having(loss_weights=weights), objective, step) | {
            "train/num_valid_samples": num_sequences,
            "train/global_valid_toks": num_tokens,
        }

    def _rollout(self, step: int) -> tuple[Batch, dict[str, float]]:
        setup, settings, rollout = self._setup, self._settings, self._setup.config.rollout
        repeated = [example for example in setup.global_examples(step) for _ in range(settings.group_size)]
        mine = setup.share(len(repeated))
        examples = repeated[mine]
        prompts = [setup.model.encode_prompt(example.prompt) for example in examples]
        longest = max(map(len, prompts)) + rollout.max_new_tokens
        check_length(setup.model, longest, f"rollout.max_new_tokens: got {rollout.max_new_tokens}")
        uniforms = sampling_uniforms(setup.seed, step, len(repeated), rollout.max_new_tokens)[mine]
        with setup.phases("generation"):
            completions = self._engine.generate(prompts, uniforms)
        with setup.phases("reward", memory=False):
            rewards = torch.tensor(setup.rewards(examples, completions))
        batch = collate(
            prompts,
            [completion.token_ids for completion in completions],
            pad_id=setup.model.pad_id,
            logprobs=[completion.logprobs for completion in completions],
        ).to(setup.device)
        return self._with_advantages(batch, rewards), self._rollout_metrics(prompts, completions, rewards)

    def _with_advantages(self, batch: Batch, rewards: Tensor) -> Batch:
        settings = self._settings
        advantages = group_advantages(
            rewards,
            settings.group_size,
            baseline=settings.advantage_baseline,
            normalize=settings.normalize_advantages,
        ).to(batch.token_ids.device)
        per_token = advantages[:, None].expand(batch.token_ids.shape)
        if self._setup.config.planted_fault == "flipped_advantages":
            per_token = _flipped(per_token)
        return batch.having(advantages=per_token)

    def _rollout_metrics(
        self, prompts: list[list[int]], completions: list[Completion], rewards: Tensor
    ) -> dict[str, float]:
        totals = self._setup.total(
            len(completions),
            float(rewards.double().sum()),
            sum(len(completion.token_ids) for completion in completions),
            sum(completion.truncated for completion in completions),
            sum(map(len, prompts)),
        )
        keys = ("reward", "mean_gen_tokens_per_sample", "truncation_rate", "mean_prompt_length")
        return {f"train/{key}": total / totals[0] for key, total in zip(keys, totals[1:], strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoObjective:
    """The clipped policy loss, with a KL penalty and an entropy bonus where the recipe has them.

    See abrun.backends.Objective. The counts are of the global batch.
    """

    settings: Grpo
    num_tokens: float
    num_sequences: float

    def losses(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        settings = self.settings
        losses = self._policy_loss(batch, logprobs).loss
        if batch.reference_logprobs is not None:
            losses = losses + settings.kl_coefficient * self._kl_penalty(batch, logprobs)
        if settings.entropy_coefficient:
            losses = losses - settings.entropy_coefficient * entropy
        assert batch.loss_weights is not None
        return weighted(losses, batch.loss_weights)

    def metrics(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> MetricParts:
        parts = policy_metrics(
            batch,
            logprobs,
            entropy,
            self._policy_loss(batch, logprobs),
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
        )
        if batch.reference_logprobs is not None:
            assert batch.loss_weights is not None
            penalty = weighted(self._kl_penalty(batch, logprobs), batch.loss_weights)
            parts.sums["train/kl_penalty"] = penalty.sum()
        parts.sums["train/loss"] = self.losses(batch, logprobs, entropy).sum()
        return parts

    def _policy_loss(self, batch: Batch, logprobs: Tensor) -> PolicyLoss:
        assert batch.old_logprobs is not None and batch.advantages is not None
        return clipped_policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.token_mask,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
        )

    def _kl_penalty(self, batch: Batch, logprobs: Tensor) -> Tensor:
        assert batch.reference_logprobs is not None
        return kl_penalty(
            logprobs, batch.reference_logprobs, batch.token_mask, estimator=self.settings.kl_estimator
        )


def _flipped(advantages: Tensor) -> Tensor:  # [B, S]
    """The planted fault: the wrong sign at every second position."""
    sign = torch.ones(advantages.shape[1], device=advantages.device)
    sign[::2] = -1
    return advantages * sign
