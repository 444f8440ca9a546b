"""One step of GRPO: sample groups of completions, judge them, and update the policy once.

Left out: several updates on one batch of rollouts, so the importance ratio of a step starts at 1 and clipping
acts only through rounding; the ratio, the clipping and their metrics are there all the same.
"""

import torch
from torch import Tensor

from abrun.backends.dtensor import DtensorBackend
from abrun.recipe import Grpo
from abrun.rl.advantages import group_advantages
from abrun.rl.batch import Batch, collate
from abrun.rl.losses import clipped_policy_loss, kl_penalty, reduce_loss
from abrun.rl.metrics import MetricParts, policy_metrics
from abrun.rollout import Completion, RolloutEngine
from abrun.rollout.torch_engine import TorchEngine
from abrun.tasks import Example
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

        def loss(microbatch: Batch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, MetricParts]:
            return self._loss(microbatch, logprobs, entropy, num_tokens, num_sequences)

        return setup.train_on(batch, loss, step) | {
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
            rewards = self._rewards(examples, completions)
        batch = collate(
            prompts,
            [completion.token_ids for completion in completions],
            pad_id=setup.model.pad_id,
            logprobs=[completion.logprobs for completion in completions],
        ).to(setup.device)
        return self._with_advantages(batch, rewards), self._rollout_metrics(prompts, completions, rewards)

    def _rewards(self, examples: list[Example], completions: list[Completion]) -> Tensor:
        decode = self._setup.model.decode
        pairs = zip(examples, completions, strict=True)
        rewards = [
            self._setup.task.reward(example, decode(completion.token_ids)) for example, completion in pairs
        ]
        return torch.tensor(rewards)

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

    def _loss(
        self, batch: Batch, trainer_logprobs: Tensor, entropy: Tensor, num_tokens: float, num_sequences: float
    ) -> tuple[Tensor, MetricParts]:
        settings, mask = self._settings, batch.token_mask
        assert batch.old_logprobs is not None and batch.advantages is not None
        policy_loss = clipped_policy_loss(
            trainer_logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        reduction = {
            "loss_reduction": settings.loss_reduction,
            "num_tokens": num_tokens,
            "num_sequences": num_sequences,
            "max_completion_tokens": self._setup.config.rollout.max_new_tokens,
        }
        loss = reduce_loss(policy_loss.loss, mask, **reduction)
        parts = policy_metrics(
            batch, trainer_logprobs, entropy, policy_loss, num_tokens=num_tokens, num_sequences=num_sequences
        )
        if batch.reference_logprobs is not None:
            penalty = kl_penalty(
                trainer_logprobs, batch.reference_logprobs, mask, estimator=settings.kl_estimator
            )
            penalty = reduce_loss(penalty, mask, **reduction)
            parts.sums["train/kl_penalty"] = penalty.detach().double()
            loss = loss + settings.kl_coefficient * penalty
        if settings.entropy_coefficient:
            loss = loss - settings.entropy_coefficient * reduce_loss(entropy, mask, **reduction)
        parts.sums["train/loss"] = loss.detach().double()
        return loss, parts


def _flipped(advantages: Tensor) -> Tensor:  # [B, S]
    """The planted fault: the wrong sign at every second position."""
    sign = torch.ones(advantages.shape[1], device=advantages.device)
    sign[::2] = -1
    return advantages * sign
