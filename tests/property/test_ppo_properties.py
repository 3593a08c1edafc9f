# SPDX-License-Identifier: Apache-2.0
"""What must hold for any rollout: ends cut or bootstrap, environments are independent, splits change nothing."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.categorical import CategoricalConfig, CategoricalPolicy
from policies.gaussian import GaussianConfig, GaussianPolicy
from robo_rl.functional import gaussian
from robo_rl.functional.advantages import gae
from robo_rl.types import STATE, ArraySpec, Continuous, Discrete, EnvSpec


def _random_rollout(seed, num_steps, num_envs):
    g = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, num_steps, num_envs, generator=g, dtype=torch.float64)
    terminated, truncated = torch.rand(2, num_steps, num_envs, generator=g) < 0.2
    return dict(reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated)


def _by_definition(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """The double sum of eq. 16, written out per start step."""
    num_steps, num_envs = reward.shape
    out = torch.zeros_like(reward)
    for n in range(num_envs):
        for start in range(num_steps):
            weight = 1.0
            for t in range(start, num_steps):
                bootstrap = 0.0 if terminated[t, n] else gamma * next_value[t, n]
                out[start, n] += weight * (reward[t, n] + bootstrap - value[t, n])
                weight *= gamma * gae_lambda
                if terminated[t, n] or truncated[t, n]:
                    break
    return out


sizes = given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.floats(0, 1), st.floats(0, 1))


@sizes
@settings(max_examples=40, deadline=None)
def test_gae_is_its_definition(seed, num_steps, num_envs, gamma, gae_lambda):
    r = _random_rollout(seed, num_steps, num_envs)
    torch.testing.assert_close(
        gae(**r, gamma=gamma, gae_lambda=gae_lambda)[0], _by_definition(**r, gamma=gamma, gae_lambda=gae_lambda)
    )


@sizes
@settings(max_examples=40, deadline=None)
def test_permuting_environments_commutes(seed, num_steps, num_envs, gamma, gae_lambda):
    r = _random_rollout(seed, num_steps, num_envs)
    order = torch.randperm(num_envs, generator=torch.Generator().manual_seed(seed))
    advantage = gae(**r, gamma=gamma, gae_lambda=gae_lambda)[0]
    permuted = gae(**{k: v[:, order] for k, v in r.items()}, gamma=gamma, gae_lambda=gae_lambda)[0]
    torch.testing.assert_close(permuted, advantage[:, order], rtol=0, atol=0)


@sizes
@settings(max_examples=40, deadline=None)
def test_splitting_at_an_end_changes_nothing(seed, num_steps, num_envs, gamma, gae_lambda):
    r = _random_rollout(seed, num_steps + 1, num_envs)
    cut = seed % num_steps + 1
    r["truncated"][cut - 1] = True
    whole = gae(**r, gamma=gamma, gae_lambda=gae_lambda)[0]
    parts = [
        gae(**{k: v[s] for k, v in r.items()}, gamma=gamma, gae_lambda=gae_lambda)[0]
        for s in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_truncation_bootstraps_and_termination_cuts():
    # One step, reward 1, value 2, next value 10, gamma 0.9: 1 + 0.9 * 10 - 2 = 8 where truncated, 1 - 2 = -1 where
    # terminated, and -1 where both are reported.
    row = torch.ones(1, 3)
    terminated, truncated = torch.tensor([[False, True, True]]), torch.tensor([[True, False, True]])
    advantage, target = gae(row, 2 * row, 10 * row, terminated, truncated, gamma=0.9, gae_lambda=0.95)
    torch.testing.assert_close(advantage, torch.tensor([[8.0, -1.0, -1.0]]))
    torch.testing.assert_close(target, torch.tensor([[10.0, 1.0, 1.0]]))


def test_nothing_flows_back_from_an_invalid_row():
    r = _random_rollout(0, 6, 2)
    r["terminated"][:], r["truncated"][:] = False, False
    valid = torch.ones(6, 2, dtype=torch.bool)
    valid[3, 0] = False
    before = gae(**r, gamma=0.9, gae_lambda=0.9, valid=valid)[0]
    r["reward"][3, 0] = 1e9
    after = gae(**r, gamma=0.9, gae_lambda=0.9, valid=valid)[0]
    torch.testing.assert_close(after[valid], before[valid], rtol=0, atol=0)


# --- densities -----------------------------------------------------------------------------------------------

BOX = Continuous(low=(-1.0, -2.0), high=(1.0, 4.0))
SPEC = EnvSpec(
    name="test",
    num_envs=4,
    obs={STATE: ArraySpec((3,))},
    action=BOX,
    control_hz=20,
    max_episode_steps=10,
)


def test_gaussian_log_prob_matches_torch():
    mean, std, x = torch.randn(5, 3), torch.rand(5, 3) + 0.1, torch.randn(5, 3)
    reference = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(gaussian.log_prob(x, mean, std.log()), reference.log_prob(x).sum(-1))
    torch.testing.assert_close(gaussian.entropy(std.log()), reference.entropy().sum(-1))
    other = torch.distributions.Normal(mean + 0.3, std * 1.7)
    torch.testing.assert_close(
        gaussian.kl(mean, std, mean + 0.3, std * 1.7), torch.distributions.kl_divergence(reference, other).sum(-1)
    )


def test_squashed_density_integrates_to_one():
    policy = GaussianPolicy(GaussianConfig(squash=True, log_std_init=0.3), SPEC)
    action = torch.linspace(-0.999999, 0.999999, 200_001, dtype=torch.float64)
    unit = action.atanh()[:, None]
    density = policy._log_prob(unit, torch.full_like(unit, 0.4), torch.full_like(unit, 0.8).log()).exp()
    assert float(torch.trapezoid(density, action)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_evaluate_repeats_what_act_said_and_actions_stay_in_bounds(squash, state_dependent_std):
    config = GaussianConfig(squash=squash, state_dependent_std=state_dependent_std, log_std_init=1.0)
    policy = GaussianPolicy(config, SPEC)
    obs = {STATE: torch.randn(64, 3)}
    sample = policy.act(obs, generator=torch.Generator().manual_seed(0))
    evaluation = policy.evaluate(obs, sample)
    torch.testing.assert_close(evaluation.log_prob, sample.log_prob)
    torch.testing.assert_close(evaluation.value, sample.value)
    low, high = torch.tensor(BOX.low), torch.tensor(BOX.high)
    assert (sample.action >= low).all() and (sample.action <= high).all()
    assert sample.action[:, 1].max() > 1, "the second dimension reaches 4, so actions must be scaled to it"


def test_categorical_density_sums_to_one_and_repeats():
    spec = EnvSpec("d", 4, SPEC.obs, Discrete(5), 20, 10)
    policy = CategoricalPolicy(CategoricalConfig(), spec)
    obs = {STATE: torch.randn(32, 3)}
    sample = policy.act(obs, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.evaluate(obs, sample).log_prob, sample.log_prob)
    torch.testing.assert_close(policy._log_probs(obs).exp().sum(-1), torch.ones(32))


def test_normaliser_statistics_do_not_depend_on_the_batching():
    from robo_rl.nn.normalizer import Normalizer

    x = torch.randn(1000, 3) * torch.tensor([1.0, 10.0, 0.1]) + 5
    whole, parts = Normalizer((3,)), Normalizer((3,))
    whole.update(x)
    for part in x.split([1, 99, 400, 500]):
        parts.update(part)
    torch.testing.assert_close(parts.mean, x.double().mean(0))
    torch.testing.assert_close(parts.var, x.double().var(0, correction=0))
    torch.testing.assert_close(whole(x), parts(x))


def test_a_limited_mean_stays_within_its_limit_and_keeps_a_gradient():
    policy: Any = GaussianPolicy(GaussianConfig(mean_limit=1.0), SPEC)
    with torch.no_grad():
        policy.actor[-1].bias += torch.tensor([-5.0, 5.0])
    sample = policy.act({STATE: torch.zeros(8, 3)})
    assert (sample.trace["mean"].abs() <= 1.0).all() and (sample.trace["mean"].abs() > 0.99).all()
    evaluation = policy.evaluate({STATE: torch.zeros(8, 3)}, sample)
    torch.testing.assert_close(evaluation.log_prob, sample.log_prob)
    evaluation.log_prob.sum().backward()
    assert policy.actor[-1].bias.grad.abs().min() > 0
