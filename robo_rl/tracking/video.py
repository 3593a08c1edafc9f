# SPDX-License-Identifier: Apache-2.0
"""Tiled videos: one tile per environment, its running return and a green border where it succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from robo_rl.errors import missing_extra

BORDER = 4
GREEN, GREY = np.array([40, 200, 80], np.uint8), np.array([60, 60, 60], np.uint8)


def write_video(
    path: Path,
    frames: Sequence[np.ndarray],
    fps: float,
    captions: Sequence[Sequence[tuple[float, bool]]] | None = None,
) -> None:
    """Write h264 (yuv420p, plays everywhere).

    Args:
        frames: one (M, height, width, 3) uint8 per time step.
        captions: `(running return, success)` of every tile at every time step.
    """
    try:
        import av
    except ImportError as error:
        raise missing_extra("av", "train") from error

    first = tile(frames[0], captions[0] if captions else None)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = first.shape[0] // 2 * 2, first.shape[1] // 2 * 2  # h264 wants even sizes
        stream.pix_fmt = "yuv420p"
        for t, frame in enumerate(frames):
            picture = tile(frame, captions[t] if captions else None)[: stream.height, : stream.width]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def tile(frame: np.ndarray, captions: Sequence[tuple[float, bool]] | None = None) -> np.ndarray:
    """One picture (rows * height, columns * width, 3) out of (M, height, width, 3), as square as it goes."""
    count, height, width, _ = frame.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    canvas = np.zeros((rows * height, columns * width, 3), np.uint8)
    for i in range(count):
        y, x = i // columns * height, i % columns * width
        canvas[y : y + height, x : x + width] = _decorate(frame[i], captions[i] if captions else None)
    return canvas


def _decorate(picture: np.ndarray, caption: tuple[float, bool] | None) -> np.ndarray:
    if caption is None:
        return picture
    from PIL import Image, ImageDraw

    value, success = caption
    image = Image.fromarray(picture)
    ImageDraw.Draw(image).text((BORDER + 4, BORDER + 2), f"{value:.1f}", fill=(255, 255, 255))
    out = np.asarray(image).copy()
    colour = GREEN if success else GREY
    out[:BORDER], out[-BORDER:], out[:, :BORDER], out[:, -BORDER:] = colour, colour, colour, colour
    return out
