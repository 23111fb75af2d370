"""Small images of weights as data URIs: one colour, whose alpha is the weight, so that dark and light both work."""
from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np

from .colours import ORANGE


def data_uri(weights: np.ndarray) -> str:
    """Return a PNG of weights `[row column]` uint8, one pixel a weight, row 0 on top."""
    height, width = weights.shape
    pixels = np.empty((height, 1 + 4 * width), np.uint8)  # each row begins with its filter, none
    pixels[:, 0] = 0
    pixels[:, 1:].reshape(height, width, 4)[...] = (*ORANGE, 0)
    pixels[:, 4::4] = weights
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)  # 8 bits of red, green, blue and alpha
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(pixels.tobytes(), 9)), _chunk(b"IEND", b""))
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def rounded(weights: np.ndarray, levels: int) -> np.ndarray:
    """Return uint8 weights rounded to so many evenly spaced levels, 0 and 255 among them."""
    step = 255 / (levels - 1)
    return np.rint(np.rint(weights / step) * step).astype(np.uint8)
