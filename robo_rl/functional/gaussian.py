# SPDX-License-Identifier: Apache-2.0
"""Diagonal Gaussians: the one density behind Gaussian policies and stochastic denoising steps.

Axes: (..., A) in, (...) out; the last axis is summed.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import softplus

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of `x` in nats, summed over the last axis. `log_std` is (..., A), or (A,) where all rows share it."""
    z = (x - mean) * (-log_std).exp()
    constant = log_std.sum(-1) + LOG_SQRT_2PI * x.shape[-1]
    return -0.5 * (z * z).sum(-1) - constant


def entropy(log_std: Tensor) -> Tensor:
    """Differential entropy in nats, summed over the last axis."""
    return log_std.sum(-1) + (0.5 + LOG_SQRT_2PI) * log_std.shape[-1]


def kl(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    """KL(p || q) in nats, summed over the last axis; both std > 0."""
    ratio = std_p / std_q
    return (0.5 * (ratio**2 + ((mean_p - mean_q) / std_q) ** 2 - 1) - ratio.log()).sum(-1)


def tanh_log_det(u: Tensor) -> Tensor:
    """log |d tanh(u) / du| = log(1 - tanh(u)^2), summed over the last axis, exact for large |u|.

    Source: the identity log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)); the naive form is -inf from |u| = 9 on
    in float32. Subtracting it from the density of u gives that of tanh(u) (Haarnoja et al. 2018,
    arXiv:1801.01290, eq. 21).
    """
    return (2 * (math.log(2) - u - softplus(-2 * u))).sum(-1)
