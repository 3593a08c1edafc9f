# SPDX-License-Identifier: Apache-2.0
"""The three errors of this project, and the two messages that recur.

A message says what is wrong and where, what was expected and what was found, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RoboRLError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(RoboRLError, ValueError):
    """The user's configuration cannot be run as written."""


class ContractError(RoboRLError, RuntimeError):
    """A simulator, policy, data set or checkpoint broke its promise, or two of them do not fit."""


class SafetyStop(RoboRLError):
    """The robot was stopped on purpose."""


def missing_extra(package: str, extra: str) -> ConfigError:
    """The error for an optional package that is not installed, with the command that installs it."""
    return ConfigError(f"`{package}` is not installed. Run: pip install -c constraints.txt -e '.[{extra}]'.")


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with its nearest matches (all names where none is near)."""
    return ConfigError(f"Unknown {what} `{name}`. {near_matches(name, sorted(known))}")


def near_matches(name: str, known: Iterable[str]) -> str:
    """A sentence for a message: which names may have been meant, or all of them where none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else f"Known: {', '.join(names)}."


class NonFiniteError(RoboRLError):
    """A loss or gradient is NaN or infinite. `tensors` is the offending minibatch, flat, for whoever saves it."""

    def __init__(self, message: str, tensors: dict):
        super().__init__(message)
        self.tensors = tensors
