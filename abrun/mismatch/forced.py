"""An engine's log-probs of tokens that are given, not drawn."""

import torch
from torch import Tensor

from abrun import progress
from abrun.backends import Backend, Decoder
from abrun.models import Text
from abrun.recipe import Rollout
from abrun.rl.batch import Sequences
from abrun.rl.sampling import filtered_logprobs


@torch.no_grad()
def decoded_logprobs(
    policy: Backend, batch: Sequences, prompt_lengths: list[int], rollout: Rollout, text: Text
) -> Tensor:  # [B, S] float32, 0 outside of completions
    """Token by token with a key-value cache, left-padded, as the torch engine samples."""
    out = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
    size = rollout.batch_size or len(batch)
    with policy.decoding() as decoder:
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            _decode(decoder, batch[rows], prompt_lengths[rows], rollout, text, out[rows])
    return out


def _decode(
    decoder: Decoder,
    batch: Sequences,
    prompt_lengths: list[int],
    rollout: Rollout,
    text: Text,
    out: Tensor,  # [B, S], which is filled
) -> None:
    longest, device = max(prompt_lengths), batch.token_ids.device
    starts = torch.tensor(prompt_lengths, device=device)
    ends = starts + batch.token_mask.sum(dim=1)
    token_ids = torch.full((len(batch), longest), text.pad_id, device=device)
    for row, length in enumerate(prompt_lengths):
        token_ids[row, longest - length :] = batch.token_ids[row, :length]
    attention_mask = (torch.arange(longest, device=device) >= longest - starts[:, None]).long()
    cache, rows = None, torch.arange(len(batch), device=device)
    for step in range(int((ends - starts).max())):
        progress.beat()
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
        logits, cache = decoder(token_ids, attention_mask, position_ids, cache)
        running = starts + step < ends
        place = torch.where(running, starts + step, 0)
        token = torch.where(running, batch.token_ids[rows, place], text.pad_id)
        logprobs, _ = filtered_logprobs(
            logits / rollout.temperature, token, filters=rollout.filters, ignore_index=-1
        )
        out[rows[running], place[running]] = logprobs[running]
        attention_mask = torch.cat([attention_mask, running[:, None].long()], dim=1)
        token_ids = token[:, None]
