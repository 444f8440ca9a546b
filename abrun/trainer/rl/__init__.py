"""Losses, advantages and metrics as pure functions on tensors.

Dimensions: B sequences, S positions, G completions of one prompt. In tensors [B, S], entry t belongs to token
t, and its log-prob is the log-prob OF token t. The token mask is 1 (or True) on the completion tokens of
valid samples. Masked positions may hold anything, NaN included. They are replaced before any arithmetic,
because 0 * NaN is NaN, in values and in gradients.
"""
