"""Sample completions of a step for inspection: prompt, text, reward and log-prob error."""

import torch
from torch import Tensor

from abrun.recipe.run import KeptSamples
from abrun.rl.batch import RolloutBatch
from abrun.runs.samples import Sample
from abrun.train.setup import RunSetup

INTERVAL = 10  # steps
MAX_TEXT_LENGTH = 4000  # characters of a recorded text


def is_due(settings: KeptSamples | None, step: int) -> bool:
    """Return True at the first step and at every tenth."""
    return settings is not None and (step == 1 or step % INTERVAL == 0)


def collect_samples(setup: RunSetup, batch: RolloutBatch, group_size: int) -> list[Sample]:
    """Return the first completion of each of the first prompts, before the step's first update. Collective.

    Arms with the same seed start a step with the same prompts, so that their samples can be compared side by
    side. Each rank computes the samples of its own share; those of the first rank are the first of the step.
    The log-probs are computed without torch.compile, which would compile again for so few rows.
    `logprob_error` is therefore as exact as in training, but not bit-identical.
    """
    settings = setup.config.keep_samples
    assert settings is not None
    rows = torch.arange(0, len(batch), group_size, device=batch.token_ids.device)[: settings.prompts]
    chosen = batch[rows]
    with torch.compiler.set_stance("force_eager"):
        logprobs = setup.policy.compute_logprobs(chosen)
    error = (logprobs - chosen.inference_logprobs).abs()
    return [
        _make_sample(setup, *row)
        for row in zip(chosen.token_ids, chosen.token_mask, error, chosen.rewards, strict=True)
        if row[1].any()  # rows without tokens are masked in the loss
    ]


def _make_sample(setup: RunSetup, token_ids: Tensor, mask: Tensor, error: Tensor, reward: Tensor) -> Sample:
    tokens = token_ids[mask].tolist()
    prompt, text = setup.data.text.decode([token_ids[: int(mask.nonzero()[0])].tolist(), tokens])
    return Sample(
        prompt=_shorten(prompt),
        text=_shorten(text),
        reward=float(reward),
        logprob_error=float(error[mask].mean()),
        num_tokens=len(tokens),
        truncated=tokens[-1] not in setup.data.text.end_ids,
    )


def _shorten(text: str) -> str:
    """Keep both ends of a long text: a question or an answer may be at either."""
    half = MAX_TEXT_LENGTH // 2
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:half]} [...] {text[-half:]}"
