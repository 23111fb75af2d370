"""What a patch is judged by: a number made of the logits at a prompt's last position."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ...errors import EditError, MiaError, PromptError, UnsupportedError
from ...residual import Readout
from ...running.launch import EngineRows

if TYPE_CHECKING:
    from ...session import Session

Tensor = torch.Tensor
Token = int | str
_ROWS = 64  # of logits held at a time
_readouts: WeakKeyDictionary[Session, dict[tuple[int, ...], Readout]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class LogitDiff:
    """The logit of one token less that of another; one token each for all prompts, or one a prompt. See `logit_diff`."""

    answer: Token | tuple[Token, ...]
    wrong: Token | tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class LogProb:
    """The log-probability of a token, in nats; one for all prompts, or one a prompt. See `log_prob`."""

    token: Token | tuple[Token, ...]


Metric = LogitDiff | LogProb | Callable[[Tensor], Any]


def logit_diff(answer: Token | Sequence[Token], wrong: Token | Sequence[Token]) -> LogitDiff:
    """The logit of `answer` less the logit of `wrong`, after any soft cap, at the last position.

    Tokens are ids, or texts that are one token: mind the space that most begin with. Give one for all prompts or a list of one
    a prompt. Source: arXiv:2309.16042, which prefers it to a probability. Read in float32 from the last block's stream, so that
    16-bit logits round nothing away; only the rows of these tokens are read of the unembedding.
    """
    return LogitDiff(_tokens(answer), _tokens(wrong))


def log_prob(token: Token | Sequence[Token]) -> LogProb:
    """The log-probability of a token at the last position, in nats, from the model's own logits."""
    return LogProb(_tokens(token))


def _tokens(given: Any) -> Token | tuple[Token, ...]:
    listed = given.tolist() if isinstance(given, Tensor) else given
    return listed if isinstance(listed, (int, str)) else tuple(listed)


class Judge:
    """A metric bound to a session and to how many prompts it has a token for."""

    def __init__(self, session: Session, metric: Metric, n_prompts: int, normed: bool = False) -> None:
        """normed: rows to judge are those after the final norm, not before it."""
        if not isinstance(metric, (LogitDiff, LogProb)) and not callable(metric):
            raise EditError(f'{metric!r} is no metric; type for example metric=mia.logit_diff(" Paris", " Rome")')
        self._session, self._metric, self._normed = session, metric, normed
        self._source = EngineRows(session._engine, [])
        asked = [] if callable(metric) else [getattr(metric, field.name) for field in fields(metric)]
        self.ids = [self._ids(token, n_prompts) for token in asked]  # [role][prompt]
        self.cap: float | None = session._engine.settings.soft_cap
        self._read = None if normed or not isinstance(metric, LogitDiff) else self._readout(sorted({t for ids in self.ids for t in ids}))

    @property
    def name(self) -> str:
        """The metric in words, with the text of its tokens."""
        texts = ["/".join(dict.fromkeys(repr(self._session.tokenizer.decode([t])) for t in ids)) for ids in self.ids]
        if isinstance(self._metric, LogitDiff):
            return f"logit {texts[0]} - logit {texts[1]}"
        return f"log-probability of {texts[0]}" if isinstance(self._metric, LogProb) else getattr(self._metric, "__name__", "metric")

    def __call__(self, rows: Tensor, prompts: Sequence[int]) -> Tensor:
        """Return the metric `[n]` float64 of last positions `[n d_model]` of the last block's stream, each of one of the prompts."""
        if self._read is not None:
            found = self._from_readout(rows.double(), prompts)
        else:
            found = torch.cat([self.of_logits(self._session.unembed(part, self._normed), prompts[i * _ROWS : (i + 1) * _ROWS])
                               for i, part in enumerate(rows.split(_ROWS))])
        if found.isnan().any():
            raise EditError(f"the metric ({self.name}) is NaN for some logits, so it measures nothing there")
        return found

    def of_logits(self, logits: Tensor, prompts: Sequence[int]) -> Tensor:
        """Return the metric `[n]` of logits `[n d_vocab]`, differentiable where the metric is."""
        at = torch.arange(len(logits))
        if isinstance(self._metric, LogitDiff):
            answer, wrong = ([ids[p] for p in prompts] for ids in self.ids)
            return (logits[at, answer] - logits[at, wrong]).double()
        if isinstance(self._metric, LogProb):
            return logits.double().log_softmax(-1)[at, [self.ids[0][p] for p in prompts]]
        values = [torch.as_tensor(self._metric(row), dtype=torch.float64) for row in logits]
        if any(value.numel() != 1 for value in values):
            raise EditError(f"the metric gave a value of shape {list(values[0].shape)} for logits [d_vocab]; it must give one number")
        return torch.stack([value.reshape(()) for value in values])

    def check(self, rows: Tensor, prompts: Sequence[int]) -> None:
        """MiaError unless the rows of tokens that were read give what the model's own unembedding gives for `rows [n d_model]`."""
        if self._read is None:
            return
        logits = self._session.unembed(rows)
        tolerance = 1e-4 if self._session.dtype == torch.float32 else 2e-2
        off = (self.of_logits(logits, prompts) - self(rows, prompts)).abs().max()
        if not off <= tolerance * logits.abs().max():
            raise MiaError(f"the logits read from the stream differ from the model's own by {float(off):.3g}; give the metric as a "
                           f"function of logits: metric=lambda logits: logits[answer] - logits[wrong]")

    def _from_readout(self, rows: Tensor, prompts: Sequence[int]) -> Tensor:
        read = self._read
        at = {token: i for i, token in enumerate(sorted({t for ids in self.ids for t in ids}))}
        normed = read.centre(rows) / read.scale(rows)
        sides = []
        for ids in self.ids:
            chosen = [at[ids[p]] for p in prompts]
            logit = (normed * read.vectors[chosen].double()).sum(-1) + read.bias[chosen].double()
            sides.append(self.cap * torch.tanh(logit / self.cap) if self.cap else logit)
        return sides[0] - sides[1]

    def _readout(self, tokens: list[int]) -> Readout | None:
        """Read the tokens' rows, once a session: that runs the unembedding over d_model rows."""
        known = _readouts.setdefault(self._session, {})
        if tuple(tokens) not in known:
            try:
                known[tuple(tokens)] = self._source.readout(tokens)
            except UnsupportedError:  # a model whose end is not a norm and a linear map: its own logits are read instead
                return None
        return known[tuple(tokens)]

    def _ids(self, asked: Token | tuple[Token, ...], n_prompts: int) -> list[int]:
        listed = [asked] * n_prompts if isinstance(asked, (int, str)) else list(asked)
        if len(listed) != n_prompts:
            raise EditError(f"give one token, or one for each of the {n_prompts} prompts; these are {len(listed)}")
        ids = [self._source.token_id(token) if isinstance(token, str) else int(token) for token in listed]
        vocab = self._session._engine.settings.d_vocab
        if any(not 0 <= t < vocab for t in ids):
            raise PromptError(f"there is no token {next(t for t in ids if not 0 <= t < vocab)}; the model has 0 to {vocab - 1}")
        return ids
