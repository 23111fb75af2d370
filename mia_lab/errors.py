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


class RoomError(MiaError, RuntimeError):
    """More different edits at once than the engine's tables hold, or more captures than a server keeps; there may be room later."""


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


class ServerError(MiaError, RuntimeError):
    """A server that cannot be reached, that refuses a request, or that is none of mia_lab's. status: its HTTP status, 0 for none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def named(name: str, text: str) -> MiaError:
    """The error of a name, as another process told it; a MiaError where no such one is known here."""
    found = globals().get(name)
    return found(text) if isinstance(found, type) and issubclass(found, MiaError) else MiaError(text)
