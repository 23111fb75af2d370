"""Gates and schedules: when, within a request, an edit acts. Decided on the device, from what the model computes."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .directions import number, whole
from .errors import EditError
from .points import Point, kind_of

OVER = ("row", "prompt_mean", "prompt_max", "prompt_last", "since")
RULES = ("sum", "any", "all")


@dataclass(frozen=True, eq=False)
class Probe:
    """A reading of the value at one point: `value . direction + bias`, or with `cosine` the cosine to it.

    direction `[width]`; mean `[width]` is subtracted from the value first (cosine without it is dominated by the mean).
    The reading sees the value as it was before the edits at its own point.
    """

    direction: torch.Tensor
    layer: int
    point: str = "resid_post"
    bias: float = 0.0
    cosine: bool = False
    mean: torch.Tensor | None = None

    def __post_init__(self) -> None:
        direction = _vector(self.direction, "direction")
        if self.cosine:
            if not direction.any():
                raise EditError("the direction of a cosine probe is zero")
            direction = direction / direction.norm()
        object.__setattr__(self, "direction", direction)
        object.__setattr__(self, "mean", None if self.mean is None else _vector(self.mean, "mean"))
        object.__setattr__(self, "layer", whole(self.layer)[0])
        object.__setattr__(self, "bias", number(self.bias, "the bias of a probe"))
        if self.mean is not None and self.mean.shape != direction.shape:
            raise EditError(f"the mean has width {len(self.mean)}, the direction {len(direction)}")

    @property
    def at(self) -> Point:
        """Where it reads."""
        return Point(kind_of(self.point), self.layer)

    @property
    def offset(self) -> float:
        """What is added to `value . direction`."""
        return self.bias - (0.0 if self.mean is None else float(self.mean.double() @ self.direction.double()))

    def read(self, value: torch.Tensor) -> float:
        """Return the reading of one value, of any shape that holds `width` numbers; EditError for another width."""
        flat = value.flatten().double()
        if flat.shape != self.direction.shape:
            raise EditError(f"the probe has width {len(self.direction)}, {self.at} has {len(flat)}")
        flat = flat if self.mean is None else flat - self.mean.double()
        return float(flat @ self.direction.double() / (flat.norm() if self.cosine else 1.0)) + self.bias


@dataclass(frozen=True, eq=False)
class Gate:
    """An edit with this gate acts only where the readings say so.

    above or below: the threshold, and the side on which the gate is open. rule: "sum" compares the sum of the readings;
    "any" and "all" compare each. over: "row" decides for each position from its own readings, at points before the
    edit's. "prompt_mean", "prompt_max" and "prompt_last" decide once, at the end of the prompt (BOS left out), for all
    generated positions. "since" opens the gate for good after the first generated position, or last prompt position,
    that passes. Source of the conditional scheme: CAST, arXiv:2409.05907; its published code inverts "larger", which is
    why the side is spelled out here.
    """

    probes: Sequence[Probe] | Probe
    above: float | None = None
    below: float | None = None
    rule: str = "sum"
    over: str = "row"

    def __post_init__(self) -> None:
        probes = (self.probes,) if isinstance(self.probes, Probe) else tuple(self.probes)
        object.__setattr__(self, "probes", probes)
        if not probes or not all(isinstance(p, Probe) for p in probes):
            raise EditError("a gate reads one or more mia.Probe")
        if (self.above is None) == (self.below is None):
            raise EditError("a gate needs a threshold on one side: above=... or below=...")
        number(self.above if self.below is None else self.below, "the threshold of a gate")
        if self.rule not in RULES or self.over not in OVER:
            raise EditError(f"rule is one of {', '.join(RULES)} and over one of {', '.join(OVER)}; "
                            f"got {self.rule!r} and {self.over!r}")
        if self.over == "prompt_mean" and self.rule != "sum" and len(probes) > 1:
            raise EditError("a mean over the prompt is taken of the sum of the readings; use rule='sum', or over='prompt_max'")

    @property
    def sign(self) -> float:
        """+1 where the gate is open above its threshold, -1 where below."""
        return 1.0 if self.above is not None else -1.0

    @property
    def votes(self) -> bool:
        """Whether each reading is compared on its own."""
        return self.rule != "sum" and len(self.probes) > 1

    @property
    def threshold(self) -> float:
        """What the signed sum of readings, or the number of passing ones, must exceed."""
        if self.votes:
            return 0.5 if self.rule == "any" else len(self.probes) - 0.5
        return self.level

    @property
    def level(self) -> float:
        """What a signed reading must exceed."""
        return self.sign * float(self.above if self.above is not None else self.below)


@dataclass(frozen=True)
class After:
    """A gate that opens for good at the first generated token that is one of these, for that position and all later ones.

    tokens: ids, or texts that are one token each.
    """

    tokens: Sequence[int | str] | int | str

    def __post_init__(self) -> None:
        tokens = (self.tokens,) if isinstance(self.tokens, (int, str)) else tuple(self.tokens)
        object.__setattr__(self, "tokens", tokens)
        if not 0 < len(tokens) <= 64:
            raise EditError(f"After takes 1 to 64 tokens, not {len(tokens)}")


@dataclass(frozen=True)
class Decay:
    """A schedule: the coefficient halves every `half_life` positions, from the first that the edit touches."""

    half_life: float

    def __post_init__(self) -> None:
        if not 1e-3 <= float(self.half_life) < 1e9:
            raise EditError(f"half_life is {self.half_life!r}; it must be a positive number of positions")

    @property
    def rate(self) -> float:
        """log2 of the factor from one position to the next."""
        return -1.0 / float(self.half_life)


def _vector(value: torch.Tensor, what: str) -> torch.Tensor:
    tensor = torch.as_tensor(value).detach().to("cpu", torch.float32).clone()
    if tensor.ndim != 1 or not torch.isfinite(tensor).all():
        raise EditError(f"the {what} of a probe is a finite vector, not {list(tensor.shape)}")
    return tensor
