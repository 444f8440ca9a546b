"""One step of supervised fine-tuning: imitate the task's reference completions."""

from dataclasses import dataclass

from torch import Tensor

from abrun.rl.batch import Batch, collate
from abrun.rl.losses import masked_mean, weighted
from abrun.rl.metrics import MetricParts
from abrun.train.setup import Setup, check_length


class Supervised:
    """The algorithm of a recipe with `algorithm: {type: sft}`."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        setup, model = self._setup, self._setup.model
        examples = setup.global_examples(step)[setup.share(setup.batch_size)]
        prompts = [model.encode_prompt(example.prompt) for example in examples]
        completions = [model.encode_completion(example.completion) for example in examples]
        batch = collate(prompts, completions, pad_id=model.pad_id).to(setup.device)
        check_length(model, batch.token_ids.shape[1], "task: got an example")
        return self.update(batch, step)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Gradients of this rank's `batch` and one optimizer step."""
        num_tokens, num_sequences = self._setup.total(float(batch.token_mask.sum()), len(batch))
        return self._setup.train_on(batch, SupervisedObjective(num_tokens=num_tokens), step) | {
            "train/num_valid_samples": num_sequences,
            "train/global_valid_toks": num_tokens,
        }


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
