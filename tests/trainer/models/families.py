"""Model families and what a run can do with each, as docs/reference/recipes.md lists them."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

Abilities = Literal["all", "streams", "rows"]
STREAMS = ("packed", "shared prompts", "context parallel")
# What each level supports besides padded rows and the torch engine, as a line of the page
ABILITIES: dict[Abilities, str] = {
    "all": "Packing, shared prompts, context and tensor parallelism, Megatron",
    "streams": "Packing, shared prompts, context parallelism",
    "rows": "Padded rows only (sliding windows, linear attention, states and convolutions cross sequences)",
}


@dataclass(frozen=True)
class Family:
    """Model type of transformers, models of it, its abilities, and the settings of this row."""

    kind: str
    examples: str
    abilities: Abilities
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the family as the page names it: the examples only if they say more than the type."""
        is_same = re.sub(r"\W", "", self.examples).lower() == self.kind.replace("_", "")
        return f"`{self.kind}`" if is_same else f"`{self.kind}` ({self.examples})"


WINDOW = {"sliding_window": 4096}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES = (
    Family("llama", "Llama 2 and 3, SmolLM2", "all"),
    Family("qwen2", "Qwen 2 and 2.5", "all"),
    Family("qwen3", "Qwen 3", "all"),
    Family("qwen3_moe", "Qwen 3 MoE", "all"),
    Family("qwen3_next", "Qwen 3 Next", "rows", LINEAR),
    Family("qwen3_5", "Qwen 3.5 text", "rows", LINEAR),
    Family(
        "mistral", "Mistral 7B v0.2 and later without `sliding_window`", "streams", {"sliding_window": None}
    ),
    Family("mistral", "Mistral 7B v0.1 with `sliding_window`", "rows", WINDOW),
    Family("ministral3", "Ministral 3 text", "streams"),
    Family("mixtral", "Mixtral", "streams"),
    Family("gemma", "Gemma", "streams"),
    Family("gemma2", "Gemma 2", "rows"),
    Family("gemma3_text", "Gemma 3 270M and 1B", "rows"),
    Family("gemma3", "Gemma 3 4B and larger", "rows"),
    Family("gemma4", "Gemma 4", "rows"),
    Family("phi3", "Phi 3 and 4 without `sliding_window`", "streams", {"sliding_window": None}),
    Family("phi3", "Phi 3 mini with `sliding_window`", "rows", WINDOW),
    Family("olmo2", "OLMo 2", "streams"),
    Family("olmo3", "OLMo 3", "rows"),
    Family("olmoe", "OLMoE", "streams"),
    Family("smollm3", "SmolLM3", "streams"),
    Family("glm4", "GLM 4", "streams"),
    Family("glm4_moe", "GLM 4.5 and later", "streams"),
    Family("granite", "Granite 3", "streams"),
    Family("granitemoe", "Granite 3 MoE", "streams"),
    Family("granitemoehybrid", "Granite 4", "rows", {"layer_types": ["mamba", "attention"]}),
    Family("cohere", "Command R", "streams"),
    Family("cohere2", "Command R7B, Command A", "rows"),
    Family("deepseek_v2", "DeepSeek V2", "streams"),
    Family("deepseek_v3", "DeepSeek V3 and R1, Kimi K2", "streams"),
    Family("llama4", "Llama 4 text", "rows"),
    Family("gpt_oss", "gpt-oss", "rows"),
    Family("minimax", "MiniMax Text 01", "rows"),
    Family("minimax_m2", "MiniMax M2", "streams"),
    Family("seed_oss", "Seed-OSS", "streams"),
    Family("hunyuan_v1_dense", "Hunyuan dense", "streams"),
    Family("ernie4_5", "ERNIE 4.5", "streams"),
    Family("exaone4", "EXAONE 4", "rows"),
    Family("starcoder2", "StarCoder 2", "streams"),
    Family("stablelm", "StableLM", "rows"),
    Family("falcon", "Falcon", "rows"),
    Family("falcon_h1", "Falcon H1", "rows"),
    Family("mamba2", "Mamba 2", "rows"),
    Family("nemotron_h", "Nemotron H", "rows"),
    Family("lfm2", "LFM2", "rows", {"layer_types": ["conv", "full_attention"]}),
    Family("gpt2", "GPT-2", "streams"),
    Family("gpt_neox", "Pythia", "streams"),
    Family("opt", "OPT", "streams"),
    Family("bloom", "BLOOM", "rows"),
)
