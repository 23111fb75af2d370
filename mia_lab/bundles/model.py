"""What a bundle is held against: the model that it is to act on."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import BundleError
from ..points import Point
from ..running.compile import Model
from .folder import Contents
from .golden import tokenizer_hash

if TYPE_CHECKING:
    from ..session import Session

MAX_EDITS = 64
MAX_NODES = 4096  # values in the JSON of a bundle's edits


@dataclass(frozen=True, slots=True, eq=False)
class ModelFacts:
    """What is known of a model that runs.

    dtype: as "bfloat16". weights, configuration: identities, as a Session has them; tokenizer_hash: as goldens have it. check: what
    edits are checked against. points: those tapped that can be captured. dialect: "sandwich" and "rotary", as points.parse takes them.
    """

    name: str
    n_layers: int
    d_model: int
    dtype: str
    weights: str
    configuration: str
    tokenizer_hash: str
    check: Model
    points: tuple[Point, ...] = ()
    tokenizer: Any = field(default=None, repr=False)
    max_len: int = 0
    dialect: Mapping[str, bool] = field(default_factory=dict)

    @property
    def widest(self) -> int:
        """Values of the widest row at any point."""
        return max(map(prod, self.check.shapes.values()), default=self.d_model)

    @classmethod
    def of(cls, session: Session) -> ModelFacts:
        """The facts of a session's model."""
        return cls(session.model, session.n_layers, session.d_model, str(session.dtype).removeprefix("torch."), session.fingerprint,
                   session.configuration, tokenizer_hash(session.tokenizer), session._submit.model, session.tapped, session.tokenizer,
                   session.max_len, session._dialect)


def check_model(about: Mapping[str, Any], here: ModelFacts, path: object) -> None:
    """BundleError where what a bundle says in `about` is of another model. Weights are compared only where the type is the same."""
    there, environment = about["model"], about["golden"].get("environment")
    for name in ("n_layers", "d_model"):
        if there.get(name) != getattr(here, name):
            raise BundleError(f"{path} was made for {there.get('name')} with {name} {there.get(name)}; {here.name} has "
                              f"{getattr(here, name)}")
    same_type = isinstance(environment, dict) and environment.get("dtype") == here.dtype
    for name in ("weights", "configuration") if same_type else ():
        if there.get(name) != getattr(here, name):
            raise BundleError(f"{path} was made with another model: its {name} are {there.get(name)}, {here.name} has "
                              f"{getattr(here, name)}")
    if about["tokenizer"] != here.tokenizer_hash:
        raise BundleError(f"{path} was made with another tokenizer")


def bounded(found: Contents, n_layers: int, widest: int, path: object) -> None:
    """BundleError where a bundle's edits would be larger, once made, than a model of `n_layers` blocks could need.

    widest: values of its widest row.
    """
    edits = found.about["edits"]
    if len(edits) > MAX_EDITS:
        raise BundleError(f"{path} has {len(edits)} edits; {MAX_EDITS} are the most that a server takes")
    most = max(widest, n_layers)
    wide = next((name for name, held in found.tensors.items() if held.ndim not in (1, 2, 3) or held.shape[-1] > most), None)
    if wide is not None:
        raise BundleError(f"{path}: {wide} has shape {list(found.tensors[wide].shape)}; this model's rows hold {widest} values at most")
    left, nodes = [edits], 0
    while left:
        value = left.pop()
        nodes += 1
        if isinstance(value, dict):
            layers = value.get("layers")
            if isinstance(layers, list) and len(layers) > n_layers:
                raise BundleError(f"{path} names {len(layers)} layers; this model has {n_layers}")
            left += value.values()
        elif isinstance(value, list):
            left += value
        if len(left) + nodes > MAX_NODES:
            raise BundleError(f"{path}: its edits hold more than {MAX_NODES} values")
