"""Every view is small, whatever notebook it is put in."""
from __future__ import annotations

import json

import pytest
from gallery import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_view_is_below_300_kB_and_no_widget(name: str) -> None:
    view = EXAMPLES[name].view()
    bundle = view._repr_mimebundle_() if hasattr(view, "_repr_mimebundle_") else {"text/html": view._repr_html_(), "text/plain": repr(view)}
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert bundle and not [kind for kind in bundle if "widget" in kind]
    assert len(json.dumps(bundle, default=lambda data: data.hex())) < 300_000
