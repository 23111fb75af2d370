"""Pictures with a palette: a third of the bytes of full colour, and no difference to be seen in drawings of few hues."""
from __future__ import annotations

from io import BytesIO

import numpy as np

_COLOURS, _STEP = 128, 8


def packed(pixels: np.ndarray) -> bytes:
    """Return a PNG of pixels `[row column rgba]` uint8, rounded to steps of 8, in the 128 most frequent colours.

    Any other colour becomes the nearest of these.
    """
    from PIL import Image

    rounded = np.minimum((pixels.astype(np.uint16) + _STEP // 2) // _STEP * _STEP, 255).astype(np.uint8)
    rounded[rounded[..., 3] == 0] = 0
    found, place, counts = np.unique(np.ascontiguousarray(rounded).view(np.uint32)[..., 0], return_inverse=True, return_counts=True)
    colours = found.view(np.uint8).reshape(-1, 4)
    kept = np.argsort(-counts, kind="stable")[:_COLOURS]
    index = _nearest(_seen(colours), _seen(colours[kept])).astype(np.uint8)
    image = Image.fromarray(index[place.reshape(pixels.shape[:2])], "P")
    image.putpalette(colours[kept].tobytes(), "RGBA")
    out = BytesIO()
    image.save(out, format="png", optimize=True)
    return out.getvalue()


def _seen(colours: np.ndarray) -> np.ndarray:
    """Colours `[n 4]` as they count: the hue of what is hardly there counts little."""
    alpha = colours[:, 3:].astype(np.float32)
    return np.concatenate([colours[:, :3] * alpha / 255, alpha], axis=1)


def _nearest(colours: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The place in `kept [m 4]` that is nearest to each of `colours [n 4]`, `[n]`."""
    squares = (colours**2).sum(1)[:, None] + (kept**2).sum(1) - 2 * colours @ kept.T
    return squares.argmin(1)
