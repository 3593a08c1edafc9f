# SPDX-License-Identifier: Apache-2.0
"""The run directory: what was run, with what, and what came out. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robo_rl.config import differences
from robo_rl.errors import ConfigError
from robo_rl.files import write_whole

log = logging.getLogger(__name__)

_COMMAND: ContextVar[Sequence[str] | None] = ContextVar("command", default=None)
PACKAGES = ("robo-rl", "torch", "numpy", "mujoco", "gymnasium", "mani-skill", "sapien", "stable-baselines3")


@dataclass(frozen=True)
class RunDir:
    """A directory with config.yaml, command.txt and versions.json; result.json once the run has ended.

    versions.json is a list of `versions()`: the first ones, and those that later resumes changed.
    """

    path: Path

    @staticmethod
    def create(path: Path, config: str, resume: bool = False) -> RunDir:
        """Make the directory and record configuration (YAML text), command line and versions.

        Raises:
            ConfigError: it is a file; or it already holds something and `resume` is False; or there is none to resume.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"The run directory `{path}` is a file. Choose another --run-dir.")
        if resume and not path.exists():
            raise ConfigError(
                f"There is no run directory `{path}` to resume. Give one that an earlier run has written."
            )
        if not resume:
            if path.exists() and any(path.iterdir()):
                raise ConfigError(
                    f"`{path}` is not empty. Choose another --run-dir, or continue it with --resume {path}."
                )
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(config)
            (path / "command.txt").write_text(command() + "\n")
        _record_versions(path / "versions.json")
        return RunDir(path)

    def write_result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write result.json; see `write_result`."""
        return write_result(self.path / "result.json", result)


def write_result(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Add command and versions to a result, write it whole or not at all, and return what was written."""
    result = to_json(result | {"command": command(), "versions": versions()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1))
    return result


def to_json(value: Any) -> Any:
    """`value` with None for NaN and infinities: JSON has no such numbers, and strict readers refuse the whole file."""
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command() -> str:
    """The command line that does again what is being done. Where there is none, because a program or a test calls this
    library, that is said, with the command line of the process."""
    script = Path(sys.argv[0])
    if _COMMAND.get() is not None:
        return shlex.join(_COMMAND.get() or ())
    if script.stem == "robo-rl":
        return shlex.join(["robo-rl", *sys.argv[1:]])
    if script.suffix == ".py" and script.parent.name == "launch":
        return shlex.join(["python", *sys.argv])
    return f"called from Python by: {shlex.join(sys.orig_argv)}"


@contextmanager
def commanded(words: Sequence[str] | None) -> Iterator[None]:
    """Within, `command` is `words`: for functions of the command line that are called with arguments of their own."""
    token = _COMMAND.set(words)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def versions() -> dict[str, str]:
    """Versions of everything that may change a number, and the commit where there is one."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "HEAD")
    if commit:
        found["commit"] = commit + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    return found


def _record_versions(path: Path) -> None:
    """Add the present versions to a list of them, and warn, where a resumed run goes on under others."""
    known = json.loads(path.read_text()) if path.exists() else []
    known = [known] if isinstance(known, dict) else known  # as it was written before a run could have several
    present = versions()
    if known and known[-1] == present:
        return
    if known:
        changes = "; ".join(differences(known[-1], present))
        log.warning("`%s` goes on under other versions, and its numbers may change: %s.", path.parent, changes)
    write_whole(path, json.dumps([*known, present], indent=1))


def _git(*arguments: str) -> str:
    """git's answer about the folder that this package lies in; empty where there is no git."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
