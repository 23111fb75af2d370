"""The start-up proof of a server: the same that a Session runs, by requests of its own."""
from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import torch

from ..edits import Edit
from ..engine import turned_away
from ..engine.reservation import ROOM, Reservation
from ..engine.reservation import encode as reserve
from ..engine.shared import take
from ..engine.wire import KEY, Spec, Take, encode
from ..points import Point
from ..running.compile import compile_edits
from ..running.proof import Read, Subject, Trials, Verdict, proving
from ..running.submit import has_bos
from ..selectors import Context

if TYPE_CHECKING:
    from .service import Service

_KEPT = Reservation("", 1, 600.0, 1 << 40, 1 << 40)  # the proof captures some rows a point, and lets them go


async def prove(service: Service) -> list[Verdict]:
    """Run the proof; ProofError where a tap does not read or write what it should."""
    model = service.model
    proof = proving(Subject(service.tapped, model.editable, model.edit_kinds, model.n_layers, service.settings.d_vocab,
                            service.settings.type, lambda ids: has_bos(service.tokenizer, ids)))
    batch = next(proof)
    while True:
        found = await asyncio.gather(*(_rows(service, batch, edits) for edits in batch.edits))
        try:
            batch = proof.send(_reader(found))
        except StopIteration as done:
            return done.value


def _reader(found: list[dict[Point, tuple[torch.Tensor, torch.Tensor]]]) -> Read:
    return lambda point, request: found[request][point]


async def _rows(service: Service, batch: Trials, edits: list[Edit]) -> dict[Point, tuple[torch.Tensor, torch.Tensor]]:
    """Run one request, and return the positions and values of every point."""
    from vllm import SamplingParams

    compiled = compile_edits(edits, Context(batch.ids, has_bos(service.tokenizer, batch.ids), service.tokenizer), service.model)
    spec = Spec(tuple(compiled.terms), tuple(Take(p.kind, p.layer, ((0, None),)) for p in service.tapped), tuple(compiled.gates))
    uid = f"proof.{secrets.token_urlsafe(24)}"
    params = SamplingParams(**batch.params, extra_args={KEY: encode(uid, spec), ROOM: reserve(_KEPT)})
    await service.vectors.hold(compiled.vectors)
    try:
        async for output in service.generate({"prompt_token_ids": batch.ids}, params, uid):
            turned_away.check(output)
        rows = (await service.rpc("collect", uid))["rows"]
    finally:
        await service.vectors.release(compiled.vectors)
        await service.rpc("drop", [uid])
    return {Point(kind, layer): (take(positions, torch.int64), take(values, service.dtype_of(kind)).view(-1, *shape))
            for kind, layer, _, positions, shape, _, values in rows}
