"""The quantities of a training step in order of dependence, each from the dump's own values before it.

Dimensions: B sequences, T positions. Formulas call the log-probs of the current policy c, of the policy at
the start of the step p, of the rollout engine g and of the reference r, and advantages A. See
docs/explanation/logprobs-and-losses.md and abrun/trainer/rl for their sources. These are written anew, with
bounds, so that the audit of abrun's own trainer does not share its faults.

A quirk is a known fault of a formula by name (`variants`); without quirks the formulas are the settings'.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from abrun.tools.audit.bounds import Bounded, Trilean
from abrun.tools.audit.reading import Dump
from abrun.tools.audit.settings import Settings

Flags = NDArray[np.bool_]
COUNT_EPSILON = 1e-8  # verl, OpenRLHF and NeMo-RL add it to counts that they divide by
ANYTHING = np.inf  # bounds of an element that cannot be recomputed


class Lacking(Exception):
    """A quantity cannot be recomputed because the dump lacks something."""


class Formulas:
    """All quantities of a dump under settings and quirks, each computed once."""

    def __init__(self, dump: Dump, settings: Settings | None = None, quirks: frozenset[str] = frozenset()):
        self.dump, self.settings, self.quirks = dump, settings or dump.settings, quirks
        self._expected: dict[str, Bounded] = {}
        self._mask: Flags | None = None

    def has(self, quirk: str) -> bool:
        return quirk in self.quirks

    def tensor(self, name: str) -> Bounded:
        if name not in self.dump.tensors:
            raise Lacking(f"the dump has no {name}")
        return self.dump.bounded(name)

    def expected(self, name: str) -> Bounded:
        if name not in self._expected:
            self._expected[name] = QUANTITIES[name](self)
        return self._expected[name]

    def value(self, name: str) -> Bounded:
        """Return the dump's own value of a quantity, recomputed if the dump lacks it."""
        return self.tensor(name) if name in self.dump.tensors else self.expected(name)

    def flags(self, name: str) -> Flags:
        return self.tensor(name).low > 0

    @property
    def mask(self) -> Flags:  # [B, T]
        """The tokens that the loss counts."""
        if self._mask is None:
            has_mask = "token_mask" in self.dump.tensors
            self._mask = self.misread(self.flags("token_mask")) if has_mask else self._expected_mask()
        return self._mask

    def _expected_mask(self) -> Flags:
        return self.expected("token_mask").low > 0

    def counts(self) -> NDArray[np.float64]:  # [B, 1], at least 1
        """Tokens of each sequence."""
        if self.has("padding_counted"):
            return np.full((len(self.mask), 1), float(self.mask.shape[1]))
        return np.maximum(self.mask.sum(axis=1, keepdims=True), 1).astype(np.float64)

    def misread(self, mask: Flags) -> Flags:
        """Return the mask that a known fault makes of a right one."""
        if self.has("mask_with_prompt"):
            return self.flags("attention_mask")
        if self.has("mask_everywhere"):
            return np.ones_like(mask)
        if self.has("mask_inverted"):
            return self.flags("attention_mask") & ~mask
        if self.has("mask_later") or self.has("mask_earlier"):
            mask = np.roll(mask, 1 if self.has("mask_later") else -1, axis=1)
            mask[:, 0 if self.has("mask_later") else -1] = False
        elif self.has("mask_without_last"):
            last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
            mask = mask & (np.arange(mask.shape[1]) != last[:, None])
        return mask


def _rolled(rows: Bounded) -> Bounded:
    return Bounded(np.roll(rows.low, 1, axis=0), np.roll(rows.high, 1, axis=0), rows.precision)


# Mask and rewards


def token_mask(step: Formulas) -> Bounded:  # [B, T]
    mask = step.flags("attention_mask") & ~step.flags("prompt_mask")
    if "excluded_mask" in step.dump.tensors:
        mask &= ~step.flags("excluded_mask")
    return Bounded.exact(step.misread(mask))


def rewards(step: Formulas) -> Bounded:  # [B]
    if "reward_parts" not in step.dump.tensors and "token_rewards" not in step.dump.tensors:
        raise Lacking("the dump has neither reward_parts nor token_rewards")
    if "reward_parts" in step.dump.tensors:
        parts = step.tensor("reward_parts")
        weights = step.settings.reward_weights
        if weights is not None and len(weights) != parts.low.shape[1]:
            raise Lacking(f"reward_weights has {len(weights)} values for {parts.low.shape[1]} reward_parts")
        total = (parts if weights is None else parts * np.array(weights)).sum(axis=1)
    else:
        total = step.tensor("token_rewards").where(step.mask).sum(axis=1)
    return _rolled(total) if step.has("rewards_of_next_row") else total


# Log-probs of the tokens whose logits the dump has


def trainer_logprobs(step: Formulas) -> Bounded:
    return _logprobs(step, "logits")


def old_logprobs(step: Formulas) -> Bounded:
    return _logprobs(step, "old_logits")


def _logprobs(step: Formulas, name: str) -> Bounded:
    """Return log softmax(z / T) of the tokens [B, T]; anything where the dump has no logits z."""
    logits = step.tensor(name)
    temperature = step.settings.temperature
    late = step.has("temperature_after_softmax")
    scaled = logits if late or temperature == 1 else logits / temperature
    shifted = scaled - scaled.high.max(axis=1, keepdims=True)
    normalizer = shifted.exp().sum(axis=1).increasing(np.log)

    rows, positions = step.tensor("logit_tokens").low.astype(int).T
    width = step.dump.tensors["token_ids"].shape[1]
    shift = step.has("logprob_of_next_token") - step.has("logprob_of_last_token")
    chosen = step.dump.tensors["token_ids"][rows, np.clip(positions + shift, 0, width - 1)].astype(int)
    picked = Bounded(
        *(bound[np.arange(len(rows)), chosen] for bound in (shifted.low, shifted.high)), shifted.precision
    )
    logprobs = picked - normalizer
    logprobs = logprobs / temperature if late else logprobs

    shape = step.dump.tensors["trainer_logprobs"].shape
    low, high = np.full(shape, -ANYTHING), np.full(shape, ANYTHING)
    low[rows, positions], high[rows, positions] = logprobs.low, logprobs.high
    return Bounded(low, high, logprobs.precision)


# Advantages


def _groups(step: Formulas) -> tuple[Bounded, Flags]:
    """Return the rewards [1, N] of the whole batch, and which of them are of each row's group [B, N]."""
    tensors = step.dump.tensors
    has_batch = "batch_rewards" in tensors
    everyone = step.tensor("batch_rewards") if has_batch else step.value("rewards")
    groups = step.tensor("group_ids").low
    if has_batch:
        all_groups = step.tensor("batch_group_ids").low
    else:
        all_groups = groups
    if step.has("misgrouped"):
        groups, all_groups = np.roll(groups, 1), np.roll(all_groups, 1)
    members = groups[:, None] == all_groups[None, :]
    size = step.settings.group_size
    if size is not None and (members.sum(axis=1) != size).any():
        raise Lacking(f"groups have other than {size} rewards, so the dump needs batch_rewards")
    return Bounded(everyone.low[None], everyone.high[None], everyone.precision), members


def baseline(step: Formulas) -> Bounded:  # [B]
    kind, own = step.settings.baseline, step.value("rewards")
    if kind == "none":
        return own * 0.0
    everyone, members = _groups(step)
    if kind == "batch_mean":
        members = np.ones_like(members)
    count = np.maximum(members.sum(axis=1), 1)
    if step.has("baseline_of_first"):
        first = members & (members.cumsum(axis=1) == 1)
        return everyone.where(first).sum(axis=1)
    total = everyone.where(members).sum(axis=1)
    if kind == "leave_one_out":
        return ((total - own) / np.maximum(count - 1, 1)).where(count > 1, own)
    return total / count


def _spread(step: Formulas) -> tuple[Bounded, Flags]:
    """Return the standard deviation [B] that each row's advantage is divided by, and where it is exactly 0."""
    everyone, members = _groups(step)
    kind, own = step.settings.advantage_std, step.value("rewards").low
    if kind == "batch":
        members = np.ones_like(members)
    elif kind == "leave_one_out":  # without one reward of the group that equals the row's own
        equal = members & (everyone.low == own[:, None])
        members = members & ~(equal & (equal.cumsum(axis=1) == 1))
    count = np.maximum(members.sum(axis=1), 1)
    mean = everyone.where(members).sum(axis=1) / count
    mean = Bounded(mean.low[:, None], mean.high[:, None], mean.precision)
    squares = (everyone - mean).square().where(members).sum(axis=1)
    variance = squares / np.maximum(count - step.settings.std_ddof, 1)
    # a program may compute E[R^2] - E[R]^2, whose rounding is that of the squares
    size = np.where(members, everyone.high**2, 0).sum(axis=1) / count
    variance = variance.rounded(variance.precision, 4.0, scale=size)
    largest = np.where(members, everyone.low, -np.inf).max(axis=1)
    smallest = np.where(members, everyone.low, np.inf).min(axis=1)
    is_zero = largest <= smallest
    return variance.maximum(0.0).sqrt().where(~is_zero), is_zero


def advantages(step: Formulas) -> Bounded:  # [B, 1] or [B, T]
    if step.settings.policy_loss in ("sft", "dpo"):
        raise Lacking(f"{step.settings.policy_loss} has none")
    if step.settings.estimator == "gae":
        return _generalized_advantages(step)
    advantage = step.value("rewards") - step.value("baseline")
    if step.settings.advantage_std != "none":
        spread, is_zero = _spread(step)
        divided = advantage / (spread + step.settings.std_epsilon)
        # NeMo-RL leaves A undivided where the std is 0
        advantage = divided.hull(advantage).where(is_zero, divided)
    advantage = _rolled(advantage) if step.has("advantage_of_next_row") else advantage
    advantage = -advantage if step.has("advantage_negated") else advantage
    return Bounded(advantage.low[:, None], advantage.high[:, None], advantage.precision)


def _generalized_advantages(step: Formulas) -> Bounded:  # [B, T]
    """Return A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = R_t + gamma V_(t+1) - V_t.

    Masked tokens are no steps: the step after a counted token is the next counted token.
    """
    tokens, values = step.tensor("token_rewards"), step.tensor("values")
    gamma, decay = step.settings.gamma, step.settings.gamma * step.settings.gae_lambda
    mask = step.mask
    zero = Bounded.exact(np.zeros(len(mask)), values.precision)
    columns: list[Bounded] = []
    next_value = next_advantage = zero
    for position in reversed(range(mask.shape[1])):
        reward, value = (
            Bounded(of.low[:, position], of.high[:, position], of.precision) for of in (tokens, values)
        )
        counted = mask[:, position]
        delta = reward + next_value * gamma - value
        advantage = delta + next_advantage * decay
        columns.append(advantage.where(counted))
        next_value, next_advantage = (
            value.where(counted, next_value),
            advantage.where(counted, next_advantage),
        )
    columns.reverse()
    low, high = (np.stack([getattr(column, end) for column in columns], axis=1) for end in ("low", "high"))
    return Bounded(low, high, values.precision)


# Per-token loss


def _old(step: Formulas) -> Bounded:
    """Return the log-probs p that the ratio is to."""
    if step.settings.ratio == "on_policy":
        return step.tensor("trainer_logprobs")
    old = step.tensor("inference_logprobs" if step.has("ratio_to_inference") else "old_logprobs")
    if step.has("old_times_temperature") or step.has("old_over_temperature"):
        temperature = step.settings.temperature
        old = old * temperature if step.has("old_times_temperature") else old / temperature
    return old


def ratio(step: Formulas) -> Bounded:  # [B, T] or [B, 1]
    if step.settings.policy_loss in ("reinforce", "sft", "dpo"):
        raise Lacking(f"{step.settings.policy_loss} has none")
    if step.settings.ratio == "on_policy":
        return Bounded.exact(np.ones(step.mask.shape))
    log_ratio = step.tensor("trainer_logprobs") - _old(step)
    log_ratio = (-log_ratio if step.has("ratio_inverted") else log_ratio).where(step.mask)
    if step.settings.ratio == "sequence":
        log_ratio = log_ratio.sum(axis=1, keepdims=True)
        log_ratio = log_ratio if step.has("ratio_of_sum") else log_ratio / step.counts()
    if step.settings.log_ratio_limit is not None:
        log_ratio = log_ratio.clip(-step.settings.log_ratio_limit, step.settings.log_ratio_limit)
    return log_ratio.exp()


def _bounds(step: Formulas) -> tuple[float, float]:
    low, high = step.settings.clip_low, step.settings.clip_high
    return -np.inf if low is None else 1 - low, np.inf if high is None else 1 + high


def clipped(step: Formulas) -> Bounded:  # [B, T]
    return _is_clipped(step).as_number()


def _is_clipped(step: Formulas) -> Trilean:
    if step.settings.policy_loss != "clipped":
        raise Lacking(f"{step.settings.policy_loss} has none")
    rho, advantage, (low, high) = step.value("ratio"), step.value("advantages"), _bounds(step)
    is_clipped = ((advantage > 0.0) & (rho > high)) | ((advantage < 0.0) & (rho < low))
    if step.settings.dual_clip is not None:
        side = advantage < 0.0 if not step.has("dual_clip_everywhere") else Trilean(*2 * [np.array(True)])
        is_clipped |= side & (rho > step.settings.dual_clip)
    return is_clipped


def kl(step: Formulas) -> Bounded:  # [B, T]
    if not step.settings.kl_coefficient:
        raise Lacking("kl_coefficient is 0")
    gap, estimator = _reference_gap(step), step.settings.kl_estimator
    if estimator == "k1":
        penalty = -gap
    elif estimator == "k2":
        penalty = gap.square() * 0.5
    else:
        penalty = gap.exp() - gap - 1.0
    if step.settings.kl_output_limit is not None:
        penalty = penalty.clip(-step.settings.kl_output_limit, step.settings.kl_output_limit)
    if step.settings.kl_weighted:
        penalty = penalty * step.value("ratio")
    return (-penalty if step.has("kl_negated") else penalty).where(step.mask)


def _reference_gap(step: Formulas) -> Bounded:
    """Return r - c [B, T]."""
    reference = step.tensor("old_logprobs" if step.has("kl_to_old") else "reference_logprobs")
    gap = (reference - step.tensor("trainer_logprobs")).where(step.mask)
    gap = -gap if step.has("kl_swapped") else gap
    limit = step.settings.kl_input_limit
    return gap if limit is None else gap.clip(-limit, limit)


def importance_weights(step: Formulas) -> Bounded:  # [B, T] or [B, 1]
    kind, low, high = (
        step.settings.importance_correction,
        step.settings.importance_low,
        step.settings.importance_high,
    )
    if kind == "none":
        raise Lacking("importance_correction is none")
    old = step.tensor("trainer_logprobs") if step.has("importance_of_current") else _old(step)
    gap = (old - step.tensor("inference_logprobs")).where(step.mask)
    gap = -gap if step.has("importance_inverted") else gap
    weight = gap.exp()
    if kind == "truncated":
        return weight.clip(low, high)
    if kind == "icepop":
        tested = weight
    else:
        total = gap.sum(axis=1, keepdims=True)
        is_product = kind.startswith("sequence_product") or step.has("importance_of_sum")
        tested = (total if is_product else total / step.counts()).exp()
        if kind == "sequence_product":
            return tested.clip(low, high)
        weight = tested if kind == "sequence_product_mask" else weight
    return weight.choose(~(tested < low) & ~(tested > high), weight * 0.0)


def token_losses(step: Formulas) -> Bounded:  # [B, T]
    """Return the loss of each token, with all its terms, before the normaliser."""
    settings = step.settings
    if settings.policy_loss == "dpo":
        raise Lacking("the loss of DPO is one of pairs")
    logprobs = step.tensor("trainer_logprobs")
    if settings.policy_loss == "sft":
        return (-logprobs).where(step.mask)
    advantage = step.value("advantages")
    if settings.policy_loss == "clipped":
        losses = _surrogate(step, advantage)
    else:
        weight = step.value("ratio").clip(*_bounds(step)) if settings.policy_loss == "cispo" else 1.0
        losses = -(advantage * weight * logprobs)
    if settings.importance_correction != "none":
        losses = losses * step.value("importance_weights")
    if settings.kl_coefficient:
        losses = losses + step.value("kl") * settings.kl_coefficient
    if settings.entropy_coefficient:
        losses = losses - step.tensor("entropy") * settings.entropy_coefficient
    return losses.where(step.mask)


def _surrogate(step: Formulas, advantage: Bounded) -> Bounded:
    rho = step.value("ratio")
    unbounded, bounded = -(advantage * rho), -(advantage * rho.clip(*_bounds(step)))
    losses = unbounded.minimum(bounded) if step.has("clip_optimistic") else unbounded.maximum(bounded)
    if step.settings.dual_clip is not None:
        limited = losses.minimum(-(advantage * step.settings.dual_clip))
        losses = limited if step.has("dual_clip_everywhere") else limited.choose(advantage < 0.0, losses)
    return losses


# From tokens to a number


def token_weights(step: Formulas) -> Bounded:  # [B, T]
    """Return the weight of each token in the loss; 0 if masked."""
    settings, mask, counts = step.settings, step.mask, step.counts()
    own_tokens = mask.size if step.has("padding_counted") else mask.sum()
    num_rows = len(mask) if step.has("empty_rows_counted") else mask.any(axis=1).sum()
    num_tokens = settings.num_tokens or max(own_tokens, 1)
    num_sequences = settings.num_sequences or max(num_rows, 1)
    divisor: float | NDArray[np.float64]
    if settings.aggregation == "token_mean":
        divisor = num_tokens
    elif settings.aggregation == "sequence_mean":
        divisor = num_sequences * counts
    elif settings.aggregation == "sequence_sum_constant":
        if settings.max_completion_tokens is None:
            raise Lacking("the settings have no max_completion_tokens")
        divisor = num_sequences * settings.max_completion_tokens
    elif settings.aggregation == "document_sum":
        divisor = num_sequences
    elif settings.aggregation == "prompt_mean":
        groups = step.tensor("group_ids").low
        of_group = groups[:, None] == groups[None, :]
        divisor = len(np.unique(groups)) * np.maximum(of_group @ counts, 1)
    else:
        divisor = 1.0
    precision = step.tensor("trainer_logprobs").precision
    exact = Bounded.exact(settings.loss_scale / np.broadcast_to(divisor, mask.shape), precision)
    padded = Bounded.exact(settings.loss_scale / (np.broadcast_to(divisor, mask.shape) + COUNT_EPSILON))
    return exact.hull(padded).where(mask).rounded(precision)


def loss(step: Formulas) -> Bounded:  # []
    if step.settings.policy_loss == "dpo":
        return _preference_loss(step)
    total = (step.value("token_losses").where(step.mask) * step.value("token_weights")).sum()
    if step.settings.auxiliary_coefficient:
        total = total + step.tensor("auxiliary_loss") * step.settings.auxiliary_coefficient
    return total


def _margins(step: Formulas) -> Bounded:  # [B / 2]
    """Return beta times the difference of the pairs' log-ratios; rows 2i are chosen, 2i + 1 rejected."""
    gap = (step.tensor("trainer_logprobs") - step.tensor("reference_logprobs")).where(step.mask)
    total = gap.sum(axis=1)
    if step.settings.logprob_reduction == "mean":
        total = total / step.counts()[:, 0]
    if len(total.low) % 2:
        raise Lacking("DPO needs pairs of rows, chosen and rejected")
    chosen, rejected = (Bounded(total.low[i::2], total.high[i::2], total.precision) for i in (0, 1))
    return (chosen - rejected) * (-step.settings.beta if step.has("pairs_swapped") else step.settings.beta)


def _preference_loss(step: Formulas) -> Bounded:
    margins, smoothing = _margins(step), step.settings.label_smoothing
    losses = (-margins).increasing(_softplus)
    if smoothing:
        losses = losses * (1 - smoothing) + margins.increasing(_softplus) * smoothing
    return losses.sum() / len(losses.low) * step.settings.loss_scale


def _softplus(values: NDArray[np.float64]) -> NDArray[np.float64]:  # -log sigmoid(-x)
    return np.logaddexp(0.0, values)


def logprob_gradients(step: Formulas) -> Bounded:  # [B, T]
    """Return the derivative of the loss by each trainer log-prob."""
    settings = step.settings
    if settings.policy_loss == "dpo":
        return _preference_gradients(step)
    weights = step.value("token_weights")
    logprobs = step.tensor("trainer_logprobs")
    if settings.policy_loss == "sft":
        return -weights
    advantage = step.value("advantages")
    if settings.policy_loss == "clipped":
        slopes = -(advantage * step.value("ratio"))
        slopes = (slopes * 0.0).choose(_is_clipped(step), slopes)
    else:
        weight = step.value("ratio").clip(*_bounds(step)) if settings.policy_loss == "cispo" else 1.0
        slopes = -(advantage * weight)
    if settings.importance_correction != "none":
        slopes = slopes * step.value("importance_weights")
    gradients = slopes.where(step.mask) * weights
    if settings.ratio == "sequence" and settings.policy_loss == "clipped":  # through the mean of the sequence
        gradients = (gradients.sum(axis=1, keepdims=True) / step.counts()) * step.mask
    if settings.kl_coefficient and not step.has("kl_without_gradient"):
        gradients = gradients + _kl_slopes(step) * settings.kl_coefficient * weights
    return gradients.where(step.mask) + logprobs * 0.0


def _kl_slopes(step: Formulas) -> Bounded:
    gap, settings = _reference_gap(step), step.settings
    slopes = {"k1": gap * 0.0 + 1.0, "k2": -gap, "k3": -(gap.exp() - 1.0)}[settings.kl_estimator]
    if settings.kl_weighted and settings.ratio == "token":
        slopes = slopes * step.value("ratio") + step.value("kl")
    for limited, limit in ((gap, settings.kl_input_limit), (step.value("kl"), settings.kl_output_limit)):
        if limit is not None:  # no gradient beyond it
            slopes = slopes.choose((limited < limit) & (limited > -limit), slopes * 0.0)
    return -slopes if step.has("kl_negated") else slopes


def _preference_gradients(step: Formulas) -> Bounded:
    margins, settings = _margins(step), step.settings
    sigmoid = (-margins).increasing(lambda values: 1 / (1 + np.exp(-values)))
    slopes = -(sigmoid - settings.label_smoothing) * (settings.beta * settings.loss_scale / len(margins.low))
    low, high = np.empty(2 * len(slopes.low)), np.empty(2 * len(slopes.low))
    low[::2], low[1::2] = slopes.low, -slopes.high
    high[::2], high[1::2] = slopes.high, -slopes.low
    rows = Bounded(low[:, None], high[:, None], slopes.precision)
    rows = rows / step.counts() if settings.logprob_reduction == "mean" else rows
    return rows.where(step.mask)


# In order of dependence
QUANTITIES: dict[str, Callable[[Formulas], Bounded]] = {
    of.__name__: of
    for of in (
        *(token_mask, rewards, trainer_logprobs, old_logprobs, baseline, advantages),
        *(ratio, clipped, kl, importance_weights, token_losses, token_weights, loss, logprob_gradients),
    )
}


# Metrics of the micro-batch, by abrun's names (docs/reference/metrics.md) without `train/`


def _token_mean(step: Formulas, values: Bounded) -> Bounded:
    return values.where(step.mask).sum() / max(step.mask.sum(), 1)


def _extreme(step: Formulas, values: Bounded, sign: int) -> Bounded:
    counted = (values * sign).where(step.mask, -np.inf)
    return Bounded(np.asarray(counted.low.max()), np.asarray(counted.high.max()), values.precision) * sign


def _mismatch(step: Formulas) -> Bounded:  # p - g
    return (_old(step) - step.tensor("inference_logprobs")).where(step.mask)


def _k3(gap: Bounded) -> Bounded:
    return gap.exp() - 1.0 - gap


def _absolute(values: Bounded) -> Bounded:
    return values.maximum(-values)


def _spread_out(step: Formulas, name: str) -> Bounded:  # [B, T]
    return step.value(name) + np.zeros(step.mask.shape)


METRICS: dict[str, Callable[[Formulas], Bounded]] = {
    "reward": lambda step: step.value("rewards").sum() / len(step.mask),
    "num_tokens": lambda step: Bounded.exact(step.mask.sum()),
    "mean_gen_tokens_per_sample": lambda step: Bounded.exact(step.mask.sum() / len(step.mask)),
    "advantages/mean": lambda step: _token_mean(step, _spread_out(step, "advantages")),
    "advantages/max": lambda step: _extreme(step, _spread_out(step, "advantages"), 1),
    "advantages/min": lambda step: _extreme(step, _spread_out(step, "advantages"), -1),
    "probs_ratio": lambda step: _token_mean(step, _spread_out(step, "ratio")),
    "probs_ratio_max": lambda step: _extreme(step, _spread_out(step, "ratio"), 1),
    "probs_ratio_min": lambda step: _extreme(step, _spread_out(step, "ratio"), -1),
    "probs_ratio_clamped": lambda step: _token_mean(step, _spread_out(step, "ratio").clip(*_bounds(step))),
    "clip_fraction": lambda step: _token_mean(step, _spread_out(step, "clipped")),
    "kl_penalty": lambda step: _token_mean(step, step.value("kl")),
    "entropy": lambda step: _token_mean(step, step.tensor("entropy")),
    "token_mult_prob_error": lambda step: _token_mean(step, _absolute(_mismatch(step)).exp()),
    "gen_kl_error": lambda step: _token_mean(step, _k3(_mismatch(step))),
    "policy_kl_error": lambda step: _token_mean(step, _k3(-_mismatch(step))),
    "sampling_importance_ratio": lambda step: _token_mean(
        step,
        _mismatch(step).exp()
        if step.settings.importance_correction == "none"
        else _spread_out(step, "importance_weights"),
    ),
}
