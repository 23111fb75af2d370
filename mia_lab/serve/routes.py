"""What a server answers under /mia/: its state, its edits, captures, and the notebook client."""
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from . import captures, remote
from .asking import Asked, resolve
from .call import CALL, Call
from .policy import LOCAL, Named
from .refusing import Refused, shown
from .sharing import digest_of

if TYPE_CHECKING:
    from .service import Service

_POSITIONS = 1 << 31


def app(service: Service) -> Callable[..., Awaitable[None]]:
    """The ASGI app of one service. A Refused leaves it, for the front to answer with."""
    router = Router([
        Route("/mia/status", status, methods=["GET"]),
        Route("/mia/edits", edits, methods=["GET"]),
        Route("/mia/edits/{name}", bundle, methods=["GET"]),
        Route("/mia/reload", reload, methods=["POST"]),
        Route("/mia/captures/{handle}", fetch, methods=["GET"]),
        Route("/mia/captures/{handle}", drop, methods=["DELETE"]),
        *remote.routes(),
    ], redirect_slashes=False, default=_missing)

    async def bounded(scope: MutableMapping[str, Any], receive: Callable, send: Callable) -> None:
        alone = {key: value for key, value in scope.items() if key != "app"}  # or errors would be raised for vLLM's app to answer
        limit = service.catalogue.policy.limits.body_bytes
        await router(alone, _bounded(scope, receive, limit), send)

    return bounded


def _bounded(scope: MutableMapping[str, Any], receive: Callable, limit: int) -> Callable[[], Awaitable[Any]]:
    """A body that is at most so long; Refused 413 as soon as it says, or turns out, to be longer."""
    refusal = Refused(413, f"the body is longer than {limit} bytes, the most that this server reads")
    said = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
    if not said.isdigit() or len(said) > 18 or int(said) > limit:
        raise refusal
    read = 0

    async def some() -> Any:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise refusal
        return message

    return some


def _call(role: str) -> Call:
    call = CALL.get()
    call.key.must(role)
    return call


async def status(request: Request) -> Response:
    """What runs: versions, the catalogue, the processes that serve it, and counts."""
    call = _call("generate")
    service, state = call.service, await call.service.sharing.beat()
    processes = {owner: {"digest": digest_of(adopted), "seconds": ago} for owner, (adopted, ago) in state["owners"].items()}
    held, size = state["held"]
    return JSONResponse({
        "mia_lab": version("mia_lab"), "vllm": service.settings.vllm, "model": service.model_facts.name, "process": service.owner,
        "digest": call.catalogue.digest, "wanted": digest_of(state["wanted"]), "version": state["version"], "processes": processes,
        "points": [str(p) for p in service.tapped], "edit_kinds": list(service.model.edit_kinds),
        "bundles": len(call.catalogue.bundles), "quarantined": len(call.catalogue.quarantined), "captured_rows": state["rows"],
        "dropped_rows": state["dropped"], "gates": dict(zip(("opened", "closed"), state["gates"])),
        "captures": {"held": held, "bytes": size}})


async def edits(request: Request) -> Response:
    """The bundles that this key may use; for an administrator also those that were set aside, and why."""
    call = _call("generate")
    found = []
    for name, served in sorted(call.catalogue.bundles.items()):
        if call.key.allows(name):
            doses = resolve(Asked((Named(name),), defaults=False), call.catalogue, LOCAL).doses
            points = sorted({p for edit in served.bundle for p in edit.steps}, key=lambda p: (p.layer, p.kind))
            found.append({"name": name, "kinds": [type(edit).__name__ for edit in served.bundle], "points": [str(p) for p in points],
                          "doses": {str(p): dose for p, dose in (doses or {}).items()}, "sha256": served.sha256,
                          "model": served.bundle.about["model"]["name"]})
    said: dict[str, Any] = {"digest": call.catalogue.digest, "edits": found}
    if call.key.may("administer"):
        said["quarantined"] = dict(call.catalogue.quarantined)
    return JSONResponse(said)


async def bundle(request: Request) -> Response:
    """A bundle's zip."""
    call, name = _call("steer"), request.path_params["name"]
    served = call.catalogue.bundles.get(name) if call.key.allows(name) else None
    if served is None:
        raise Refused(404, f"there is no edit {shown(name)} that this key may use; GET /mia/edits lists them")
    return Response(await asyncio.to_thread(served.zipped), media_type="application/zip")


async def reload(request: Request) -> Response:
    """Read the folder anew, in every process."""
    return JSONResponse(await _call("administer").service.sharing.reload())


async def fetch(request: Request) -> Response:
    """What is there of a capture, as safetensors."""
    call, since = _call("capture"), request.query_params.get("since", "0")
    if not since.isascii() or not since.isdigit() or len(since) > 10 or int(since) >= _POSITIONS:
        raise Refused(400, f"since is {shown(since)}; it is the first position to return, as in ?since=12")
    found = await captures.fetch(call.service, call.key.tenant, request.path_params["handle"], int(since))
    return Response(found, media_type="application/octet-stream")


async def drop(request: Request) -> Response:
    """Let go of a capture; nothing is said of whether there was one."""
    call = _call("capture")
    await call.service.rpc("drop", [captures.known(call.key.tenant, request.path_params["handle"])])
    return Response(status_code=204)


async def _missing(scope: MutableMapping[str, Any], receive: Callable, send: Callable) -> None:
    raise Refused(404, "there is no such path under /mia/; there are status, edits, edits/NAME, reload and captures/HANDLE")
