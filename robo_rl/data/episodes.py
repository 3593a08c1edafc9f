# SPDX-License-Identifier: Apache-2.0
"""Episodes on disk: a folder of one safetensors file per episode and one JSON file that describes them. No torch.

    episodes.json                 {"format": 1, "spec": {...}, "source": ..., "settings": {...}, "progress": {...},
                                   "episodes": [{"file", "length", ...}]}
    episode_000000.safetensors    obs keys (length + 1, ...), action (length, A), reward, terminated, truncated, success

Observations are one longer than actions: the last one is the true final observation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from robo_rl.config import build, differences, to_dict
from robo_rl.errors import ConfigError, ContractError
from robo_rl.files import write_whole
from robo_rl.types import EnvSpec

FORMAT = 1
INDEX = "episodes.json"


class EpisodeWriter:
    """Writes episodes one at a time. What was written is readable whenever the process dies, but for the last moment:
    the index is rewritten by `close` and, while episodes come, every `index_every_s` seconds.

    Attributes:
        episodes: the index so far, one dict per episode.
        progress: plain data about the work that writes, kept in the index for whoever goes on with it.
    """

    def __init__(
        self,
        folder: Path,
        spec: EnvSpec,
        source: str,
        settings: Mapping[str, Any] | None = None,
        index_every_s: float = 1.0,
    ):
        """
        Args:
            source: what acted, for whoever trains on it.
            settings: plain data about how the episodes come about. A folder that was written with equal spec, source
                and settings is continued; None: only a new folder will do.

        Raises:
            ConfigError: the folder already holds something else.
        """
        self.folder, self._every = Path(folder), index_every_s
        described = {"spec": to_dict(spec), "source": source, "settings": to_dict(settings)}
        self._index: dict[str, Any] = {"format": FORMAT, **described, "progress": {}, "episodes": []}
        if settings is not None and (self.folder / INDEX).exists():
            found = _read_index(self.folder)
            _refuse_others(self.folder, found, json.loads(json.dumps(described)))
            self._index |= {"progress": found["progress"], "episodes": found["episodes"]}
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"`{folder}` is not empty. Choose a new folder for the episodes.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_index()

    @property
    def episodes(self) -> list[dict[str, Any]]:
        return self._index["episodes"]

    @property
    def progress(self) -> dict[str, Any]:
        return self._index["progress"]

    @progress.setter
    def progress(self, value: dict[str, Any]) -> None:
        self._index["progress"] = value

    def add(self, tensors: Mapping[str, np.ndarray], task_id: int, episode: int) -> None:
        """One episode: obs keys (length + 1, ...) and the per-step arrays (length, ...)."""
        name = f"episode_{len(self.episodes):06d}.safetensors"
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, self.folder / name)
        self.episodes.append(
            {
                "file": name,
                "length": len(tensors["reward"]),
                "task_id": task_id,
                "episode": episode,
                "return": float(tensors["reward"].sum()),
                "success": bool(tensors["success"].any()),
            }
        )
        # Not every time: the index grows, and small episodes come fast.
        if time.monotonic() - self._written >= self._every:
            self._write_index()

    def close(self) -> None:
        self._write_index()

    def _write_index(self) -> None:
        write_whole(self.folder / INDEX, json.dumps(self._index, indent=1))
        self._written = time.monotonic()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EpisodeFolder:
    """Reads what EpisodeWriter wrote. `spec` is the environment, `index` a list with one dict per episode."""

    def __init__(self, folder: Path):
        """Raises ContractError where the folder has no readable index."""
        self.folder = Path(folder)
        data, path = _read_index(self.folder), self.folder / INDEX
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


def _read_index(folder: Path) -> dict[str, Any]:
    """The index as written. Raises ContractError where there is none that this version can read."""
    path = folder / INDEX
    if not path.exists():
        raise ContractError(f"`{folder}` is not an episode folder: it has no {INDEX}.")
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ContractError(f"`{path}` is not valid JSON: {error}.") from None
    if data.get("format", 0) > FORMAT:
        raise ContractError(f"`{path}` has format {data['format']}; this version reads up to {FORMAT}.")
    return data


def _refuse_others(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ConfigError where the episodes of a folder were collected in another way than those wanted now."""
    if found.get("settings") is None:
        raise ConfigError(
            f"`{folder}` holds episodes and says nothing of how they were collected. Choose a new folder."
        )
    different = differences({key: found[key] for key in wanted}, wanted)
    if different:
        raise ConfigError(
            f"`{folder}` holds episodes that were collected in another way: {'; '.join(different[:5])}. Choose a new "
            "folder, or repeat what was said the first time."
        )
