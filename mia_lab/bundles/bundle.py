"""Export edits, load them elsewhere, and verify that there they do the same."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..edits import Edit
from ..errors import BundleError
from . import folder, signing
from .codec import Tensors, decode_edits, encode
from .golden import PROMPTS, Golden, Replay, as_json, environment, record, replay, tokenizer_hash
from .model import ModelFacts, check_model

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


def export(edits: Sequence[Edit] | Edit, path: str | Path, *, session: Session | None = None, prompts: Sequence[Any] = PROMPTS,
           max_tokens: int = 24, provenance: dict[str, Any] | None = None, evaluation: dict[str, Any] | None = None,
           format: str | None = None, **options: Any) -> Path:
    """Write edits, with golden outputs of `max_tokens` tokens after each prompt, as a bundle; return its path.

    path: a folder `NAME.steer`, or a zip where it ends in .zip. provenance: how they were fitted; evaluation: what they were found
    to do; both as JSON. Open `steer` scopes do not enter. Raises EditError where the session could not run an edit.

    format: another tool's, of those that `mia-lab targets` lists, where the path's suffix does not say it; then nothing is run. The
    options are model=, which some formats keep, and bos=, what becomes of BOS where a format cannot name it: "none" (prompts have
    none), "skip" (it is position 0, and left out) or "edit" (edited like the rest); a session knows. Raises BundleError, with the
    reason, for what the format cannot say.
    """
    from .targets.registry import export_to, guess

    edits = [edits] if isinstance(edits, Edit) else edits if isinstance(edits, Bundle) else list(edits)
    for edit in edits if session is not None else ():
        session._submit.check(edit)
    known = guess(Path(path))
    if format is not None or known is not None:
        if session is not None:
            options.setdefault("bos", "skip" if session._has_bos_rule() else "none")
        return export_to(format or known.name, edits, path, **options)
    if options or session is None:
        raise BundleError(f"a bundle takes no {next(iter(options))}=" if options else
                          "a bundle holds what a model said with the edits: give session=, or format= for another tool's file")
    if not edits or not prompts:
        raise BundleError("a bundle holds at least one edit, and a golden output of at least one prompt")
    tensors: Tensors = {}
    about = {"edits": encode(edits, tensors, "edits"), "provenance": provenance or {}, "evaluation": evaluation or {},
             "model": {"name": session.model, "weights": session.fingerprint, "configuration": session.configuration,
                       "n_layers": session.n_layers, "d_model": session.d_model},
             "tokenizer": tokenizer_hash(session.tokenizer),
             "golden": {"environment": environment(session), "outputs": as_json(record(session, edits, prompts, max_tokens))}}
    return folder.write(path, about, tensors)


def load(path: str | Path, *, signer: str | Path | bytes | None = None, format: str | None = None, **options: Any) -> Bundle | list[Edit]:
    """Read a bundle as a list of edits. Raises BundleError for what is none, or was changed since it was written.

    signer: a public ed25519 key (PEM, its file, or 64 hexadecimal digits); then a bundle that its holder did not sign is refused.
    format: another tool's, of those that `mia-lab targets` lists, where the file's name does not say it; `options` as it takes them.
    """
    from .targets.registry import guess, import_from

    known = None if format is not None or Path(path).is_dir() else guess(Path(path))
    if format is not None or known is not None:
        if signer is not None:
            raise BundleError(f"{path} is no bundle, and only bundles are signed")
        return import_from(format or known.name, path, **options)
    if options:
        raise BundleError(f"a bundle takes no {next(iter(options))}=; for another tool's file give format= too")
    return opened(path, signer)[0]


def opened(path: str | Path, signer: str | Path | bytes | None = None, strict: bool = False) -> tuple[Bundle, dict[str, bytes]]:
    """A bundle, and the very bytes of the files that it was read from; strict as `folder.get` says, as it is with a signer."""
    files = folder.get(path, strict=strict or signer is not None)
    return of_files(files, path, signer), files


def of_files(files: Mapping[str, bytes], path: str | Path, signer: str | Path | bytes | None = None,
             check: Callable[[folder.Contents, object], None] | None = None) -> Bundle:
    """The bundle that files hold, which `path` names in errors; BundleError for what is none.

    check: raises for contents of which no edits are to be made; given them and the path.
    """
    if signer is not None:
        signing.check(files, signer, path)
    found = folder.parse(files, path)
    for name, kind in (("model", dict), ("golden", dict), ("tokenizer", str), ("edits", list)):
        if not isinstance(found.about.get(name), kind):
            raise BundleError(f"{path}: steer.json lacks {name!r}")
    if not isinstance(found.about["model"].get("name"), str) or not isinstance(found.about["golden"].get("environment"), dict):
        raise BundleError(f"{path}: steer.json does not say its model's name, or where its golden outputs were made")
    if check is not None:
        check(found, path)
    bundle = Bundle(decode_edits(found.about["edits"], found.tensors), found.about, Path(path))
    if not bundle or not bundle.goldens:
        raise BundleError(f"{path} holds no edit, or no golden output")
    return bundle


def verify(path: str | Path, session: Session, *, signer: str | Path | bytes | None = None) -> Verification:
    """Replay a bundle's golden outputs on a session, one at a time.

    signer: a public key, as for `load`. Raises BundleError, which says what differs, when the model or tokenizer is another or an
    output is not the golden one.
    """
    bundle = opened(path, signer)[0]
    here, there = environment(session), bundle.about["golden"].get("environment")
    check_model(bundle.about, ModelFacts.of(session), bundle.path)
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
