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


class VideoWriter:
    """An h264 file (yuv420p, plays everywhere), written frame by frame; close it, or use it as a context."""

    def __init__(self, path: Path, fps: float):
        """Raises ConfigError where PyAV is missing."""
        try:
            import av
        except ImportError as error:
            raise missing_extra("av", "train") from error
        self._av = av
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        self._stream.pix_fmt = "yuv420p"
        self._size: tuple[int, int] | None = None  # (height, width), of the first frame

    def add(self, frame: np.ndarray, captions: Sequence[tuple[float, bool]] | None = None) -> None:
        """One time step: (M, height, width, 3) uint8, and `(running return, success)` of every tile."""
        picture = tile(frame, captions)
        if self._size is None:
            height, width = self._size = picture.shape[0] // 2 * 2, picture.shape[1] // 2 * 2  # h264 wants even sizes
            self._stream.height, self._stream.width = height, width
        height, width = self._size
        image = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture[:height, :width]), format="rgb24")
        self._container.mux(self._stream.encode(image))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
