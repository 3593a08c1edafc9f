# SPDX-License-Identifier: Apache-2.0
"""Many parameters as one: the optimiser and the gradient clip then cost a handful of kernels, not one per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def flatten_parameters(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One flat (P,) parameter whose storage, and whose gradient's storage, the given ones become views of.

    Gradients accumulate in place, so clear them with `flat.grad.zero_()`, never by setting them to None. Move the
    module to its device first: `module.to()` afterwards would cut the views.
    """
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for p in parameters:
        end = start + p.numel()
        p.data = flat.data[start:end].view_as(p)
        p.grad = flat.grad[start:end].view_as(p)
        start = end
    return flat
