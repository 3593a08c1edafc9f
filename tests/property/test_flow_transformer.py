# SPDX-License-Identifier: Apache-2.0
"""The velocity network for pictures and language: rows are independent, the prefix is exact, words matter."""

from typing import Any

import pytest
import torch

from policies.flow.config import CNNTokens, FlowConfig, TransformerVelocity, ViTTokens
from policies.flow.policy import FlowPolicy
from robo_rl.types import STATE, TASK_ID, ArraySpec, Continuous, EnvSpec

CAMERA = "observation.images.front"
SPEC = EnvSpec(
    "test",
    4,
    {STATE: ArraySpec((3,)), CAMERA: ArraySpec((42, 42, 3), "uint8"), TASK_ID: ArraySpec((), "int64")},
    Continuous((-1.0, -2.0), (1.0, 4.0)),
    20,
    10,
    tasks=("lift the red cube", "put the blue ball far away on the green plate"),
)
G = torch.Generator().manual_seed(1)
OBS = {
    STATE: torch.randn(6, 3, generator=G),
    CAMERA: torch.randint(0, 256, (6, 42, 42, 3), generator=G, dtype=torch.uint8),
    TASK_ID: torch.tensor([0, 1, 0, 1, 0, 1]),
}


def make(encoder=None, **settings) -> Any:
    torch.manual_seed(0)
    network = TransformerVelocity(width=32, depth=1, expert_depth=2, heads=4, encoder=encoder or CNNTokens((8, 8)))
    return FlowPolicy(FlowConfig(obs_keys=(CAMERA, STATE, TASK_ID), network=network, **settings), SPEC)


def velocity(policy, obs, x, t):
    with torch.no_grad():
        return policy.network(policy.network.features(obs), x, t)[0]


@pytest.mark.parametrize("encoder", [CNNTokens((8, 8)), ViTTokens(patch=14)], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"stochastic_steps": "all"}, {"sampler": "noise", "stochastic_steps": "all"}], ids=str
)
@pytest.mark.parametrize("critic", ["obs", "encoder", "expert"])
def test_the_ratio_is_one_on_the_first_pass(encoder, settings, critic):
    policy = make(encoder, critic=critic, executed=3, **settings)
    sample = policy.act(OBS)
    evaluation = policy.evaluate(OBS, sample)
    torch.testing.assert_close(evaluation.log_prob, sample.log_prob, rtol=1e-4, atol=1e-3)
    assert evaluation.value.shape == (6,)


def test_several_chunks_of_one_observation_equal_each_alone():
    policy = make()
    x, t = torch.randn(18, 4, 2), torch.rand(18)
    together = velocity(policy, OBS, x, t)
    for row in range(6):
        for s in range(3):
            i = 3 * row + s
            alone = velocity(policy, {k: v[row : row + 1] for k, v in OBS.items()}, x[i : i + 1], t[i : i + 1])
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)


def test_permuting_rows_commutes():
    policy, order = make(), torch.tensor([3, 0, 5, 1, 4, 2])
    x, t = torch.randn(6, 4, 2), torch.rand(6)
    permuted = velocity(policy, {k: v[order] for k, v in OBS.items()}, x[order], t[order])
    torch.testing.assert_close(permuted, velocity(policy, OBS, x, t)[order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", [CAMERA, STATE, TASK_ID])
def test_every_input_has_a_say(key):
    policy = make()
    x, t = torch.randn(6, 4, 2), torch.rand(6)
    other = OBS | {key: OBS[key].flip(0) if key != TASK_ID else 1 - OBS[key]}
    assert not torch.allclose(velocity(policy, OBS, x, t), velocity(policy, other, x, t), atol=1e-6)


def test_actions_of_a_chunk_see_each_other_and_the_time():
    policy = make()
    x, t = torch.randn(6, 4, 2), torch.rand(6)
    base = velocity(policy, OBS, x, t)
    moved = x.clone()
    moved[:, 3] += 1
    assert not torch.allclose(velocity(policy, OBS, moved, t)[:, 0], base[:, 0], atol=1e-6)
    assert not torch.allclose(velocity(policy, OBS, x, t * 0.5), base, atol=1e-6)
