# SPDX-License-Identifier: Apache-2.0
"""PPO from a camera on the real tabletop; only the critic sees the simulator's exact state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from policies.gaussian import GaussianConfig
from robo_rl import checkpoint
from robo_rl.algorithms.ppo import PPOConfig
from robo_rl.app.evaluate import EvaluateConfig, EvaluationConfig, evaluate, load_policy
from robo_rl.app.train_sim import Run, TrainSimConfig, make_run, train_sim
from robo_rl.errors import ConfigError
from robo_rl.types import ENVIRONMENT_STATE, IMAGES, STATE, Obs
from sims.mujoco.tabletop import TabletopConfig

FRONT = IMAGES + "front"
CONFIG = TrainSimConfig(
    env=TabletopConfig("reach", num_envs=4, cameras=("front",), image_size=36, horizon=12, num_threads=1),
    policy=GaussianConfig(
        obs_keys=(STATE, FRONT), critic_obs_keys=(STATE, ENVIRONMENT_STATE), hidden=(16,), image_features=8
    ),
    algorithm=PPOConfig(num_steps=8, minibatch_size=16, epochs=2, kl_stop=None),
    total_env_steps=64,
    evaluation=EvaluationConfig(episodes=4),
)


@pytest.fixture
def run():
    run = make_run(CONFIG)
    yield run
    run.close()


def perturbed(obs: Obs, key: str) -> Obs:
    other = 255 - obs[key] if obs[key].dtype == torch.uint8 else obs[key] + 0.5
    return obs | {key: other}


def test_the_policy_loss_reaches_every_layer_of_the_image_encoder(run: Run):
    rollout = run.algorithm.with_advantages(run.loop.collect()).flatten()
    # The critic has an encoder of its own and entropy costs nothing: what arrives in the actor's is the surrogate's.
    assert not run.policy.shared and CONFIG.algorithm.entropy_coef == 0
    run.algorithm.loss(rollout)[0].backward()
    encoder = dict(run.policy.actor_encoder.named_parameters())
    assert any("conv" in name for name in encoder)
    for name, parameter in encoder.items():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name
    assert not list(run.policy.critic_encoder.parameters()), "no picture for the critic: nothing in it learns"


def test_two_updates_move_every_layer(run: Run):
    before = {name: parameter.detach().clone() for name, parameter in run.policy.named_parameters()}
    for _ in range(2):
        metrics = next(run.loop)
    assert all(torch.tensor(value).isfinite() for name, value in metrics.items() if name.startswith("train/"))
    for name, parameter in run.policy.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_the_exact_state_is_for_the_critic_alone(run: Run):
    for _ in range(2):
        next(run.loop)
    obs = {key: value.clone() for key, value in run.loop.obs.items()}

    def act(obs: Obs):
        return run.policy.act(obs, generator=torch.Generator().manual_seed(1))

    usual, other = act(obs), act(perturbed(obs, ENVIRONMENT_STATE))
    assert torch.equal(usual.action, other.action) and torch.equal(usual.log_prob, other.log_prob)
    assert (usual.value != other.value).all()
    other = act(perturbed(obs, FRONT))
    assert (usual.action != other.action).any(1).all()
    assert torch.equal(usual.value, other.value), "nor has the critic the picture"
    without = {key: value for key, value in obs.items() if key != ENVIRONMENT_STATE}
    with pytest.raises(KeyError, match=ENVIRONMENT_STATE):
        run.policy.value(without)
    features = run.policy.actor_encoder(without)  # what acts on a robot has no such state
    assert torch.equal(features, run.policy.actor_encoder(obs))


def test_a_checkpoint_gives_the_same_actions_and_values(run: Run, tmp_path):
    for _ in range(2):
        next(run.loop)
    run.save(tmp_path, 0.0, 0.0)
    loaded, spec = load_policy(checkpoint.load(tmp_path))
    assert spec.obs[FRONT].shape == (36, 36, 3)
    for deterministic in (True, False):
        mine, theirs = (
            policy.act(run.loop.obs, deterministic=deterministic, generator=torch.Generator().manual_seed(2))
            for policy in (run.policy, loaded)
        )
        assert torch.equal(mine.action, theirs.action) and torch.equal(mine.value, theirs.value)


def test_pictures_too_small_for_the_encoder_are_refused():
    with pytest.raises(ConfigError, match=r"32 x 32.*at least 36 x 36.*image_size"):
        make_run(replace(CONFIG, env=replace(CONFIG.env, image_size=32)))


def test_a_run_from_pictures_is_evaluated_from_its_checkpoint(tmp_path):
    result = train_sim(CONFIG, tmp_path / "run", live=False)
    assert result["env_steps"] == 64 and result["episodes"] == 4
    again = evaluate(EvaluateConfig(CONFIG.env, CONFIG.evaluation, actor=str(tmp_path / "run")))
    assert again["metrics"]["eval/mean_reward"] == pytest.approx(result["metrics"]["eval/mean_reward"], rel=1e-5)
