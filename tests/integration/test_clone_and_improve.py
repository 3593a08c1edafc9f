# SPDX-License-Identifier: Apache-2.0
"""Clone a flow policy from scripted demonstrations, then improve it: the two launch files, small."""

import json

import numpy as np
import pytest
import torch

from policies.flow.config import FlowConfig
from policies.flow.policy import FlowPolicy
from robo_rl.algorithms.bc import BCConfig
from robo_rl.algorithms.ppo import PPO, PPOConfig
from robo_rl.app.collect import CollectConfig, collect
from robo_rl.app.evaluate import EvaluateConfig, EvaluationConfig, evaluate
from robo_rl.app.train_offline import DemonstrationsConfig, TrainOfflineConfig, train_offline
from robo_rl.app.train_sim import CloneConfig, TrainSimConfig, train_sim
from robo_rl.batch import Rollout
from robo_rl.data.episodes import EpisodeFolder
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import STATE, ArraySpec, Continuous, EnvSpec
from sims.mujoco.tabletop import TabletopConfig

ENV = TabletopConfig(task="reach", num_envs=16, reward="success", num_threads=1)
POLICY = FlowConfig(obs_keys=("observation.state", "observation.environment_state"))


def offline(**demonstrations):
    return TrainOfflineConfig(
        ENV,
        POLICY,
        BCConfig(gradient_steps=500, batch_size=256, learning_rate=2e-3),
        DemonstrationsConfig(**({"episodes": 8} | demonstrations)),
        evaluation=EvaluationConfig(episodes=32, tuning=True),
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone") / "run"
    return folder, train_offline(offline(), folder, live=False)


def test_a_clone_solves_part_of_the_task_and_says_so(clone):
    folder, result = clone
    assert result["demonstrations"] == 8 and result["demonstration_steps"] == 8 * 50
    assert result["successes"] >= 6, "an untrained policy solves none of 32"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/flow_matching_loss"] for line in lines if "train/flow_matching_loss" in line]
    assert losses[-1] < 0.5 * 2.0, "the velocity of standard noise alone costs about 1 + the action's variance"


def test_its_checkpoint_evaluates_and_collects_one_action_at_a_time(clone, tmp_path):
    folder, result = clone
    again = evaluate(EvaluateConfig(ENV, EvaluationConfig(episodes=32, tuning=True), str(folder)))
    assert again["successes"] == result["successes"], "same states, same noise, same weights"
    collect(CollectConfig(ENV, str(folder), episodes=4), tmp_path / "episodes")
    episodes = EpisodeFolder(tmp_path / "episodes")
    assert len(episodes) == 4 and episodes[0]["action"].shape == (50, 6)


def test_reinforcement_starts_from_the_clone_and_resumes(clone, tmp_path):
    config = TrainSimConfig(
        ENV,
        POLICY,
        PPOConfig(num_steps=6, minibatch_size=64, learning_rate=5e-5, schedule="constant", critic_warmup=1),
        start_from=str(clone[0]),
        total_env_steps=2 * 16 * 6 * 4,
        evaluation=EvaluationConfig(episodes=32, tuning=True),
    )
    whole = train_sim(config, tmp_path / "run", live=False)
    # Two updates, one of them of the critic alone: the policy is nearly the clone.
    assert abs(whole["successes"] - clone[1]["successes"]) <= 6
    # 50 steps are 12 chunks and a half: what is not executed is not counted.
    assert 2 * 16 * 6 * 4 * 0.9 < whole["env_steps"] <= 3 * 16 * 6 * 4
    with pytest.raises(ConfigError, match="not both"):
        train_sim(TrainSimConfig(ENV, POLICY, clone=CloneConfig(), start_from="x"), tmp_path / "both", live=False)
    other = TrainSimConfig(ENV, FlowConfig(obs_keys=POLICY.obs_keys, chunk=8), start_from=str(clone[0]))
    with pytest.raises(ContractError, match="`policy` section"):
        train_sim(other, tmp_path / "other", live=False)


def test_demonstrations_that_are_not_there_or_too_few_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"launch/collect\.py"):
        train_offline(offline(path=str(tmp_path / "nothing")), tmp_path / "a", live=False)
    collect(CollectConfig(ENV, "expert", episodes=2), tmp_path / "two")
    with pytest.raises(ContractError, match="holds 2 successful episodes, 8 are asked for"):
        train_offline(offline(path=str(tmp_path / "two")), tmp_path / "b", live=False)


@pytest.mark.parametrize(
    "settings", [dict(), dict(sampler="noise", stochastic_steps="all"), dict(sampler="cps", level=0.8)], ids=str
)
@pytest.mark.parametrize("ratio", ["chunk", "action"])
def test_ppo_moves_a_flow_policy_towards_reward(settings, ratio):
    """A bandit: the nearer every executed action to 0.5, the better; the ODE's actions get there too."""
    torch.manual_seed(0)
    spec = EnvSpec("bandit", 256, {STATE: ArraySpec((3,))}, Continuous((-1.0,) * 2, (1.0,) * 2), 20, 10)
    policy = FlowPolicy(FlowConfig(chunk=2, executed=2, network=FlowConfig().network, **settings), spec)
    config = PPOConfig(
        learning_rate=5e-4, schedule="constant", minibatch_size=128, target_kl=0.05, scale_reward=False, ratio=ratio
    )
    ppo, generator = PPO(policy, config, 256), torch.Generator().manual_seed(0)
    costs = []
    for _ in range(40):
        obs = {STATE: torch.randn(256, 3, generator=generator)}
        sample = policy.act(obs, generator=generator)
        rollout = Rollout.allocate(1, spec, obs, sample)
        rollout.write(0, obs, sample)
        rollout.reward[0] = -((sample.action - 0.5) ** 2).sum(-1)
        rollout.valid[:] = rollout.terminated[:] = True
        ppo.update(rollout, generator)
        exact = policy.act(obs, deterministic=True, generator=generator).action
        costs.append(float(((exact - 0.5) ** 2).sum((1, 2)).mean()))
    assert costs[-1] < 0.35 * costs[0], costs[:: len(costs) - 1]


def test_noise_disturbs_what_is_executed_and_not_what_is_written(tmp_path):
    for name, noise in (("clean", 0.0), ("noisy", 0.3)):
        collect(CollectConfig(ENV, "expert", episodes=2, noise=noise), tmp_path / name)
    clean, noisy = EpisodeFolder(tmp_path / "clean")[0], EpisodeFolder(tmp_path / "noisy")[0]
    # The first action is the expert's in both; what follows differs, because other states were reached.
    np.testing.assert_array_equal(clean["action"][0], noisy["action"][0])
    assert np.abs(clean["observation.state"][1] - noisy["observation.state"][1]).max() > 1e-3
