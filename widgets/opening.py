"""Making a steering panel of what a caller has: a vector, several, a library, or an edit."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mia_lab.analysis.library import Library, library
from mia_lab.analysis.vectors import Vector
from mia_lab.directions import whole
from mia_lab.edits import Add
from mia_lab.errors import EditError

from .naming import call, name_of
from .setting import PRESETS, SELECTORS, Setting
from .steering import SteeringPanel
from .vector_library import called

if TYPE_CHECKING:
    from mia_lab.session import Session


def steering_panel(session: Session, vector: Any, prompt: str, layers: int | Iterable[int] | None, coeff: float, where: str, seed: int,
                   temperature: float, max_tokens: int, presets: Mapping[str, Mapping[str, Any]] | None) -> SteeringPanel:
    """Return what `Session.panel` promises."""
    if where not in SELECTORS:
        raise EditError(f"where={where!r} is none of {', '.join(SELECTORS)}")
    given = vector
    if isinstance(given, Add):
        vector, layers, coeff, where = _of_edit(given)
    vectors, codes = _named(vector, session)
    first = next(iter(vectors))
    there = vectors[first].layers
    chosen = (there[len(there) // 2],) if layers is None else tuple(whole([layers] if isinstance(layers, int) else list(layers)))
    start = Setting(first, chosen, coeff, where, prompt, seed, temperature, max_tokens)
    for found in vectors.values():  # another model's vector fails here, not when it is chosen
        session._submit.check(Add(found))
    session._submit.check(start.edit(vectors))
    if not -1.0 <= coeff <= 1.0:
        raise EditError(f"coeff={coeff:g} is beyond the slider, which goes from -1 to 1 mean centred norms; scale the vector: 2 * v")
    named = isinstance(given, Add) and name_of(given, "") != ""
    edited = {} if named else dict(layers=layers, coeff=coeff, where=where)
    remake = call(session.panel, *_given(given if named else vector), prompt=prompt, **edited, seed=seed, temperature=temperature,
                  max_tokens=max_tokens, presets=presets)
    held = library() if vector is None else vector
    kept = _kept(held, vectors) if isinstance(held, Library) else {}
    return SteeringPanel(session, vectors, start, (PRESETS if presets is None else presets) | kept, codes, remake)


def _given(value: Any) -> list[str]:
    """What a panel's first argument is called in code, if it has one."""
    if value is None:
        return []
    return [name_of(value, called(value) if isinstance(value, Library) else "v" if isinstance(value, Vector) else "vectors")]


def _kept(held: Library, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The presets that vectors were saved with."""
    return {f"{name}: {key}": {"vector": name, **values} for name in names for key, values in held.about(name).get("presets", {}).items()}


def _of_edit(edit: Add) -> tuple[Vector, tuple[int, ...], float, str]:
    """The parts of an Add that a panel has controls for; EditError where it has others."""
    where = [name for name, (make, _) in SELECTORS.items() if make() == edit.where]
    if not isinstance(edit.vector, Vector) or not where or edit.when or edit.schedule or edit.keep_norm or edit.head is not None:
        raise EditError("a panel's controls are over an Add of a Vector, without gate or schedule, at one of the selectors "
                        f"{', '.join(SELECTORS)}; run other edits with s.generate(prompt, edits=[...])")
    layers = edit.vector.layers if edit.layers is None else tuple(whole(edit.layers))
    return edit.vector, layers, edit.coeff, where[0]


def _named(vector: Any, session: Session) -> tuple[dict[str, Vector], dict[str, str]]:
    """Vectors by name, and what each is called in code."""
    if vector is None:
        vector = library()
    if isinstance(vector, Library):
        there = vector.of(session)
        if not there:
            raise EditError(f"{vector.folder} holds no vector for this model; fit one, v = s.vector(pairs), and give it: s.panel(v)")
        return {name: vector[name] for name in there}, {name: f"{called(vector)}[{name!r}]" for name in there}
    if isinstance(vector, Vector):
        name = name_of(vector, "v")
        return {name: vector}, {name: name}
    if isinstance(vector, Mapping) and vector and all(isinstance(v, Vector) for v in vector.values()):
        held = name_of(vector, "vectors")
        return {str(name): v for name, v in vector.items()}, {str(name): f"{held}[{name!r}]" for name in vector}
    raise EditError(f"a panel takes a Vector, several by name, a Library or an Add, not {type(vector).__name__}; "
                    f"type for example s.panel(v)")
