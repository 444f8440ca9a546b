"""Modules whose gradients megatron-core reduces, and their AdamW: of policy and critic alike.

Gradients are sums over tokens, microbatches and ranks, divided by nothing (`calculate_per_token_loss`). They
are reduced once an optimizer step, however many passes came before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from abrun.backends.megatron.cpu import standing_in
from abrun.backends.megatron.library import quiet
from abrun.backends.pieces import Held, of_optimizer
from abrun.recipe.policy import Optimizer


class Sharded:
    """A megatron module with its optimizer, if it has one; without, it is frozen.

    `held_of` says of a parameter, by its name in the module, which pieces of whole tensors it is.
    `replicated`: every rank of a replica has all of the module and all of its gradients.
    """

    def __init__(
        self,
        module: Any,
        held_of: Callable[[str], Held],
        optimizer: Optimizer | None,
        *,
        distributed: bool,
        device: torch.device,
        replicated: bool = False,
    ) -> None:
        self._replicated, self._distributed, self._held_of = replicated, distributed, held_of
        self.module: Any = module  # what the schedule calls
        self._device, self._named = device, dict(module.named_parameters())
        self._optimizer: Any = None
        if optimizer is None:
            module.requires_grad_(False)
            return
        with standing_in(device), quiet():
            # Parameters are never prefetched: that follows the calls of modules, and the head is not called.
            reduction = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                use_distributed_optimizer=distributed,
            )
            self.module = DistributedDataParallel(module.config, reduction, module)
            self._optimizer = _adamw(self.module, optimizer, distributed)

    @torch.no_grad()
    def assign(self, name: str, value: Tensor) -> None:
        """Set this rank's part of a parameter, and where that is not float32, of its master."""
        parameter: Any = self._named[name]
        parameter.copy_(value)
        main = getattr(parameter, "main_param", None)
        if main is not None:
            main.copy_(value.flatten()[self._own(parameter)].view_as(main))

    @torch.no_grad()
    def master(self, name: str) -> Tensor:
        """This rank's part of a parameter as it is trained, in float32. Collective over replicas."""
        parameter: Any = self._named[name]
        if not hasattr(parameter, "main_param"):
            return parameter.detach()
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if parameter.main_param is not None:
            whole[self._own(parameter)] = parameter.main_param.detach().flatten()
        if self._distributed:  # each rank has some, and adding up bits keeps every one of them
            dist.all_reduce(whole.view(torch.int32), group=self._optimizer_of(parameter).data_parallel_group)
        return whole.view_as(parameter)

    def _own(self, parameter: Tensor) -> slice:
        """The elements whose master this rank has; maybe none."""
        if not self._distributed:
            return slice(None)
        try:
            span = self._optimizer_of(parameter)._get_model_param_range_map(parameter)["param"]
        except KeyError:
            return slice(0, 0)
        return slice(span.start, span.end)

    def _optimizer_of(self, parameter: Tensor) -> Any:
        """Of the experts', or of all others."""
        is_expert = not getattr(parameter, "allreduce", True)
        return next(
            each
            for each in self._optimizer.chained_optimizers
            if each.param_groups and each.param_groups[0]["is_expert_parallel"] == is_expert
        )

    def optimizer_step(self, learning_rate: float) -> float:
        """See abrun.backends.Trained. Reduces the gradients first."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with standing_in(self._device), quiet():
            if self._replicated:
                self.module.finish_grad_sync()
            else:
                finalize_model_grads([self.module], None)
            _, norm, _ = self._optimizer.step()
            self.module.zero_grad_buffer()
            self._optimizer.zero_grad()
        return float(norm)

    def local_state(self) -> dict[str, Tensor]:
        """See abrun.backends.Trained."""
        state = {f"weights/{name}": parameter.detach() for name, parameter in self._named.items()}
        return state | dict(self._optimizer_state())

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """See abrun.backends.Trained."""
        for index, (inner, parameter) in enumerate(self._optimized()):
            inner.state.pop(parameter, None)
            if f"optimizer/step/{index}" in state:
                inner.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),  # where the fused AdamW wants it
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        with torch.no_grad():
            for name, tensor in self.local_state().items():
                tensor.copy_(state[name])

    def pieces(self) -> dict[str, Held]:
        """See abrun.backends.Trained."""
        found, trained = {}, {}
        for name, parameter in self._named.items():
            held = replace(self._held_of(name), rounded=hasattr(parameter, "main_param"))
            found[f"weights/{name}"] = held.under("weights/")
            trained[self._trained(parameter).data_ptr()] = name, parameter
        for index, (_, own) in enumerate(self._optimized()):
            name, parameter = trained[own.data_ptr()]
            span = self._own(parameter)
            held = replace(self._held_of(name), span=(span.start, span.stop) if self._distributed else None)
            if hasattr(parameter, "main_param"):
                found[f"optimizer/master/{index}"] = held.under("weights/")
            for key, of_state in of_optimizer(held).items():
                found[f"optimizer/{key}/{index}"] = of_state.under(f"optimizer/{key}/")
        return found

    def _trained(self, parameter: Any) -> Tensor:
        """What the optimizer has of a parameter: its master, or some of its own elements."""
        if getattr(parameter, "main_param", None) is not None:
            return parameter.main_param
        return parameter.detach().flatten()[self._own(parameter)]

    def resident_tensors(self) -> Sequence[Tensor]:
        """See abrun.backends.Trained."""
        gradients = [p.main_grad for p in self._named.values() if hasattr(p, "main_grad")]
        return [*self.local_state().values(), *gradients]

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """By the parameter's place in the optimizer, which has a part of it, or a copy in float32."""
        weights = {_storage(parameter) for parameter in self._named.values()}
        for index, (inner, parameter) in enumerate(self._optimized()):
            if _storage(parameter) not in weights:
                yield f"optimizer/master/{index}", parameter.detach()
            for key, value in inner.state.get(parameter, {}).items():
                yield f"optimizer/{key}/{index}", value

    def _optimized(self) -> Iterator[tuple[Any, Tensor]]:
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for each in chained if self._optimizer is not None else ():
            inner = each.optimizer
            for group in inner.param_groups if inner is not None else ():
                yield from ((inner, parameter) for parameter in group["params"])


def _adamw(module: Any, settings: Optimizer, distributed: bool) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.max_grad_norm,
        bf16=module.config.bf16,
        params_dtype=module.config.params_dtype,
        use_distributed_optimizer=distributed,
    )
    # torch's own, as on the other backend, whatever else is installed.
    before = megatron_optimizer.USING_PYTORCH_OPTIMIZER
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        optimizer = get_megatron_optimizer(config, [module], use_gloo_process_groups=False)
    finally:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = before
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]  # 0 for norms and biases; only its scheduler would do it
        group |= {"fused": True, "foreach": False}
    return optimizer


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
