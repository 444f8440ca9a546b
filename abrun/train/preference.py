"""One step of direct preference optimisation, on the task's pairs of completions."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from abrun.recipe import Dpo
from abrun.rl.batch import Batch
from abrun.rl.losses import masked_mean, weighted
from abrun.rl.metrics import MetricParts, together
from abrun.rl.preferences import PreferenceLoss, dpo_loss, over_tokens, preference_metrics
from abrun.tasks import Example
from abrun.train.setup import Setup
from abrun.train.validation import Evaluation


class Preference:
    """The algorithm of a recipe with `algorithm: {type: dpo}`; the reference is the run's initial policy."""

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.config.algorithm, Dpo)
        self._setup, self._settings = setup, setup.config.algorithm
        self._reference = setup.make_reference()

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        setup = self._setup
        return self.update(self._pairs(setup.global_examples(step)[setup.share(setup.batch_size)]), step)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Reference log-probs and gradients of this rank's `batch`, whose rows alternate, and one update."""
        with self._setup.phases("reference_logprobs"):
            batch = self._with_reference(batch)
        objective = self._objective(batch)
        return self._setup.train_on(batch, objective, step) | {
            "train/num_valid_samples": objective.num_pairs,
            "train/global_valid_toks": objective.num_tokens,
        }

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """The loss on these pairs, and the share of them that the policy orders right. Collective.

        A pair's reward is its margin: 0 before the first update, which is not right.
        """
        setup = self._setup
        batch = self._with_reference(self._pairs(examples[setup.share(len(examples))]))
        logprobs, objective = setup.backend.logprobs(batch), self._objective(batch)
        no_entropy = torch.zeros_like(logprobs)  # the loss has no such term
        (loss,) = setup.total(float(objective.losses(batch, logprobs, no_entropy).sum()))
        margins = setup.gather(objective.preference_loss(batch, logprobs).margins.tolist())
        lengths = setup.gather(batch.token_mask[::2].sum(dim=1).tolist())
        accuracy = sum(margin > 0 for margin in margins) / len(margins)
        metrics = {"validation/loss": loss, "validation/accuracy": accuracy}
        return Evaluation(rewards=margins, lengths=lengths, metrics=metrics)

    def _pairs(self, examples: list[Example]) -> Batch:
        texts = [(one.prompt, text) for one in examples for text in (one.completion, one.rejected)]
        return self._setup.encoded(texts)

    def _with_reference(self, batch: Batch) -> Batch:
        batch = replace(batch, rows_together=2)
        return batch.having(reference_logprobs=self._reference.logprobs(batch))

    def _objective(self, batch: Batch) -> "PreferenceObjective":
        """Of the global batch that this rank's `batch` is a part of. Collective."""
        counts = len(batch) / 2, float(batch.token_mask.sum()), float(batch.token_mask[::2].sum())
        num_pairs, num_tokens, num_chosen_tokens = self._setup.total(*counts)
        return PreferenceObjective(
            settings=self._settings,
            num_pairs=num_pairs,
            num_tokens=num_tokens,
            num_chosen_tokens=num_chosen_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective:
    """DPO, with minus the mean log-prob of the chosen tokens where the recipe has it.

    See abrun.backends.Objective. The counts are of the global batch.
    """

    settings: Dpo
    num_pairs: float
    num_tokens: float  # of both completions
    num_chosen_tokens: float

    def losses(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        preference = self.preference_loss(batch, logprobs)
        shares = over_tokens(preference.loss / self.num_pairs, batch.token_mask)
        if not self.settings.sft_coefficient:
            return shares
        chosen = batch.token_mask.clone()
        chosen[1::2] = False
        weights = chosen.double() * self.settings.sft_coefficient / self.num_chosen_tokens
        return shares + weighted(-logprobs, weights)

    def metrics(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> MetricParts:
        sums = {
            "train/loss": self.losses(batch, logprobs, entropy).sum(),
            "train/entropy": masked_mean(entropy.double(), batch.token_mask, self.num_tokens),
        }
        of_pairs = preference_metrics(self.preference_loss(batch, logprobs), num_pairs=self.num_pairs)
        return together(MetricParts(sums=sums, maxima={}, minima={}), of_pairs)

    def preference_loss(self, batch: Batch, logprobs: Tensor) -> PreferenceLoss:
        assert batch.reference_logprobs is not None
        return dpo_loss(
            logprobs,
            batch.reference_logprobs,
            batch.token_mask,
            beta=self.settings.beta,
            logprob_reduction=self.settings.logprob_reduction,
        )
