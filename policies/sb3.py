# SPDX-License-Identifier: Apache-2.0
"""Policies that Stable-Baselines3 trained, as our Actors: PPO, A2C, SAC, TD3 and DDPG with `MlpPolicy`.

A zip of Stable-Baselines3 holds JSON with pickled parts in it, and tensors. Only the plain JSON values are looked at,
and the tensors are read with torch's weights-only reader: nothing in the file is ever unpickled or run.

Axes: B batch, A action_dim.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from policies.sb3_vecnormalize import VecNormalizeStatistics, read_vecnormalize
from robo_rl.errors import ConfigError, ContractError
from robo_rl.nn.mlp import ACTIVATIONS
from robo_rl.types import STATE, ActionSample, Continuous, Discrete, EnvSpec, Obs

MAX_BYTES = 2**30  # of one member, unpacked
LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0  # SAC's


class SB3Actor:
    """An Actor that chooses what the model's own `predict` chooses. `algorithm` is `ppo`, `sac` or `td3` (the layout:
    A2C has PPO's, DDPG has TD3's)."""

    def __init__(
        self,
        algorithm: str,
        network: nn.Module,
        log_std: nn.Module | Tensor | None,
        action: Continuous | Discrete,
        obs_keys: tuple[str, ...],
        statistics: VecNormalizeStatistics | None,
    ):
        self.algorithm, self._network, self._log_std, self._action = algorithm, network, log_std, action
        self._obs_keys, self._statistics = obs_keys, statistics
        if isinstance(action, Continuous):
            self._low, self._high = torch.tensor(action.low), torch.tensor(action.high)

    @torch.no_grad()
    def act(self, obs: Obs, *, deterministic: bool = False, generator: Generator | None = None) -> ActionSample:
        """Actions (B, A) within the bounds, or (B,) int64; no log-prob, no value."""
        x = torch.cat([obs[key].float().cpu() for key in self._obs_keys], dim=1)
        if self._statistics is not None:
            x = torch.from_numpy(self._statistics(x.numpy()))
        if self.algorithm == "sac":
            return ActionSample(self._unscale(self._sac(x, deterministic, generator)))
        out = self._network(x)
        if self.algorithm == "td3":
            return ActionSample(self._unscale(out.tanh()))
        if isinstance(self._action, Discrete):
            if deterministic:
                return ActionSample(out.argmax(1))
            return ActionSample(torch.multinomial(out.softmax(1), 1, generator=generator).squeeze(1))
        assert isinstance(self._log_std, Tensor)
        if not deterministic:
            out = out + self._log_std.exp() * torch.randn(out.shape, generator=generator)
        return ActionSample(out.clamp(self._low, self._high))

    def reset(self, rows: Tensor | None = None) -> None:
        """Nothing is remembered between steps."""

    def _sac(self, x: Tensor, deterministic: bool, generator: Generator | None) -> Tensor:
        assert isinstance(self._network, nn.ModuleDict)
        latent = self._network["trunk"](x)
        mean = self._network["mean"](latent)
        if not deterministic:
            log_std = self._network["log_std"](latent).clamp(LOG_STD_MIN, LOG_STD_MAX)
            mean = mean + log_std.exp() * torch.randn(mean.shape, generator=generator)
        return mean.tanh()

    def _unscale(self, unit: Tensor) -> Tensor:
        """From [-1, 1] to the bounds."""
        return self._low + 0.5 * (unit + 1.0) * (self._high - self._low)


def load_sb3(
    path: Path,
    spec: EnvSpec,
    obs_keys: tuple[str, ...] = (STATE,),
    vecnormalize: Path | None = None,
    activation: str | None = None,
) -> SB3Actor:
    """The trained policy in a zip of Stable-Baselines3.

    Args:
        obs_keys: the observation vectors that the model was trained on, concatenated in this order.
        vecnormalize: the `vecnormalize.pkl` saved beside the model, if its observations were normalised.
        activation: of the hidden layers; read from the zip where it says, else the algorithm's default.

    Raises:
        ConfigError: no such zip, damaged, too large, or of a kind that is not read.
        ContractError: its observation or action does not fit `spec` (both shapes in the message).
    """
    path = Path(path)
    data, weights = _read(path)
    if data.get("use_sde"):
        raise ConfigError(f"`{path}` was trained with generalised state-dependent exploration, which is not read.")
    if any("features_extractor" in name for name in weights):
        raise ConfigError(f"`{path}` has a feature extractor (CnnPolicy or MultiInputPolicy); only MlpPolicy is read.")
    log_std: Tensor | None = None
    if "action_net.weight" in weights:
        algorithm, hidden, output = "ppo", "mlp_extractor.policy_net.", "action_net."
        log_std = weights.get("log_std")
    elif "actor.log_std.weight" in weights:
        algorithm, hidden, output = "sac", "actor.latent_pi.", "actor.mu."
    elif "actor.mu.0.weight" in weights:
        algorithm, hidden, output = "td3", "actor.mu.", ""
    else:
        raise ConfigError(
            f"`{path}` holds no policy of PPO, A2C, SAC, TD3 or DDPG; its tensors: {sorted(weights)[:4]}."
        )
    name = activation or _activation(data) or ("tanh" if algorithm == "ppo" else "relu")
    if name not in ACTIVATIONS:
        raise ConfigError(f"`{path}` has the activation `{name}`; known: {', '.join(ACTIVATIONS)}.")
    layers = [_linear(weights, prefix) for prefix in _numbered(weights, hidden)]
    trunk: list[nn.Module] = []
    for layer in layers:
        trunk += [layer, ACTIVATIONS[name]()]
    if algorithm == "td3":
        trunk.pop()  # the last layer is the output
        network: nn.Module = nn.Sequential(*trunk)
        last = layers[-1]
    elif algorithm == "ppo":
        last = _linear(weights, output)
        network = nn.Sequential(*trunk, last)
    else:
        last = _linear(weights, output)
        parts = {"trunk": nn.Sequential(*trunk), "mean": last, "log_std": _linear(weights, "actor.log_std.")}
        network = nn.ModuleDict(parts)
    first = layers[0] if layers else last
    _check_fits(path, spec, obs_keys, first.in_features, last.out_features, algorithm, data)
    statistics = None if vecnormalize is None else read_vecnormalize(vecnormalize)
    if statistics is not None and statistics.mean.shape != (first.in_features,):
        raise ContractError(
            f"`{vecnormalize}` has statistics of shape {statistics.mean.shape}, `{path}` observations of "
            f"({first.in_features},): they are not of the same run."
        )
    return SB3Actor(algorithm, network.eval(), log_std, spec.action, tuple(obs_keys), statistics)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The plain JSON values and the policy's tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in ("data", "policy.pth"):
                size = archive.getinfo(member).file_size
                if size > MAX_BYTES:
                    raise ConfigError(f"`{member}` in `{path}` has {size:,} bytes; at most {MAX_BYTES:,} are read.")
            data = json.loads(archive.read("data"))
            raw = archive.read("policy.pth")
    except KeyError as error:
        raise ConfigError(f"`{path}` is not a zip of Stable-Baselines3: {error.args[0]}") from None
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise ConfigError(f"`{path}` cannot be read as a zip of Stable-Baselines3: {error}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"`{path}` is not a zip of Stable-Baselines3: `data` is no JSON object.")
    try:
        file = io.BytesIO(raw)
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, among them what unpickling of anything but tensors raises
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"`policy.pth` in `{path}` holds something other than tensors, or is damaged; nothing in it was run. "
            f"({first_line})"
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise ConfigError(f"`policy.pth` in `{path}` is not a dict of tensors.")
    return data, weights


def _numbered(weights: dict[str, Tensor], prefix: str) -> list[str]:
    """Prefixes of the numbered layers below `prefix`, in order: `prefix0.`, `prefix2.`, ..."""
    numbers = {m.group(1) for n in weights if (m := re.fullmatch(re.escape(prefix) + r"(\d+)\.weight", n))}
    return [f"{prefix}{number}." for number in sorted(numbers, key=int)]


def _linear(weights: dict[str, Tensor], prefix: str) -> nn.Linear:
    weight, bias = weights[prefix + "weight"].float(), weights[prefix + "bias"].float()
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def _activation(data: dict[str, Any]) -> str | None:
    """From the readable text beside the pickled arguments: `<class 'torch.nn.modules.activation.ReLU'>`."""
    arguments = data.get("policy_kwargs")
    text = str(arguments.get("activation_fn", "")) if isinstance(arguments, dict) else ""
    match = re.search(r"activation\.(\w+)'", text)
    return match.group(1).lower() if match else None


def _check_fits(
    path: Path,
    spec: EnvSpec,
    obs_keys: tuple[str, ...],
    in_features: int,
    out_features: int,
    algorithm: str,
    data: dict[str, Any],
) -> None:
    missing = [key for key in obs_keys if key not in spec.obs]
    if missing:
        raise ContractError(f"The policy wants {missing}, but `{spec.name}` gives {sorted(spec.obs)}.")
    dim = sum(int(np.prod(spec.obs[key].shape)) for key in obs_keys)
    if dim != in_features:
        raise ContractError(
            f"`{path}` was trained on observations of ({in_features},); `{spec.name}` gives ({dim},) as "
            f"{' + '.join(obs_keys)}. Name the keys that it was trained on."
        )
    actions = spec.action.dim if isinstance(spec.action, Continuous) else spec.action.n
    discrete = algorithm == "ppo" and "Discrete" in str(data.get("action_space", ""))
    if actions != out_features or discrete != isinstance(spec.action, Discrete):
        kind = "discrete actions" if discrete else "continuous action dimensions"
        raise ContractError(f"`{path}` has {out_features} {kind}; `{spec.name}` has {spec.action}.")
    if isinstance(spec.action, Continuous):
        for name, mine in (("low", spec.action.low), ("high", spec.action.high)):
            theirs = _floats(data.get("action_space"), name)
            if theirs is not None and not np.allclose(theirs, mine, rtol=1e-4, atol=1e-6):
                raise ContractError(
                    f"`{path}` was trained with action bounds {name} = {theirs.tolist()}; `{spec.name}` has "
                    f"{list(mine)}."
                )


def _floats(space: Any, name: str) -> np.ndarray | None:
    """The bounds as the zip prints them, `[-2. -2.]`; None where it does not, or abbreviates."""
    text = str(space.get(name, "")) if isinstance(space, dict) else ""
    try:
        return np.array([float(x) for x in text.strip("[] ").split()]) if text.startswith("[") else None
    except ValueError:
        return None
