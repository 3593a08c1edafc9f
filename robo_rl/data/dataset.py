# SPDX-License-Identifier: Apache-2.0
"""Episodes in memory, drawn as windows for imitation.

Axes: M steps of all episodes, B batch, H window, A action_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from robo_rl.data.episodes import EpisodeFolder
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import EnvSpec, Obs


@dataclass(frozen=True, slots=True)
class Windows:
    """`obs` (B, ...) where each window starts, the actions from there on (B, H, A), and `valid` (B, H): False beyond
    the episode's end, where the last action is repeated."""

    obs: Obs
    action: Tensor
    valid: Tensor


class EpisodeDataset:
    """Every step of some episodes; a window may start at any of them."""

    def __init__(self, episodes: Sequence[dict[str, np.ndarray]], spec: EnvSpec):
        """`episodes` as `EpisodeFolder` gives them. Raises ConfigError where there is none."""
        if not episodes:
            raise ConfigError(
                "A data set needs at least one episode; found none. Collect with a better actor, or keep "
                "the unsuccessful ones too."
            )
        self.spec = spec
        self._episodes = list(episodes)
        lengths = torch.tensor([len(e["reward"]) for e in episodes])
        self.obs = {key: torch.from_numpy(np.concatenate([e[key][:-1] for e in episodes])) for key in spec.obs}
        self.action = torch.from_numpy(np.concatenate([e["action"] for e in episodes]))
        self._last = (lengths.cumsum(0) - 1).repeat_interleave(lengths)  # of each step, its episode's last one

    @staticmethod
    def load(folder: Path, successful_only: bool = False, limit: int | None = None) -> EpisodeDataset:
        """The episodes of a folder, the first `limit` of those wanted."""
        reader = EpisodeFolder(folder)
        episodes = [e for _, e in zip(range(limit or len(reader)), reader.episodes(successful_only), strict=False)]
        if limit is not None and len(episodes) < limit:
            raise ContractError(
                f"`{folder}` holds {len(episodes)} {'successful ' if successful_only else ''}episodes, {limit} are "
                "asked for."
            )
        return EpisodeDataset(episodes, reader.spec)

    def __len__(self) -> int:
        return len(self.action)

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    def sample(self, batch_size: int, window: int = 1, generator: Generator | None = None) -> Windows:
        """`batch_size` windows, starts drawn uniformly over all steps with replacement."""
        start = torch.randint(len(self), (batch_size,), generator=generator)
        steps = start[:, None] + torch.arange(window)
        last = self._last[start][:, None]
        return Windows(
            obs={k: v[start] for k, v in self.obs.items()},
            action=self.action[steps.minimum(last)],
            valid=steps <= last,
        )

    def split(self, fraction: float, generator: Generator | None = None) -> tuple[EpisodeDataset, EpisodeDataset]:
        """Two data sets of whole episodes: a random `fraction` of them, at least one, and the rest."""
        order = torch.randperm(self.num_episodes, generator=generator).tolist()
        count = min(max(1, round(fraction * self.num_episodes)), self.num_episodes - 1)
        parts = [self._episodes[i] for i in order[:count]], [self._episodes[i] for i in order[count:]]
        return EpisodeDataset(parts[0], self.spec), EpisodeDataset(parts[1], self.spec)
