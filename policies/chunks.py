# SPDX-License-Identifier: Apache-2.0
"""One action at a time from an actor that predicts chunks.

Axes: B batch, E executed actions of a chunk, A action_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from robo_rl.types import ActionSample, Actor

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from robo_rl.types import Obs


class ChunkQueue:
    """An `Actor` over one that returns (B, E, A): hands out the actions of each row's chunk one by one, and asks for a
    new chunk where a row has none left. For loops that act at every step: collecting, a real robot."""

    def __init__(self, actor: Actor):
        self.actor = actor
        self._chunks: Tensor | None = None
        self._next: Tensor | None = None  # (B,) index of each row's next action; E where none is left

    def act(self, obs: Obs, *, deterministic: bool = False, generator: Generator | None = None) -> ActionSample:
        """Actions (B, A), without log-prob or value: those belong to whole chunks."""
        import torch

        rows = next(iter(obs.values())).shape[0]
        if self._chunks is None or self._next is None or len(self._next) != rows:
            self._chunks = self.actor.act(obs, deterministic=deterministic, generator=generator).action.clone()
            self._next = torch.zeros(rows, dtype=torch.int64)
        else:
            empty = (self._next >= self._chunks.shape[1]).nonzero().squeeze(-1)
            if len(empty):
                part = {k: v[empty] for k, v in obs.items()}
                self._chunks[empty] = self.actor.act(part, deterministic=deterministic, generator=generator).action
                self._next[empty] = 0
        action = self._chunks[torch.arange(rows), self._next]
        self._next += 1
        return ActionSample(action)

    def reset(self, rows: Tensor | None = None) -> None:
        """Drop what is left of these rows' chunks (all where None)."""
        if self._chunks is not None and self._next is not None:
            self._next[slice(None) if rows is None else rows] = self._chunks.shape[1]
        self.actor.reset(rows)
