# SPDX-License-Identifier: Apache-2.0
"""A flow policy acts and is judged by one function, so its ratio is 1 until its weights change."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.flow.config import FlowConfig
from policies.flow.policy import FlowPolicy
from robo_rl.data.dataset import Windows
from robo_rl.errors import ConfigError
from robo_rl.types import STATE, ArraySpec, Continuous, Discrete, EnvSpec

BOX = Continuous((-1.0, -2.0), (1.0, 4.0), ("a", "b"))
SPEC = EnvSpec("test", 4, {STATE: ArraySpec((3,))}, BOX, control_hz=20, max_episode_steps=10)
OBS = {STATE: torch.randn(16, 3, generator=torch.Generator().manual_seed(1))}

SAMPLERS = [
    dict(sampler="sde"),
    dict(sampler="sde", ignore_last=True),
    dict(sampler="cps"),
    dict(sampler="sde", stochastic_steps="all"),
    dict(sampler="cps", stochastic_steps="all", joint="mean"),
    dict(sampler="noise", stochastic_steps="all"),
]


def make(**settings) -> Any:
    torch.manual_seed(0)
    return FlowPolicy(FlowConfig(**settings), SPEC)


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
@pytest.mark.parametrize("critic", ["obs", "encoder", "expert"])
def test_the_ratio_is_one_on_the_first_pass(settings, critic):
    policy = make(**settings, critic=critic, executed=3)
    for seed in range(4):  # the random step is drawn: several draws
        sample = policy.act(OBS, generator=torch.Generator().manual_seed(seed))
        evaluation = policy.evaluate(OBS, sample)
        torch.testing.assert_close(evaluation.log_prob, sample.log_prob, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(evaluation.mean, sample.trace["mean"])
        torch.testing.assert_close(evaluation.std, sample.trace["std"])
        assert sample.log_prob.shape == (16, 3) and sample.action.shape == (16, 3, 2)
        assert evaluation.log_prob.any(dim=0).all(), "every executed action has a density"
        assert sample.value.shape == evaluation.value.shape == policy.value(OBS).shape == (16,)
        if critic != "expert" or (settings.get("stochastic_steps") == "all" and settings["sampler"] != "cps"):
            torch.testing.assert_close(evaluation.value, sample.value)


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_actions_that_are_not_executed_never_change_the_log_prob(settings):
    policy = make(**settings, chunk=5, executed=2)
    sample = policy.act(OBS)
    trace = {k: v.clone() for k, v in sample.trace.items()}
    trace["next"][:, :, 2:] += 100.0
    changed = policy.evaluate(OBS, replace(sample, trace=trace))
    torch.testing.assert_close(changed.log_prob, sample.log_prob, rtol=1e-5, atol=1e-4)


def test_log_prob_is_the_density_that_moves_under_the_weights():
    policy = make()
    sample = policy.act(OBS)
    policy.evaluate(OBS, sample).log_prob.sum().backward()
    assert policy.network.out[-1].weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in policy.critic.parameters())


@pytest.mark.parametrize("critic", ["encoder", "expert"])
def test_a_critic_on_the_actors_features_does_not_move_them(critic):
    policy = make(critic=critic)
    policy.evaluate(OBS, policy.act(OBS)).value.sum().backward()
    assert policy.critic[0].weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in policy.network.parameters())


def test_the_random_step_is_shared_by_the_batch_and_all_are_drawn():
    policy, generator = make(denoise_steps=4), torch.Generator().manual_seed(0)
    steps = [policy.act(OBS, generator=generator).trace["step"] for _ in range(40)]
    assert all((s == s[0]).all() for s in steps)
    assert {int(s[0]) for s in steps} == {0, 1, 2, 3}
    exact_end = make(sampler="cps", denoise_steps=4)
    assert {int(exact_end.act(OBS, generator=generator).trace["step"][0]) for _ in range(40)} == {0, 1, 2}


def test_evaluation_walks_the_ode_without_a_density():
    policy = make(level=5.0)
    once, again = (
        policy.act(OBS, deterministic=True, generator=torch.Generator().manual_seed(3)).action for _ in range(2)
    )
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    assert policy.act(OBS, deterministic=True).log_prob is None
    explored = policy.act(OBS, generator=torch.Generator().manual_seed(3)).action
    assert not torch.allclose(explored, once)


def test_noise_heads_std_stays_in_its_range_and_learns():
    policy = make(sampler="noise", stochastic_steps="all", noise_std=(0.05, 0.3))
    with torch.no_grad():
        policy.noise_head[-1].weight.mul_(1e4)
    sample = policy.act(OBS)
    std = sample.trace["std"]
    assert float(std.min()) >= 0.05 - 1e-6 and float(std.max()) <= 0.3 + 1e-6 and float(std.std()) > 0.01
    evaluation = policy.evaluate(OBS, sample)
    assert evaluation.entropy.shape == (16,) and evaluation.entropy.any()
    evaluation.entropy.sum().backward()
    assert policy.noise_head[0].weight.grad is not None


def test_joint_mean_is_the_sum_over_the_number_of_steps():
    summed, averaged = make(stochastic_steps="all"), make(stochastic_steps="all", joint="mean")
    sample = summed.act(OBS)
    torch.testing.assert_close(averaged.evaluate(OBS, sample).log_prob * 4, sample.log_prob)


def test_cloning_reaches_a_two_mode_distribution():
    """Half of the demonstrations go left, half right; their mean, which no one showed, must not come out."""
    policy = make(chunk=1, executed=1, denoise_steps=8)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for _ in range(400):
        side = torch.randint(2, (256, 1, 1), generator=generator) * 2.0 - 1
        action = side * torch.tensor([0.8, 2.4]) + torch.tensor([0.0, 1.0])
        batch = Windows({STATE: torch.zeros(256, 3)}, action, torch.ones(256, 1, dtype=torch.bool))
        loss, _ = policy.imitation_loss(batch, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drawn = policy.act({STATE: torch.zeros(512, 3)}, deterministic=True, generator=generator).action[:, 0, 0]
    assert 0.3 < float((drawn > 0).float().mean()) < 0.7
    assert float((drawn.abs() - 0.8).abs().median()) < 0.15


def test_padding_has_no_say_in_cloning():
    policy = make()
    action, valid = torch.zeros(8, 4, 2), torch.ones(8, 4, dtype=torch.bool)
    valid[:, 2:] = False
    obs = {STATE: OBS[STATE][:8]}
    seeds = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    # Noise and time are the same; the padded actions are not. x_t at padded places does reach the MLP, which sees the
    # whole noisy chunk, so only the loss there is left out.
    loss, _ = policy.imitation_loss(Windows(obs, action, valid), seeds())
    loss.backward()
    rows = policy.network.out[-1].weight.grad.view(4, 2, -1)
    assert rows[:2].any() and not rows[2:].any()


@pytest.mark.parametrize("kind", ["bounds", "mean_std", "quantile"])
def test_action_statistics_are_taken_once_and_actions_stay_in_bounds(kind):
    policy = make(action_normalization=kind)
    shown = torch.rand(1000, 2) * torch.tensor([0.2, 1.0]) + torch.tensor([0.5, 2.0])
    policy.fit_statistics({STATE: torch.randn(1000, 3) * 5 + 1}, shown)
    scaled = (shown - policy.offset) / policy.scale
    if kind == "mean_std":
        torch.testing.assert_close(scaled.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
        torch.testing.assert_close(scaled.std(0), torch.ones(2), atol=1e-3, rtol=0)
    if kind == "quantile":
        assert float(scaled.abs().max()) < 1.05 and float((scaled.abs() <= 1).float().mean()) > 0.95
    action = policy.act({STATE: 10 * torch.randn(200, 3)}).action
    assert (action >= policy.low).all() and (action <= policy.high).all()
    before = policy.network.encoder.normalizers["observation/state"].mean.clone()
    policy.update_statistics({STATE: torch.full((50, 3), 99.0)})
    assert torch.equal(before, policy.network.encoder.normalizers["observation/state"].mean)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(chunk=4, executed=5), "policy.executed = 5 of policy.chunk = 4"),
        (dict(sampler="noise"), "stochastic_steps `all`"),
        (dict(sampler="cps", denoise_steps=1), "leaves no random step"),
        (dict(critic="expert", critic_obs_keys=(STATE,)), "critic_obs_keys"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)


def test_discrete_actions_are_refused():
    with pytest.raises(ConfigError, match="categorical"):
        FlowPolicy(FlowConfig(), EnvSpec("d", 4, SPEC.obs, Discrete(5), 20, 10))
