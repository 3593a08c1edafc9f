# SPDX-License-Identifier: Apache-2.0
"""What must hold of any flow sampler, on a Gaussian whose exact velocity is known."""

import math

import pytest
import torch

from robo_rl.functional import flow

MEAN, STD = 1.5, 0.4


def exact_velocity(x, t):
    """E[noise - action | x_t = x] for action ~ N(MEAN, STD^2) and independent standard noise."""
    variance = t**2 + (1 - t) ** 2 * STD**2
    gain = (t - (1 - t) * STD**2) / variance
    return gain * (x - (1 - t) * MEAN) - MEAN


def walk(sampler, steps, level, rows=40_000):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    for k in range(steps):
        index = torch.full((rows,), k)
        velocity = exact_velocity(x, 1 - k / steps)
        mean, std = flow.denoise_step(x, velocity, index, steps, sampler, level)
        x = mean + std * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return float(x.mean()), float(x.std())


@pytest.mark.parametrize(("sampler", "level"), [("ode", 0.0), ("sde", 0.3), ("sde", 0.5), ("sde", 0.8)])
def test_the_sde_keeps_the_marginal_of_the_flow(sampler, level):
    mean, std = walk(sampler, 200, level)
    assert mean == pytest.approx(MEAN, rel=0.02)
    assert std == pytest.approx(STD, rel=0.02)


def test_sde_std_at_the_first_step_is_the_level_whatever_the_number_of_steps():
    x = torch.zeros(1, 3)
    for steps in (1, 2, 4, 10):
        _, std = flow.denoise_step(x, x, torch.tensor([0]), steps, "sde", 0.37)
        assert float(std) == pytest.approx(0.37)


def test_rows_with_different_indices_equal_each_row_alone():
    x, v = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    together = flow.denoise_step(x, v, torch.arange(4), 4, "sde", 0.5)
    for k in range(4):
        alone = flow.denoise_step(x[k : k + 1], v[k : k + 1], torch.tensor([k]), 4, "sde", 0.5)
        torch.testing.assert_close(together[0][k : k + 1], alone[0])
        torch.testing.assert_close(together[1][k : k + 1], alone[1])


def test_exact_steps_have_log_prob_zero_and_a_finite_gradient():
    mean = torch.randn(2, 3, requires_grad=True)
    terms = flow.log_prob_terms(torch.randn(2, 3), mean, torch.tensor([[0.0], [0.5]]))
    assert not terms[0].any() and terms[1].all()
    terms.sum().backward()
    assert torch.isfinite(mean.grad).all() and not mean.grad[0].any()


def test_drawn_times_follow_the_beta_and_never_reach_zero():
    t = flow.draw_time(200_000, torch.Generator().manual_seed(0))
    assert float(t.min()) >= 0.001 and float(t.max()) <= 1
    assert float(t.mean()) == pytest.approx(0.001 + 0.999 * 1.5 / 2.5, abs=0.002)
    # Beta(1.5, 1) has the distribution function u^1.5.
    assert float((t < 0.5).float().mean()) == pytest.approx(((0.5 - 0.001) / 0.999) ** 1.5, abs=0.005)


def test_the_interpolant_has_the_velocity_noise_minus_action():
    action, noise = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    t = torch.tensor([0.2, 0.7])
    h = 1e-3
    slope = (flow.interpolate(action, noise, t + h) - flow.interpolate(action, noise, t - h)) / (2 * h)
    torch.testing.assert_close(slope, noise - action, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(flow.interpolate(action, noise, torch.zeros(2)), action)


def test_cps_splits_the_noise_that_is_left():
    """Old and fresh noise together have the variance that the schedule asks for."""
    x, v = torch.randn(1, 1), torch.randn(1, 1)
    mean, std = flow.denoise_step(x, v, torch.tensor([1]), 4, "cps", 0.5)
    t, left = 0.75, 0.5
    action, noise = x - t * v, x + (1 - t) * v
    kept = (mean - (1 - left) * action) / noise
    assert float(kept) ** 2 + float(std) ** 2 == pytest.approx(left**2, rel=1e-4)
    assert math.isclose(float(flow.denoise_step(x, v, torch.tensor([3]), 4, "cps", 0.5)[1]), 0.0)
