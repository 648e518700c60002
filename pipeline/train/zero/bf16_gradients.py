"""Fewer kernels for the gradients of stage 1 in bf16.

DeepSpeed's BF16_Optimizer adds, measures and clips the gradient of each parameter by itself: five kernels each, which a host can
take longer to launch than a GPU to run. Here one call adds all of them, one measures them, and the flat tensors that hold
them are clipped as they are. To remove this, do not call `use_few_kernels`.
"""

from typing import Any

import torch
from torch import Tensor


def use_few_kernels(optimizer: Any) -> None:
    """Replace two methods of a BF16_Optimizer. No-op for DeepSpeed's other optimizers."""
    if not hasattr(optimizer, "fp32_groups_gradients_flat"):
        return

    @torch.no_grad()
    def update_hp_grads(clear_lp_grads: bool = False) -> None:
        """Add the gradients of a micro-batch, in 16 bits, to those of the step, in fp32."""
        assert not clear_lp_grads
        pairs = [
            (total, parameter.grad.view(total.shape))
            for parameters, totals in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            for parameter, total in zip(parameters, totals, strict=True)
            if parameter.grad is not None
        ]
        if pairs:
            totals, added = zip(*pairs, strict=True)
            torch._foreach_add_(totals, added)

    @torch.no_grad()
    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        """Tensors to clip; or (tensors whose norm is that of the gradient, none of experts). Gradients that nobody set are zeros."""
        if for_clipping:
            return optimizer.fp32_groups_gradients_flat
        totals: list[Tensor] = [total for group in optimizer.fp32_groups_gradients for total in group]
        return [torch.stack(torch._foreach_norm(totals))], {}

    optimizer.update_hp_grads, optimizer.get_grads_for_norm = update_hp_grads, get_grads_for_norm
