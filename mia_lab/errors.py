"""The one error family. A message says what was asked, what exists, and what to type."""
from __future__ import annotations


class MiaError(Exception):
    """Base of every error that mia_lab raises on purpose."""


class PointError(MiaError, KeyError):
    """An unknown point or layer, or one that this session does not tap."""

    def __str__(self) -> str:  # KeyError would print the message's repr
        return str(self.args[0]) if self.args else ""


class EditError(MiaError, ValueError):
    """An edit that cannot be applied: wrong width, NaN, undeclared point, too many at once."""


class PromptError(MiaError, ValueError):
    """A prompt that cannot be run: empty, too long, or of an unknown type."""


class UnsupportedError(MiaError, RuntimeError):
    """A model, vLLM version or engine option under which results could be wrong."""


class ProofError(MiaError, RuntimeError):
    """The start-up proof failed: a tap did not read or write what it should."""


class MissingRowsError(MiaError, RuntimeError):
    """Rows were asked for that were never computed or are no longer held."""


class ClosedError(MiaError, RuntimeError):
    """The session was closed, and the engine with it."""


class EngineError(MiaError, RuntimeError):
    """vLLM could not load a model, or its engine died; the message has the cause and the log's path."""


class BundleError(MiaError, ValueError):
    """A bundle that cannot be read, or that does not do here what it did where it was made."""
