"""One step of supervised fine-tuning: imitate the task's reference completions."""

from torch import Tensor

from abrun.rl.batch import Batch, collate
from abrun.rl.losses import masked_mean
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

        def loss(microbatch: Batch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, MetricParts]:
            share = masked_mean(-logprobs, microbatch.token_mask, num_tokens)
            uncertainty = masked_mean(entropy.detach(), microbatch.token_mask, num_tokens)
            sums = {"train/loss": share.detach().double(), "train/entropy": uncertainty.double()}
            return share, MetricParts(sums=sums, maxima={}, minima={})

        return self._setup.train_on(batch, loss, step) | {
            "train/num_valid_samples": num_sequences,
            "train/global_valid_toks": num_tokens,
        }
