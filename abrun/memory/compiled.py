"""Stand-in for torch.compile that saves the activations a compiled layer would save.

Inductor partitions the joint forward-backward graph of a layer by a min cut: it saves the fewest bytes and
recomputes the rest in the backward pass (torch._functorch.partitioners). This module uses the same partition
and decompositions. It then runs the two graphs operator by operator, which takes slightly more memory within
a layer than fused kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

ATTENTION = ("torch_attn::_varlen_attn", "aten::_scaled_dot_product_flash_attention_for_cpu")

_TENSOR = object()  # placeholder for a tensor in a layer's arguments
_graphs: dict[Any, Callable[..., Any]] = {}  # shared by layers of equal type and shapes


def partition_layer(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """Return a partitioned version of a layer's bound `forward`, as a replacement of torch.compile."""
    module: nn.Module = forward.__self__  # pyright: ignore[reportFunctionMemberAccess]

    def run_layer(*inputs: Any, **keyword_inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **keyword_inputs)
        parameters = dict(module.named_parameters())
        leaves, spec = tree_flatten((inputs, keyword_inputs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        saves_attention_only = functorch_config.activation_memory_budget == 0.0
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*parameters.values(), *tensors))
        key = (type(module), saves_attention_only, shapes)
        if key not in _graphs:
            other_leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            _graphs[key] = _partition_graph(
                module, forward, list(parameters), other_leaves, spec, saves_attention_only
            )
        return _graphs[key](list(parameters.values()), tensors)

    return run_layer


def _partition_graph(
    module: nn.Module,
    forward: Any,
    parameter_names: list[str],
    leaves: list[Any],
    spec: Any,
    saves_attention_only: bool,
) -> Callable[..., Any]:
    def call_layer(weights: list[Tensor], tensors: list[Tensor]) -> Any:
        remaining_tensors = iter(tensors)
        filled_leaves = [next(remaining_tensors) if leaf is _TENSOR else leaf for leaf in leaves]
        inputs, keyword_inputs = tree_unflatten(filled_leaves, spec)
        with torch.nn.utils.stateless._reparametrize_module(
            module, dict(zip(parameter_names, weights, strict=True))
        ):
            return forward(*inputs, **keyword_inputs)

    return aot_function(
        call_layer,
        fw_compiler=_run_graph_as_is,
        bw_compiler=_run_graph_as_is,
        partition_fn=_partition_around_attention
        if saves_attention_only
        else min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def _run_graph_as_is(gm: fx.GraphModule, example_inputs: Any) -> Any:
    return make_boxed_func(gm.forward)


def _partition_around_attention(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Partition a layer for selective checkpointing: save only attention and its inputs and outputs.

    abrun.backends.dtensor.layers does the same in real training.
    """
    backward_nodes: set[fx.Node] = set()
    saved_nodes: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.name) or not backward_nodes.isdisjoint(
            node.all_input_nodes
        ):
            backward_nodes.add(node)
        elif getattr(getattr(node.target, "_schema", None), "name", "") in ATTENTION:
            saved_nodes |= {node, *node.users, *map(_find_storage_owner, node.all_input_nodes)}
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in backward_nodes:
            policy = CheckpointPolicy.MUST_SAVE if node in saved_nodes else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["recompute"] = policy
    with functorch_config.patch(activation_memory_budget=1.0):
        return min_cut_rematerialization_partition(joint, *args, **options)


def _find_storage_owner(node: fx.Node) -> fx.Node:
    """Return the node that owns the storage of a view, or the node itself."""
    while node.op == "call_function" and get_default_op_list().is_view(node):
        node = node.all_input_nodes[0]
    return node
