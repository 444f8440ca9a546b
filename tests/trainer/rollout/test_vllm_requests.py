"""What vLLM is asked for, and in which order, with an engine in its place that only notes it."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, GPT2Config, Qwen3NextConfig

from abrun.errors import LaunchError
from abrun.recipe.policy import Model
from abrun.recipe.run import share_of_device
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.sources import preset_config
from abrun.trainer.rollout.vllm import instance
from abrun.trainer.rollout.vllm.engines import ColocatedEngine
from abrun.trainer.rollout.vllm.startup import LogTail, _engine_arguments, _memory_arguments, cache_bytes
from abrun.trainer.seeds import Draws
from tests.trainer.rollout.vllm_sampling import MAX_NEW_TOKENS, TEXT, config_of, replace_vllm

PROMPTS = [[5, 6], [7], [5, 6], [8, 9, 10]]
END = min(TEXT.end_ids)
GIB = 2**30


class Noting:
    """A vLLM that finishes requests last to first.

    An odd row r draws r tokens and an end, an even one as many as it may, or `room`.
    """

    def __init__(self) -> None:
        self.llm_engine = self
        self.events: list[str] = []
        self.requests: dict[str, tuple[list[int], Any]] = {}
        self.loaded: list[str] = []
        self.is_reset = True
        self.room = MAX_NEW_TOKENS
        self.beside = 0  # by how much its log-probs are of other tokens than were drawn
        self.model = Layers(self)
        self._waiting: list[str] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        self.requests[name] = (prompt["prompt_token_ids"], parameters)
        self._waiting.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Any]:
        row = int(self._waiting.pop())
        tokens = [20 + row] * row + [END] if row % 2 else [50] * self.room
        logprobs = SimpleNamespace(  # vLLM may give others behind the drawn one
            token_ids=[each for token in tokens for each in (token + self.beside, 0)],
            logprobs=[value for place in range(len(tokens)) for value in (-0.25 * (place + 1), -9.0)],
            start_indices=range(0, 2 * len(tokens), 2),
        )
        reason = "stop" if row % 2 else "length"
        output = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
        return [
            SimpleNamespace(finished=False, request_id="0", outputs=[]),
            SimpleNamespace(finished=True, request_id=str(row), outputs=[output]),
        ]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.loaded = [name for name, _ in kwargs["weights_iterator"]]
        self.events.append(method)

    def apply_model(self, function: Any) -> list[Any]:
        if function is instance._repack:
            self.events.append("_repack")
            return [None]
        return [function(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.events.append("reset_prefix_cache")
        return self.is_reset


class Layers(torch.nn.Module):
    """A model of vLLM's with a norm and a product, of which `lost` does not arrive."""

    def __init__(self, vllm: Noting, method: str = "UnquantizedLinearMethod", lost: str = "") -> None:
        super().__init__()
        self.norm, self.up_proj = torch.nn.LayerNorm(2, bias=False), torch.nn.Linear(2, 2, bias=False)
        vars(self.up_proj)["quant_method"] = type(method, (), {})()
        self.act = torch.nn.Identity()
        vars(self.act)["quant_method"] = None
        self.attn = Attention()
        self._events, self._lost = vllm.events, lost

    def load_weights(self, weights: Any) -> set[str]:
        self._events.append("load_weights")
        return {"norm.weight", "up_proj.weight", *(name for name, _ in weights)} - {self._lost}


class Attention(torch.nn.Module):
    """vLLM's, with a tensor that is no buffer; what it samples with is in `impl`."""

    def __init__(self, sinks: torch.Tensor | None = None) -> None:
        super().__init__()
        self.scale, self.kv_cache = torch.tensor(3.0), torch.zeros(2)
        self.impl = SimpleNamespace(alibi_slopes=torch.tensor([0.5, 0.25]), sinks=sinks)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


class Composite:
    """What attends in vLLM from 0.30 on with two implementations, by what is asked of it."""

    def __init__(self, *variants: SimpleNamespace) -> None:
        self.variants = variants

    def get_impl_variants(self) -> tuple[SimpleNamespace, ...]:
        return self.variants


class MLAAttention(Attention):
    """What vLLM calls attention whose weights it multiplies with each other."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Noting:
    made = Noting()
    replace_vllm(monkeypatch, made)
    return made


def engine_of(*overrides: str) -> ColocatedEngine:
    backend: Any = SimpleNamespace(ranks=make_ranks(torch.device("cpu"), {}))
    return ColocatedEngine(config_of(*overrides), backend, TEXT)


def draws() -> Draws:
    return Draws(seed=6, stream="sampling", step=1, rows=range(4, 8))


def test_every_request_asks_for_the_recipes_distribution_and_its_rows_own_seed(
    vllm: Noting, group: None
) -> None:
    filters = ("rollout.min_p=0.05", "rollout.top_k=7", "rollout.top_p=0.8")
    engine = engine_of("rollout.temperature=0.7", *filters)
    completions = engine.generate(PROMPTS, draws())
    asked = {
        "temperature": 0.7,
        "min_p": 0.05,
        "top_k": 7,
        "top_p": 0.8,
        "max_tokens": MAX_NEW_TOKENS,
        "stop_token_ids": sorted(TEXT.end_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "output_kind": "final",
    }
    for row, (prompt, seed) in enumerate(zip(PROMPTS, draws().seeds(), strict=True)):
        found, parameters = vllm.requests[str(row)]
        assert (found, vars(parameters)) == (prompt, asked | {"seed": seed})
    longest = [50] * MAX_NEW_TOKENS
    assert [one.token_ids for one in completions] == [longest, [21, END], longest, [23, 23, 23, END]]
    assert [one.truncated for one in completions] == [True, False, True, False]
    assert completions[3].logprobs == [-0.25, -0.5, -0.75, -1.0]
    assert all(one.support is None for one in completions)
    greedy = engine.generate(PROMPTS, draws(), temperature=0.0)
    assert vllm.requests["0"][1].temperature == 0 and greedy[3].logprobs == [0.0] * 4


def test_log_probs_of_other_tokens_are_an_error(vllm: Noting, group: None) -> None:
    vllm.beside = 1
    with pytest.raises(LaunchError, match="to other tokens"):
        engine_of().generate(PROMPTS, draws())


def test_a_sequence_that_vllm_has_no_room_for_is_an_error_and_not_cut(
    vllm: Noting, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.room, engine = MAX_NEW_TOKENS - 1, engine_of()
    with pytest.raises(
        LaunchError, match=r"truncated after 23 of 24 tokens: .*; rollout\.gpu_memory_utilization sets"
    ):
        engine.generate(PROMPTS, draws())

    def refuse(*request: Any) -> None:
        raise ValueError("The prompt (length 9): maximum model length 8.")

    monkeypatch.setattr(vllm, "add_request", refuse)
    with pytest.raises(LaunchError, match=r"maximum model length 8\.; rollout\.gpu_memory_utilization sets"):
        engine.generate(PROMPTS, draws())


def test_the_trainers_memory_is_taken_back_before_each_part_that_has_no_room_beside_it(
    vllm: Noting, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = {
        tag: SimpleNamespace(handle=(0, num_bytes), is_asleep=False)
        for tag, num_bytes in (("weights", 4 * GIB), ("kv_cache", 10 * GIB))
    }
    library: Any = ModuleType("vllm.device_allocator.cumem")
    library.CuMemAllocator = SimpleNamespace(get_instance=lambda: SimpleNamespace(pointer_to_data=pool))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", library)

    def sleep(level: int) -> None:
        for data in pool.values():
            data.is_asleep = level == 2
        for tensor in (attn.scale, attn.kv_cache, attn.impl.alibi_slopes):
            tensor.fill_(torch.nan)

    def wake_up(tags: list[str]) -> None:
        for tag in tags:
            pool[tag].is_asleep = False
            vllm.events.append(tag)

    attn: Any = vllm.model.attn
    vllm.sleep, vllm.wake_up = sleep, wake_up  # pyright: ignore[reportAttributeAccessIssue]
    free: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.pop(0), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: vllm.events.append("empty_cache"))
    monkeypatch.setattr(instance, "preserving_globals", lambda device: contextlib.nullcontext())
    engine = instance.VllmInstance(config_of(), torch.device("cuda"), 1, frozenset({END}))
    assert not engine.wake()  # it has not slept
    loads = ["load_weights", "kv_cache", "reset_prefix_cache"]
    for free_bytes, expected in (
        ([16 * GIB, 12 * GIB], ["weights", *loads]),
        ([15 * GIB, 16 * GIB], ["empty_cache", "weights", *loads]),
        # The trainer has gathered weights meanwhile
        ([16 * GIB, 9 * GIB], ["weights", loads[0], "empty_cache", *loads[1:]]),
    ):
        assert engine.sleep() == engine.sleep() == 14 * GIB
        free[:] = free_bytes
        vllm.events.clear()
        assert engine.wake()
        assert (attn.scale.item(), attn.impl.alibi_slopes.tolist()) == (3.0, [0.5, 0.25])
        assert attn.kv_cache.isnan().all()  # its memory is away still
        engine.load(iter([]))
        assert vllm.events == expected
        assert not engine.wake()  # its weights are there


def test_a_sync_ends_with_an_empty_prefix_cache(vllm: Noting, group: None) -> None:
    engine = engine_of()
    weights = [("model.embed_tokens.weight", torch.zeros(2)), ("model.norm.weight", torch.zeros(2))]
    for count in (1, 2):
        engine.sync(iter(weights))
        assert vllm.events == ["reload_weights", "_repack", "reset_prefix_cache"] * count
        assert vllm.loaded == [name for name, _ in weights]
    vllm.is_reset = False
    with pytest.raises(LaunchError, match=r"policy's weights: .*prefix cache"):
        engine.sync(iter(weights))


def test_on_a_gpu_weights_go_to_their_places_where_vllm_computes_with_them_as_they_are(
    vllm: Noting, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "preserving_globals", lambda device: contextlib.nullcontext())
    engine = instance.VllmInstance(config_of(), torch.device("cuda"), 1, frozenset({END}))
    engine.load(iter([]))
    experts, (mla, sinks, composite) = (
        Layers(vllm, "UnquantizedFusedMoEMethod"),
        (Layers(vllm) for _ in "123"),
    )
    mla.attn, sinks.attn = MLAAttention(), Attention(sinks=torch.zeros(2))
    vars(composite.attn)["impl"] = Composite(Attention().impl, sinks.attn.impl)
    for vllm.model in (experts, mla, sinks, composite):
        engine.load(iter([]))
    plain, processed = ([how, "reset_prefix_cache"] for how in ("load_weights", "reload_weights"))
    assert vllm.events == plain + processed * 4
    vllm.model = Layers(vllm, lost="norm.weight")
    with pytest.raises(LaunchError, match=r"failed to take .* not loaded: norm\.weight"):
        engine.load(iter([]))


def test_a_mixture_that_lacks_an_experts_matrix_is_an_error(vllm: Noting, group: None) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in (0, 1) for expert in (0, 1)
    ]
    engine = engine_of()
    engine.sync((name, torch.zeros(1)) for name in names)
    with pytest.raises(
        LaunchError, match=r"layers\.1\.mlp\.experts: up_proj\.weight of 1 experts, but others have 2"
    ):
        engine.sync((name, torch.zeros(1)) for name in names[:-1])


def test_it_is_started_to_return_the_log_probs_of_what_it_draws_from() -> None:
    cpu = torch.device("cpu")
    plain = _engine_arguments(config_of(), cpu, 1, None)
    assert (plain["logprobs_mode"], plain["generation_config"]) == ("processed_logprobs", "vllm")
    assert plain["dtype"] == "float32" and "hf_overrides" not in plain and "max_num_seqs" not in plain
    assert plain["max_model_len"] == -1  # it may be more than abrun takes, and than the cache has room for
    head = "policy.logprobs.head_dtype=float32"
    other = _engine_arguments(config_of("policy.dtype=bfloat16", head, "rollout.batch_size=3"), cpu, 1, None)
    assert (other["dtype"], other["hf_overrides"]) == ("bfloat16", {"head_dtype": "float32"})
    assert other["max_num_seqs"] == 3


def test_beside_the_trainer_it_takes_what_a_step_needs_of_keys_and_values() -> None:
    config = preset_config(Model(preset="qwen2.5-1.5b"))
    asked = ["model.preset=qwen2.5-1.5b", "policy.dtype=bfloat16", "rollout.max_new_tokens=2000"]
    step = ["algorithm.prompts_per_step=8", "algorithm.group_size=8"]
    run = config_of(*asked, *step)
    a_token = 28 * 2 * 2 * 128 * 2  # layers, keys and values, heads, their size, bytes
    whole = 64 * (2 * 2000 + 64) * a_token
    assert cache_bytes(run, 1, config) == whole
    assert cache_bytes(run, 4, config) == whole // 4
    halves = config_of(*asked, *step, "rollout.tensor_parallel=2", "cluster.cpu_ranks=4")
    assert cache_bytes(halves, 4, config) == whole // 4  # two engines, each of half the heads a device
    few = config_of(*asked, *step, "rollout.batch_size=2")
    assert cache_bytes(few, 1, config) == (32_768 + 64) * a_token  # one longest sequence
    ungrouped = GPT2Config(n_layer=28, n_embd=256, n_head=2, n_positions=128)  # names no key-value heads
    assert cache_bytes(run, 1, ungrouped) == whole
    recurrent = Qwen3NextConfig()  # vLLM wants a state for each of max_num_seqs
    for other in (recurrent, Gemma4TextConfig()):  # whose heads differ from layer to layer
        assert cache_bytes(run, 1, other) is None
    assert _memory_arguments(run, recurrent, 140 * GIB) == {"gpu_memory_utilization": 0.6}
    assert _memory_arguments(run, config, 140 * GIB) == {
        "kv_cache_memory_bytes": whole,
        "gpu_memory_utilization": whole / (140 * GIB),
    }
    assert _memory_arguments(run, config, 20 * GIB) == {
        "gpu_memory_utilization": 0.6
    }  # too much: as much as there is
    asked_for = config_of(*asked, *step, "rollout.gpu_memory_utilization=0.3")
    assert _memory_arguments(asked_for, config, 140 * GIB) == {"gpu_memory_utilization": 0.3}
    alone = config_of(*asked, *step, "rollout.devices=1")
    assert _memory_arguments(alone, config, 140 * GIB) == {"gpu_memory_utilization": 0.9}
    assert _memory_arguments(run, config, None) == {"kv_cache_memory_bytes": GIB}
    # Beside other runs on the GPU: as alone, or not at all
    shared = config_of(*asked, *step, "cluster={gpus_per_node: 1, runs_per_gpu: 4}")
    assert _memory_arguments(shared, config, 140 * GIB) == _memory_arguments(run, config, 140 * GIB)
    for device_bytes, network, share_bytes in (
        (40 * GIB, config, share_of_device(40 * GIB, 4)),  # too much of its share
        (20 * GIB, config, None),  # alone, as much as there is
        (140 * GIB, recurrent, None),
    ):
        with pytest.raises(LaunchError, match=r"cluster\.runs_per_gpu: got 4, but vLLM") as refused:
            _memory_arguments(shared, network, device_bytes)
        assert ("share of the whole GPU" if share_bytes is None else f"{share_bytes / 2**30:.1f} GiB") in str(
            refused.value
        )


def test_what_vllm_goes_on_without_is_noted() -> None:
    import logging

    tail = LogTail()
    log = logging.Logger("vllm", logging.INFO)
    log.addHandler(tail)
    log.info("weights were not loaded from checkpoint: {'model.layers.0.mlp.experts.routed_experts.w13'}")
    assert not tail.missing_weights
    log.info("Following weights were not loaded: {'model.norm.weight'}")
    assert "model.norm.weight" in tail.missing_weights
