"""One object stands for all specs that are equal, and can be sent."""
from __future__ import annotations

import numpy as np
import pytest

from mia_lab.engine.wire import Spec, Take, decode, encode, shared


def test_one_object_stands_for_equal_specs() -> None:
    specs = [Spec(takes=(Take("resid_post", 1, ((0, 4),)),)) for _ in range(2)]
    assert specs[0] is not specs[1] and shared(specs[0]) is shared(specs[1]) is decode(encode("u", specs[1]))[1] == specs[0]


@pytest.mark.parametrize("wrong", [np.int64(4), True, 5.0])
def test_a_spec_that_cannot_be_sent_does_not_stand_for_one_that_can(wrong: object) -> None:
    bad, good = (Spec(takes=(Take("z", 77, ((0, end),)),)) for end in (wrong, int(wrong)))
    assert bad == good
    for call in (shared, lambda spec: encode("u", spec)):
        with pytest.raises((TypeError, ValueError)):
            call(bad)
    assert shared(good) == good and type(shared(good).takes[0].spans[0][1]) is int
    assert shared(bad) == good  # it is the good one now
