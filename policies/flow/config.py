# SPDX-License-Identifier: Apache-2.0
"""Settings of flow policies; torch-free, so that a configuration can be read anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MLPVelocity:
    """An MLP over observation features, the noisy chunk and the time: for states."""

    kind: Literal["mlp"] = "mlp"
    hidden: tuple[int, ...] = (256, 256, 256)


@dataclass(frozen=True)
class CNNTokens:
    """A small CNN from scratch; one token for each cell of its last grid."""

    kind: Literal["cnn"] = "cnn"
    channels: tuple[int, ...] = (16, 32, 64, 128)
    """Of convolutions 8 x 8 by 4, 4 x 4 by 2, and 3 x 3 by 2 from then on. Four of them make 3 x 3 tokens of pictures
    of 84 pixels; three make 5 x 5, which cost twice the time and, with as many gradient steps, clone worse."""


@dataclass(frozen=True)
class ViTTokens:
    """A small vision transformer from scratch, as wide as the network that it is for."""

    kind: Literal["vit"] = "vit"
    patch: int = 21
    """Pixels of a patch's side; must divide the pictures'."""
    depth: int = 1


@dataclass(frozen=True)
class TimmTokens:
    """Any image model of timm; one token for each cell of its last grid."""

    kind: Literal["timm"] = "timm"
    name: str = "resnet18"
    weights: str | None = None
    """A local safetensors file; None: fresh weights. Nothing is ever downloaded."""


@dataclass(frozen=True)
class TorchvisionTokens:
    """Any convolutional classifier of torchvision (and swin); one token for each cell of its last grid."""

    kind: Literal["torchvision"] = "torchvision"
    name: str = "resnet18"
    weights: str | None = None
    """A local safetensors file; None: fresh weights. Nothing is ever downloaded."""


@dataclass(frozen=True)
class TransformerVelocity:
    """A small transformer: tokens of pictures, vectors and the instruction (where `task_id` is among the policy's
    obs_keys), read once per chunk, and an action expert that attends to them at every denoising step."""

    kind: Literal["transformer"] = "transformer"
    width: int = 128
    depth: int = 1
    """Blocks over the tokens of the observation."""
    expert_depth: int = 2
    """Blocks of the action expert."""
    heads: int = 4
    encoder: CNNTokens | ViTTokens | TimmTokens | TorchvisionTokens = field(default_factory=CNNTokens)
    """Of pictures; each camera has its own."""


@dataclass(frozen=True)
class FlowConfig:
    kind: Literal["flow"] = "flow"
    obs_keys: tuple[str, ...] = ("observation.state",)
    """What the actor sees, in this order."""
    critic_obs_keys: tuple[str, ...] = ()
    """What the critic sees; empty: the same. Listing privileged keys makes the critic asymmetric."""
    network: MLPVelocity | TransformerVelocity = field(default_factory=MLPVelocity)
    chunk: int = 4
    """Actions predicted at once."""
    executed: int = 4
    """Actions of a chunk that are executed before the next one is predicted; the first ones."""
    denoise_steps: int = 4
    sampler: Literal["sde", "cps", "noise"] = "sde"
    """How training explores: Flow-SDE, coefficients-preserving, or Flow-Noise with a learned std. Evaluation is the
    ODE under all of them."""
    level: float = 0.5
    """Noise level of `sde` and `cps`."""
    stochastic_steps: Literal["one", "all"] = "one"
    """One denoising step of each chunk is random, drawn anew for each chunk and shared by the batch, and the update
    recomputes that one only; or all are. `noise` needs all."""
    ignore_last: bool = False
    """Never make the last denoising step of `sde` the random one, since its noise goes into the action as it is."""
    noise_std: tuple[float, float] = (0.08, 0.16)
    """Bounds of the std that `noise` learns, in units of the normalised action."""
    joint: Literal["sum", "mean"] = "sum"
    """With several random steps: the log-prob of a chunk is the sum over them (the true joint one), or their mean (the
    official piRL code; the ratio is then the root of the true one)."""
    critic: Literal["obs", "encoder", "expert", "none"] = "obs"
    """The critic reads observations by a network of its own, the actor's detached features, or the action expert's
    detached hidden states (averaged over the denoising steps when acting). none: there is none, for GRPO."""
    critic_hidden: tuple[int, ...] = (256, 256)
    image_features: int = 64
    """Features per camera, of the MLP's encoder and of a critic on observations."""
    image_shift: int = 0
    """Cloning shifts each picture at random by up to this many pixels either way. For cameras that may move, and for
    long training on few demonstrations; it slows down the start."""
    normalize_obs: bool = True
    """Scale vectors by the statistics of the data that the policy was cloned from; frozen afterwards."""
    obs_clip: float = 8.0
    min_std: float = 0.01
    """A number that varied less than this in the demonstrations (a joint that never moved) is scaled as if it had
    varied this much: otherwise the first small motion of it would look like nothing ever seen."""
    action_normalization: Literal["bounds", "mean_std", "quantile"] = "bounds"
    """Actions are scaled by the environment's bounds, or by statistics of the demonstrations (1 and 99 per cent for
    quantiles)."""
    frozen: tuple[str, ...] = ()
    """Parameters that reinforcement learning leaves as they are, by the start of their name, for example `encoder`."""
