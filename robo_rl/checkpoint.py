# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: directories of safetensors and JSON, written beside and renamed. Nothing is ever unpickled.

    checkpoints/step_000000819200/{policy,algorithm,rng,env}.safetensors  state.json  spec.json  COMPLETE
    checkpoints/last            the name of the newest one

A directory without COMPLETE was being written when something died; it is ignored. Needs no torch: tensors of either
library go in, `load` gives the one asked for.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError

from robo_rl.config import build, to_dict
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import EnvSpec

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """`parts` maps a part's name to its tensors by name; `state` and `spec` are the JSON files."""

    path: Path
    parts: dict[str, dict[str, Any]]
    state: dict[str, Any]
    spec: dict[str, Any]

    @property
    def env_spec(self) -> EnvSpec:
        """The environment that the policy was trained in."""
        return build(EnvSpec, self.spec["env"], where=str(self.path / "spec.json"))


def save(
    root: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
    spec: Mapping[str, Any],
    keep: int = 3,
) -> Path:
    """Write a checkpoint under `root`, then delete all but the newest `keep`.

    Returns:
        Its directory.

    Raises:
        ConfigError: `keep` is below 1.
        ContractError: the disk is full; what was there before is untouched and the partial directory removed.
    """
    if keep < 1:
        raise ConfigError(f"checkpoint.keep is {keep}: the checkpoint just written has to stay. Set it to 1 or more.")
    final = root / f"step_{step:012d}"
    partial, replaced = root / f".partial_{final.name}", root / f".replaced_{final.name}"
    for leftover in root.glob(".*_step_*"):  # of a process that died while writing
        shutil.rmtree(leftover)
    try:
        partial.mkdir(parents=True)
        for name, tensors in parts.items():
            _write_tensors(partial / f"{name}.safetensors", tensors)
        _write_text(partial / "state.json", json.dumps({"format": FORMAT, "step": step, **state}, indent=1))
        _write_text(partial / "spec.json", json.dumps({"format": FORMAT, **spec}, indent=1))
        _write_text(partial / "COMPLETE", "")
        _write_text(root / ".last", final.name)
        _sync_folder(partial)
        # All data is on disk: from here on there are only renames, which a full disk cannot stop.
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        (root / ".last").rename(root / "last")
        _sync_folder(root)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = latest(root)
            raise ContractError(
                f"The disk is full: the checkpoint of step {step} could not be written to `{root}`. "
                + (f"The last one, `{kept.name}`, is whole: free some space and resume." if kept else "None was kept.")
            ) from error
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    for old in complete(root)[:-keep]:
        (old / "COMPLETE").unlink()  # first, so that a half-deleted one is never taken for a checkpoint
        shutil.rmtree(old)
    return final


def load(path: Path, framework: Literal["torch", "numpy"] = "torch") -> Checkpoint:
    """Read a checkpoint: its directory, or a run directory or `checkpoints` folder, whose newest is taken.

    Raises:
        ContractError: there is none, it is incomplete or damaged, or of a newer format.
    """
    path = Path(path)
    found = path if (path / "COMPLETE").exists() else latest(path / "checkpoints") or latest(path)
    if found is None:
        raise ContractError(f"`{path}` holds no complete checkpoint (a directory `step_N` with a file COMPLETE).")
    if framework == "torch":
        from safetensors.torch import load_file
    else:
        from safetensors.numpy import load_file
    try:
        state, spec = (json.loads((found / f"{name}.json").read_text()) for name in ("state", "spec"))
        parts = {file.stem: load_file(file) for file in sorted(found.glob("*.safetensors"))}
    except (OSError, ValueError, SafetensorError) as error:
        raise ContractError(f"The checkpoint `{found}` is damaged: {error}. Use an older one beside it.") from error
    if state["format"] > FORMAT:
        raise ContractError(f"`{found}` has format {state['format']}, this version reads up to {FORMAT}: upgrade.")
    return Checkpoint(found, parts, state, spec)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None."""
    found = complete(root)
    return found[-1] if found else None


def complete(root: Path) -> list[Path]:
    """All complete checkpoints under `root`, oldest first."""
    return sorted(p for p in root.glob("step_*") if (p / "COMPLETE").exists()) if root.is_dir() else []


def check_fits(trained: EnvSpec, env: EnvSpec, keys: tuple[str, ...]) -> list[str]:
    """Refuse a policy that does not fit an environment; returns warnings about what merely differs.

    Args:
        trained: where the policy was trained, from its checkpoint.
        env: where it is to act.
        keys: the observation keys that the policy reads.

    Raises:
        ContractError: an observation, the action, the control rate or a convention differs; with both values.
    """
    problems = []
    for key in keys:
        mine, theirs = trained.obs[key], env.obs.get(key)
        if theirs is None:
            problems.append(
                f"observation `{key}`: trained with {mine.shape}, the environment has only {sorted(env.obs)}"
            )
        elif (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype) or mine.names != theirs.names:
            problems.append(f"observation `{key}`: trained with {mine}, the environment gives {theirs}")
    if trained.action != env.action:
        problems.append(f"action: trained with {trained.action}, the environment takes {env.action}")
    if trained.control_hz != env.control_hz:
        problems.append(
            f"control rate: trained at {trained.control_hz} Hz, the environment runs at {env.control_hz} Hz"
        )
    problems += [
        f"convention `{name}`: trained with `{trained.convention[name]}`, here `{env.convention[name]}`"
        for name in sorted(trained.convention.keys() & env.convention.keys())
        if trained.convention[name] != env.convention[name]
    ]
    if problems:
        raise ContractError(
            f"This checkpoint (trained on `{trained.name}`) does not fit `{env.name}`:\n  - " + "\n  - ".join(problems)
        )
    warnings = []
    if trained.simulator != env.simulator:
        warnings.append(f"trained with {trained.simulator}, running with {env.simulator}")
    if trained.name != env.name:
        warnings.append(f"trained on `{trained.name}`, running on `{env.name}`")
    return warnings


def env_spec_dict(spec: EnvSpec) -> dict[str, Any]:
    """An EnvSpec as plain JSON data; `Checkpoint.env_spec` reads it back."""
    return to_dict(spec)


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    if all(isinstance(t, np.ndarray) for t in tensors.values()):
        from safetensors.numpy import save as serialise
    else:
        import torch
        from safetensors.torch import save as serialise

        # safetensors refuses tensors that share storage (flat parameters, shared normalisers): each gets its own.
        tensors = {k: t.detach().clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
    _write(path, serialise(dict(tensors)))


def _write_text(path: Path, text: str) -> None:
    _write(path, text.encode())


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make renames within `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
