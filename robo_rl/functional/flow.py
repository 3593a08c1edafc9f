# SPDX-License-Identifier: Apache-2.0
"""Flow matching. t = 1 is noise, t = 0 is data: x_t = t noise + (1 - t) action, and the velocity is noise - action.

That is openpi's and LeRobot's direction. The piRL paper (arXiv:2510.25889) counts the other way; its printed equations
7 to 9 are the ones for noise at 1 and do not keep the marginal in its own direction. Everything here is in ours.

A sampler walks K Euler steps down the grid t_i = 1 - i / K. `denoise_step` gives the Gaussian of the next state under
each sampler, and both the rollout and the update call it, so that a ratio of the two is 1 until the weights change.

Axes: B batch, K denoise_steps; an action chunk is (B, H, A).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Generator, Tensor

from robo_rl.functional.gaussian import LOG_SQRT_2PI

Sampler = Literal["ode", "sde", "cps", "noise"]


def interpolate(action: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t (B, ...) on the straight line between them; `t` (B,)."""
    t = _over(t, action)
    return t * noise + (1 - t) * action


def draw_time(batch: int, generator: Generator | None = None, alpha: float = 1.5) -> Tensor:
    """(B,) training times in (0.001, 1], drawn from Beta(alpha, 1): more at the noisy end, never t = 0.

    Source: openpi (Physical Intelligence), the time draw of pi0: 0.001 + 0.999 Beta(1.5, 1).
    """
    return 0.001 + 0.999 * torch.rand(batch, generator=generator) ** (1 / alpha)


def grid_time(index: Tensor | int, denoise_steps: int) -> Tensor:
    """t_i = 1 - i / K of step `index`, float32. Step K would be t = 0, where no velocity is ever asked for."""
    return 1 - torch.as_tensor(index, dtype=torch.float32) / denoise_steps


def denoise_step(
    x: Tensor,
    velocity: Tensor,
    index: Tensor,
    denoise_steps: int,
    sampler: Sampler,
    level: float = 0.5,
    learned_std: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and std of the state after step `index`, a diagonal Gaussian.

    Args:
        x, velocity: (B, ...) the state at t_i and the network's velocity there.
        index: (B,) int64, 0 to K - 1.
        level: the noise level a of `sde` and `cps`.
        learned_std: (B, ...) for `noise`.

    Returns:
        mean (B, ...), and std that broadcasts with it: (B, 1, ...), or (B, ...) where learned. Std 0 is an exact step.

    Source: piRL, arXiv:2510.25889, in the form of Flow-GRPO (Liu et al. 2025, arXiv:2505.05470, eq. 9):
        ode    x - v / K
        sde    sigma^2 = a^2 t / (1 - t), at t = 1 with the denominator of the first step, 1 / K:
               mean x - v / K - sigma^2 / (2 t K) (x + (1 - t) v), std sigma / sqrt(K); keeps the marginal of the flow
        cps    the coefficients-preserving step of Flow-CPS (Wang and Yu 2025, arXiv:2509.05952): the noise that is
               left, t - 1 / K, is split by the angle a pi / 2 into old and fresh; std 0 at the last step
        noise  the ode step with a learned std (Flow-Noise)
    """
    delta = 1.0 / denoise_steps
    t = _over(grid_time(index, denoise_steps).to(x.device), x)
    if sampler == "ode":
        return x - delta * velocity, torch.zeros_like(t)
    if sampler == "noise":
        assert learned_std is not None, "the sampler `noise` needs learned_std"
        return x - delta * velocity, learned_std
    noise = x + (1 - t) * velocity  # where the flow believes this state came from ...
    action = x - t * velocity  # ... and where it leads
    if sampler == "cps":
        left, angle = t - delta, level * math.pi / 2
        left = torch.where(index_is_last(index, denoise_steps, left), torch.zeros_like(left), left)
        return (1 - left) * action + left * math.cos(angle) * noise, left * math.sin(angle)
    # sigma^2 delta / t, with t / (1 - t) at t = 1 read as 1 / delta: the same trick as Flow-GRPO's sigma_max.
    strength = level**2 * delta / (1 - t).clamp_min(delta)
    return x - delta * velocity - 0.5 * strength * noise, (strength * t).sqrt()


def index_is_last(index: Tensor, denoise_steps: int, like: Tensor) -> Tensor:
    """Bool, broadcastable with `like`: whether the step is the last one, which ends at t = 0 exactly."""
    return _over(index.to(like.device) == denoise_steps - 1, like)


def learned_std(raw: Tensor, low: float, high: float) -> Tensor:
    """Std of Flow-Noise between `low` and `high` from an unbounded output: log-variance linear in tanh(raw).

    Source: piRL, arXiv:2510.25889, section 4.1; the numbers that the paper calls log-variances are stds.
    """
    low, high = 2 * math.log(low), 2 * math.log(high)
    return (0.5 * (low + (high - low) * (raw.tanh() + 1) / 2)).exp()


def log_prob_terms(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of each element of `x` in nats, not summed; 0 where std is 0, since an exact step has no density."""
    std = std.expand_as(mean)
    exact = std == 0
    std = torch.where(exact, torch.ones_like(std), std)
    terms = -0.5 * ((x - mean) / std) ** 2 - std.log() - LOG_SQRT_2PI
    return torch.where(exact, torch.zeros_like(terms), terms)


def anneal(start: float, end: float, steps: int, step: int) -> float:
    """A noise level that falls linearly from `start` to `end` over `steps` updates and then stays."""
    return start + (end - start) * min(step / steps, 1.0)


def _over(t: Tensor, like: Tensor) -> Tensor:
    """(B,) as (B, 1, ...), to broadcast with `like` (B, ...)."""
    return t.view(-1, *([1] * (like.ndim - 1)))
