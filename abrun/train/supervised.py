"""One step of supervised fine-tuning: imitate the task's reference completions."""

import math
from dataclasses import dataclass

from torch import Tensor

from abrun.rl.batch import Batch
from abrun.rl.losses import masked_mean, weighted
from abrun.rl.metrics import MetricParts
from abrun.tasks import Example
from abrun.train.setup import Setup
from abrun.train.validation import Evaluation


class Supervised:
    """The algorithm of a recipe with `algorithm: {type: sft}`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        setup = self._setup
        return self.update(self._batch(setup.global_examples(step)[setup.share(setup.batch_size)]), step)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Gradients of this rank's `batch` and one optimizer step."""
        num_tokens, num_sequences = self._setup.total(float(batch.token_mask.sum()), len(batch))
        return self._setup.train_on(batch, SupervisedObjective(num_tokens=num_tokens), step) | {
            "train/num_valid_samples": num_sequences,
            "train/global_valid_toks": num_tokens,
        }

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """The loss on these examples; a prompt's reward is minus its own. Collective."""
        setup = self._setup
        batch = self._batch(examples[setup.share(len(examples))])
        logprobs = setup.backend.logprobs(batch).double()  # 0 outside of the mask
        lengths = setup.gather(batch.token_mask.sum(dim=1).tolist())
        sums = setup.gather(logprobs.sum(dim=1).tolist())
        return Evaluation(
            rewards=[total / max(length, 1) for total, length in zip(sums, lengths, strict=True)],
            lengths=lengths,
            metrics={"validation/loss": -math.fsum(sums) / sum(lengths)},
        )

    def _batch(self, examples: list[Example]) -> Batch:
        return self._setup.encoded([(example.prompt, example.completion) for example in examples])


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedObjective:
    """Minus the log-prob, its mean over the completion tokens; see abrun.backends.Objective."""

    num_tokens: float  # of the global batch

    def losses(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return weighted(-logprobs, batch.token_mask.double() / self.num_tokens)

    def metrics(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> MetricParts:
        sums = {
            "train/loss": self.losses(batch, logprobs, entropy).sum(),
            "train/entropy": masked_mean(entropy.double(), batch.token_mask, self.num_tokens),
        }
        return MetricParts(sums=sums, maxima={}, minima={})
