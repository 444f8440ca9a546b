"""The quantities of a training step in order of dependence, each from the dump's own values before it.

Dimensions: B sequences, T positions, N rewards of the batch. Formulas call the log-probs of the current
policy c, of the policy at the start of the step p, of the rollout engine g and of the reference r, and
advantages A; docs/explanation/logprobs-and-losses.md has their sources. They are written anew, with bounds,
so that an audit of abrun's own trainer does not share its faults.

A quirk is a known fault of a formula (`variants`); without quirks the formulas are the settings'.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from abrun.tools.audit.bounds import Bounded, Trilean
from abrun.tools.audit.reading import Dump
from abrun.tools.audit.settings import Settings

Flags = NDArray[np.bool_]
COUNT_EPSILON = 1e-8  # verl, OpenRLHF and NeMo-RL add it to counts that they divide by


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

    def flags(self, name: str) -> Flags:
        return self.tensor(name).low > 0

    def expected(self, name: str) -> Bounded:
        if name not in self._expected:
            self._expected[name] = QUANTITIES[name](self)
        return self._expected[name]

    def value(self, name: str) -> Bounded:
        """Return the dump's own value of a quantity, recomputed if the dump lacks it."""
        return self.tensor(name) if name in self.dump.tensors else self.expected(name)

    @property
    def mask(self) -> Flags:  # [B, T]
        """The tokens that the loss counts."""
        if self._mask is None:
            is_dumped = "token_mask" in self.dump.tensors
            self._mask = self.misread(self.flags("token_mask")) if is_dumped else token_mask(self).low > 0
        return self._mask

    @property
    def counts(self) -> NDArray[np.float64]:  # [B, 1], at least 1
        if self.has("padding_counted"):
            return np.full((len(self.mask), 1), float(self.mask.shape[1]))
        return np.maximum(self.mask.sum(axis=1, keepdims=True), 1).astype(np.float64)

    def misread(self, mask: Flags) -> Flags:
        """Return the mask that a known fault makes of a right one."""
        for quirk in self.quirks & MISREADINGS.keys():
            mask = MISREADINGS[quirk](self, mask)
        return mask


MISREADINGS: dict[str, Callable[[Formulas, Flags], Flags]] = {
    "mask_with_prompt": lambda step, mask: step.flags("attention_mask"),
    "mask_everywhere": lambda step, mask: np.ones_like(mask),
    "mask_inverted": lambda step, mask: step.flags("attention_mask") & ~mask,
    "mask_later": lambda step, mask: np.pad(mask, ((0, 0), (1, 0)))[:, :-1],
    "mask_earlier": lambda step, mask: np.pad(mask, ((0, 0), (0, 1)))[:, 1:],
    "mask_without_last": lambda step, mask: mask & (mask.cumsum(axis=1) < mask.sum(axis=1, keepdims=True)),
}


# Mask, rewards, and the log-probs of tokens whose logits the dump has


def token_mask(step: Formulas) -> Bounded:  # [B, T]
    mask = step.flags("attention_mask") & ~step.flags("prompt_mask")
    if "excluded_mask" in step.dump.tensors:
        mask &= ~step.flags("excluded_mask")
    return Bounded.exact(step.misread(mask))


def rewards(step: Formulas) -> Bounded:  # [B]
    if "reward_parts" in step.dump.tensors:
        parts, weights = step.tensor("reward_parts"), step.settings.reward_weights
        if weights is not None and len(weights) != parts.low.shape[1]:
            raise Lacking(f"reward_weights has {len(weights)} values for {parts.low.shape[1]} reward_parts")
        total = (parts if weights is None else parts * np.array(weights)).sum(axis=1)
    else:
        total = step.tensor("token_rewards").where(step.mask).sum(axis=1)
    return _row_before(total) if step.has("rewards_of_next_row") else total


def _row_before(rows: Bounded) -> Bounded:
    return rows[np.arange(len(rows.low)) - 1]


def trainer_logprobs(step: Formulas) -> Bounded:
    return _logprobs(step, "logits")


def old_logprobs(step: Formulas) -> Bounded:
    return _logprobs(step, "old_logits")


def _logprobs(step: Formulas, name: str) -> Bounded:
    """Return log softmax(z / T) of the tokens [B, T]; anything where the dump has no logits z."""
    logits, temperature = step.tensor(name), step.settings.temperature
    is_late = step.has("temperature_after_softmax")
    scaled = logits if is_late or temperature == 1 else logits / temperature
    shifted = scaled - scaled.high.max(axis=1, keepdims=True)
    normalizer = shifted.exp().sum(axis=1).increasing(np.log)

    rows, positions = step.tensor("logit_tokens").low.astype(int).T
    token_ids = step.dump.tensors["token_ids"].astype(int)
    moved = positions + step.has("logprob_of_next_token") - step.has("logprob_of_last_token")
    tokens = token_ids[rows, np.clip(moved, 0, token_ids.shape[1] - 1)]
    logprobs = shifted[np.arange(len(rows)), tokens] - normalizer
    logprobs = logprobs / temperature if is_late else logprobs

    low, high = (np.full(token_ids.shape, bound) for bound in (-np.inf, np.inf))
    low[rows, positions], high[rows, positions] = logprobs.low, logprobs.high
    return Bounded(low, high, logprobs.precision)


# Advantages


def _groups(step: Formulas, is_whole_batch: bool) -> tuple[Bounded, Flags]:
    """Return the rewards [1, N] of the batch, and which of them each row is compared with [B, N]."""
    has_batch = "batch_rewards" in step.dump.tensors
    everyone = step.tensor("batch_rewards") if has_batch else step.value("rewards")
    if is_whole_batch:
        return everyone[None], np.ones((len(step.mask), len(everyone.low)), bool)
    groups = step.tensor("group_ids").low
    all_groups = step.tensor("batch_group_ids").low if has_batch else groups
    if step.has("misgrouped"):
        groups, all_groups = np.roll(groups, 1), np.roll(all_groups, 1)
    members = groups[:, None] == all_groups[None]
    size = step.settings.group_size
    if size is not None and (members.sum(axis=1) != size).any():
        raise Lacking(f"groups have other than {size} rewards, so the dump needs batch_rewards")
    return everyone[None], members


def baseline(step: Formulas) -> Bounded:  # [B]
    kind, own = step.settings.baseline, step.value("rewards")
    if kind == "none":
        return own * 0.0
    everyone, members = _groups(step, kind == "batch_mean")
    if step.has("baseline_of_first"):
        return everyone.where(members & (members.cumsum(axis=1) == 1)).sum(axis=1)
    count, total = np.maximum(members.sum(axis=1), 1), everyone.where(members).sum(axis=1)
    if kind == "leave_one_out":
        return ((total - own) / np.maximum(count - 1, 1)).where(count > 1, own)
    return total / count


def _spread(step: Formulas) -> tuple[Bounded, Flags]:
    """Return the standard deviation [B] that each row's advantage is divided by, and where it is exactly 0."""
    kind = step.settings.advantage_std
    everyone, members = _groups(step, kind == "batch")
    if kind == "leave_one_out":  # without one reward of the group that equals the row's own
        equal = members & (everyone.low == step.value("rewards").low[:, None])
        members = members & ~(equal & (equal.cumsum(axis=1) == 1))
    largest, smallest = (np.where(members, everyone.low, edge) for edge in (-np.inf, np.inf))
    is_zero = largest.max(axis=1) <= smallest.min(axis=1)
    everyone, count = everyone.where(members), np.maximum(members.sum(axis=1), 1)
    deviations = (everyone - (everyone.sum(axis=1) / count)[:, None]).where(members)
    variance = deviations.square().sum(axis=1) / np.maximum(count - step.settings.std_ddof, 1)
    # a program may compute E[R^2] - E[R]^2, whose rounding is that of the squares
    variance = variance.rounded(variance.precision, 4.0, scale=(everyone.high**2).sum(axis=1) / count)
    return variance.sqrt().where(~is_zero), is_zero


def advantages(step: Formulas) -> Bounded:  # [B, 1] or [B, T]
    settings = step.settings
    if settings.estimator == "gae":
        return _generalized_advantages(step)
    advantage = step.value("rewards") - step.value("baseline")
    if settings.advantage_std != "none":
        spread, is_zero = _spread(step)
        divided = advantage / (spread + settings.std_epsilon)
        # NeMo-RL leaves A undivided where the std is 0
        advantage = divided.hull(advantage).where(is_zero, divided)
    advantage = _row_before(advantage) if step.has("advantage_of_next_row") else advantage
    return (-advantage if step.has("advantage_negated") else advantage)[:, None]


def _generalized_advantages(step: Formulas) -> Bounded:  # [B, T]
    """Return A_t = delta_t + gamma lambda A_(t+1), delta_t = R_t + gamma V_(t+1) - V_t, whitened if asked.

    Masked tokens are no steps: the step after a counted token is the next counted token.
    """
    settings, mask = step.settings, step.mask
    earned, values = step.tensor("token_rewards"), step.tensor("values")
    columns = []
    next_value = next_advantage = values[:, 0] * 0.0
    for column in reversed(range(mask.shape[1])):
        value, counted = values[:, column], mask[:, column]
        delta = earned[:, column] + next_value * settings.gamma - value
        advantage = delta + next_advantage * (settings.gamma * settings.gae_lambda)
        next_value, next_advantage = (
            value.where(counted, next_value),
            advantage.where(counted, next_advantage),
        )
        columns.insert(0, next_advantage)
    low, high = (np.stack([getattr(of, end) for of in columns], axis=1) for end in ("low", "high"))
    advantage = Bounded(low, high, values.precision).where(mask)
    if settings.advantage_std == "tokens":
        count = max(mask.sum(), 2)
        advantage = (advantage - advantage.sum() / count).where(mask)
        advantage = advantage / (
            (advantage.square().sum() / (count - settings.std_ddof)).sqrt() + settings.std_epsilon
        )
    return advantage


# Per-token loss


def _old(step: Formulas) -> Bounded:
    """Return the log-probs p that the ratio is to."""
    if step.settings.ratio == "on_policy":
        return step.tensor("trainer_logprobs")
    old = step.tensor("inference_logprobs" if step.has("ratio_to_inference") else "old_logprobs")
    if step.has("old_times_temperature"):
        return old * step.settings.temperature
    return old / step.settings.temperature if step.has("old_over_temperature") else old


def ratio(step: Formulas) -> Bounded:  # [B, T] or [B, 1]
    settings = step.settings
    if settings.ratio == "on_policy":
        return Bounded.exact(np.ones(step.mask.shape), step.tensor("trainer_logprobs").precision)
    log_ratio = (step.tensor("trainer_logprobs") - _old(step)).where(step.mask)
    log_ratio = -log_ratio if step.has("ratio_inverted") else log_ratio
    if settings.ratio == "sequence":
        log_ratio = log_ratio.sum(axis=1, keepdims=True)
        log_ratio = log_ratio if step.has("ratio_of_sum") else log_ratio / step.counts
    limit = settings.log_ratio_limit
    return (log_ratio if limit is None else log_ratio.clip(-limit, limit)).exp()


def _bounds(step: Formulas) -> tuple[float, float]:
    low, high = step.settings.clip_low, step.settings.clip_high
    return -np.inf if low is None else 1 - low, np.inf if high is None else 1 + high


def _is_clipped(step: Formulas) -> Trilean:
    rho, advantage, (low, high) = step.value("ratio"), step.value("advantages"), _bounds(step)
    is_clipped = ((advantage > 0.0) & (rho > high)) | ((advantage < 0.0) & (rho < low))
    if step.settings.dual_clip is None:
        return is_clipped
    is_limited = rho > step.settings.dual_clip
    return is_clipped | (is_limited if step.has("dual_clip_everywhere") else is_limited & (advantage < 0.0))


def clipped(step: Formulas) -> Bounded:  # [B, T]
    return _is_clipped(step).as_number()


def _reference_gap(step: Formulas) -> Bounded:  # r - c [B, T]
    reference = step.tensor("old_logprobs" if step.has("kl_to_old") else "reference_logprobs")
    gap = (reference - step.tensor("trainer_logprobs")).where(step.mask)
    gap, limit = -gap if step.has("kl_swapped") else gap, step.settings.kl_input_limit
    return gap if limit is None else gap.clip(-limit, limit)


def kl(step: Formulas) -> Bounded:  # [B, T]
    gap, settings = _reference_gap(step), step.settings
    penalty = {"k1": lambda: -gap, "k2": lambda: gap.square() * 0.5, "k3": lambda: gap.exp() - gap - 1.0}[
        settings.kl_estimator
    ]()
    if settings.kl_output_limit is not None:
        penalty = penalty.clip(-settings.kl_output_limit, settings.kl_output_limit)
    penalty = penalty * step.value("ratio") if settings.kl_weighted else penalty
    return (-penalty if step.has("kl_negated") else penalty).where(step.mask)


def importance_weights(step: Formulas) -> Bounded:  # [B, T] or [B, 1]
    settings = step.settings
    kind, low, high = settings.importance_correction, settings.importance_low, settings.importance_high
    if kind == "none":
        raise Lacking("importance_correction is none")
    old = step.tensor("trainer_logprobs") if step.has("importance_of_current") else _old(step)
    gap = (old - step.tensor("inference_logprobs")).where(step.mask)
    gap = -gap if step.has("importance_inverted") else gap
    weight = judged = gap.exp()
    if kind == "truncated":
        return weight.clip(low, high)
    if kind != "icepop":
        total = gap.sum(axis=1, keepdims=True)
        is_mean = kind == "sequence_mask" and not step.has("importance_of_sum")
        judged = (total / step.counts if is_mean else total).exp()
        if kind == "sequence_product":
            return judged.clip(low, high)
        weight = weight if kind == "sequence_mask" else judged
    return weight.choose(~(judged < low) & ~(judged > high), weight * 0.0)


def token_losses(step: Formulas) -> Bounded:  # [B, T]
    """Return the loss of each token, with all its terms, before the normaliser."""
    settings, logprobs = step.settings, step.tensor("trainer_logprobs")
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
    rho, limit = step.value("ratio"), step.settings.dual_clip
    unbounded, bounded = -(advantage * rho), -(advantage * rho.clip(*_bounds(step)))
    losses = unbounded.minimum(bounded) if step.has("clip_optimistic") else unbounded.maximum(bounded)
    if limit is None:
        return losses
    limited = losses.minimum(-(advantage * limit))
    return limited if step.has("dual_clip_everywhere") else limited.choose(advantage < 0.0, losses)


# From tokens to a number


def token_weights(step: Formulas) -> Bounded:  # [B, T]
    """Return the weight of each token in the loss; 0 if masked."""
    settings, mask, counts = step.settings, step.mask, step.counts
    num_rows = len(mask) if step.has("empty_rows_counted") else mask.any(axis=1).sum()
    num_tokens = settings.num_tokens or max(mask.size if step.has("padding_counted") else mask.sum(), 1)
    num_sequences = settings.num_sequences or max(num_rows, 1)
    divisors = {
        "token_mean": num_tokens,
        "sequence_mean": num_sequences * counts,
        "sequence_sum_constant": num_sequences * (settings.max_completion_tokens or np.nan),
        "document_sum": num_sequences,
        "sum": 1.0,
    }
    if settings.aggregation == "prompt_mean":
        groups = step.tensor("group_ids").low
        divisors["prompt_mean"] = len({*groups}) * np.maximum((groups[:, None] == groups[None]) @ counts, 1)
    divisor = np.broadcast_to(divisors[settings.aggregation], mask.shape)
    if np.isnan(divisor).any():
        raise Lacking("the settings have no max_completion_tokens")
    precision = step.tensor("trainer_logprobs").precision
    weights = Bounded.exact(settings.loss_scale / divisor, precision)
    padded = Bounded.exact(settings.loss_scale / (divisor + COUNT_EPSILON), precision)
    return weights.hull(padded).where(mask).rounded(precision)


def loss(step: Formulas) -> Bounded:  # []
    settings = step.settings
    if settings.policy_loss == "dpo":
        margins, smoothing = _margins(step), settings.label_smoothing
        losses = (-margins).increasing(_softplus) * (1 - smoothing)
        losses = losses + margins.increasing(_softplus) * smoothing if smoothing else losses
        return losses.sum() / len(losses.low) * settings.loss_scale
    total = (step.value("token_losses").where(step.mask) * step.value("token_weights")).sum()
    if settings.auxiliary_coefficient:
        total = total + step.tensor("auxiliary_loss") * settings.auxiliary_coefficient
    return total


def _softplus(values: NDArray[np.float64]) -> NDArray[np.float64]:  # -log sigmoid(-x)
    return np.logaddexp(0.0, values)


def _margins(step: Formulas) -> Bounded:  # [B / 2]
    """Return beta times the difference of the pairs' log-ratios; rows 2i are chosen, 2i + 1 rejected."""
    total = (step.tensor("trainer_logprobs") - step.tensor("reference_logprobs")).where(step.mask).sum(axis=1)
    if len(total.low) % 2:
        raise Lacking("DPO needs pairs of rows, chosen and rejected")
    total = total / step.counts[:, 0] if step.settings.logprob_reduction == "mean" else total
    return (total[::2] - total[1::2]) * (-1 if step.has("pairs_swapped") else 1) * step.settings.beta


def logprob_gradients(step: Formulas) -> Bounded:  # [B, T]
    """Return the derivative of the loss by each trainer log-prob."""
    settings, mask = step.settings, step.mask
    if settings.policy_loss == "dpo":
        sigmoid = (-_margins(step)).increasing(lambda values: 1 / (1 + np.exp(-values)))
        slopes = (sigmoid - settings.label_smoothing) * (
            settings.beta * settings.loss_scale / len(sigmoid.low)
        )
        rows = slopes[np.arange(len(mask)) // 2] * np.where(np.arange(len(mask)) % 2, 1.0, -1.0)
        rows = rows / step.counts[:, 0] if settings.logprob_reduction == "mean" else rows
        return rows[:, None].where(mask)
    weights = step.value("token_weights")
    if settings.policy_loss == "sft":
        return -weights
    slopes = -step.value("advantages")
    if settings.policy_loss == "clipped":
        slopes = slopes * step.value("ratio")
        slopes = (slopes * 0.0).choose(_is_clipped(step), slopes)
    elif settings.policy_loss == "cispo":
        slopes = slopes * step.value("ratio").clip(*_bounds(step))
    if settings.importance_correction != "none":
        slopes = slopes * step.value("importance_weights")
    gradients = slopes.where(mask) * weights
    if settings.ratio == "sequence" and settings.policy_loss == "clipped":  # through the sequence's mean
        gradients = gradients.sum(axis=1, keepdims=True) / step.counts
    if settings.kl_coefficient and not step.has("kl_without_gradient"):
        gradients = gradients + _kl_slopes(step) * settings.kl_coefficient * weights
    # their own precision is that of the log-probs, in which autograd keeps them
    return gradients.where(mask).rounded(step.tensor("trainer_logprobs").precision)


def _kl_slopes(step: Formulas) -> Bounded:
    gap, settings = _reference_gap(step), step.settings
    slopes = {"k1": gap * 0.0 + 1.0, "k2": -gap, "k3": -(gap.exp() - 1.0)}[settings.kl_estimator]
    if settings.kl_weighted and settings.ratio == "token":
        slopes = slopes * step.value("ratio") + step.value("kl")
    for limited, limit in ((gap, settings.kl_input_limit), (step.value("kl"), settings.kl_output_limit)):
        if limit is not None:  # no gradient beyond it
            slopes = slopes.choose((limited < limit) & (limited > -limit), slopes * 0.0)
    return -slopes if step.has("kl_negated") else slopes


# In order of dependence
QUANTITIES: dict[str, Callable[[Formulas], Bounded]] = {
    of.__name__: of
    for of in (
        *(token_mask, rewards, trainer_logprobs, old_logprobs, baseline, advantages),
        *(ratio, clipped, kl, importance_weights, token_losses, token_weights, loss, logprob_gradients),
    )
}


# Metrics of the micro-batch, by abrun's names (docs/reference/metrics.md) without `train/`, most of them means over
# the counted tokens


def _gap_to_engine(step: Formulas) -> Bounded:  # p - g
    return (_old(step) - step.tensor("inference_logprobs")).where(step.mask)


def _weights(step: Formulas) -> Bounded:
    has_weights = step.settings.importance_correction != "none"
    return step.value("importance_weights") if has_weights else _gap_to_engine(step).exp()


TOKEN_MEANS: dict[str, Callable[[Formulas], Bounded]] = {
    "advantages/mean": lambda step: step.value("advantages"),
    "probs_ratio": lambda step: step.value("ratio"),
    "probs_ratio_clamped": lambda step: step.value("ratio").clip(*_bounds(step)),
    "clip_fraction": lambda step: step.value("clipped"),
    "kl_penalty": lambda step: step.value("kl"),
    "entropy": lambda step: step.tensor("entropy"),
    "token_mult_prob_error": lambda step: _gap_to_engine(step).maximum(-_gap_to_engine(step)).exp(),
    "sampling_importance_ratio": _weights,
}
METRICS = (*TOKEN_MEANS, "reward", "num_tokens", "loss")


def metric(step: Formulas, name: str) -> Bounded:  # []
    if name in TOKEN_MEANS:
        return TOKEN_MEANS[name](step).where(step.mask).sum() / max(step.mask.sum(), 1)
    if name == "reward":
        return step.value("rewards").sum() / len(step.mask)
    return step.value("loss") if name == "loss" else Bounded.exact(step.mask.sum())
