"""The controls that a Session opens in a notebook. They need ipywidgets; the work is done in `widgets/`."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import MiaError

if TYPE_CHECKING:
    from ..analysis.library import Library
    from ..analysis.vectors import Vector
    from ..widgets.attention import AttentionExplorer
    from ..widgets.layers import LayerExplorer
    from ..widgets.pair_editor import PairEditor
    from ..widgets.steering import SteeringPanel
    from ..widgets.sweeping import SweepLauncher
    from ..widgets.vector_library import LibraryBrowser


class Panels:
    """The methods of a Session that make controls. Each panel has a result in HTML that stays when the kernel is gone, says what it
    is set to as code, and with `freeze()` takes its controls away. While a panel runs something, cells that use the session wait."""

    def panel(self, vector: Any = None, *, prompt: str = "I think that", layers: int | Iterable[int] | None = None, coeff: float = 0.2,
              where: str = "text", seed: int = 16, temperature: float = 0.0, max_tokens: int = 24,
              presets: Mapping[str, Mapping[str, Any]] | None = None) -> SteeringPanel:
        """Return controls over a steering vector, beside default and steered text, streamed as they are generated.

        vector: a Vector, several by name, a Library, or an `Add` of a Vector, whose layers and coefficient the controls then start at;
        by default what `mia.library()` holds for this model. layers: by default the vector's middle one. where: "text" (all but BOS),
        "everywhere", "prompt", "generated" or "last". presets: controls to set together, by name, as {"strong": {"coeff": 0.4}}.
        """
        return _widgets("opening").steering_panel(self, vector, prompt, layers, coeff, where, seed, temperature, max_tokens, presets)

    def layer_explorer(self, prompt: str = "I think that", *, point: str = "resid_post") -> LayerExplorer:
        """Return controls over a prompt and a layer: norms of each token there and, of the stream, what it would say next."""
        return _widgets("layers").LayerExplorer(self, prompt, point)

    def attention_explorer(self, prompt: str = "I think that", *, layer: int = 0) -> AttentionExplorer:
        """Return controls over the layer and head whose attention is shown; load with points=["q", "k", ...]."""
        return _widgets("attention").AttentionExplorer(self, prompt, layer)

    def sweep_launcher(self, vector: Any, *, prompts: Any = None, metrics: Sequence[Any] = (), pairs: Any = None,
                       **options: Any) -> SweepLauncher:
        """Return controls over the layers and coefficients of a sweep, which runs beside the notebook; Stop keeps what is done.

        prompts, metrics, pairs and options: as in `sweep`.
        """
        return _widgets("sweeping").SweepLauncher(self, vector, prompts, metrics, pairs, options)

    def pair_editor(self, pairs: Any = (), *, point: str = "resid_post", method: str = "mean_diff") -> PairEditor:
        """Return rows of positive and negative text to edit and paste into, and a button that fits a vector to them."""
        return _widgets("pair_editor").PairEditor(self, pairs, point, method)

    def vector_library(self, vector: Vector | None = None, *, library: Library | None = None) -> LibraryBrowser:
        """Return controls over the vectors that are kept on this machine: load, delete, and save the given one.

        library: by default `mia.library()`.
        """
        from ..analysis.library import library as default

        return _widgets("vector_library").LibraryBrowser(self, vector, default() if library is None else library)


def _widgets(name: str) -> Any:
    """A module of the controls; MiaError where what they need is not installed."""
    try:
        return import_module(f"mia_lab.widgets.{name}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("ipywidgets", "IPython"):
            raise MiaError('controls need ipywidgets: pip install "mia_lab[lab]"') from None
        raise
