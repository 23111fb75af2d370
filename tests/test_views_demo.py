"""Attention and live readings on the embedded model."""
from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image

import mia_lab as mia

pytestmark = pytest.mark.full
PROMPT = "The cat sat on the mat because it was tired.\nThen <b>it</b> went home."


@pytest.fixture(scope="module")
def session() -> Iterator[mia.Session]:
    with mia.Session("demo", dtype="float32", points=["resid_post", "q", "k"], max_model_len=256, max_num_seqs=16,
                     enforce_eager=True) as session:
        yield session


def test_each_row_of_each_image_sums_to_one_and_is_the_cache_s_pattern(session: mia.Session) -> None:
    view, (_, cache) = session.attention(PROMPT), session.run_with_cache(PROMPT, ["q", "k"])
    markup, n = view._repr_html_(), len(view.tokens)
    images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[..., 3] / 255
              for data in re.findall(r"src='data:image/png;base64,([^']+)'", markup)]
    assert len(images) == len(view.names) == 18 * 4 and len(markup) < 300_000
    for weights, image in zip(view.weights.flatten(0, 1), images):
        assert np.abs(image.sum(1) - 1).max() <= n * 0.5 / 255
        assert np.abs(image - weights.numpy()).max() <= 0.5 / 255 + 1e-6
    for layer in (0, 5, 17):
        torch.testing.assert_close(view.weights[layer], cache["pattern", layer][0], rtol=0, atol=1e-6)
    assert [layer for layer, window in zip(view.layers, view.windows) if window is None] == [5, 11, 17]
    assert set(view.windows) == {512, None} and view.group == 4 and "layer 5 head 3, kv 0" in view.names
    assert "<bos>, the first token" in repr(view)


def test_live_readings_are_those_of_a_capture(session: mia.Session) -> None:
    v = session.vector(list(mia.dataset("sentiment_pairs"))[:8])
    probe = mia.Probe(v[9].rows[0], 9, cosine=True)
    found = session.live("The food was", probe, threshold=0.0, max_tokens=12)
    rows = session.capture(list(found.ids), layers=9, at=None).get()
    wanted = [probe.read(row) for row in rows][found.n_prompt - 1 : -1]
    np.testing.assert_allclose(found.values[found.n_prompt - 1 : -1], wanted, atol=1e-4)
    assert len(found._repr_html_()) < 300_000
