"""Losses, advantages and metrics as pure functions on tensors.

Letters used in this package: B sequences, S positions, G groups of completions of one prompt. Tensors [B, S]
are aligned so that entry t is about token t, and its log-prob is the log-prob OF token t; the token mask is 1
(or True) on completion tokens of valid samples. Masked positions may hold anything, NaN included: they are
replaced before they enter any arithmetic, since 0 * NaN is NaN, in a value and in a gradient alike.
"""
