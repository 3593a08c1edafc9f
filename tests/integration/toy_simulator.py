# SPDX-License-Identifier: Apache-2.0
"""A point on a line as a `sims.workers.Simulator`, which dies, hangs or raises where its configuration says so.

In a file of its own because worker processes must be able to import it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import ConfigError
from robo_rl.types import ArraySpec, Continuous, EnvSpec


@dataclass(frozen=True)
class ToyConfig:
    max_episode_steps: int = 5
    fail_at: float = 1e9
    """The failure happens in the step that would pass this position."""
    failure: str = "raise"
    refuse: bool = False
    broken_episodes: tuple[int, ...] = ()
    """Their first observation is not finite."""


class ToySimulator:
    info_names = ("distance",)

    def __init__(self, config: ToyConfig):
        if config.refuse:
            raise ConfigError("refused as asked")
        self.config = config
        self.spec = EnvSpec(
            name="toy",
            num_envs=1,
            obs={
                "observation.state": ArraySpec((2,)),
                "observation.images.front": ArraySpec((4, 6, 3), "uint8"),
                "task_id": ArraySpec((), "int64"),
            },
            action=Continuous((-1.0,), (1.0,)),
            control_hz=10.0,
            max_episode_steps=config.max_episode_steps,
            tasks=("left", "right"),
        )

    def _obs(self) -> dict[str, np.ndarray]:
        state = np.array([self.position, self.steps], np.float32)
        image = np.full((4, 6, 3), int(np.nan_to_num(abs(self.position)) * 10) % 256, np.uint8)
        return {"observation.state": state, "observation.images.front": image, "task_id": np.array(self.task_id)}

    def reset(self, task_id: int, episode: int) -> dict[str, np.ndarray]:
        self.task_id, self.steps = task_id, 0
        self.position = np.random.default_rng((task_id, episode)).uniform(-0.1, 0.1)
        if episode in self.config.broken_episodes:
            self.position = float("nan")
        return self._obs()

    def step(self, action: np.ndarray):
        self.steps += 1
        self.position += float(np.clip(action[0], -1, 1))
        if self.position > self.config.fail_at:
            match self.config.failure:
                case "raise":
                    raise RuntimeError("the toy broke")
                case "hang":
                    time.sleep(1000)
                case "exit":
                    os._exit(7)
                case "nan":
                    self.position = float("nan")
        reached = self.position > 3.0
        info = {"success": reached, "distance": 3.0 - self.position}
        truncated = self.steps >= self.config.max_episode_steps
        return self._obs(), self.position, reached, truncated, info

    def render(self) -> np.ndarray:
        return np.full((8, 8, 3), self.steps % 256, np.uint8)

    def close(self) -> None:
        pass


def make(config: ToyConfig) -> ToySimulator:
    return ToySimulator(config)
