"""Known variants of a step's formulas: what a program may compute where its settings say something else."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args

from abrun.tools.audit.settings import AGGREGATIONS, Correction, Settings


@dataclass(frozen=True, slots=True)
class Variant:
    quantity: str  # the first quantity that it changes
    says: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    quirks: frozenset[str] = frozenset()

    def __or__(self, variant: "Variant") -> "Variant":
        says, settings = f"{self.says}; and {variant.says}", {**self.settings, **variant.settings}
        return Variant(self.quantity, says, settings, self.quirks | variant.quirks)


# Quantity, then the values of a setting, or a quirk of the formulas and its words. In order of dependence
KNOWN: tuple[tuple[str, str, Any], ...] = (
    ("token_mask", "mask_with_prompt", "the mask counts prompt tokens"),
    ("token_mask", "mask_everywhere", "the mask counts every position, padding included"),
    ("token_mask", "mask_without_last", "the mask leaves out the last token of each sequence"),
    ("token_mask", "mask_later", "the mask is shifted to the next token"),
    ("token_mask", "mask_earlier", "the mask is shifted to the token before"),
    ("token_mask", "mask_inverted", "the mask is inverted"),
    ("rewards", "rewards_of_next_row", "the rewards are those of the row before"),
    ("trainer_logprobs", "temperature_after_softmax", "they are log_softmax(z) / T, not log_softmax(z / T)"),
    ("trainer_logprobs", "logprob_of_next_token", "the log-probs are those of the next token"),
    ("trainer_logprobs", "logprob_of_last_token", "the log-probs are those of the token before"),
    ("baseline", "baseline", ("group_mean", "leave_one_out", "batch_mean", "none")),
    ("baseline", "baseline_of_first", "the baseline is the reward of the group's first completion"),
    ("baseline", "misgrouped", "the groups are shifted by one row"),
    ("advantages", "advantage_std", ("group", "leave_one_out", "batch", "none")),
    ("advantages", "std_ddof", (0, 1)),
    ("advantages", "std_epsilon", (1e-4, 1e-5, 1e-6, 1e-8)),
    ("advantages", "advantage_of_next_row", "the advantages are those of the row before"),
    ("advantages", "advantage_negated", "the advantages have the wrong sign"),
    ("ratio", "ratio", ("token", "sequence", "on_policy")),
    ("ratio", "ratio_inverted", "the ratio is old over new"),
    ("ratio", "ratio_of_sum", "the sequence's ratio is the product of its tokens', not their geometric mean"),
    ("ratio", "ratio_to_inference", "the ratio is to the engine's log-probs, not to old_logprobs"),
    ("ratio", "old_times_temperature", "the old log-probs are of another temperature (times T)"),
    ("ratio", "old_over_temperature", "the old log-probs are of another temperature (over T)"),
    ("clipped", "dual_clip", (None, 3.0)),
    ("clipped", "dual_clip_everywhere", "the dual clip also limits tokens with positive advantages"),
    ("clipped", "clip_optimistic", "the smaller of both losses is taken, not the larger"),
    ("kl", "kl_coefficient", (0.0,)),
    ("kl", "kl_estimator", ("k1", "k2", "k3")),
    ("kl", "kl_weighted", (False, True)),
    ("kl", "kl_without_gradient", "the KL penalty has no gradient"),
    ("kl", "kl_negated", "the KL penalty has the wrong sign"),
    ("kl", "kl_swapped", "the KL penalty has policy and reference swapped"),
    ("kl", "kl_to_old", "the KL penalty is to the old policy, not to the reference"),
    ("importance_weights", "importance_correction", get_args(Correction)),
    ("importance_weights", "importance_high", (1e30,)),
    ("importance_weights", "importance_inverted", "the importance weights are engine over trainer"),
    ("importance_weights", "importance_of_current", "the importance weights are of the current policy"),
    ("importance_weights", "importance_of_sum", "sequences are judged by a product, not by a geometric mean"),
    ("token_losses", "policy_loss", ("clipped", "cispo", "reinforce")),
    ("token_losses", "entropy_coefficient", (0.0,)),
    ("token_weights", "padding_counted", "padding is in the denominator"),
    ("token_weights", "empty_rows_counted", "sequences without a counted token are in the denominator"),
    ("loss", "logprob_reduction", ("sum", "mean")),
    ("loss", "auxiliary_coefficient", (0.0,)),
    ("loss", "pairs_swapped", "chosen and rejected are swapped"),
)
ABSENT = {
    "kl_coefficient": "the KL penalty is not in the loss",
    "entropy_coefficient": "the entropy bonus is not in the loss",
    "auxiliary_coefficient": "the auxiliary loss is not in the loss",
    "importance_correction": "the importance weights are not applied",
    "importance_high": "the importance weights are not limited",
}


def variants(settings: Settings) -> Iterator[Variant]:
    """Yield the variants that differ from the settings."""
    for quantity, name, values in KNOWN:
        if isinstance(values, str):
            yield Variant(quantity, values, quirks=frozenset([name]))
            continue
        current = getattr(settings, name)
        for value in values:
            is_absent = name in ABSENT and value in (0.0, "none", 1e30)
            says = ABSENT[name] if is_absent else f"{name} is {value}; the settings say {current}"
            if value != current:
                yield Variant(quantity, says, {name: value})
    yield from _limits(settings)
    yield from _normalizers(settings)


def _limits(settings: Settings) -> Iterator[Variant]:
    """Yield other temperatures and clip ranges."""
    temperature, low, high = settings.temperature, settings.clip_low, settings.clip_high
    for value, how in ((1.0, "not divided"), (temperature**2, "divided twice")):
        if temperature != 1:
            says = f"the logits are {how} by the temperature"
            yield Variant("trainer_logprobs", says, {"temperature": value})
    ranges = {
        "the ratio is not clipped": (None, None),
        "clip_low and clip_high are swapped": (high, low),
        "clip_low is used for both bounds": (low, low),
        "clip_high is used for both bounds": (high, high),
        "clip_high is the bound itself, not its distance from 1": (low, max((high or 1.0) - 1, 0.0)),
    }
    for says, (new_low, new_high) in ranges.items():
        if (new_low, new_high) != (low, high):
            yield Variant("clipped", says, {"clip_low": new_low, "clip_high": new_high})


def _normalizers(settings: Settings) -> Iterator[Variant]:
    """Yield other aggregations, the micro-batch's own counts, and factors, the fewest changes first."""
    sizes = {name: getattr(settings, name) for name in ("data_parallel_size", "gradient_accumulation")}
    factors = {1.0: ""}
    for powers in sorted(product((0, 1, -1), repeat=2), key=lambda powers: sum(map(abs, powers))):
        factor, words = 1.0, []
        for (name, size), power in zip(sizes.items(), powers, strict=True):
            factor *= float(size) ** power
            words += [f"{'multiplied' if power > 0 else 'divided'} by {name} ({size})"] if power else []
        factors.setdefault(factor, " and ".join(words))
    factors.setdefault(1 / settings.loss_scale, f"without its loss_scale of {settings.loss_scale:g}")
    scopes = (False, True) if settings.num_tokens or settings.num_sequences else (False,)
    ranked: list[tuple[int, Variant]] = []
    for aggregation, is_own, (factor, words) in product(AGGREGATIONS, scopes, factors.items()):
        says, changes = [], {"aggregation": aggregation, "loss_scale": settings.loss_scale * factor}
        if aggregation != settings.aggregation:
            current = AGGREGATIONS[settings.aggregation]
            says.append(f"this is {AGGREGATIONS[aggregation]}; the settings say {current}")
        if is_own:
            changes |= {"num_tokens": None, "num_sequences": None}
            says.append("the counts are this micro-batch's own, as in a mean of micro-batch means")
        if factor != 1:
            says.append(f"the loss is {words}")
        if says:
            ranked.append((len(says), Variant("token_weights", "; ".join(says), changes)))
    yield from (variant for _, variant in sorted(ranked, key=lambda counted: counted[0]))
