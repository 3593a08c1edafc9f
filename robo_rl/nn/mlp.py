# SPDX-License-Identifier: Apache-2.0
"""Multi-layer perceptrons with the orthogonal initialisation that on-policy methods are used to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

Activation = Literal["elu", "tanh", "relu", "silu", "gelu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    """The layer itself, with orthogonal weights (Saxe et al. 2014, arXiv:1312.6120) and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(in_dim: int, hidden: Sequence[int], out_dim: int, activation: Activation, out_gain: float) -> nn.Sequential:
    """(B, in_dim) -> (B, out_dim); hidden layers with gain sqrt(2), the linear output with `out_gain`."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [orthogonal(nn.Linear(in_dim, width), 2**0.5), ACTIVATIONS[activation]()]
        in_dim = width
    return nn.Sequential(*layers, orthogonal(nn.Linear(in_dim, out_dim), out_gain))
