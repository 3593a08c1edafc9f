# SPDX-License-Identifier: Apache-2.0
"""From an observation dict to one feature vector: vectors normalised, images through a small CNN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from robo_rl.errors import ConfigError
from robo_rl.nn.mlp import orthogonal
from robo_rl.nn.normalizer import Normalizer
from robo_rl.nn.vision import check_picture_spec, check_pictures, pixels
from robo_rl.types import IMAGES, TASK_ID, ArraySpec, Obs

SMALLEST = 36  # pixels; three convolutions make one of them


class SmallCNN(nn.Module):
    """(B, height, width, 3) uint8 -> (B, features). The three convolutions of Mnih et al. 2015, narrower."""

    def __init__(self, shape: tuple[int, ...], features: int, channels: Sequence[int] = (16, 32, 32)):
        super().__init__()
        height, width, depth = shape
        if min(height, width) < SMALLEST:
            raise ConfigError(
                f"Pictures of {height} x {width} pixels are too small for the image encoder: at least {SMALLEST} x "
                f"{SMALLEST}. Raise env.image_size."
            )
        a, b, c = channels
        gain = 2**0.5
        self.conv = nn.Sequential(
            orthogonal(nn.Conv2d(depth, a, 8, stride=4), gain),
            nn.ReLU(),
            orthogonal(nn.Conv2d(a, b, 4, stride=2), gain),
            nn.ReLU(),
            orthogonal(nn.Conv2d(b, c, 3, stride=1), gain),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.conv(torch.zeros(1, depth, height, width)).shape[1]
        self.out = nn.Sequential(orthogonal(nn.Linear(flat, features), gain), nn.LayerNorm(features), nn.Tanh())

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.conv(pixels(image).sub_(0.5)))


class ObsEncoder(nn.Module):
    """Concatenates the features of the listed observation keys into (B, `out_dim`), keys in the given order.

    Vectors are normalised by running statistics (or passed as they are), images encoded, `task_id` one-hot.
    """

    def __init__(
        self,
        obs_spec: Mapping[str, ArraySpec],
        keys: Sequence[str],
        num_tasks: int,
        normalize: bool,
        clip: float,
        image_features: int,
        min_std: float = 0.0,
    ):
        super().__init__()
        check_keys(obs_spec, keys)
        self.keys = tuple(keys)
        self.num_tasks = num_tasks
        self.shapes = {key: obs_spec[key].shape for key in self.keys}
        self.normalizers = nn.ModuleDict()
        self.images = nn.ModuleDict()
        self.out_dim = 0
        for key in self.keys:
            spec = obs_spec[key]
            if key == TASK_ID:
                self.out_dim += num_tasks
            elif key.startswith(IMAGES):
                check_picture_spec(key, spec)
                self.images[module_name(key)] = SmallCNN(spec.shape, image_features)
                self.out_dim += image_features
            else:
                if len(spec.shape) != 1:
                    raise ConfigError(f"`{key}` has shape {spec.shape}; a vector or an image is expected.")
                if normalize:
                    self.normalizers[module_name(key)] = Normalizer(spec.shape, clip=clip, min_std=min_std)
                self.out_dim += spec.shape[0]

    def forward(self, obs: Obs) -> Tensor:
        parts = [self.encode(key, obs[key]) for key in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def encode(self, key: str, x: Tensor) -> Tensor:
        """The features (B, ...) of one key's values `x` (B, ...)."""
        if key == TASK_ID:
            return nn.functional.one_hot(x, self.num_tasks).float()
        if key.startswith(IMAGES):
            return self.images[module_name(key)](check_pictures(key, x, self.shapes[key]))
        name = module_name(key)
        return self.normalizers[name](x) if name in self.normalizers else x

    def update_statistics(self, obs: Obs) -> None:
        """Merge fresh observations (B, ...) into the normalisers of this encoder's keys."""
        for key in self.keys:
            if module_name(key) in self.normalizers:
                normalizer = self.normalizers[module_name(key)]
                assert isinstance(normalizer, Normalizer)
                normalizer.update(obs[key])


def check_keys(obs_spec: Mapping[str, ArraySpec], keys: Sequence[str]) -> None:
    """Raises ConfigError where the environment does not give all `keys`."""
    missing = [k for k in keys if k not in obs_spec]
    if missing:
        raise ConfigError(f"The policy wants {missing}, but the environment gives {sorted(obs_spec)}.")


def module_name(key: str) -> str:
    """Module names may not contain dots, observation keys do."""
    return key.replace(".", "/")
