# SPDX-License-Identifier: Apache-2.0
"""The one normaliser: running mean and variance kept in float64, applied in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Normalizer(nn.Module):
    """Scales (..., *shape) to zero mean and unit variance by what `update` has seen; identity before that.

    The statistics are buffers: they travel with the checkpoint and change only through `update`, so that evaluation
    never moves them. Source of the merge: Chan et al. 1979, the parallel variance formula.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, epsilon: float = 1e-8, min_std: float = 0.0):
        """`min_std`: numbers that varied less are scaled as if they had varied this much."""
        super().__init__()
        self.clip, self.epsilon, self.min_std = clip, epsilon, min_std
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # What forward uses; float32 and derived, but saved so that loading needs no second step.
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Merge a batch (B, *shape) into the statistics."""
        x = x.reshape(-1, *self.mean.shape).double()
        batch_var, batch_mean = torch.var_mean(x, 0, correction=0)
        total = self.count + x.shape[0]
        delta = batch_mean - self.mean
        spread = self.var * self.count + batch_var * x.shape[0] + delta**2 * self.count * x.shape[0] / total
        self.mean += delta * x.shape[0] / total
        self.var.copy_(spread / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.var.clamp_min(self.min_std**2) + self.epsilon).rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)


class RewardScaler(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return; never shifts them.

    Source: the reward scaling of Engstrom et al. 2020, arXiv:2005.12729, section 2 (not in the PPO paper). The mean
    stays where it is, because shifting a reward changes which behaviour is best where episodes end early.
    """

    returns: Tensor

    def __init__(self, num_envs: int, clip: float = 10.0):
        super().__init__()
        self.clip = clip
        self.statistics = Normalizer((), clip=clip)
        self.register_buffer("returns", torch.zeros(num_envs))

    @torch.no_grad()
    def forward(self, reward: Tensor, gamma: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Scale (T, N) rewards, after merging their returns under the discounts `gamma` (T, N) into the statistics."""
        seen = torch.empty_like(reward)
        for t in range(reward.shape[0]):
            self.returns.mul_(gamma[t]).add_(torch.where(valid[t], reward[t], 0.0))
            seen[t] = self.returns
            self.returns.mul_(~ended[t])
        self.statistics.update(seen.flatten())
        return (reward * self.statistics.scale).clamp(-self.clip, self.clip)
