"""The quantities of a training step in order of dependence, each from the dump's own values before it.

Dimensions: B sequences, T positions, N rewards of the batch. Formulas call the log-probs of the current
policy c, of the policy at the start of the step p, of the rollout engine g and of the reference r, and
advantages A; docs/explanation/logprobs-and-losses.md has their sources. They are written anew, with bounds,
so that an audit of abrun's own trainer does not share its faults.

A quirk is a known fault of a formula (`variants`); without quirks the formulas are the settings'.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from abrun.tools.audit.bounds import Bounded, Trilean
from abrun.tools.audit.reading import Dump
from abrun.tools.audit.settings import Settings

Flags = NDArray[np.bool_]
MAX_KL_GAP, MAX_KL = 20.0, 10.0  # of abrun, verl, NeMo-RL and SkyRL
LOGITS = {"trainer_logprobs": "logits", "old_logprobs": "old_logits"}
COUNT_EPSILON = 1e-8  # verl, OpenRLHF and NeMo-RL add it to the counts that they divide by


class Lacking(Exception):
    """A quantity cannot be recomputed because the dump lacks something."""


class Formulas:
    """All quantities of a dump under settings and quirks, each computed once."""

    def __init__(self, dump: Dump, settings: Settings | None = None, quirks: frozenset[str] = frozenset()):
        self.dump, self.settings, self.quirks = dump, settings or dump.settings, quirks
        self._expected: dict[str, Bounded] = {}
        self._rows_before = np.arange(len(dump.tensors["trainer_logprobs"])) - 1

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
            is_scored = name in LOGITS
            self._expected[name] = self._logprobs(LOGITS[name]) if is_scored else getattr(self, name)()
        return self._expected[name]

    def value(self, name: str) -> Bounded:
        """Return the dump's own value of a quantity, recomputed if the dump lacks it."""
        return self.tensor(name) if name in self.dump.tensors else self.expected(name)

    @cached_property
    def mask(self) -> Flags:  # [B, T]
        """The tokens that the loss counts."""
        is_dumped = "token_mask" in self.dump.tensors
        return self.misread(self.flags("token_mask")) if is_dumped else self.token_mask().low > 0

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

    # Mask, rewards, and the log-probs of tokens whose logits the dump has

    def token_mask(self) -> Bounded:  # [B, T]
        mask = self.flags("attention_mask") & ~self.flags("prompt_mask")
        if "excluded_mask" in self.dump.tensors:
            mask &= ~self.flags("excluded_mask")
        return Bounded.exact(self.misread(mask))

    def rewards(self) -> Bounded:  # [B]
        if "reward_parts" in self.dump.tensors:
            columns, weights = self.tensor("reward_parts"), self.settings.reward_weights
            if weights is not None and len(weights) != columns.low.shape[1]:
                raise Lacking(
                    f"reward_weights has {len(weights)} values for {columns.low.shape[1]} reward_parts"
                )
            total = (columns if weights is None else columns * np.array(weights)).sum(axis=1)
        elif "token_rewards" not in self.dump.tensors:
            raise Lacking("the dump has no parts of the rewards")
        else:
            total = self.tensor("token_rewards").where(self.mask).sum(axis=1)
        return total[self._rows_before] if self.has("rewards_of_next_row") else total

    def _logprobs(self, name: str) -> Bounded:
        """Return log softmax(z / T) of the tokens [B, T]; anything where the dump has no logits z."""
        logits, temperature = self.tensor(name), self.settings.temperature
        is_late = self.has("temperature_after_softmax")
        scaled = logits if is_late or temperature == 1 else logits / temperature
        shifted = scaled - scaled.high.max(axis=1, keepdims=True)
        normalizer = shifted.exp().sum(axis=1).increasing(np.log)

        rows, positions = self.tensor("logit_tokens").low.astype(int).T
        token_ids = self.tensor("token_ids").low.astype(int)
        limits = ((rows, len(token_ids)), (positions, token_ids.shape[1]), (token_ids, logits.low.shape[1]))
        if any((of < 0).any() or (of >= limit).any() for of, limit in limits):
            raise Lacking("logit_tokens or token_ids are out of range")
        moved = positions + self.has("logprob_of_next_token") - self.has("logprob_of_last_token")
        tokens = token_ids[rows, np.clip(moved, 0, token_ids.shape[1] - 1)]
        logprobs = shifted[np.arange(len(rows)), tokens] - normalizer
        logprobs = logprobs / temperature if is_late else logprobs

        low, high = (np.full(token_ids.shape, bound) for bound in (-np.inf, np.inf))
        low[rows, positions], high[rows, positions] = logprobs.low, logprobs.high
        return Bounded(low, high, logprobs.precision)

    # Advantages

    def _groups(self, is_whole_batch: bool) -> tuple[Bounded, Flags]:
        """Return the rewards [1, N] of the batch, and which of them each row is compared with [B, N]."""
        has_batch = "batch_rewards" in self.dump.tensors
        all_rewards = self.tensor("batch_rewards") if has_batch else self.value("rewards")
        if is_whole_batch:
            return all_rewards[None], np.ones((len(self.mask), len(all_rewards.low)), bool)
        groups = self.tensor("group_ids").low
        all_groups = self.tensor("batch_group_ids").low if has_batch else groups
        if self.has("misgrouped"):
            groups, all_groups = np.roll(groups, 1), np.roll(all_groups, 1)
        members = groups[:, None] == all_groups[None]
        size = self.settings.group_size
        if size is not None and (members.sum(axis=1) != size).any():
            raise Lacking(f"groups have other than {size} rewards, so the dump needs batch_rewards")
        return all_rewards[None], members

    def baseline(self) -> Bounded:  # [B]
        kind, reward = self.settings.baseline, self.value("rewards")
        if kind == "none":
            return reward * 0.0
        all_rewards, members = self._groups(kind == "batch_mean")
        if self.has("baseline_of_first"):
            return all_rewards.where(members & (members.cumsum(axis=1) == 1)).sum(axis=1)
        count, total = np.maximum(members.sum(axis=1), 1), all_rewards.where(members).sum(axis=1)
        if kind == "leave_one_out":
            return ((total - reward) / np.maximum(count - 1, 1)).where(count > 1, reward)
        return total / count

    def _spread(self) -> tuple[Bounded, Flags]:
        """Return the standard deviation [B] that advantages are divided by, and where it is exactly 0."""
        kind = self.settings.advantage_std
        all_rewards, members = self._groups(kind == "batch")
        if kind == "leave_one_out":  # without one reward of the group that equals the row's own
            equal = members & (all_rewards.low == self.value("rewards").low[:, None])
            members = members & ~(equal & (equal.cumsum(axis=1) == 1))
        largest, smallest = (np.where(members, all_rewards.low, edge) for edge in (-np.inf, np.inf))
        is_zero = largest.max(axis=1) <= smallest.min(axis=1)
        all_rewards, count = all_rewards.where(members), np.maximum(members.sum(axis=1), 1)
        deviations = (all_rewards - (all_rewards.sum(axis=1) / count)[:, None]).where(members)
        variance = deviations.square().sum(axis=1) / np.maximum(count - self.settings.std_ddof, 1)
        # a program may compute E[R^2] - E[R]^2, whose rounding is that of the squares
        variance = variance.rounded(variance.precision, 4.0, scale=(all_rewards.high**2).sum(axis=1) / count)
        return variance.sqrt().where(~is_zero), is_zero

    def advantages(self) -> Bounded:  # [B, 1] or [B, T]
        settings = self.settings
        if settings.estimator == "other":
            raise Lacking("they are not recomputed for this estimator")
        advantage = self.value("rewards") - self.value("baseline")
        if settings.advantage_std != "none":
            spread, is_zero = self._spread()
            divided = advantage / (spread + settings.std_epsilon)
            # NeMo-RL leaves A undivided where the std is 0
            advantage = divided.hull(advantage).where(is_zero, divided)
        advantage = advantage[self._rows_before] if self.has("advantage_of_next_row") else advantage
        return (-advantage if self.has("advantage_negated") else advantage)[:, None]

    # Per-token loss

    def _old(self) -> Bounded:
        """Return the log-probs p that the ratio is to."""
        if self.settings.ratio == "on_policy":
            return self.tensor("trainer_logprobs")
        old = self.tensor("inference_logprobs" if self.has("ratio_to_inference") else "old_logprobs")
        if self.has("old_times_temperature"):
            return old * self.settings.temperature
        return old / self.settings.temperature if self.has("old_over_temperature") else old

    def ratio(self) -> Bounded:  # [B, T] or [B, 1]
        settings = self.settings
        if settings.ratio == "on_policy":
            return Bounded.exact(np.ones(self.mask.shape), self.tensor("trainer_logprobs").precision)
        log_ratio = (self.tensor("trainer_logprobs") - self._old()).where(self.mask)
        log_ratio = -log_ratio if self.has("ratio_inverted") else log_ratio
        if settings.ratio == "sequence":
            log_ratio = log_ratio.sum(axis=1, keepdims=True)
            log_ratio = log_ratio if self.has("ratio_of_sum") else log_ratio / self.counts
        limit = settings.log_ratio_limit
        return (log_ratio if limit is None else log_ratio.clip(-limit, limit)).exp()

    def clip_bounds(self) -> tuple[float, float]:
        low, high = self.settings.clip_low, self.settings.clip_high
        return -np.inf if low is None else 1 - low, np.inf if high is None else 1 + high

    def _is_clipped(self) -> Trilean:
        rho, advantage, (low, high) = self.value("ratio"), self.value("advantages"), self.clip_bounds()
        is_clipped = ((advantage > 0.0) & (rho > high)) | ((advantage < 0.0) & (rho < low))
        # beyond a bound, both losses may round to the same, and share the gradient
        differs = -(advantage * rho.clip(low, high)) > -(advantage * rho)
        is_clipped = Trilean(is_clipped.surely & differs.surely, is_clipped.possibly)
        if self.settings.dual_clip is None:
            return is_clipped
        is_limited, everywhere = rho > self.settings.dual_clip, self.has("dual_clip_everywhere")
        return is_clipped | (is_limited if everywhere else is_limited & (advantage < 0.0))

    def _may_tie(self) -> Trilean:
        """Where both losses may round to the same beyond a bound of the ratio, and share the gradient."""
        rho, advantage, (low, high) = self.value("ratio"), self.value("advantages"), self.clip_bounds()
        loss, clipped = advantage * rho, advantage * rho.clip(low, high)
        is_beyond, differs = (rho > high) | (rho < low), (clipped > loss) | (clipped < loss)
        return Trilean(np.zeros_like(differs.surely), is_beyond.possibly & ~differs.surely)

    def clipped(self) -> Bounded:  # [B, T]
        is_clipped = self._is_clipped()
        return Bounded.exact(is_clipped.surely).hull(is_clipped.possibly)

    def _reference_gap(self) -> Bounded:  # r - c [B, T]
        reference = self.tensor("old_logprobs" if self.has("kl_to_old") else "reference_logprobs")
        gap = (reference - self.tensor("trainer_logprobs")).where(self.mask)
        gap = -gap if self.has("kl_swapped") else gap
        return gap.clip(-MAX_KL_GAP, MAX_KL_GAP) if self.settings.kl_limited else gap

    def kl(self) -> Bounded:  # [B, T]
        gap, settings = self._reference_gap(), self.settings
        estimates = {"k1": -gap, "k2": gap.square() * 0.5, "k3": gap.exp() - gap - 1.0}
        penalty = estimates[settings.kl_estimator]
        penalty = penalty.clip(-MAX_KL, MAX_KL) if settings.kl_limited else penalty
        penalty = penalty * self.value("ratio") if settings.kl_weighted else penalty
        return (-penalty if self.has("kl_negated") else penalty).where(self.mask)

    def engine_gap(self) -> Bounded:  # p - g [B, T]
        old = self.tensor("trainer_logprobs") if self.has("importance_of_current") else self._old()
        return (old - self.tensor("inference_logprobs")).where(self.mask)

    def importance_weights(self) -> Bounded:  # [B, T] or [B, 1]
        settings = self.settings
        kind, low, high = settings.importance_correction, settings.importance_low, settings.importance_high
        if kind == "none":
            raise Lacking("importance_correction is none")
        gap = -self.engine_gap() if self.has("importance_inverted") else self.engine_gap()
        weight = judged = gap.exp()
        if kind == "truncated":
            return weight.clip(low, high)
        if kind != "icepop":
            total = gap.sum(axis=1, keepdims=True)
            is_mean = kind == "sequence_mask" and not self.has("importance_of_sum")
            judged = (total / self.counts if is_mean else total).exp()
            if kind == "sequence_product":
                return judged.clip(low, high)
            weight = weight if kind == "sequence_mask" else judged
        return weight.choose(~(judged < low) & ~(judged > high), weight * 0.0)

    def token_losses(self) -> Bounded:  # [B, T]
        """Return the loss of each token, with all its terms, before the normaliser."""
        settings, logprobs = self.settings, self.tensor("trainer_logprobs")
        if settings.policy_loss == "sft":
            return (-logprobs).where(self.mask)
        advantage = self.value("advantages")
        if settings.policy_loss == "clipped":
            losses = self._surrogate(advantage)
        else:
            weight = self.value("ratio").clip(*self.clip_bounds()) if settings.policy_loss == "cispo" else 1.0
            losses = -(advantage * weight * logprobs)
        if settings.importance_correction != "none":
            losses = losses * self.value("importance_weights")
        if settings.kl_coefficient:
            losses = losses + self.value("kl") * settings.kl_coefficient
        if settings.entropy_coefficient:
            losses = losses - self.tensor("entropy") * settings.entropy_coefficient
        return losses.where(self.mask)

    def _surrogate(self, advantage: Bounded) -> Bounded:
        rho, limit = self.value("ratio"), self.settings.dual_clip
        unbounded, bounded = -(advantage * rho), -(advantage * rho.clip(*self.clip_bounds()))
        losses = unbounded.minimum(bounded) if self.has("clip_optimistic") else unbounded.maximum(bounded)
        if limit is None:
            return losses
        limited = losses.minimum(-(advantage * limit))
        return limited if self.has("dual_clip_everywhere") else limited.choose(advantage < 0.0, losses)

    # From tokens to a number

    def token_weights(self) -> Bounded:  # [B, T]
        """Return the weight of each token in the loss; 0 if masked."""
        settings, mask, counts = self.settings, self.mask, self.counts
        num_rows = len(mask) if self.has("empty_rows_counted") else mask.any(axis=1).sum()
        num_tokens = settings.num_tokens or max(mask.size if self.has("padding_counted") else mask.sum(), 1)
        num_sequences = settings.num_sequences or max(num_rows, 1)
        divisors = {
            "token_mean": num_tokens,
            "sequence_mean": num_sequences * counts,
            "sequence_sum_constant": num_sequences * (settings.max_completion_tokens or np.nan),
            "document_sum": num_sequences,
            "sum": 1.0,
        }
        divisor = np.broadcast_to(divisors[settings.aggregation], mask.shape)
        if np.isnan(divisor).any():
            raise Lacking("the settings have no max_completion_tokens")
        precision = self.tensor("trainer_logprobs").precision
        weights = Bounded.exact(settings.loss_scale / divisor, precision)
        padded = Bounded.exact(settings.loss_scale / divisor / (1 + COUNT_EPSILON), precision)
        return weights.hull(padded).where(mask).rounded(precision)

    def loss(self) -> Bounded:  # []
        settings = self.settings
        if settings.policy_loss == "dpo":
            margins, smoothing = self._margins(), settings.label_smoothing
            losses, flipped = (of.increasing(lambda x: np.logaddexp(0.0, x)) for of in (-margins, margins))
            losses = losses * (1 - smoothing) + flipped * smoothing
            return losses.sum() / len(losses.low) * settings.loss_scale
        total = (self.value("token_losses").where(self.mask) * self.value("token_weights")).sum()
        if settings.auxiliary_coefficient:
            total = total + self.tensor("auxiliary_loss") * settings.auxiliary_coefficient
        return total

    def _margins(self) -> Bounded:  # [B / 2]
        """Return beta times the difference of the pairs' log-ratios; rows 2i are chosen, 2i + 1 rejected."""
        names = ("trainer_logprobs", "reference_logprobs")
        current, reference = (self.tensor(name).where(self.mask).sum(axis=1) for name in names)
        total = current - reference  # a difference of sums rounds more than a sum of differences
        if len(total.low) % 2:
            raise Lacking("DPO needs pairs of rows, chosen and rejected")
        total = total / self.counts[:, 0] if self.settings.logprob_reduction == "mean" else total
        return (total[::2] - total[1::2]) * (-1 if self.has("pairs_swapped") else 1) * self.settings.beta

    def logprob_gradients(self) -> Bounded:  # [B, T]
        """Return the derivative of the loss by each trainer log-prob."""
        settings, mask = self.settings, self.mask
        if settings.policy_loss == "dpo":
            sigmoid = (-self._margins()).increasing(lambda values: 1 / (1 + np.exp(-values)))
            scale = settings.beta * settings.loss_scale / len(sigmoid.low)
            slopes = (sigmoid - settings.label_smoothing) * scale
            rows = slopes[np.arange(len(mask)) // 2] * np.where(np.arange(len(mask)) % 2, 1.0, -1.0)
            rows = rows / self.counts[:, 0] if settings.logprob_reduction == "mean" else rows
            return rows[:, None].where(mask)
        weights = self.value("token_weights")
        if settings.policy_loss == "sft":
            return -weights
        slopes = -self.value("advantages")
        if settings.policy_loss == "clipped":
            slopes = slopes * self.value("ratio")
            slopes = (slopes * 0.0).choose(self._is_clipped() | self._may_tie(), slopes)
        elif settings.policy_loss == "cispo":
            slopes = slopes * self.value("ratio").clip(*self.clip_bounds())
        if settings.importance_correction != "none":
            slopes = slopes * self.value("importance_weights")
        gradients = slopes.where(mask) * weights
        if settings.ratio == "sequence" and settings.policy_loss == "clipped":  # through the sequence's mean
            gradients = gradients.sum(axis=1, keepdims=True) / self.counts
        if settings.kl_coefficient and not self.has("kl_without_gradient"):
            gradients = gradients + self._kl_slopes() * settings.kl_coefficient * weights
        # their own precision is that of the log-probs, in which autograd keeps them
        return gradients.where(mask).rounded(self.tensor("trainer_logprobs").precision)

    def _kl_slopes(self) -> Bounded:
        gap, settings = self._reference_gap(), self.settings
        slopes = {"k1": gap * 0.0 + 1.0, "k2": -gap, "k3": -(gap.exp() - 1.0)}[settings.kl_estimator]
        if settings.kl_weighted and settings.ratio == "token":
            slopes = slopes * self.value("ratio") + self.value("kl")
        if settings.kl_limited:  # no gradient beyond the limits
            for limited, limit in ((gap, MAX_KL_GAP), (self.value("kl"), MAX_KL)):
                slopes = slopes.choose((limited < limit) & (limited > -limit), slopes * 0.0)
        return -slopes if self.has("kl_negated") else slopes


MISREADINGS: dict[str, Callable[[Formulas, Flags], Flags]] = {
    "mask_with_prompt": lambda step, mask: step.flags("attention_mask"),
    "mask_everywhere": lambda step, mask: np.ones_like(mask),
    "mask_inverted": lambda step, mask: step.flags("attention_mask") & ~mask,
    "mask_later": lambda step, mask: np.pad(mask, ((0, 0), (1, 0)))[:, :-1],
    "mask_earlier": lambda step, mask: np.pad(mask, ((0, 0), (0, 1)))[:, 1:],
    "mask_without_last": lambda step, mask: mask & (mask.cumsum(axis=1) < mask.sum(axis=1, keepdims=True)),
}
QUANTITIES = (  # in order of dependence
    *("token_mask", "rewards", "trainer_logprobs", "old_logprobs", "baseline", "advantages"),
    *("ratio", "clipped", "kl", "importance_weights", "token_losses", "token_weights"),
    *("loss", "logprob_gradients"),
)
# Means over the counted tokens, by abrun's names of metrics without `train/`
TOKEN_MEANS: dict[str, Callable[[Formulas], Bounded]] = {
    "advantages/mean": lambda step: step.value("advantages"),
    "probs_ratio": lambda step: step.value("ratio"),
    "clip_fraction": lambda step: step.value("clipped"),
    "kl_penalty": lambda step: step.value("kl"),
    "entropy": lambda step: step.tensor("entropy"),
    "token_mult_prob_error": lambda step: step.engine_gap().maximum(-step.engine_gap()).exp(),
}
METRICS = (*TOKEN_MEANS, "reward")


def metric(step: Formulas, name: str) -> Bounded:  # []
    """Return a metric of the micro-batch."""
    if name == "reward":
        return step.value("rewards").sum() / len(step.mask)
    return TOKEN_MEANS[name](step).where(step.mask).sum() / max(step.mask.sum(), 1)
