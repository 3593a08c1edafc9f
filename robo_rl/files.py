# SPDX-License-Identifier: Apache-2.0
"""Small files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename: whoever reads, and whenever this process dies, sees the old or the new."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
