"""Export edits, load them elsewhere, and verify that there they do the same."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..edits import Edit
from ..errors import BundleError
from . import folder
from .codec import Tensors, decode_edits, encode
from .golden import PROMPTS, Golden, Replay, as_json, environment, record, replay, tokenizer_hash

if TYPE_CHECKING:
    from ..session import Session

_SAME = 1e-3  # nats that a replay may differ by where it was made
_FLOOR = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # and elsewhere, however near the model without edits comes
_CEILING = 0.5  # from here on the model itself says something else


class Bundle(list):
    """The edits of a bundle, ready for `edits=`, and what is said about them in `about`."""

    def __init__(self, edits: Sequence[Edit], about: dict[str, Any], path: Path) -> None:
        super().__init__(edits)
        self.about, self.path = about, path

    @property
    def goldens(self) -> list[Golden]:
        """The golden outputs; BundleError where they are damaged."""
        try:
            return [Golden.of(found) for found in self.about["golden"]["outputs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{self.path}: its golden outputs cannot be read: {error!r}") from None

    def __repr__(self) -> str:
        golden = len(self.about["golden"]["outputs"])
        return f"Bundle({self.path.name}: {list.__repr__(self)}, for {self.about['model']['name']}, {golden} golden outputs)"


@dataclass(frozen=True, slots=True)
class Verification:
    """A bundle that does here what it did where it was made: each golden's replay with edits and without.

    exact: whether tokens had to be the same one by one, as on the device, type and versions that it was made with; otherwise
    they may part where two tokens are as near as `tolerance` nats, which is twice the model's own difference without edits.
    """

    path: Path
    exact: bool
    tolerance: float
    steered: tuple[Replay, ...]
    plain: tuple[Replay, ...]

    def __repr__(self) -> str:
        same = sum(one.exact for one in self.steered)
        how = "token for token" if self.exact else f"within {self.tolerance:.3g} nats"
        return (f"Verification({self.path.name}: {len(self.steered)} golden outputs {how}, {same} of them exact; worst log-probability "
                f"difference {max(one.worst for one in self.steered):.2g})")


def export(edits: Sequence[Edit] | Edit, path: str | Path, *, session: Session, prompts: Sequence[Any] = PROMPTS, max_tokens: int = 24,
           provenance: dict[str, Any] | None = None, evaluation: dict[str, Any] | None = None) -> Path:
    """Write edits, with golden outputs of `max_tokens` tokens after each prompt, as a bundle; return its path.

    path: a folder `NAME.steer`, or a zip where it ends in .zip. provenance: how they were fitted; evaluation: what they were found
    to do; both as JSON. Open `steer` scopes do not enter. Raises EditError where the session could not run an edit.
    """
    edits = [edits] if isinstance(edits, Edit) else list(edits)
    if not edits or not prompts:
        raise BundleError("a bundle holds at least one edit, and a golden output of at least one prompt")
    for edit in edits:
        session._submit.check(edit)
    tensors: Tensors = {}
    about = {"edits": encode(edits, tensors, "edits"), "provenance": provenance or {}, "evaluation": evaluation or {},
             "model": {"name": session.model, "weights": session.fingerprint, "configuration": session.configuration,
                       "n_layers": session.n_layers, "d_model": session.d_model},
             "tokenizer": tokenizer_hash(session.tokenizer),
             "golden": {"environment": environment(session), "outputs": as_json(record(session, edits, prompts, max_tokens))}}
    return folder.write(path, about, tensors)


def load(path: str | Path) -> Bundle:
    """Read a bundle as a list of edits. Raises BundleError for what is none, or was changed since it was written."""
    found = folder.read(path)
    for name, kind in (("model", dict), ("golden", dict), ("tokenizer", str), ("edits", list)):
        if not isinstance(found.about.get(name), kind):
            raise BundleError(f"{path}: steer.json lacks {name!r}")
    bundle = Bundle(decode_edits(found.about["edits"], found.tensors), found.about, Path(path))
    if not bundle or not bundle.goldens:
        raise BundleError(f"{path} holds no edit, or no golden output")
    return bundle


def verify(path: str | Path, session: Session) -> Verification:
    """Replay a bundle's golden outputs on a session, one at a time.

    Raises BundleError, which says what differs, when the model or tokenizer is another or an output is not the golden one.
    """
    bundle = load(path)
    here, there = environment(session), bundle.about["golden"].get("environment")
    _same_model(bundle, session, same_type=isinstance(there, dict) and there.get("dtype") == here["dtype"])
    for edit in bundle:
        session._submit.check(edit)
    steered, plain = zip(*(replay(session, bundle, golden) for golden in bundle.goldens))
    exact = here == there
    tolerance = _SAME if exact else max(_FLOOR.get(here["dtype"], _FLOOR["bfloat16"]), 2 * max(map(_distance, plain)))
    if tolerance > _CEILING:
        raise BundleError(f"{bundle.path} cannot be verified here: without any edit the model differs by {tolerance / 2:.3g} nats from "
                          f"what it said where the bundle was made")
    for i, one in enumerate(steered):
        if _distance(one) > tolerance or (exact and not one.exact):
            raise BundleError(f"{bundle.path}: golden output {i} differs by {_distance(one):.3g} nats after {one.agreed} of {one.tokens} "
                              f"tokens, where {tolerance:.3g} is the most")
    agreed, tokens = sum(one.agreed for one in steered), sum(one.tokens for one in steered)
    if 2 * agreed < tokens:
        raise BundleError(f"{bundle.path}: only {agreed} of {tokens} golden tokens came before outputs parted at near ties, too few to "
                          f"tell")
    return Verification(bundle.path, exact, tolerance, tuple(steered), tuple(plain))


def _distance(found: Replay) -> float:
    return max(found.worst, found.behind)


def _same_model(bundle: Bundle, session: Session, same_type: bool) -> None:
    model = bundle.about["model"]
    for name, here in (("n_layers", session.n_layers), ("d_model", session.d_model)):
        if model.get(name) != here:
            raise BundleError(f"{bundle.path} was made for {model.get('name')} with {name} {model.get(name)}; {session.model} has {here}")
    for name, here in (("weights", session.fingerprint), ("configuration", session.configuration)) if same_type else ():
        if model.get(name) != here:
            raise BundleError(f"{bundle.path} was made with another model: its {name} are {model.get(name)}, {session.model} has {here}")
    if bundle.about["tokenizer"] != tokenizer_hash(session.tokenizer):
        raise BundleError(f"{bundle.path} was made with another tokenizer")
