"""What a Session shows of a run: attention, and a generation with a monitor's readings. The work is done in `analysis/`."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..analysis.attention_view import AttentionView
    from ..analysis.live import Readings
    from ..gates import Probe


class Views:
    """The methods of a Session that return a view."""

    def attention(self, prompt: Any, *, layers: int | Iterable[int] | None = None, heads: int | Iterable[int] | None = None,
                  at: Any = None, edits: Any = None) -> AttentionView:
        """Return what heads attend to on one prompt, by default all heads of all layers at which `q` and `k` are tapped.

        at: the positions whose attention is wanted, as in `capture`, by default all. Rebuilt on the device from queries and keys;
        4 bytes a layer, head, query and key are kept here. The view draws as many heads as fit in 300 kB.
        """
        from ..analysis.attention_view import attention

        return attention(self, prompt, layers, heads, at, edits)

    def live(self, prompt: Any, probe: Probe, *, threshold: float | None = None, max_tokens: int = 64, temperature: float = 0.0,
             seed: int | None = None, edits: Any = None, **sampling: Any) -> Readings:
        """Generate, show each token as it comes, coloured by what `probe` reads there, and return the readings.

        The reading at a position is of the stream at that position's own token, as `capture` gives it, before the edits at the
        probe's point: what the model held when it had read that token and was about to choose the next. So the last token generated,
        which the model has not read, has none, nor have the prompt's before its last. threshold: readings above it are counted.
        An interrupt ends the generation and keeps what is there. In a notebook the cell's output is updated some ten times a second;
        elsewhere the text runs to stdout.
        """
        from ..analysis.live import live

        return live(self, prompt, probe, threshold, max_tokens, edits, dict(temperature=temperature, seed=seed) | sampling)
