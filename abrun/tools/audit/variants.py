"""Known variants of a step's formulas: what a program may compute where its settings say something else."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from abrun.tools.audit.settings import AGGREGATIONS, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    quantity: str  # the first quantity that it changes
    says: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    quirks: frozenset[str] = frozenset()

    def __or__(self, other: "Variant") -> "Variant":
        return Variant(
            quantity=self.quantity,
            says=f"{self.says}; and {other.says}",
            settings={**self.settings, **other.settings},
            quirks=self.quirks | other.quirks,
        )


# Quirks by the quantity that they change, each after a report: see docs/reference/audit-dump.md
QUIRKS = {
    "token_mask": {
        "mask_with_prompt": "the mask counts prompt tokens",
        "mask_everywhere": "the mask counts every position, padding included",
        "mask_without_last": "the mask leaves out the last token of each sequence",
        "mask_later": "the mask is shifted to the next token",
        "mask_earlier": "the mask is shifted to the token before",
        "mask_inverted": "the mask is inverted",
    },
    "rewards": {"rewards_of_next_row": "the rewards are those of the row before"},
    "trainer_logprobs": {
        "temperature_after_softmax": "the log-probs are log_softmax(z) / T, not log_softmax(z / T)",
        "logprob_of_next_token": "the log-probs are those of the next token",
        "logprob_of_last_token": "the log-probs are those of the token before",
    },
    "baseline": {
        "baseline_of_first": "the baseline is the reward of the group's first completion",
        "misgrouped": "the groups are shifted by one row",
    },
    "advantages": {
        "advantage_of_next_row": "the advantages are those of the row before",
        "advantage_negated": "the advantages have the wrong sign",
    },
    "ratio": {
        "ratio_inverted": "the ratio is old over new",
        "ratio_of_sum": "the sequence's ratio is the product of its tokens', not their geometric mean",
        "ratio_to_inference": "the ratio is to the engine's log-probs, not to old_logprobs",
        "old_times_temperature": "the old log-probs are of another temperature (times T)",
        "old_over_temperature": "the old log-probs are of another temperature (over T)",
    },
    "clipped": {
        "clip_optimistic": "the smaller of both losses is taken, not the larger",
        "dual_clip_everywhere": "the dual clip also limits tokens with positive advantages",
    },
    "kl": {
        "kl_negated": "the KL penalty has the wrong sign",
        "kl_swapped": "the KL penalty has policy and reference swapped",
        "kl_to_old": "the KL penalty is to the old policy, not to the reference",
        "kl_without_gradient": "the KL penalty has no gradient",
    },
    "importance_weights": {
        "importance_inverted": "the importance weights are engine over trainer",
        "importance_of_current": "the importance weights are of the current policy, not of old_logprobs",
        "importance_of_sum": "a sequence is judged by the product of its weights, not their geometric mean",
    },
    "token_weights": {
        "padding_counted": "padding is in the denominator",
        "empty_rows_counted": "sequences without a counted token are in the denominator",
    },
    "loss": {"pairs_swapped": "chosen and rejected are swapped"},
}
# Values of settings by the quantity that they change
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "trainer_logprobs": {},
    "baseline": {"baseline": ("group_mean", "leave_one_out", "batch_mean", "none")},
    "advantages": {
        "advantage_std": ("group", "leave_one_out", "batch", "none"),
        "std_ddof": (0, 1),
        "std_epsilon": (1e-4, 1e-5, 1e-6, 1e-8),
    },
    "ratio": {"ratio": ("token", "sequence", "on_policy")},
    "clipped": {"dual_clip": (None, 3.0)},
    "kl": {"kl_estimator": ("k1", "k2", "k3"), "kl_weighted": (False, True), "kl_coefficient": (0.0,)},
    "importance_weights": {
        "importance_correction": (
            *("none", "truncated", "icepop", "sequence_mask"),
            *("sequence_product", "sequence_product_mask"),
        )
    },
    "token_losses": {
        "policy_loss": ("clipped", "cispo", "reinforce"),
        "entropy_coefficient": (0.0,),
    },
    "loss": {"logprob_reduction": ("sum", "mean"), "auxiliary_coefficient": (0.0,)},
}
WORDS = {
    "baseline": {
        "group_mean": "the group's mean",
        "leave_one_out": "the mean of the group's others (RLOO)",
        "batch_mean": "the batch's mean",
        "none": "nothing",
    },
    "ratio": {
        "token": "a ratio of each token",
        "sequence": "GSPO's ratio of each sequence",
        "on_policy": "the ratio 1 (old log-probs are the current ones)",
    },
}


def variants(settings: Settings) -> Iterator[Variant]:
    """Yield the known variants, in order of dependence."""
    stages = dict.fromkeys([*QUIRKS, *CHOICES])
    order = [*dict.fromkeys([*CHOICES, *stages])]
    order.sort(key=_ORDER.index)
    for quantity in order:
        for quirk, says in QUIRKS.get(quantity, {}).items():
            yield Variant(quantity=quantity, says=says, quirks=frozenset([quirk]))
        for key, values in CHOICES.get(quantity, {}).items():
            current = getattr(settings, key)
            for value in values:
                if value != current:
                    says = f"{_phrase(key, value)}; the settings say {_value(key, current)}"
                    yield Variant(quantity=quantity, says=says, settings={key: value})
        if quantity == "trainer_logprobs":
            yield from _temperatures(settings)
        elif quantity == "clipped":
            yield from _clip_ranges(settings)
        elif quantity == "importance_weights" and settings.importance_correction != "none":
            yield Variant(
                quantity=quantity,
                says="the importance weights are not limited",
                settings={"importance_low": 0.0, "importance_high": 1e30},
            )
        elif quantity == "token_weights":
            yield from _normalizers(settings)


_ORDER = [
    *("token_mask", "rewards", "trainer_logprobs", "baseline", "advantages", "ratio", "clipped"),
    *("kl", "importance_weights", "token_losses", "token_weights", "loss"),
]


def _value(key: str, value: Any) -> str:
    return str(WORDS.get(key, {}).get(value, value))


def _phrase(key: str, value: Any) -> str:
    zero = {
        "kl_coefficient": "the KL penalty is not in the loss",
        "entropy_coefficient": "the entropy bonus is not in the loss",
        "auxiliary_coefficient": "the auxiliary loss is not in the loss",
    }
    if value == "none" and key == "importance_correction":
        return "the importance weights are not applied"
    return zero.get(key, f"{key} is {_value(key, value)}")


def _temperatures(settings: Settings) -> Iterator[Variant]:
    temperature = settings.temperature
    if temperature != 1:
        for value, how in ((1.0, "not divided by"), (temperature**2, "divided twice by")):
            yield Variant(
                quantity="trainer_logprobs",
                says=f"the logits are {how} the temperature",
                settings={"temperature": value},
            )


def _clip_ranges(settings: Settings) -> Iterator[Variant]:
    low, high = settings.clip_low, settings.clip_high
    ranges = {
        "the ratio is not clipped": (None, None),
        "clip_low is used for both bounds": (low, low),
        "clip_high is used for both bounds": (high, high),
        "clip_low and clip_high are swapped": (high, low),
        "the ratio has no lower bound": (None, high),
        "the ratio has no upper bound": (low, None),
        "clip_high is the bound itself, not its distance from 1": (
            None,
            None if high is None or high < 1 else high - 1,
        ),
        "the clip range is 0.2": (0.2, 0.2),
    }
    for says, (new_low, new_high) in ranges.items():
        if (new_low, new_high) != (low, high):
            changes = {"clip_low": new_low, "clip_high": new_high}
            yield Variant(quantity="clipped", says=says, settings=changes)


def _normalizers(settings: Settings) -> Iterator[Variant]:
    """Yield other aggregations, counts of the micro-batch's own, and factors, the fewest changes first."""
    ranks, steps = settings.data_parallel_size, settings.gradient_accumulation
    factors = {1.0: ""}
    for power_of_ranks, power_of_steps in product((0, 1, -1), repeat=2):
        factor = float(ranks**power_of_ranks * steps**power_of_steps)
        words = [
            f"{'multiplied' if power > 0 else 'divided'} by {name} ({size})"
            for power, name, size in (
                (power_of_ranks, "data_parallel_size", ranks),
                (power_of_steps, "gradient_accumulation", steps),
            )
            if power
        ]
        factors.setdefault(factor, " and ".join(words))
    factors.setdefault(1 / settings.loss_scale, f"without the loss_scale of {settings.loss_scale:g}")
    own = {"num_tokens": None, "num_sequences": None}
    has_counts = settings.num_tokens is not None or settings.num_sequences is not None
    found = []
    for aggregation, is_own, (factor, words) in product(
        AGGREGATIONS, (False, True) if has_counts else (False,), factors.items()
    ):
        is_other = aggregation != settings.aggregation
        changes: dict[str, Any] = {"aggregation": aggregation} if is_other else {}
        changes |= own if is_own else {}
        changes |= {"loss_scale": settings.loss_scale * factor} if factor != 1 else {}
        says = []
        if is_other:
            says.append(
                f"this is {AGGREGATIONS[aggregation]}; the settings say {AGGREGATIONS[settings.aggregation]}"
            )
        if is_own:
            says.append(
                "the counts are this micro-batch's own, not the batch's (a mean of micro-batch means)"
            )
        if factor != 1:
            says.append(f"the loss is {words}, which the settings do not say")
        if changes:
            cost = is_other + is_own + (factor != 1)
            found.append((cost, Variant(quantity="token_weights", says="; ".join(says), settings=changes)))
    yield from (variant for _, variant in sorted(found, key=lambda pair: pair[0]))
