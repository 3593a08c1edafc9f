# SPDX-License-Identifier: Apache-2.0
"""Episodes on disk: a folder of one safetensors file per episode and one JSON file that describes them. No torch.

    episodes.json                 {"format": 1, "spec": {...}, "source": ..., "episodes": [{"file", "length", ...}]}
    episode_000000.safetensors    obs keys (length + 1, ...), action (length, A), reward, terminated, truncated, success

Observations are one longer than actions: the last one is the true final observation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from robo_rl.config import build, to_dict
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import EnvSpec

FORMAT = 1
INDEX = "episodes.json"


class EpisodeWriter:
    """Writes episodes one at a time; the index is rewritten by `close`, so close it (or use it as a context)."""

    def __init__(self, folder: Path, spec: EnvSpec, source: str):
        """Refuses a folder that already holds something. `source` says what acted, for whoever trains on it."""
        self.folder = Path(folder)
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"`{folder}` is not empty. Choose a new folder for the episodes.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._index: dict[str, Any] = {"format": FORMAT, "spec": to_dict(spec), "source": source, "episodes": []}

    def add(self, tensors: Mapping[str, np.ndarray], task_id: int, episode: int) -> None:
        """One episode: obs keys (length + 1, ...) and the per-step arrays (length, ...)."""
        name = f"episode_{len(self._index['episodes']):06d}.safetensors"
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, self.folder / name)
        self._index["episodes"].append(
            {
                "file": name,
                "length": len(tensors["reward"]),
                "task_id": task_id,
                "episode": episode,
                "return": float(tensors["reward"].sum()),
                "success": bool(tensors["success"].any()),
            }
        )

    def close(self) -> None:
        (self.folder / INDEX).write_text(json.dumps(self._index, indent=1))

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EpisodeFolder:
    """Reads what EpisodeWriter wrote. `spec` is the environment, `index` a list with one dict per episode."""

    def __init__(self, folder: Path):
        """Raises ContractError where the folder has no readable index."""
        self.folder = Path(folder)
        path = self.folder / INDEX
        if not path.exists():
            raise ContractError(f"`{folder}` is not an episode folder: it has no {INDEX}.")
        try:
            data = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ContractError(f"`{path}` is not valid JSON: {error}.") from None
        if data.get("format", 0) > FORMAT:
            raise ContractError(f"`{path}` has format {data['format']}; this version reads up to {FORMAT}.")
        self.spec: EnvSpec = build(EnvSpec, data["spec"], where=str(path), key="spec")
        self.source: str = data["source"]
        self.index: list[dict[str, Any]] = data["episodes"]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Episode i's arrays by name. Raises ContractError for a damaged file or arrays of unequal length."""
        entry = self.index[i]
        path = self.folder / entry["file"]
        if path.parent != self.folder:
            raise ContractError(f"Episode {i} names a file outside of `{self.folder}`: {entry['file']!r}.")
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ContractError(f"Episode {i} (`{path}`) cannot be read: {error}.") from error
        for name, array in arrays.items():
            expected = entry["length"] + (name in self.spec.obs)
            if len(array) != expected:
                raise ContractError(f"Episode {i} (`{path}`): `{name}` has {len(array)} rows, expected {expected}.")
        return arrays

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.episodes()

    def episodes(self, successful_only: bool = False) -> Iterator[dict[str, np.ndarray]]:
        """Every episode's arrays by name, one file read at a time."""
        return (self[i] for i, entry in enumerate(self.index) if entry["success"] or not successful_only)
