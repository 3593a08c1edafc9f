# SPDX-License-Identifier: Apache-2.0
"""One PPO update on made-up data: what it changes, what it refuses, what it remembers."""

from dataclasses import replace

import pytest
import torch

from policies.gaussian import GaussianConfig, GaussianPolicy
from robo_rl.algorithms.ppo import PPO, PPOConfig
from robo_rl.batch import Rollout, minibatches
from robo_rl.errors import ConfigError, NonFiniteError
from robo_rl.types import STATE, ArraySpec, Continuous, EnvSpec

N, T = 8, 16
SPEC = EnvSpec("test", N, {STATE: ArraySpec((3,))}, Continuous((-1.0, -1.0), (1.0, 1.0)), 20, 10)


def _policy():
    torch.manual_seed(0)
    return GaussianPolicy(GaussianConfig(hidden=(16,)), SPEC)


def _rollout(policy, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rollout = None
    for t in range(T):
        obs = {STATE: torch.randn(N, 3, generator=generator)}
        sample = policy.act(obs, generator=generator)
        rollout = rollout or Rollout.allocate(T, SPEC, obs, sample)
        rollout.write(t, obs, sample)
        rollout.reward[t] = sample.action[:, 0]  # more of the first action dimension is better
        rollout.next_value[t] = sample.value
    rollout.valid[:] = True
    rollout.terminated[:] = True
    return rollout


def _generator():
    return torch.Generator().manual_seed(1)


def test_an_update_makes_rewarded_actions_likelier():
    policy = _policy()
    algorithm = PPO(policy, PPOConfig(minibatch_size=32, kl_stop=None), N)
    obs = {STATE: torch.randn(100, 3)}
    before = policy.act(obs, deterministic=True).action.mean(0)
    for seed in range(10):
        algorithm.update(_rollout(policy, seed), _generator())
    change = policy.act(obs, deterministic=True).action.mean(0) - before
    assert change[0] > 0.2
    assert change[0] > 3 * change[1].abs()


def test_the_first_pass_has_ratio_one():
    policy = _policy()
    algorithm = PPO(policy, PPOConfig(), N)
    _, metrics = algorithm.loss(algorithm.with_advantages(_rollout(policy)).flatten())
    assert abs(float(metrics["approx_kl"])) < 1e-6
    assert float(metrics["kl"]) < 1e-6
    assert float(metrics["clip_fraction"]) == 0


def test_accumulated_minibatches_make_the_same_step_as_one_large_batch():
    whole, parts = _policy(), _policy()
    config = PPOConfig(epochs=1, minibatch_size=T * N, normalize_advantage="rollout")
    PPO(whole, config, N).update(_rollout(whole), _generator())
    split = replace(config, minibatch_size=T * N // 4, gradient_accumulation=4)
    PPO(parts, split, N).update(_rollout(parts), _generator())
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_invalid_rows_change_nothing():
    policies = [_policy(), _policy()]
    for policy, garbage in zip(policies, (0.0, 1e6), strict=True):
        rollout = _rollout(policy)
        rollout.valid[5, 3] = False
        rollout.reward[5, 3] = garbage
        rollout.sample.value[5, 3] = garbage
        PPO(policy, PPOConfig(minibatch_size=32), N).update(rollout, _generator())
    for a, b in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_non_finite_gradient_stops_before_the_step_and_hands_over_the_batch():
    policy = _policy()
    rollout = _rollout(policy)
    rollout.obs[STATE][3, 2] = float("nan")
    algorithm = PPO(policy, PPOConfig(minibatch_size=T * N), N)
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(NonFiniteError, match="gradient norm is nan") as caught:
        algorithm.update(rollout, _generator())
    assert caught.value.tensors[f"obs/{STATE}"].isnan().any()
    for p, q in zip(policy.parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_state_round_trip_continues_bit_identically():
    policy = _policy()
    algorithm = PPO(policy, PPOConfig(minibatch_size=32), N)
    algorithm.update(_rollout(policy), _generator())
    other = _policy()
    copy = PPO(other, PPOConfig(minibatch_size=32), N)
    other.load_state_dict(policy.state_dict())
    copy.load_state_dict({k: v.clone() for k, v in algorithm.state_dict().items()})
    for a, p in ((algorithm, policy), (copy, other)):
        a.update(_rollout(p, seed=5), _generator())
    assert copy.optimizer.learning_rate == algorithm.optimizer.learning_rate
    for a, b in zip(policy.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_learning_rates_follow_their_schedules():
    policy = _policy()
    algorithm = PPO(policy, PPOConfig(schedule="linear", critic_learning_rate=2e-3), N)
    metrics = algorithm.update(_rollout(policy), _generator(), progress=0.75)
    assert metrics["train/learning_rate"] == pytest.approx(0.25e-3)
    assert [g["lr"] for g in algorithm.optimizer.param_groups] == pytest.approx([0.25e-3, 0.5e-3])
    with pytest.raises(ConfigError, match="target_kl"):
        PPO(_policy(), PPOConfig(target_kl=None), N)


def test_kl_stop_ends_an_update_early():
    policy = _policy()
    config = PPOConfig(epochs=20, minibatch_size=16, learning_rate=0.05, schedule="constant", target_kl=0.01)
    assert PPO(policy, config, N).update(_rollout(policy), _generator())["train/epochs"] < 20


def test_minibatches_hold_every_row_once():
    policy = _policy()
    rollout = _rollout(policy)
    rollout.ids[:] = torch.arange(T * N).view(T, N)
    seen = torch.cat([b.ids for b in minibatches(rollout.flatten(), 30, _generator())])
    assert sorted(seen.tolist()) == list(range(T * N))


def test_late_answers_find_their_row_and_expire():
    rollout = _rollout(_policy())
    rollout.ids[:] = torch.arange(T * N).view(T, N) + 1000
    rollout = replace(
        rollout, extras={"teacher": torch.zeros(T, N), "has_teacher": torch.zeros(T, N, dtype=torch.bool)}
    )
    expired = rollout.amend(torch.tensor([1000 + 9, 999, 1000 + T * N]), {"teacher": torch.tensor([7.0, 8.0, 9.0])})
    assert expired == 2
    assert float(rollout.extras["teacher"][1, 1]) == 7.0  # id 1009 is step 1, row 1
    assert rollout.extras["has_teacher"].sum() == 1
    rollout.amend(torch.tensor([1003]), {"reward": torch.tensor([0.25])})
    assert float(rollout.reward[0, 3]) == 0.25
