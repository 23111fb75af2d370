"""serve.toml: keys and what each may do, the edits that act on every request, and limits."""
from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from ..bundles.folder import NAME
from ..errors import MiaError
from .refusing import Refused, shown

ROLES = ("generate", "steer", "capture", "administer")
MAX_BYTES = 1 << 20  # of serve.toml
MAX_LINE = 4096  # characters, since a key of many parts takes long to read
MAX_COEFF = 1e6
_TENANT = re.compile(r"[a-z0-9-]{1,32}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")


class PolicyError(MiaError, ValueError):
    """A serve.toml that cannot be followed."""


@dataclass(frozen=True, slots=True)
class Named:
    """An edit by its bundle's name, and what multiplies it."""

    name: str
    coeff: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server holds and takes: bytes, counts and seconds. capture_bytes_per_tenant: None for what `Policy.share` makes of it."""

    request_bytes: int = 65_536
    edits_per_request: int = 8
    capture_bytes_per_request: int = 268_435_456
    capture_bytes: int = 2_147_483_648
    capture_bytes_per_tenant: int | None = None
    capture_seconds: float = 600
    body_bytes: int = 67_108_864


@dataclass(frozen=True, slots=True)
class Key:
    """Who asks. edits: names it may use, as fnmatch patterns. max_dose: at any one point; None where there is no cap.

    sha256: of the key itself, in hexadecimal digits; "" for whoever needs none.
    """

    tenant: str
    roles: frozenset[str]
    edits: tuple[str, ...] = ("*",)
    max_dose: float | None = None
    inline: bool = False
    isolate_cache: bool = True
    sha256: str = field(default="", repr=False)

    def may(self, role: str) -> bool:
        """Whether it has a role."""
        return role in self.roles

    def must(self, role: str) -> None:
        """Refused (403) without a role."""
        if role not in self.roles:
            raise Refused(403, f"this needs the role {role!r}; {self._whose} has {', '.join(sorted(self.roles)) or 'none'}")

    def allows(self, name: str) -> bool:
        """Whether it may use an edit of this name, whether there is one or not."""
        return any(fnmatchcase(name, pattern) for pattern in self.edits)

    @property
    def _whose(self) -> str:
        return "your key" if self.sha256 else "a server without [[keys]] in its serve.toml"


EVERYONE = Key("", frozenset(ROLES) - {"administer"}, inline=True, isolate_cache=False)  # where serve.toml names no key
LOCAL = Key("", frozenset(ROLES), inline=True, isolate_cache=False)  # a caller in the server's own process


@dataclass(frozen=True, slots=True)
class Policy:
    """What a serve.toml says. defaults: edits that act on every request; signer: whose bundles alone are taken, "" for anyone's."""

    keys: tuple[Key, ...] = ()
    defaults: tuple[Named, ...] = ()
    limits: Limits = Limits()
    signer: str = ""
    share: int = field(init=False)  # bytes that the captures of one tenant may take together

    def __post_init__(self) -> None:
        whole, mine = self.limits.capture_bytes, self.limits.capture_bytes_per_tenant
        tenants = {key.tenant for key in self.keys if key.may("capture")}
        object.__setattr__(self, "share", min(whole, mine) if mine is not None else whole // 2 if len(tenants) > 1 else whole)

    @classmethod
    def open(cls) -> Policy:
        """The policy of a folder without a serve.toml."""
        return cls()

    @classmethod
    def read(cls, text: bytes) -> Policy:
        """The policy that a serve.toml states; PolicyError for one that says anything else, which is never read in part."""
        said = _table(_toml(text), "serve.toml", ("defaults", "limits", "keys", "signer"))
        keys = tuple(_key(found, f"[[keys]] {i + 1}") for i, found in enumerate(_list(said.get("keys", []), "keys", 4096)))
        sums = [key.sha256 for key in keys]
        twice = next((i for i, one in enumerate(sums) if one in sums[:i]), None)
        if twice is not None:
            raise PolicyError(f"serve.toml: [[keys]] {twice + 1} has the sha256 of [[keys]] {sums.index(sums[twice]) + 1}; a key has one "
                              f"entry")
        if "keys" in said and not keys:
            raise PolicyError("serve.toml: keys is empty, which would let everyone in; leave it out if that is meant")
        listed = _table(said.get("defaults", {}), "[defaults]", ("edits",)).get("edits", [])
        defaults = tuple(named(one, "[defaults]") for one in _list(listed, "[defaults] edits", 64))
        return cls(keys, defaults, _limits(said.get("limits", {})), _text(said.get("signer", ""), "signer", 4096))

    def key_of(self, authorization: str | None) -> Key:
        """Whose an Authorization header is; Refused (401) where a key is needed and this is none. Every key is compared, in full."""
        if not self.keys:
            return EVERYONE
        if authorization is None:
            raise Refused(401, "this server needs a key; send the header Authorization: Bearer KEY")
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given or not given.isascii() or len(given) > MAX_LINE:
            raise Refused(401, "the Authorization header is not of the form: Bearer KEY")
        asked, found = hashlib.sha256(given.encode()).hexdigest(), None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, asked):
                found = key
        if found is None:
            raise Refused(401, "this server does not know this key")
        return found


def new_key() -> tuple[str, str]:
    """A fresh key, and the sha256 that serve.toml has of it."""
    key = f"mia-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


def named(value: object, where: str) -> Named:
    """A name, or a table of a name and a coefficient; PolicyError for anything else."""
    if isinstance(value, str):
        value = {"name": value}
    found = _table(value, f"{where}: an edit", ("name", "coeff"))
    name = found.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PolicyError(f"{where}: {shown(name)} is the name of no bundle; type for example {{ name = \"cheerful\", coeff = 0.5 }}")
    return Named(name, float(_number(found.get("coeff", 1.0), f"{where}: coeff", -MAX_COEFF)) + 0.0)


def _toml(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise PolicyError(f"serve.toml has {len(text)} bytes; {MAX_BYTES} are the most")
    if any(len(line) > MAX_LINE for line in text.splitlines()):
        raise PolicyError(f"serve.toml has a line of more than {MAX_LINE} characters")
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"serve.toml is no TOML: {str(error)[:200]}") from None


def _key(value: object, where: str) -> Key:
    found = _table(value, where, ("sha256", "tenant", "roles", "edits", "max_dose", "inline", "isolate_cache"))
    sums, tenant = found.get("sha256"), found.get("tenant")
    if not isinstance(sums, str) or not _HEX.fullmatch(sums):
        raise PolicyError(f"{where}: sha256 is the 64 hexadecimal digits of the key's sha256, never the key; type mia-lab key")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise PolicyError(f"{where}: tenant is {shown(tenant)}; it is 1 to 32 of a-z, 0-9 and -")
    roles = [_text(role, f"{where}: a role", 64) for role in _list(found.get("roles", []), f"{where}: roles", 64)]
    wrong = [role for role in roles if role not in ROLES]
    if wrong or not roles:
        found = f"there is no role {shown(wrong[0])}" if wrong else "it has no role"
        raise PolicyError(f"{where}: {found}; the roles are {', '.join(ROLES)}")
    edits = tuple(_text(name, f"{where}: an edit", 128) for name in _list(found.get("edits", ["*"]), f"{where}: edits", 4096))
    dose = None if "max_dose" not in found else _number(found["max_dose"], f"{where}: max_dose", 0.0)
    inline = _truth(found.get("inline", False), f"{where}: inline")
    if inline and "steer" not in roles:
        raise PolicyError(f'{where}: inline = true needs the role "steer"')
    if inline and dose is not None:
        raise PolicyError(f"{where}: inline = true lets any edit come with a request, past max_dose; leave one of them out")
    return Key(tenant, frozenset(roles), edits, dose, inline, _truth(found.get("isolate_cache", True), f"{where}: isolate_cache"),
               sums.lower())


def _limits(value: object) -> Limits:
    most = {"request_bytes": 1 << 18, "edits_per_request": 64, "capture_seconds": 7 * 86_400}
    found = _table(value, "[limits]", tuple(field.name for field in fields(Limits)))
    given = {name: _number(one, f"[limits] {name}", 1, most.get(name, 1 << 50), int if name != "capture_seconds" else (int, float))
             for name, one in found.items()}
    return Limits(**given)


def _table(value: object, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PolicyError(f"{where} is {shown(value)}; it is a table with {', '.join(known)}")
    strange = [name for name in value if name not in known]
    if strange:
        raise PolicyError(f"{where} has {shown(strange[0])}; it may have {', '.join(known)}")
    return value


def _list(value: object, where: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise PolicyError(f"{where} is a list of at most {most}")
    return value


def _text(value: object, where: str, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise PolicyError(f"{where} is {shown(value)}; it is a text of at most {most} characters")
    return value


def _truth(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{where} is {shown(value)}; it is true or false")
    return value


def _number(value: object, where: str, low: float, high: float = MAX_COEFF, kind: Any = (int, float)) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise PolicyError(f"{where} is {shown(value)}; it is a number from {low:g} to {high:g}")
    return value
