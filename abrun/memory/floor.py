"""The least memory that a step can do with, from a model's shapes: what is left to save is what lies above.

Letters: N parameters of a rank, L layers, T tokens of a rank's microbatch, H hidden size, V vocabulary, I
the products' inner size, P tensor-parallel ranks.
"""

from typing import Any

from abrun.experiment.preflight.model_files import shape_of
from abrun.memory.step import is_cut
from abrun.recipe.algorithms import Dpo, PolicyGradientSettings
from abrun.recipe.model_fit import PLAIN_DECODERS
from abrun.recipe.policy import Model
from abrun.recipe.run import OwnRunConfig

DEFAULT_BUDGET_MIB = 512  # of the log-prob kernels
CHARACTERS = 99  # the tokens of every preset's tokenizer
ITEMSIZE = {"float32": 4, "bfloat16": 2}


def floor_of(
    config: OwnRunConfig, *, length: int, num_sequences: int, master_dtype: str = "float32"
) -> dict[str, int] | None:
    """Bytes by kind; their sum is the floor. None where the model's shapes are not known here.

    Weights, gradients and AdamW's moments are of `master_dtype`, cut over ranks. Of activations it has what
    the backward pass cannot do without: with `full` a layer's input, else what its products, its activation
    and attention take in. The log-probs need the dense logits and their gradient, in the products' dtype, or
    of the kernels the logits of a chunk, as far as their budget goes. In a step of one microbatch gradients
    and activations need not be there at once: the larger counts. `num_sequences`: of a rank's microbatch.
    """
    shape = known_shape(config.model)
    if shape is None or config.policy.backend.type != "dtensor":
        return None
    policy, layout = config.policy, config.policy.backend
    tensor = layout.tensor_parallel
    over = config.cluster.ranks // tensor
    num_dense, num_experts = num_parameters(shape)
    own = (num_dense // tensor + num_experts) // over  # tensor-parallel ranks have the same experts
    item = ITEMSIZE[policy.dtype]
    tokens = num_sequences * length // layout.context_parallel
    saved = shape["num_hidden_layers"] * tokens * _saved(shape, config, tensor) * item
    vocab, settings = -(-shape["vocab_size"] // tensor), policy.logprobs
    if settings.impl == "logits":
        logprobs = 2 * tokens * vocab * item
    else:
        chunk = tokens * min(settings.chunk_size or vocab, vocab) * item
        logprobs = min((settings.memory_budget_mib or DEFAULT_BUDGET_MIB) * 2**20, chunk)
    weights = ITEMSIZE[master_dtype] * own
    floor = {"weights": weights, "optimizer state": 2 * weights}
    if _has_reference(config):
        floor["reference weights"] = weights
    of_pass = {"activations": saved, "log-probs": logprobs}
    if is_cut(config):
        return floor | {"gradients": weights} | of_pass
    return floor | ({"gradients": weights} if weights > sum(of_pass.values()) else of_pass)


def _saved(shape: dict[str, Any], config: OwnRunConfig, tensor: int) -> int:
    """Numbers that a layer keeps of a token."""
    hidden = shape["hidden_size"] // (tensor if config.policy.backend.sequence_parallel else 1)
    if config.policy.activation_checkpointing == "full":
        return hidden
    queries = shape["num_attention_heads"] * _head_size(shape) // tensor
    keys = shape["num_key_value_heads"] * _head_size(shape) // min(tensor, shape["num_key_value_heads"])
    attention = 2 * queries + 2 * keys  # in and out
    if config.policy.activation_checkpointing == "selective":
        return hidden + attention
    if "num_experts" in shape:
        inner = shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
    else:
        inner = shape["intermediate_size"] // tensor
    return 4 * hidden + attention + 3 * inner


def num_parameters(shape: dict[str, Any]) -> tuple[int, int]:
    """Of a plain decoder: those that every token meets, and those of experts."""
    hidden, layers, vocab = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    head = _head_size(shape)
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    layer = 2 * hidden * queries + 2 * hidden * keys + 2 * hidden
    if shape["model_type"] == "qwen2":
        layer += queries + 2 * keys  # biases
    if shape["model_type"].startswith("qwen3"):
        layer += 2 * head  # norms of queries and keys
    experts = 0
    if "num_experts" in shape:
        layer += hidden * shape["num_experts"]
        experts = shape["num_experts"] * 3 * hidden * shape["moe_intermediate_size"]
    else:
        layer += 3 * hidden * shape["intermediate_size"]
    heads = 1 if shape.get("tie_word_embeddings") else 2
    return layers * layer + heads * vocab * hidden + hidden, layers * experts


def known_shape(model: Model) -> dict[str, Any] | None:
    """A configuration's fields, of a preset or a folder, where it is one of the families that are known."""
    shape = {"vocab_size": CHARACTERS, **shape_of(model)}
    return shape if shape.get("model_type") in PLAIN_DECODERS else None


def _head_size(shape: dict[str, Any]) -> int:
    return shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]


def _has_reference(config: OwnRunConfig) -> bool:
    algorithm = config.algorithm
    return isinstance(algorithm, Dpo) or (
        isinstance(algorithm, PolicyGradientSettings) and algorithm.kl_coefficient > 0
    )
