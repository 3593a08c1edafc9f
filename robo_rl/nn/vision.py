# SPDX-License-Identifier: Apache-2.0
"""Pictures as tokens: a small CNN, a small ViT, or a backbone of timm or torchvision; and the shift that augments them.

Every encoder takes (B, height, width, 3) uint8 and gives (B, tokens, W), where each token knows its place. Nothing is
ever downloaded: a backbone starts from fresh weights or from a local safetensors file.

Axes: B batch, W width of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from robo_rl.errors import ConfigError, ContractError, missing_extra, unknown_name
from robo_rl.nn.attention import Block
from robo_rl.nn.mlp import orthogonal
from robo_rl.types import ArraySpec

# --- pictures ------------------------------------------------------------------------------------------------------


def check_picture_spec(key: str, spec: ArraySpec) -> None:
    """Raises ContractError unless `spec` is one of RGB pictures."""
    if len(spec.shape) != 3 or spec.shape[2] != 3 or spec.dtype != "uint8":
        raise ContractError(
            f"`{key}` must be pictures of (height, width, 3) uint8, RGB from 0 to 255; the environment says "
            f"{spec.shape} {spec.dtype}. Convert them where the environment is made."
        )


def check_pictures(key: str, image: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`image` itself. Raises ContractError unless it is (B, *shape) uint8: floats would be scaled twice, and pictures
    of another size encoded as another scene."""
    if image.dtype != torch.uint8 or tuple(image.shape[1:]) != tuple(shape):
        found = f"{tuple(image.shape)} {str(image.dtype).removeprefix('torch.')}"
        if image.dtype.is_floating_point and image.numel():
            found += f", {float(image.min()):g} to {float(image.max()):g}"
        raise ContractError(
            f"`{key}` must be (batch, {', '.join(map(str, shape))}) uint8, RGB from 0 to 255; got {found}. Convert the "
            "pictures before the policy sees them."
        )
    return image


def pixels(image: Tensor) -> Tensor:
    """(B, height, width, 3) uint8 -> (B, 3, height, width) float32 in [0, 1], channels last in memory."""
    return image.permute(0, 3, 1, 2).float().div_(255)


def random_shift(image: Tensor, limit: int, generator: Generator | None = None) -> Tensor:
    """Each picture of (B, height, width, 3) shifted by whole pixels, up to `limit` either way along both axes; its edge
    is repeated where nothing is left. Source: DrQ, Yarats et al. 2021, arXiv:2004.13649, section 3.1."""
    batch, height, width, _ = image.shape
    # Drawn on the CPU, so that a seed gives the same pictures on every device.
    shift = torch.randint(-limit, limit + 1, (2, batch, 1), generator=generator).to(image.device)
    row = (torch.arange(height, device=image.device) + shift[0]).clamp_(0, height - 1)
    column = (torch.arange(width, device=image.device) + shift[1]).clamp_(0, width - 1)
    index = torch.arange(batch, device=image.device)
    return image[index[:, None, None], row[:, :, None], column[:, None, :]]


# --- from scratch --------------------------------------------------------------------------------------------------


class GridCNN(nn.Module):
    """Convolutions, and a token for each cell of the last one's grid.

    The first two are those of Mnih et al. 2015 (8 x 8 by 4, 4 x 4 by 2), further ones 3 x 3 by 2, all padded: 84 pixels
    become 21, 10, 5, 3 to the side.
    """

    def __init__(self, shape: tuple[int, ...], width: int, channels: Sequence[int]):
        super().__init__()
        layers: list[nn.Module] = []
        depth, gain = shape[2], 2**0.5
        for i, count in enumerate(channels):
            kernel, stride, padding = ((8, 4, 2), (4, 2, 1))[i] if i < 2 else (3, 2, 1)
            layers += [orthogonal(nn.Conv2d(depth, count, kernel, stride, padding), gain), nn.ReLU()]
            depth = count
        self.conv = nn.Sequential(*layers)
        self.project = nn.Linear(depth, width)
        with torch.no_grad():
            try:
                self.tokens = self._grid(torch.zeros(1, *shape, dtype=torch.uint8)).shape[1]
            except RuntimeError:
                raise ConfigError(
                    f"Pictures of {shape[0]} x {shape[1]} pixels are too small for {len(channels)} convolutions. Raise "
                    "env.image_size or shorten policy.network.encoder.channels."
                ) from None
        self.position = positions(self.tokens, width)

    def forward(self, image: Tensor) -> Tensor:
        return self.project(self._grid(image)) + self.position

    def _grid(self, image: Tensor) -> Tensor:
        return self.conv(pixels(image).sub_(0.5)).flatten(2).transpose(1, 2)


class PatchViT(nn.Module):
    """Square patches through a linear layer and transformer blocks (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

    def __init__(self, shape: tuple[int, ...], width: int, patch: int, depth: int, heads: int):
        super().__init__()
        height, breadth, colors = shape
        if height % patch or breadth % patch:
            raise ConfigError(
                f"Pictures of {height} x {breadth} pixels cannot be cut into patches of {patch}. Choose a "
                "policy.network.encoder.patch that divides both."
            )
        self.patches = nn.Conv2d(colors, width, patch, stride=patch)
        self.tokens = (height // patch) * (breadth // patch)
        self.position = positions(self.tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(pixels(image).sub_(0.5)).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return x


def positions(tokens: int, width: int) -> nn.Parameter:
    """(tokens, W) learned, as large as what the encoders give at first: places matter from the first step on."""
    return nn.Parameter(0.3 * torch.randn(tokens, width))


# --- from elsewhere ------------------------------------------------------------------------------------------------


Package = Literal["timm", "torchvision"]


class Backbone(nn.Module):
    """An image model of timm or torchvision without its classifier, and a token for each cell of its last grid.

    It never leaves evaluation mode: with batch statistics or dropout a policy would act by another function than it is
    judged by. Fresh weights therefore have group instead of batch norm (as in Chi et al. 2023, arXiv:2303.04137).

    A file of weights that is not there is refused at the first use, not before: a checkpoint brings its own, and is to
    load on a machine that never had the file.
    """

    loaded: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        width: int,
        package: Literal["timm", "torchvision"],
        name: str,
        weights: str | None,
    ):
        """Raises ConfigError for an unknown name or a missing package, ContractError where the weights do not fit."""
        super().__init__()
        self.weights = weights
        body = _timm(name) if package == "timm" else _torchvision(name)
        if weights is None:
            _without_batch_norm(body.model)
        elif Path(weights).exists():
            _load(body, Path(weights), f"{package}'s {name}")
        self.body, self.size = body.features, body.size
        self.register_buffer("loaded", torch.tensor(weights is None or Path(weights).exists()))
        self.register_buffer("mean", torch.tensor(body.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(body.std).view(3, 1, 1), persistent=False)
        self._usable = False
        self.train()
        with torch.no_grad():
            grid = self._grid(torch.zeros(1, *shape, dtype=torch.uint8))
        self.tokens = grid.shape[1]
        self.project = nn.Sequential(nn.LayerNorm(grid.shape[2]), nn.Linear(grid.shape[2], width))
        self.position = positions(self.tokens, width)

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, image: Tensor) -> Tensor:
        self._usable = self._usable or bool(self.loaded)
        if not self._usable:
            raise ConfigError(
                f"policy.network.encoder.weights: there is no file `{self.weights}`, and no checkpoint was loaded "
                "instead. Nothing is downloaded: fetch the weights as safetensors and give their path."
            )
        return self.project(self._grid(image)) + self.position

    def _grid(self, image: Tensor) -> Tensor:
        """(B, cells, channels)."""
        x = pixels(image)
        if self.size is not None and x.shape[-2:] != self.size:
            x = nn.functional.interpolate(x, self.size, mode="bilinear", antialias=True, align_corners=False)
        x = self.body((x - self.mean) / self.std)
        return x.flatten(2).transpose(1, 2) if x.ndim == 4 else x


@dataclass(frozen=True)
class _Body:
    """A model without its classifier."""

    features: nn.Module
    """(B, 3, rows, columns) -> (B, channels, rows, columns) or (B, cells, channels)."""
    model: nn.Module
    """The same, or a part of it; its weights are named as in files."""
    mean: Sequence[float]
    std: Sequence[float]
    """Of the pictures that its published weights were trained on."""
    heads: tuple[str, ...]
    """What the names of the classifier's weights start with, in files."""
    size: tuple[int, int] | None = None
    """The only picture size that it takes; None: any."""


def _timm(name: str) -> _Body:
    try:
        import timm
    except ImportError:
        raise missing_extra("timm", "clip") from None
    # Names such as `hf-hub:...` are no models of the package, and would be looked up on the network.
    if not timm.is_model(name):
        raise unknown_name("timm model", name, timm.list_models())
    model = timm.create_model(name, pretrained=False, num_classes=0)
    config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    heads = config["classifier"]
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    size = tuple(config["input_size"][1:]) if config.get("fixed_input_size") else None
    return _Body(_TimmFeatures(model), model, config["mean"], config["std"], heads, size)


class _TimmFeatures(nn.Module):
    """A timm model up to its last features; the channels are second in a grid, whatever the model thinks."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        x = self.model.forward_features(x)
        return x.permute(0, 3, 1, 2) if x.ndim == 4 and x.shape[1] != self.model.num_features else x


_TORCHVISION_HEADS = ("avgpool", "classifier", "fc", "head")
_TORCHVISION_WITHOUT_GRID = ("vit_", "maxvit", "googlenet", "inception")


def _torchvision(name: str) -> _Body:
    """All of a classifier that comes before its pooling."""
    try:
        from torchvision import models
    except ImportError:
        raise missing_extra("torchvision", "clip") from None
    # Classifiers only: others fetch the weights of their backbone unless told otherwise.
    known = [n for n in models.list_models(module=models) if not n.startswith(_TORCHVISION_WITHOUT_GRID)]
    if name not in known:
        raise unknown_name("torchvision model", name, known)
    body = nn.Sequential()
    for part, module in models.get_model(name, weights=None).named_children():
        if part in _TORCHVISION_HEADS:
            break
        body.add_module(part, module)
    return _Body(body, body, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), _TORCHVISION_HEADS)


def _without_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            setattr(module, name, nn.GroupNorm(math.gcd(child.num_features, 16), child.num_features))
        else:
            _without_batch_norm(child)


def _load(body: _Body, path: Path, what: str) -> None:
    """Read safetensors into the body; they are to be all of its weights, and the classifier's at most beyond."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"policy.network.encoder.weights: `{path}` cannot be read as safetensors ({error}). Other formats may run "
            "code when they are opened and are not read; convert the file once with safetensors.torch.save_file."
        ) from None
    wanted = body.model.state_dict()
    found = {
        "missing": [k for k in wanted if k not in state and not k.endswith("num_batches_tracked")],
        "unknown": [k for k in state if k not in wanted and not k.startswith(body.heads)],
        "of another shape": [k for k in wanted if k in state and state[k].shape != wanted[k].shape],
    }
    problems = [f"{len(names)} {kind} (such as `{names[0]}`)" for kind, names in found.items() if names]
    if problems:
        raise ContractError(f"The weights in `{path}` are not those of {what}: {', '.join(problems)}.")
    body.model.load_state_dict({k: v for k, v in state.items() if k in wanted}, strict=False)
