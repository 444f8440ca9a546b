"""Model families: what `config.json` alone shows that a run would be refused for; read without transformers.

The names are transformers' model types. tests/models/test_family_tables.py compares them with what
transformers loads and with what the trainer's checks at load refuse.
"""

import re
from collections.abc import Mapping
from typing import Any

from abrun.reasons import Code, Reason
from abrun.recipe.policy import Policy


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# They take images or sound; transformers' AutoModelForCausalLM has nothing for them.
MULTIMODAL = _names(
    """
    apertus1p5 aria aya_vision blip blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge
    cosmos3_omni deepseek_ocr2 deepseek_vl deepseek_vl_hybrid diffusion_gemma ernie4_5_vl_moe evolla
    exaone4_5 fast_vlm florence2 fun_asr_nano glm46v glm4v glm4v_moe glm5_next glm_ocr glmasr glmga
    granite4_vision granite_docling granite_speech granite_speech_plus hunyuan_vl hy_v4_vl
    hyperclovax_vision_v2 idefics idefics2 idefics3 inkling2 inkling2_loop inkling_mm_model
    instructblip instructblipvideo internvl janus kimi_k25 kosmos-2 kosmos-2.5 kyutai_speech_to_text
    lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr
    minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral4 mistral_large4 molmo2 muse_glimmer
    muse_spark nemo_speechlm nemotron_h_omni omniasr ovis2 paddleocr_vl paligemma perception_lm pi0
    pix2struct pp_chart2table pp_formulanet qianfan_ocr qwen2_5_omni qwen2_5_omni_thinker qwen2_5_vl
    qwen2_audio qwen2_vl qwen3_asr qwen3_omni_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    shieldgemma2 smolvlm step3p7 t5gemma2 udop unlimited_ocr vibevoice_asr video_llama_3 video_llava
    vipllava vision-encoder-decoder voxtral voxtral_realtime
    """
)
# Encoder and decoder; transformers has no class of the decoder alone, as it has of others.
ENCODER_DECODERS = _names(
    """
    encoder-decoder fsmt led longt5 m2m_100 mt5 nllb-moe pegasus_x seamless_m4t
    seamless_m4t_v2 switch_transformers t5 t5gemma umt5
    """
)
# Their LM head adds a bias, and the log-prob kernels take none.
BIASED_HEADS = _names(
    """
    bert bert-generation big_bird camembert codegen ctrl data2vec-text electra ernie git gptj
    megatron-bert modernbert-decoder phi rembert roberta roberta-prelayernorm roc_bert roformer xlm
    xlm-roberta xlm-roberta-xl xlnet xmod
    """
)
# Their layers never take a stream of sequences: state-space layers, attention or positions of their own.
STREAMLESS = _names(
    """
    axk2 bamba bart bigbird_pegasus blenderbot blenderbot-small bloom deepseek_v32 deepseek_v4 doge
    dots3_note_text falcon falcon_h1 falcon_mamba flint gemma2 glm_moe_dsa got_ocr2 gpt_neo
    gpt_neox_japanese gpt_oss granite_swa granitemoe_swa hy_v4 inkling2_loop_text inkling2_text
    inkling_text jamba mamba mamba2 marian mbart mpt mvp nemotron nemotron_h olmo_hybrid openai-gpt pegasus
    plbart qwen4_exp qwen4_exp_text recurrent_gemma rwkv stablelm trocr vaultgemma xglm xlstm zaya
    """
)
# Some of their layers have windows, chunks, linear attention or convolutions, unless layer_types says
# otherwise.
MIXED = _names(
    """
    afmoe bailing_hybrid beam cohere2 cohere2_moe cwm dory exaone4 exaone_moe gemma3 gemma3_text
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text granitemoehybrid kimi_linear
    kolibri1 lfm2_moe lfm3 llama4 llama4_text mimo_v2_flash minimax ministral olmo3
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
    """
)
# Every layer has the window that sliding_window gives.
WINDOWED = _names("ministral3 mistral mixtral phi3 phi4_multimodal starcoder2")
# Training draws experts at random, by the gaps between scores that their evaluation depends on too.
SAMPLING_ROUTERS = frozenset({"phimoe"})
SHARED_LAYERS = frozenset({"zamba", "zamba2"})

NO_CAUSAL_LM = "a multimodal model that transformers has no causal LM for"
ENCODER_DECODER = "an encoder-decoder model"
BIASED_HEAD = "an LM head with a bias, which the log-prob kernels do not take"
SAMPLING_ROUTER = "whose router samples experts in training"
SHARES_LAYERS = "whose layers share weights, so that they cannot be sharded one by one"

# Kinds of layers, as `layer_types` names them, that mix sequences or miss some of their tokens.
NOT_FULL = re.compile(r"sliding|chunk|linear|conv|mamba|recurrent|compress|index|hybrid")


def family_refusal(model: Mapping[str, Any]) -> str | None:
    """Return why a model of this configuration (`config.json`) cannot be trained; None if nothing says so."""
    family = model.get("model_type")
    if not isinstance(family, str):
        return None
    reasons = {
        ENCODER_DECODER: ENCODER_DECODERS,
        NO_CAUSAL_LM: MULTIMODAL,
        BIASED_HEAD: BIASED_HEADS,
        SAMPLING_ROUTER: SAMPLING_ROUTERS,
        SHARES_LAYERS: SHARED_LAYERS,
    }
    return next((reason for reason, families in reasons.items() if family in families), None)


def stream_setting(policy: Policy) -> tuple[str, str] | None:
    """Return the setting that puts sequences into streams, as messages name it, and its alternative."""
    ranks = policy.backend.context_parallel
    if policy.packing:
        return "policy.packing: got true", "packing: false"
    if ranks > 1:
        return f"policy.backend.context_parallel: got {ranks}", "context_parallel: 1"
    return None


def stream_misfit(model: Mapping[str, Any], policy: Policy) -> Reason | None:
    """Return why a model cannot be packed or spread over a context; None if nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    setting, reason = stream_setting(policy), attention_obstacle(model)
    if setting is None or reason is None:
        return None
    asked, instead = setting
    return Code.STREAM_NEEDS_FULL_ATTENTION(
        setting=asked, family=model.get("model_type"), obstacle=reason, instead=instead
    )


def attention_obstacle(model: Mapping[str, Any]) -> str | None:
    """Return what a model has besides full, causal attention in every layer; None if nothing says so."""
    nested = model.get("text_config")
    text = nested if isinstance(nested, Mapping) else model
    families = {name for name in (model.get("model_type"), text.get("model_type")) if isinstance(name, str)}
    if families & STREAMLESS:
        return "whose layers do not take a stream of sequences"
    layer_types, window = text.get("layer_types"), text.get("sliding_window")
    if isinstance(layer_types, list):
        kinds = sorted({str(kind) for kind in layer_types if NOT_FULL.search(str(kind))})
        return f"which has layers of {', '.join(kinds)}" if kinds else None
    no_window = "sliding_window" in text and window is None
    if families & MIXED and not no_window:
        return "not all of whose layers have full attention"
    if isinstance(window, int) and window and _uses_window(text, families):
        return f"whose layers attend to windows of {window} tokens"
    return None


def _uses_window(text: Mapping[str, Any], families: set[str]) -> bool:
    if text.get("use_sliding_window") is not True:
        return bool(families & WINDOWED) and text.get("use_sliding_window") is None
    first, layers = text.get("max_window_layers"), text.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)
