"""A few of a step's completions, to be looked at: the prompt, the text, and what it was worth."""

import torch
from torch import Tensor

from abrun.recipe.run import KeptSamples
from abrun.rl.batch import RolloutBatch
from abrun.runs.samples import Sample
from abrun.train.setup import RunSetup

MAX_TEXT_LENGTH = 4000  # of a text that is kept


def is_due(settings: KeptSamples | None, step: int) -> bool:
    """At the first step and at every k-th."""
    return settings is not None and (step == 1 or step % settings.every == 0)


def collect_samples(setup: RunSetup, batch: RolloutBatch, group_size: int) -> list[Sample]:
    """The first completion of each of a step's first prompts, before its first update. Collective.

    Arms of one seed begin a step with the same prompts, so that these can be laid side by side. Every rank
    computes those of its own share; the first rank's are the step's first. Their log-probs are never those of
    compiled layers, which would be compiled once more for so few rows: `logprob_error` is then as exact, and
    not to the bit that of what is trained.
    """
    settings = setup.config.keep_samples
    assert settings is not None
    rows = torch.arange(0, len(batch), group_size, device=batch.token_ids.device)[: settings.prompts]
    chosen = batch[rows]
    with torch.compiler.set_stance("force_eager"):
        logprobs = setup.policy.logprobs(chosen)
    error = (logprobs - chosen.inference_logprobs).abs()
    return [
        _make_sample(setup, *row)
        for row in zip(chosen.token_ids, chosen.token_mask, error, chosen.rewards, strict=True)
        if row[1].any()  # else it was left out of the loss
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
    """Its two ends, where it is long: a prompt's question and a completion's answer may be at either."""
    half = MAX_TEXT_LENGTH // 2
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:half]} [...] {text[-half:]}"
