# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3's `vecnormalize.pkl`, read without running anything in it.

A pickle is a program for a small stack machine. The one here knows the instructions that push and combine data; a name
(`os.system`) stays text, calling it makes a `Record` of what would have been called, and nothing is ever imported or
called. Names outside a short list are refused all the same: such a file is not what it claims to be.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.errors import ConfigError

MAX_BYTES = 64 * 2**20
ALLOWED = ("numpy.", "gymnasium.spaces.", "collections.OrderedDict", "stable_baselines3.common.running_mean_std.")
ROOT = "stable_baselines3.common.vec_env.vec_normalize.VecNormalize"
# Data that genops has decoded already.
PUSH = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINSTRING",
    "SHORT_BINSTRING", "STRING",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
NOTHING = ("PROTO", "FRAME")
DTYPES = ("f8", "f4", "i8", "i4", "b1", "u1")


@dataclass
class Record:
    """An object that the pickle asks for: the name of its class or function, what it is called with, its state."""

    name: str
    args: Any = ()
    state: Any = None


@dataclass(frozen=True)
class VecNormalizeStatistics:
    """What `VecNormalize` knows about observations: `mean`, `var` (obs_dim,) float64."""

    mean: np.ndarray
    var: np.ndarray
    epsilon: float
    clip: float

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Normalised observations (B, obs_dim) float32, as Stable-Baselines3 computes them."""
        scaled = (obs - self.mean) / np.sqrt(self.var + self.epsilon)
        return np.clip(scaled, -self.clip, self.clip).astype(np.float32)


def read_vecnormalize(path: Path) -> VecNormalizeStatistics | None:
    """The observation statistics in `vecnormalize.pkl`; None where observations were not normalised (`norm_obs` False).

    Raises:
        ConfigError: the file is too large, no VecNormalize of flat observations, or has anything else in it.
    """
    path = Path(path)
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"`{path}` has {path.stat().st_size:,} bytes; statistics of at most {MAX_BYTES:,} are read.")
    try:
        root = _data(path.read_bytes())
        state = root.state
        if root.name != ROOT or not isinstance(state, dict):
            raise ConfigError(f"it holds `{root.name}`, not a VecNormalize")
        if not state["norm_obs"]:
            return None
        rms = state["obs_rms"]
        if not isinstance(rms, Record):
            raise ConfigError("it normalises a Dict of observations; only flat ones are read")
        return VecNormalizeStatistics(
            _array(rms.state["mean"]), _array(rms.state["var"]), float(state["epsilon"]), float(state["clip_obs"])
        )
    except ConfigError as error:
        raise ConfigError(f"`{path}` was not read: {error}. Nothing in it was run.") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"`{path}` is not a VecNormalize file ({error!r}). Nothing in it was run.") from None


def _data(program: bytes) -> Record:
    """Run the data instructions of a pickle; the record on top at its end."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, marks.pop()
        return items

    for opcode, argument, _ in pickletools.genops(program):
        name = opcode.name
        if name in NOTHING:
            continue
        if name in PUSH:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "MARK":
            marks.append(stack)
            stack = []
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            items = pop_to_mark()  # first: it swaps the stack
            stack.append(tuple(items))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            items = pop_to_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            items = pop_to_mark()
            stack[-1].extend(items)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]  # type: ignore[index]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])  # type: ignore[index]
        elif name == "GLOBAL":
            stack.append(_allowed(str(argument).replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_allowed(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, called = stack.pop(), stack.pop()
            if not isinstance(called, Record):
                raise ConfigError(f"it calls {called!r}")
            stack.append(Record(called.name, args))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "STOP":
            root = stack.pop()
            if not isinstance(root, Record):
                raise ConfigError("it holds no object")
            return root
        else:
            raise ConfigError(f"it has the instruction {name}, which statistics do not need")
    raise ConfigError("it ends too early")


def _allowed(name: str) -> Record:
    if name != ROOT and not name.startswith(ALLOWED):
        raise ConfigError(f"it names `{name}`, which has no place among statistics")
    return Record(name)


def _array(record: Any) -> np.ndarray:
    """The float64 copy of a pickled array: protocols up to 4 build one from bytes, protocol 5 from a buffer."""
    if not isinstance(record, Record):
        raise ConfigError("its statistics are no arrays")
    if record.name.endswith("multiarray._reconstruct"):
        _, shape, dtype, fortran, raw = record.state
    elif record.name.endswith("numeric._frombuffer"):
        raw, dtype, shape, order = record.args
        fortran = order == "F"
    else:
        raise ConfigError(f"its statistics are `{record.name}`, not arrays")
    code, order = dtype.args[0], dtype.state[1]
    if code not in DTYPES or order not in "<>|":
        raise ConfigError(f"its statistics have the type {code!r}")
    flat = np.frombuffer(bytes(raw), dtype=np.dtype((order if order != "|" else "") + code))
    return flat.reshape(shape, order="F" if fortran else "C").astype(np.float64)
