# SPDX-License-Identifier: Apache-2.0
"""Episodes in groups that start from the same state and are judged against each other: what GRPO has for a critic.

Axes: N episodes, a multiple of the group size G; group g is rows g * G to (g + 1) * G - 1. `valid` (N,) bool is False
for episodes in which something broke: they have no part in their group's statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantage(score: Tensor, group_size: int, valid: Tensor) -> Tensor:
    """How much better than its group each episode was, (N,): (score - mean) / (std + 1e-6).

    0 for invalid episodes, and exactly 0 in groups whose scores are all equal.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); std is the unbiased one, as in the
    authors' and RLinf's code.

    Example: a group of four that scores 1, 0, 0, 0
        mean 0.25, std 0.5;  advantage = [1.5, -0.5, -0.5, -0.5]
    """
    within = valid.view(-1, group_size)
    count = within.sum(1, keepdim=True)
    x = torch.where(within, score.view(-1, group_size), 0.0)
    deviation = torch.where(within, x - x.sum(1, keepdim=True) / count.clamp_min(1), 0.0)
    std = (deviation.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    # Rounding leaves equal scores a deviation of 1e-8, which 1e-6 would make a hundredth.
    advantage = torch.where(differ(score, group_size, valid).view_as(within), deviation / (std + 1e-6), 0.0)
    return advantage.flatten()


def differ(score: Tensor, group_size: int, valid: Tensor) -> Tensor:
    """(N,) bool, the valid episodes of groups whose scores are not all equal: the others teach nothing."""
    within, x = valid.view(-1, group_size), score.view(-1, group_size)
    low = torch.where(within, x, torch.inf).amin(1)
    high = torch.where(within, x, -torch.inf).amax(1)
    return ((low < high)[:, None] & within).flatten()


def mean_within(success: Tensor, group_size: int, low: float, high: float, valid: Tensor) -> Tensor:
    """(N,) bool, the valid episodes of groups whose mean success is in [low, high].

    Source: the group filter of SimpleVLA-RL (Li et al. 2025, arXiv:2509.09674) and piRL (arXiv:2510.25889).
    """
    within = valid.view(-1, group_size)
    # In float64, where 1 of 10 is the same number as 0.1.
    mean = (success.view(-1, group_size) & within).sum(1).double() / within.sum(1).clamp_min(1)
    return (((mean >= low) & (mean <= high))[:, None] & within).flatten()
