"""LazyTensor: PyTorch, NumPy and plotting libraries take it for a tensor; nothing is fetched before values are used."""
from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from einops import einsum, pack, rearrange, reduce, repeat

from mia_lab.lazy import LazyTensor, human_bytes


class Source:
    """A loader that counts its calls."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.calls = values, 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.values.clone()


def make(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[LazyTensor, torch.Tensor, Source]:
    """A lazy tensor, the plain tensor it stands for, and its loader."""
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    source = Source(plain)
    return LazyTensor(source, shape, dtype, "resid_post.3"), plain, source


FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda t: t.shape, "size": lambda t: t.size(1), "dtype": lambda t: t.dtype, "len": len,
    "numel": lambda t: t.numel(), "ndim": lambda t: t.ndim, "dim": lambda t: t.dim(), "device": lambda t: t.device,
    "nbytes": lambda t: t.nbytes, "is_floating_point": lambda t: t.is_floating_point(),
    "requires_grad": lambda t: t.requires_grad, "isinstance": lambda t: isinstance(t, torch.Tensor),
}


@pytest.mark.parametrize("ask", FREE.values(), ids=FREE)
def test_what_is_known_beforehand_is_answered_without_a_fetch(ask: Callable) -> None:
    lazy, plain, source = make(2, 3, 4, dtype=torch.bfloat16)
    assert ask(lazy) == ask(plain)
    assert source.calls == 0
    assert not lazy.fetched


@pytest.mark.parametrize("write", [repr, str, "{}".format, lambda t: f"{t}", lambda t: f"{[t]}"[1:-1]])
def test_its_text_does_not_fetch_and_says_whether_values_are_here(write: Callable) -> None:
    lazy, _, source = make(2, 3, 4, dtype=torch.bfloat16)
    assert write(lazy) == "<lazy resid_post.3 [2, 3, 4] bfloat16, 48 B, not fetched>"
    assert source.calls == 0
    lazy.get()
    assert write(lazy) == "<lazy resid_post.3 [2, 3, 4] bfloat16, 48 B, here>"


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "rearrange": lambda t: rearrange(t, "b p d -> (b p) d"),
    "reduce": lambda t: reduce(t, "b p d -> b d", "mean"),
    "repeat": lambda t: repeat(t, "b p d -> b 2 p d"),
    "pack": lambda t: pack([t], "b *")[0],
    "einops einsum": lambda t: einsum(t, torch.ones(4), "b p d, d -> b p"),
    "torch einsum": lambda t: torch.einsum("bpd,bqd->bpq", t, t),
    "vmap": torch.func.vmap(lambda row: row.sum(0)),
    "vmap beside a plain one": lambda t: torch.func.vmap(torch.matmul, in_dims=(0, None))(t, torch.ones(4, 2)),
    "grad": torch.func.grad(lambda t: t.square().sum()),
    "grad of a weight": lambda t: torch.func.grad(lambda w: (t @ w).square().sum())(torch.ones(4)),
    "vmap of grad": torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum())),
    "jacobian": torch.func.jacrev(lambda t: t.sum(-1)),
    "index": lambda t: t[1], "slice": lambda t: t[:, 1:], "list index": lambda t: t[:, [0, 2]],
    "ellipsis": lambda t: t[..., -1], "mask": lambda t: t[t > 0], "element": lambda t: t[1, 2, 3],
    "@ from the left": lambda t: t @ torch.ones(4), "@ from the right": lambda t: torch.ones(2, 3) @ t,
    "2 * t": lambda t: 2 * t, "1 - t": lambda t: 1 - t, "t / t": lambda t: t / t, "t == t": lambda t: t == t,
    "stack": lambda t: torch.stack([t, t]), "cat": lambda t: torch.cat([t, torch.zeros(1, 3, 4)]),
    "svd": lambda t: torch.linalg.svdvals(t), "norm": lambda t: t.norm(dim=-1),
    "softmax": lambda t: t.softmax(-1), "cosine": lambda t: torch.cosine_similarity(t[0], t[1], dim=-1),
    "linear": lambda t: torch.nn.functional.linear(t, torch.ones(5, 4)), "double": lambda t: t.double(),
    "iteration": lambda t: torch.stack(list(t)), "unpacking": lambda t: (lambda a, b: a - b)(*t),
    "where": lambda t: torch.where(t > 0, t, 0.0), "clone": lambda t: t.clone(), "get": lambda t: t + 0,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_operation_gives_the_plain_result_in_a_plain_tensor(use: Callable) -> None:
    lazy, plain, source = make(2, 3, 4)
    found = use(lazy)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, use(plain), rtol=1e-6, atol=1e-5)
    assert source.calls == 1


VALUES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], Any]]] = {
    "tolist": ((2, 3), lambda t: t.tolist()), "item": ((), lambda t: t.item()), "float": ((1,), float),
    "bool": ((), bool), "bool of any": ((3,), lambda t: bool((t > 100).any())), "in": ((3,), lambda t: 100.0 in t),
    "format": ((), lambda t: f"{t:.2f}"), "argmax": ((3,), lambda t: int(t.argmax())),
    "numpy mean": ((3, 4), lambda t: np.asarray(t).mean(1).tolist()),
}


@pytest.mark.parametrize(("shape", "use"), VALUES.values(), ids=VALUES)
def test_python_values_are_those_of_the_plain_tensor(shape: tuple[int, ...], use: Callable) -> None:
    lazy, plain, source = make(*shape)
    assert use(lazy) == use(plain)
    assert source.calls == 1


def test_a_condition_on_several_values_is_ambiguous_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(make(2)[0])


def test_values_are_fetched_once_and_kept() -> None:
    lazy, plain, source = make(2, 3)
    assert lazy.get() is lazy.get()
    assert torch.equal(lazy + lazy, plain + plain)
    assert lazy.fetched
    assert source.calls == 1


def test_writing_changes_the_values_it_holds_and_not_those_of_its_source() -> None:
    lazy, plain, source = make(2, 3)
    lazy[0] = 9.0
    lazy.add_(1)
    assert lazy.tolist() == [[10.0] * 3, (plain[1] + 1).tolist()]
    assert torch.equal(source.values, plain)


def test_gradients_flow_to_a_lazy_leaf() -> None:
    lazy, plain, _ = make(2, 3)
    lazy.requires_grad_().square().sum().backward()
    assert torch.equal(lazy.grad, 2 * plain)


@pytest.mark.parametrize("values", [torch.zeros(2, 4), torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3).double()])
def test_a_source_that_gives_something_else_than_announced_is_an_error(values: torch.Tensor) -> None:
    lazy = LazyTensor(lambda: values, (2, 3), torch.float32, "logits")
    with pytest.raises(RuntimeError, match=r"logits announced \(2, 3\) torch.float32 but its source gave"):
        lazy + 1
    assert not lazy.fetched


def test_a_fetch_that_failed_is_tried_again() -> None:
    answers = iter([OSError("the worker is busy"), torch.ones(2)])

    def load() -> torch.Tensor:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lazy = LazyTensor(load, (2,), torch.float32)
    with pytest.raises(OSError, match="the worker is busy"):
        lazy.sum()
    assert lazy.sum() == 2


# -- NumPy and drawing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [np.asarray, np.array, lambda t: t.numpy(), lambda t: t.numpy(force=True)])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "float32"), (torch.float16, "float16"),
                                             (torch.bfloat16, "float32"), (torch.int64, "int64")])
def test_numpy_gets_the_values_and_float32_for_bfloat16(convert: Callable, dtype: torch.dtype, kind: str) -> None:
    lazy, plain, _ = make(2, 3, dtype=dtype)
    array = convert(lazy)
    assert type(array) is np.ndarray
    assert array.dtype == kind
    assert array.tolist() == plain.tolist()


def test_numpy_casts_to_the_dtype_that_is_asked_for() -> None:
    assert np.asarray(make(2, dtype=torch.bfloat16)[0], dtype=np.float64).dtype == np.float64


def test_matplotlib_draws_it() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    line, plain_line, _ = make(5)
    image, plain_image, _ = make(4, 3, dtype=torch.bfloat16)
    assert axes.plot(line)[0].get_ydata().tolist() == plain_line.tolist()
    assert axes.imshow(image).get_array().tolist() == plain_image.tolist()


def test_plotly_takes_it_as_trace_data() -> None:
    graph = pytest.importorskip("plotly.graph_objects")
    line, plain_line, _ = make(5)
    image, plain_image, _ = make(4, 3, dtype=torch.bfloat16)
    assert graph.Scatter(y=line).y.tolist() == plain_line.tolist()
    assert graph.Heatmap(z=image).z.tolist() == plain_image.tolist()
    assert '"shape":"4, 3"' in graph.Figure(graph.Heatmap(z=image)).to_json()


# -- copies -----------------------------------------------------------------------------------------------------------


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("again", [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy, saved_and_loaded,
                                   lambda t: saved_and_loaded({"acts": [t]})["acts"][0],
                                   lambda t: copy.deepcopy([t])[0]])
@pytest.mark.parametrize("fetched", [False, True])
def test_a_copy_is_a_plain_tensor_that_shares_nothing(again: Callable, fetched: bool) -> None:
    lazy, plain, _ = make(2, 3, dtype=torch.bfloat16)
    if fetched:
        lazy.get()
    found = again(lazy)
    assert type(found) is torch.Tensor
    assert torch.equal(found, plain)
    found.zero_()
    assert torch.equal(lazy.get(), plain)


def test_np_array_gives_a_copy() -> None:
    lazy, plain, _ = make(2, 3)
    np.array(lazy)[...] = 0
    assert torch.equal(lazy.get(), plain)


def test_it_owns_its_memory_when_the_source_gives_a_view() -> None:
    buffer = torch.zeros(1000, 3)
    lazy = LazyTensor(lambda: buffer[5:7], (2, 3), torch.float32)
    lazy.get()
    buffer.fill_(1)
    assert lazy.sum() == 0
    assert lazy.get().untyped_storage().nbytes() == lazy.nbytes


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_safetensors_saves_it() -> None:
    lazy, plain, _ = make(2, 3)
    assert torch.equal(safetensors.torch.load(safetensors.torch.save({"a": lazy}))["a"], plain)


def test_dlpack_hands_over_the_values() -> None:
    script = ("import numpy as np, torch; from mia_lab.lazy import LazyTensor; "
              "lazy = LazyTensor(lambda: torch.arange(3.), (3,), torch.float32); "
              "assert np.from_dlpack(lazy).tolist() == torch.from_dlpack(lazy).tolist() == [0, 1, 2]")
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)  # it may crash the interpreter


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (96, "96 B"), (1023, "1023 B"), (1024, "1 KiB"),
                                            (147456, "144 KiB"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"),
                                            (1 << 40, "1024 GiB")])
def test_a_size_is_written_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert human_bytes(size) == text
