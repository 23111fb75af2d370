"""A running server in words: what a reload did, what it serves, how it fares."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..errors import ServerError
from ..lazy import human_bytes
from ..show.parts import Part, Table
from .client.library import ServedLibrary
from .client.transport import Transport

Told = tuple[list[Part], int]  # what is shown, and the command's exit status


def reload(http: Transport) -> Told:
    """Have the folder read anew; 1 where a bundle is set aside or a process lags behind."""
    said = _json(http, http.post("/mia/reload"), ("version", "digest", "adopted", "loaded", "quarantined", "changed"))
    behind = sorted(owner for owner, adopted in said["adopted"].items() if not adopted)
    changed = {name: ", ".join(said["changed"].get(name, ())) or "none" for name in ("added", "removed", "changed")}
    rows = {"catalogue": f"{said['digest']}, version {said['version']}", "served": ", ".join(said["loaded"]) or "no bundle", **changed,
            "processes": f"{len(said['adopted'])}, {len(behind)} of them not there yet" if behind else str(len(said["adopted"]))}
    parts: list[Part] = [Table(("reloaded", ""), tuple((name, str(value)) for name, value in rows.items()))]
    return parts + _aside(said["quarantined"]), int(bool(said["quarantined"] or behind))


def edits(http: Transport) -> Told:
    """The bundles that are served; 1 where one is set aside."""
    found = ServedLibrary(http)
    return found.parts, int(bool(found.quarantined))


def status(http: Transport) -> Told:
    """Versions, catalogue, processes and counts; 1 where a process serves another catalogue."""
    said = _json(http, http.get("/mia/status"), (
        "mia_lab", "vllm", "model", "digest", "wanted", "version", "processes", "points", "edit_kinds", "bundles", "quarantined",
        "captured_rows", "dropped_rows", "gates", "captures"))
    held, gates = said["captures"], said["gates"]
    rows = {"model": said["model"], "versions": f"mia_lab {said['mia_lab']}, vLLM {said['vllm']}",
            "catalogue": f"{said['digest']}, version {said['version']}" + ("" if said["wanted"] in ("", said["digest"]) else
                                                                           f"; {said['wanted']} is wanted"),
            "bundles": f"{said['bundles']} served, {said['quarantined']} set aside", "points": _kinds(said["points"]),
            "edits": ", ".join(said["edit_kinds"]) or "none", "captured rows": f"{said['captured_rows']}, {said['dropped_rows']} dropped",
            "gates": f"{gates['opened']} opened, {gates['closed']} closed",
            "captures held": f"{held['held']}, {human_bytes(held['bytes'])}"}
    processes = tuple((owner, str(one["digest"]), f"{one['seconds']:.1f} s ago") for owner, one in sorted(said["processes"].items()))
    return [Table(("server", http.url), tuple((name, str(value)) for name, value in rows.items())),
            Table(("process", "serves", "heard of"), processes)], int(any(one[1] != said["digest"] for one in processes))


def _kinds(points: list[str]) -> str:
    """Tapped points by kind, with how many layers each has."""
    kinds = [point.rpartition(".")[0] for point in points]
    return ", ".join(f"{kind} x{kinds.count(kind)}" for kind in dict.fromkeys(kinds))


def _aside(quarantined: dict[str, str]) -> list[Part]:
    return [Table(("set aside", "reason"), tuple((name, str(why)) for name, why in sorted(quarantined.items())))] if quarantined else []


def _json(http: Transport, text: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        said = json.loads(text)
        return {name: said[name] for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{http.url} answered otherwise than this mia_lab reads ({error!r}); are they the same version?") from None


ASKED: dict[str, Callable[[Transport], Told]] = {"reload": reload, "list": edits, "status": status}
