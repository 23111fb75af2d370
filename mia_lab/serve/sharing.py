"""One catalogue for all API server processes: each reads the folder itself, and adopts what it reads where that is what is wanted."""
from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any

from ..errors import MiaError
from .catalogue import Catalogue
from .refusing import Refused

if TYPE_CHECKING:
    from .service import Service

_BEAT_SECONDS = 1.0
_ALIVE_SECONDS = 5.0  # since its last beat, for a process to be waited for
_RELOAD_SECONDS = 15.0
_log = logging.getLogger("mia_lab")


class Sharing:
    """The catalogue of one process, and what it hears of the others through the worker.

    What is published, and said to be adopted, is a tag: a catalogue's digest, a dot, and a mark of the reload. So a reload has every
    process read the folder, even where all that changed is what is set aside.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._reading = service, asyncio.Lock()
        self.catalogue: Catalogue = None  # type: ignore[assignment]  # nothing is served before `start`
        self._tag = self._missed = ""  # what is adopted; what was last wanted and could not be found
        self.state: dict[str, Any] = {}  # of the last beat

    async def start(self) -> None:
        """Read the folder for the first time; MiaError for a policy that cannot be followed."""
        found = await self._read()
        self._adopt(found, _tagged(found))
        wanted = (await self.beat())["wanted"]
        if not wanted:
            await self._service.rpc("publish", self._tag)
        elif digest_of(wanted) == found.digest:
            self._tag = wanted

    async def beat_on(self) -> None:
        """Beat as long as the engine lives, and follow where another catalogue is wanted."""
        while not self._service.engine.errored:
            await asyncio.sleep(_BEAT_SECONDS)
            try:
                wanted = (await self.beat())["wanted"]
                if wanted and wanted != self._tag:
                    await self._follow(wanted)
            except Exception as error:  # whatever it was, the next beat may do
                _log.warning("mia_lab goes on with the catalogue that it has: %s", error)

    async def beat(self) -> dict[str, Any]:
        """Tell the worker what this process serves, and hear of the others."""
        service = self._service
        self.state = await service.rpc("beat", service.owner, self._tag)
        service.metrics.beat(self.state, service.owner == min(self._alive(), default=service.owner))
        return self.state

    async def reload(self) -> dict[str, Any]:
        """Read the folder, and have every process serve it; Refused 409 for a policy that cannot be followed, with nothing changed."""
        try:
            async with self._reading:
                before, found = self.catalogue, await self._read()
                tag = _tagged(found)
                version = await self._service.rpc("publish", tag)
                self._adopt(found, tag)
        except MiaError as error:
            raise Refused(409, f"the folder was not taken over, and what was served still is: {error}") from None
        deadline = asyncio.get_running_loop().time() + _RELOAD_SECONDS
        while True:
            wanted = (await self.beat())["wanted"]  # that of a later reload, where there was one meanwhile
            adopted = {owner: serves in (tag, wanted) for owner, serves in self._alive().items()}
            if all(adopted.values()) or asyncio.get_running_loop().time() > deadline:
                return {"version": version, "digest": found.digest, "adopted": adopted, "loaded": sorted(found.bundles),
                        "quarantined": dict(found.quarantined), "changed": _changed(before, found)}
            await asyncio.sleep(0.1)

    async def _follow(self, wanted: str) -> None:
        """Read the folder, and adopt it if it is what is wanted; else the next beat tries again."""
        async with self._reading:
            if wanted != self._tag:
                found = await self._read()
                if found.digest == digest_of(wanted):
                    self._adopt(found, wanted)
                elif self._missed != wanted:
                    self._missed = wanted
                    _log.warning("mia_lab reads catalogue %s in %s, where %s is wanted; it goes on with %s until these agree", found.digest,
                                 self._service.folder, digest_of(wanted), self.catalogue.digest)

    async def _read(self) -> Catalogue:
        return await asyncio.to_thread(Catalogue.read, self._service.folder, self._service.model_facts, self.catalogue)

    def _adopt(self, found: Catalogue, tag: str) -> None:
        self.catalogue, self._tag = found, tag
        self._service.metrics.adopted(found)
        for name, reason in found.quarantined.items():
            _log.warning("mia_lab sets %s aside: %s", name, reason)

    def _alive(self) -> dict[str, str]:
        """The tag that each process that beat lately serves, by owner."""
        return {owner: adopted for owner, (adopted, ago) in self.state["owners"].items() if ago < _ALIVE_SECONDS}


def digest_of(tag: str) -> str:
    """The digest that a tag is of."""
    return tag.partition(".")[0]


def _tagged(found: Catalogue) -> str:
    return f"{found.digest}.{secrets.token_hex(4)}"


def _changed(before: Catalogue, after: Catalogue) -> dict[str, list[str]]:
    old, new = ({name: one.sha256 for name, one in found.bundles.items()} for found in (before, after))
    return {"added": sorted(new.keys() - old.keys()), "removed": sorted(old.keys() - new.keys()),
            "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name])}
