"""What a run can do with a family, tried out on a tiny random network: the rows of docs/models.md."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from abrun.backends.dtensor import DtensorBackend
from abrun.backends.ranks import make_ranks
from abrun.errors import RecipeError
from abrun.models import check_decoding, check_network, facts_of
from abrun.recipe.policy import Policy
from abrun.rl.batch import collate
from tests.backends.megatron_policies import make_backend
from tests.backends.policies import CPU, Advised, WeightedLoss, plain_logprobs
from tests.models.architectures import MAMBA_HEADS, tiny_network


@dataclass(frozen=True)
class Family:
    """A row: transformers' model type, models of it, and settings that tell it from other rows."""

    kind: str
    examples: str
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


WINDOW = {"sliding_window": 4096}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES = (
    Family("llama", "Llama 2 and 3, SmolLM2"),
    Family("qwen2", "Qwen 2 and 2.5"),
    Family("qwen3", "Qwen 3"),
    Family("qwen3_moe", "Qwen 3 MoE"),
    Family("qwen3_next", "Qwen 3 Next", LINEAR),
    Family("qwen3_5", "Qwen 3.5 (text; its vision tower is exported as it was)", LINEAR),
    Family("mistral", "Mistral 7B v0.2 and later", {"sliding_window": None}, "`sliding_window: null`"),
    Family("mistral", "Mistral 7B v0.1", WINDOW, "with `sliding_window`"),
    Family("ministral3", "Ministral 3 (text)"),
    Family("mixtral", "Mixtral"),
    Family("gemma", "Gemma"),
    Family("gemma2", "Gemma 2"),
    Family("gemma3_text", "Gemma 3 270M and 1B"),
    Family("gemma3", "Gemma 3 4B and larger"),
    Family("gemma4", "Gemma 4"),
    Family("phi3", "Phi 3 and 4", {"sliding_window": None}, "`sliding_window: null`"),
    Family("phi3", "Phi 3 mini", WINDOW, "with `sliding_window`"),
    Family("olmo2", "OLMo 2"),
    Family("olmo3", "OLMo 3"),
    Family("olmoe", "OLMoE"),
    Family("smollm3", "SmolLM3"),
    Family("glm4", "GLM 4"),
    Family("glm4_moe", "GLM 4.5 and later"),
    Family("granite", "Granite 3"),
    Family("granitemoe", "Granite 3 MoE"),
    Family("granitemoehybrid", "Granite 4", {"layer_types": ["mamba", "attention"]}),
    Family("cohere", "Command R"),
    Family("cohere2", "Command R7B, Command A"),
    Family("deepseek_v2", "DeepSeek V2"),
    Family("deepseek_v3", "DeepSeek V3 and R1, Kimi K2"),
    Family("llama4", "Llama 4 (text; its vision tower is exported as it was)"),
    Family("gpt_oss", "gpt-oss"),
    Family("minimax", "MiniMax Text 01"),
    Family("minimax_m2", "MiniMax M2"),
    Family("seed_oss", "Seed-OSS"),
    Family("hunyuan_v1_dense", "Hunyuan dense"),
    Family("ernie4_5", "ERNIE 4.5"),
    Family("exaone4", "EXAONE 4"),
    Family("starcoder2", "StarCoder 2"),
    Family("stablelm", "StableLM"),
    Family("falcon", "Falcon"),
    Family("falcon_h1", "Falcon H1", MAMBA_HEADS | {"mamba_d_ssm": 64, "mamba_n_groups": 1}),
    Family("mamba2", "Mamba 2"),
    Family("nemotron_h", "Nemotron H"),
    Family("lfm2", "LFM2", {"layer_types": ["conv", "full_attention"]}),
    Family("gpt2", "GPT-2"),
    Family("gpt_neox", "Pythia"),
    Family("opt", "OPT"),
    Family("bloom", "BLOOM"),
)
POLICIES: dict[str, dict[str, Any]] = {
    "packed": {"packing": True},
    "shared prompts": {"packing": True, "share_prompts": True},
    "context parallel": {"backend": {"context_parallel": 2}},
    "tensor parallel": {"backend": {"tensor_parallel": 2}},
    "Megatron": {"backend": {"type": "megatron"}},
}
COLUMNS = ("padded", *POLICIES, "torch engine")


def abilities(rank: int, world_size: int, families: tuple[Family, ...]) -> list[dict[str, bool]]:
    """Try each family on two ranks: a refusal is False, and other log-probs than the network's raise."""
    return [_abilities(family) for family in families]


def _abilities(family: Family) -> dict[str, bool]:
    network = _network(family)
    batch = _batch()
    network.config.use_cache = False
    with torch.no_grad():
        expected, _ = plain_logprobs(network.eval(), batch)
    _train_a_step(family, batch, expected)
    found = {"padded": True}
    for name, settings in POLICIES.items():
        try:
            policy = _policy(family, settings)
        except RecipeError:
            found[name] = False
            continue
        _assert_same(policy.compute_logprobs(batch), expected, f"{family.kind}, {name}")
        found[name] = True
    try:
        check_decoding(network, facts_of(network))
        found["torch engine"] = True
    except RecipeError:
        found["torch engine"] = False
    return found


def _network(family: Family) -> Any:
    network = tiny_network(family.kind, **family.settings)
    check_network(network, facts_of(network))
    return network


def _policy(family: Family, settings: dict[str, Any]) -> Any:
    policy = Policy.model_validate(settings)
    load, ranks = partial(_network, family), make_ranks(CPU, policy.backend.shape)
    if policy.backend.type == "dtensor":
        return DtensorBackend(load, policy, ranks)
    return make_backend(load=load)


def _train_a_step(family: Family, batch: Advised, expected: Tensor) -> None:
    policy = _policy(family, {})
    _assert_same(policy.compute_logprobs(batch), expected, family.kind)
    policy.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    assert policy.optimizer_step(0.1) > 0
    moved = (policy.compute_logprobs(batch) - expected).abs().max()
    assert moved.isfinite() and moved > 1e-4, f"{family.kind} does not train"


def _batch() -> Advised:
    """Three prompts, the first two of which have two completions each."""
    draw = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 99, (length,), generator=draw).tolist()

    prompts = [tokens(5), tokens(3), tokens(4)]
    rows = collate([prompts[i] for i in (0, 0, 1, 1, 2)], [tokens(n) for n in (4, 6, 3, 8, 2)], pad_id=0)
    return rows.with_fields(Advised, advantages=torch.randn(rows.token_ids.shape, generator=draw))


def _assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, atol=1e-4, rtol=1e-4, msg=lambda message: f"{what}: {message}"
    )
