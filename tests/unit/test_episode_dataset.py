# SPDX-License-Identifier: Apache-2.0
"""Windows of demonstrations never cross an episode's end."""

import numpy as np
import pytest
import torch

from robo_rl.data.dataset import EpisodeDataset
from robo_rl.errors import ConfigError
from robo_rl.types import STATE, ArraySpec, Continuous, EnvSpec

SPEC = EnvSpec("test", 1, {STATE: ArraySpec((1,))}, Continuous((-1.0,), (1.0,)), 20, 10)


def episode(number, length):
    """Observation and action of step t are 100 * number + t."""
    steps = (100 * number + np.arange(length + 1, dtype=np.float32))[:, None]
    return {STATE: steps, "action": steps[:-1], "reward": np.zeros(length, np.float32)}


def test_windows_start_anywhere_and_stop_at_the_end():
    dataset = EpisodeDataset([episode(0, 3), episode(1, 5)], SPEC)
    assert len(dataset) == 8 and dataset.num_episodes == 2
    batch = dataset.sample(500, window=4, generator=torch.Generator().manual_seed(0))
    start = batch.obs[STATE][:, 0]
    assert set(start.tolist()) == {0, 1, 2, 100, 101, 102, 103, 104}
    last = torch.where(start < 50, 2.0, 104.0)
    expected = (start[:, None] + torch.arange(4)).minimum(last[:, None])
    torch.testing.assert_close(batch.action[:, :, 0], expected)
    assert torch.equal(batch.valid, start[:, None] + torch.arange(4) <= last[:, None])


def test_a_split_keeps_episodes_whole():
    dataset = EpisodeDataset([episode(i, 3) for i in range(10)], SPEC)
    one, other = dataset.split(0.3, torch.Generator().manual_seed(0))
    assert (one.num_episodes, other.num_episodes) == (3, 7)
    numbers = [set((part.obs[STATE] // 100).flatten().tolist()) for part in (one, other)]
    assert not numbers[0] & numbers[1] and len(numbers[0] | numbers[1]) == 10


def test_no_episode_is_refused():
    with pytest.raises(ConfigError, match="at least one episode"):
        EpisodeDataset([], SPEC)
