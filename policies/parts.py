# SPDX-License-Identifier: Apache-2.0
"""What policies are built of: an encoder after their configuration, and the scaling of actions to a unit box."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from robo_rl.nn.encoder import ObsEncoder
from robo_rl.types import Continuous, EnvSpec

if TYPE_CHECKING:
    from policies.categorical import CategoricalConfig
    from policies.flow.config import FlowConfig
    from policies.gaussian import GaussianConfig


def make_encoder(
    config: GaussianConfig | CategoricalConfig | FlowConfig, spec: EnvSpec, keys: tuple[str, ...], min_std: float = 0.0
) -> ObsEncoder:
    """The encoder of the observation `keys`; see `ObsEncoder`."""
    return ObsEncoder(
        spec.obs, keys, len(spec.tasks), config.normalize_obs, config.obs_clip, config.image_features, min_std
    )


def action_box(action: Continuous) -> dict[str, Tensor]:
    """`low`, `high`, `scale` and `offset`, (A,) each: `offset + scale * u` takes u in [-1, 1] to the bounds. Scale 1
    and offset 0 where there are none."""
    low, high = torch.tensor(action.low), torch.tensor(action.high)
    bounded = low.isfinite() & high.isfinite()
    scale = torch.where(bounded, (high - low) / 2, torch.ones_like(low))
    offset = torch.where(bounded, (high + low) / 2, torch.zeros_like(low))
    return {"low": low, "high": high, "scale": scale, "offset": offset}
