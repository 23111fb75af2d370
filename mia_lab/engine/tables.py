"""The fixed-address tables that the taps read, and the host's book of who uses which entry."""
from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from .config import Sizes
from .wire import MAX_TERMS

K = TypeVar("K", bound=Hashable)


class Shelf(Generic[K]):
    """Places for content-addressed entries: equal ones share a place, counted by use; idle ones stay until needed."""

    def __init__(self, size: int, what: str) -> None:
        self.size, self.what = size, what
        self._place: dict[K, int] = {}
        self._uses: dict[K, int] = {}
        self._idle: dict[K, None] = {}  # in the order they fell idle
        self._free = list(range(size - 1, -1, -1))

    def take(self, key: K) -> tuple[int, bool]:
        """Return the entry's place and whether it must be written; RuntimeError when all places are in use."""
        if key in self._place:
            self._uses[key] += 1
            self._idle.pop(key, None)
            return self._place[key], False
        if not self._free:
            if not self._idle:
                raise RuntimeError(f"all {self.size} {self.what} are in use")
            self.evict(next(iter(self._idle)))
        self._place[key], self._uses[key] = self._free.pop(), 1
        return self._place[key], True

    def give(self, key: K) -> bool:
        """Drop one use of the entry; True when that was the last."""
        self._uses[key] -= 1
        if self._uses[key]:
            return False
        self._idle[key] = None
        return True

    def evict(self, key: K) -> None:
        """Forget an idle entry and free its place."""
        del self._idle[key], self._uses[key]
        self._free.append(self._place.pop(key))


Program = tuple[tuple[int, str, float], ...]  # (site, vector, coefficient), sorted
Plan = tuple[int, ...]  # captured sites, sorted


class Tables:
    """Device tables of one engine. All are allocated here, once; afterwards only their contents change."""

    def __init__(self, n_sites: int, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        new = lambda shape, fill, kind: torch.full(shape, fill, dtype=kind, device=device)  # noqa: E731
        self.rows = new((sizes.tokens, 4), -1, torch.int32)
        self.vec = new((n_sites, sizes.programs, MAX_TERMS), -1, torch.int32)
        self.coef = new((n_sites, sizes.programs, MAX_TERMS), 0.0, torch.float32)
        self.bank = new((sizes.bank_rows, sizes.width), 0.0, torch.float32)
        self.offsets = new((n_sites, sizes.plans), -1, torch.int32)
        self.half = sizes.captured_tokens * n_sites * sizes.width
        self.arena = new((2 * self.half,), 0.0, dtype)
        self._programs: Shelf[Program] = Shelf(sizes.programs, "edit programs")
        self._plans: Shelf[Plan] = Shelf(sizes.plans, "capture plans")
        self._bank: Shelf[str] = Shelf(sizes.bank_rows, "vector places")
        self._vectors: dict[str, torch.Tensor] = {}
        self.plans: dict[int, Plan] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(t.nbytes for t in (self.rows, self.vec, self.coef, self.bank, self.offsets, self.arena))

    def of_site(self, site: int) -> tuple[torch.Tensor, ...]:
        """The tensors that one site's tap reads, in the operator's order."""
        return self.rows, self.vec[site], self.coef[site], self.bank, self.offsets[site], self.arena

    def register(self, sha: str, vector: torch.Tensor) -> None:
        """Hold a vector `[d_model]` float32 on the host, from where programs bring it into the bank."""
        self._vectors[sha] = vector

    def forget(self, sha: str) -> None:
        """Let go of a vector on the host; a program that uses it keeps its place in the bank."""
        self._vectors.pop(sha, None)

    def take_program(self, program: Program) -> int:
        """Return the table place of a program, writing it and its vectors where they are new."""
        index, fresh = self._programs.take(program)
        if fresh:
            vec = torch.full((self.vec.shape[0], MAX_TERMS), -1, dtype=torch.int32)
            coef = torch.zeros(vec.shape)
            filled = [0] * len(vec)
            for i, (site, sha, weight) in enumerate(program):
                try:
                    place = self._place_vector(sha)
                except BaseException:
                    self._undo(program, i)
                    raise
                vec[site, filled[site]], coef[site, filled[site]] = place, weight
                filled[site] += 1
            self.vec[:, index].copy_(vec)
            self.coef[:, index].copy_(coef)
        return index

    def _place_vector(self, sha: str) -> int:
        place, fresh = self._bank.take(sha)
        if fresh:
            try:
                self.bank[place].copy_(self._vectors[sha])
            except BaseException:
                self._bank.give(sha)
                self._bank.evict(sha)
                raise
        return place

    def _undo(self, program: Program, taken: int) -> None:
        self._programs.give(program)
        self._programs.evict(program)
        for _, sha, _ in program[:taken]:
            self._bank.give(sha)

    def give_program(self, program: Program) -> None:
        """Drop one use of a program; its vectors fall idle with the last."""
        if self._programs.give(program):
            self._programs.evict(program)
            for _, sha, _ in program:
                self._bank.give(sha)

    def take_plan(self, plan: Plan) -> int:
        """Return the table place of a capture plan, writing it where it is new."""
        index, fresh = self._plans.take(plan)
        if fresh:
            offsets = torch.full((self.offsets.shape[0],), -1, dtype=torch.int32)
            offsets[list(plan)] = torch.arange(len(plan), dtype=torch.int32) * self.sizes.width
            self.offsets[:, index].copy_(offsets)
            self.plans[index] = plan
        return index

    def give_plan(self, plan: Plan) -> None:
        """Drop one use of a plan."""
        self._plans.give(plan)
