"""What config.json alone shows of families, compared with transformers and with the checks at load."""

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from abrun.errors import RecipeError
from abrun.recipe.families import (
    BIASED_HEADS,
    MIXED,
    MULTIMODAL,
    SHARED_LAYERS,
    STREAMLESS,
    WINDOWED,
    family_refusal,
    stream_misfit,
)
from abrun.recipe.policy import Policy
from abrun.trainer.backends.attention import enable_streams
from abrun.trainer.models.checks import check_network
from abrun.trainer.models.families import facts_of
from tests.snapshot import Snapshot
from tests.trainer.models.architectures import tiny_config, tiny_network

PACKED = Policy(packing=True)
SOME = (
    "llama",
    "qwen3_moe",
    "mistral",
    "gemma3",
    "gpt_oss",
    "qwen3_next",
    "bloom",
    "marian",
    "phi",
    "zamba2",
)
# Need a package or settings of their own to be built at all.
NOT_BUILT = {"cohere_compass_text", "dbrx", "dots3_note", "gemma3n", "gemma4_assistant", "musicgen"}
NOT_BUILT |= {"musicgen_melody", "reformer"}
# Refused by what the checks compute, which no configuration shows.
FOUND_AT_LOAD = {"blt", "cpmant", "dory", "gemma4_unified_assistant", "hrm_text", "lara_mini", "prophetnet"}
FOUND_AT_LOAD |= {"sarvam_moe"}


def written(config: Any) -> dict[str, Any]:
    """What config.json says."""
    return json.loads(json.dumps(config.to_dict(), default=str))


def refusal(kind: str, **settings: Any) -> str | None:
    """Why the checks at load refuse a network of this family, or to pack it."""
    network = tiny_network(kind, **settings)
    try:
        check_network(network, facts_of(network))
        enable_streams(network, PACKED)
    except RecipeError as error:
        return str(error)
    return None


def test_multimodal_families_are_those_that_transformers_has_no_causal_lm_for(snapshot: Snapshot) -> None:
    multimodal = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    known = MULTIMODAL & set(CONFIG_MAPPING)
    assert known == multimodal - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    for kind in ("mistral3", "qwen2_5_vl", "qwen3_vl"):
        obstacle = family_refusal({"model_type": kind})
        assert obstacle
        snapshot(obstacle)


@pytest.mark.parametrize(
    "kind",
    [
        *SOME,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            if kind not in SOME
        ),
    ],
)
def test_a_configuration_is_refused_as_its_network_is(kind: str) -> None:
    """With `layer_types`, as transformers writes them, and without, as older files are."""
    if kind in NOT_BUILT:
        assert not {kind} & (BIASED_HEADS | SHARED_LAYERS | STREAMLESS | MIXED | WINDOWED)
        return
    config, reason = written(tiny_config(kind)), refusal(kind)
    if kind in FOUND_AT_LOAD:
        assert reason is not None
        return
    obstacle = family_refusal(config)
    if obstacle is not None:
        assert reason is not None and obstacle in reason
        return
    assert (stream_misfit(config, PACKED) is None) == (reason is None), reason
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("layer_types", None)
    if stream_misfit(config, PACKED) is not None:
        assert reason is not None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
        ("smollm3", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("lfm2", {"layer_types": ["full_attention", "full_attention"]}),
        ("llama4", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("llama4", {"layer_types": ["full_attention", "full_attention"]}),
        ("phi3", {"sliding_window": 8}),
        ("exaone4", {"layer_types": ["full_attention"] * 2, "sliding_window": None}),
    ],
)
def test_settings_decide_as_they_do_at_load(kind: str, settings: dict[str, Any]) -> None:
    config = written(tiny_config(kind, **settings))
    assert (stream_misfit(config, PACKED) is None) == (refusal(kind, **settings) is None)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": ["llama"]},
        {"model_type": 3, "text_config": "x"},
        {"model_type": "gemma3", "text_config": None, "sliding_window": None},
        {"model_type": "llama", "layer_types": [None, 3]},
        {"model_type": "qwen2", "sliding_window": "8", "use_sliding_window": "yes"},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "a_new_one", "sliding_window": 8},
    ],
)
def test_what_says_nothing_refuses_nothing(config: dict[str, Any]) -> None:
    assert family_refusal(config) is None and stream_misfit(config, PACKED) is None


def test_context_parallelism_goes_the_same_way(snapshot: Snapshot) -> None:
    context = Policy.model_validate({"backend": {"context_parallel": 2}})
    published = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "sliding_window": 1024}}
    misfit = stream_misfit(published, context)
    assert misfit and "with a gemma3 model, " in misfit
    snapshot(misfit)
    assert stream_misfit(published, PACKED) is not None and stream_misfit(published, Policy()) is None
