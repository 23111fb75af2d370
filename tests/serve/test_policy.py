"""serve.toml: what it may say, whose a key is, and that nothing else is believed."""
from __future__ import annotations

import contextlib
import hashlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_lab.errors import EditError, MiaError, MissingRowsError, RoomError
from mia_lab.serve.policy import EVERYONE, LOCAL, Limits, Named, Policy, PolicyError, new_key
from mia_lab.serve.refusing import Refused, printable, refused

ONE, TWO = (hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two"))
FULL = f"""
signer = "{'ab' * 32}"
[defaults]
edits = ["polite", {{ name = "cheerful", coeff = -0.5 }}]
[limits]
edits_per_request = 2
capture_seconds = 1.5
[[keys]]
sha256 = "{ONE}"
tenant = "acme"
roles = ["generate", "steer"]
edits = ["cheerful", "tone-*"]
max_dose = 0.5
[[keys]]
sha256 = "{TWO.upper()}"
tenant = "other-1"
roles = ["administer"]
isolate_cache = false
"""


def key(**changed: str) -> bytes:
    said = {"sha256": f'"{ONE}"', "tenant": '"acme"', "roles": '["generate"]'} | changed
    return ("[[keys]]\n" + "\n".join(f"{name} = {value}" for name, value in said.items() if value)).encode()


def test_what_it_says_is_what_holds() -> None:
    policy = Policy.read(FULL.encode())
    assert policy.defaults == (Named("polite"), Named("cheerful", -0.5)) and policy.signer == "ab" * 32
    assert policy.limits == Limits(edits_per_request=2, capture_seconds=1.5)
    first, second = policy.keys
    assert (first.tenant, first.roles, first.max_dose) == ("acme", {"generate", "steer"}, 0.5)
    assert first.isolate_cache and not first.inline
    assert first.may("steer") and not first.may("capture") and not second.isolate_cache
    assert [name for name in ("cheerful", "tone-dry", "tone", "Cheerful", "polite") if first.allows(name)] == ["cheerful", "tone-dry"]
    assert second.allows("anything")
    with pytest.raises(Refused, match="needs the role 'capture'; your key has generate, steer") as found:
        first.must("capture")
    assert found.value.status == 403 and first.must("steer") is None


def test_tenants_that_capture_share_the_room() -> None:
    share = lambda *keys, limits="": Policy.read(("[limits]\n" + limits + "\n").encode() + b"\n".join(keys)).share  # noqa: E731
    one, other = key(roles='["capture"]'), key(sha256=f'"{TWO}"', roles='["capture"]', tenant='"other"')
    whole = Limits().capture_bytes
    assert share() == share(one) == share(one, key(sha256=f'"{TWO}"', tenant='"other"')) == whole  # who does not capture needs no room
    assert share(one, other) == whole // 2
    assert share(one, other, limits="capture_bytes = 9") == 4
    assert share(one, other, limits="capture_bytes_per_tenant = 77") == share(limits="capture_bytes_per_tenant = 77") == 77
    assert share(one, limits="capture_bytes = 9\ncapture_bytes_per_tenant = 77") == 9


def test_without_keys_everyone_may_all_but_administer() -> None:
    for policy in (Policy.open(), Policy.read(b""), Policy.read(b"[limits]\nbody_bytes = 9")):
        assert policy.key_of(None) is policy.key_of("Bearer x") is EVERYONE
    assert (EVERYONE.tenant, EVERYONE.inline, EVERYONE.isolate_cache) == ("", True, False)
    assert EVERYONE.roles == {"generate", "steer", "capture"} and LOCAL.may("administer")


@pytest.mark.parametrize("said", ["Bearer one", "bearer one", "BEARER one"])
def test_a_key_is_known_by_its_sum(said: str) -> None:
    assert Policy.read(FULL.encode()).key_of(said).tenant == "acme"


@pytest.mark.parametrize("said", [None, "", "one", "Basic one", "Bearer", "Bearer ", "Bearer  one", "Bearer one ", "Bearer One",
                                  f"Bearer {ONE}", "Bearer onе", "Bearer one\0", "Bearer " + "x" * 10**6, "Bearer \udcff"])
def test_any_other_header_is_nobody(said: str | None) -> None:
    with pytest.raises(Refused) as found:
        Policy.read(FULL.encode()).key_of(said)
    assert found.value.status == 401 and "one" not in found.value.message.replace("none", "")


def test_no_key_is_nobodys_even_where_its_sum_is_listed() -> None:
    with pytest.raises(Refused):
        Policy.read(key(sha256=f'"{hashlib.sha256(b"").hexdigest()}"')).key_of("Bearer ")


def test_a_fresh_key_is_known_by_what_is_pasted() -> None:
    fresh, sum_ = new_key()
    assert Policy.read(key(sha256=f'"{sum_}"')).key_of(f"Bearer {fresh}").tenant == "acme"
    assert new_key()[0] != fresh and fresh not in repr(Policy.read(key(sha256=f'"{sum_}"'))) and len(fresh) > 40


WRONG = {
    "a key that is no sum": (key(sha256='"one"'), "64 hexadecimal digits"),
    "no sum": (key(sha256=""), "64 hexadecimal digits"),
    "a sum in other digits": (key(sha256='"' + "٣" * 64 + '"'), "64 hexadecimal digits"),
    "the same key twice": (key() + b"\n" + key(sha256=f'"{ONE.upper()}"'), "has the sha256 of"),
    "no roles": (key(roles="[]"), "it has no role"),
    "roles left out": (key(roles=""), "it has no role"),
    "an unknown role": (key(roles='["generate", "root"]'), "there is no role 'root'"),
    "a role that is a number": (key(roles="[1]"), "it is a text"),
    "roles as text": (key(roles='"steer"'), "is a list"),
    "no tenant": (key(tenant=""), "1 to 32 of"),
    "an empty tenant": (key(tenant='""'), "1 to 32 of"),
    "a tenant with a slash": (key(tenant='"a/b"'), "1 to 32 of"),
    "a tenant with a line": (key(tenant='"a\\n"'), "1 to 32 of"),
    "a tenant in other letters": (key(tenant='"аcme"'), "1 to 32 of"),
    "a long tenant": (key(tenant=f'"{"a" * 33}"'), "1 to 32 of"),
    "a dose below zero": (key(max_dose="-0.5"), "from 0 to"),
    "a dose that is no number": (key(max_dose="nan"), "from 0 to"),
    "an endless dose": (key(max_dose="inf"), "from 0 to"),
    "a dose that is true": (key(max_dose="true"), "from 0 to"),
    "inline as text": (key(inline='"yes"'), "true or false"),
    "inline without steer": (key(inline="true"), 'needs the role "steer"'),
    "inline past a cap": (key(inline="true", roles='["steer"]', max_dose="1"), "past max_dose"),
    "an unknown name in a key": (key(role='["steer"]'), "has 'role'"),
    "an unknown name": (b"key = 1", "has 'key'"),
    "keys that are a table": (b"[keys]\ntenant = 'a'", "is a list"),
    "an empty list of keys": (b"keys = []", "would let everyone in"),
    "a limit of zero": (b"[limits]\nbody_bytes = 0", "from 1 to"),
    "a limit that is true": (b"[limits]\nbody_bytes = true", "from 1 to"),
    "a share of nothing": (b"[limits]\ncapture_bytes_per_tenant = 0", "from 1 to"),
    "a limit in parts": (b"[limits]\nbody_bytes = 1.5", "from 1 to"),
    "an endless time": (b"[limits]\ncapture_seconds = inf", "from 1 to"),
    "an unknown limit": (b"[limits]\nbytes = 3", "has 'bytes'"),
    "a default without a name": (b"[defaults]\nedits = [{ coeff = 1 }]", "name of no bundle"),
    "a default that climbs": (b"[defaults]\nedits = ['../x']", "name of no bundle"),
    "a default of NaN": (b"[defaults]\nedits = [{ name = 'a', coeff = nan }]", "from -1e"),
    "a default that is true": (b"[defaults]\nedits = [{ name = 'a', coeff = true }]", "from -1e"),
    "a default with more": (b"[defaults]\nedits = [{ name = 'a', layers = [1] }]", "has 'layers'"),
    "no TOML": (b"[[keys", "no TOML"),
    "no text": (b"\xff\xfe", "no TOML"),
    "a name twice": (b"signer = 'a'\nsigner = 'b'", "no TOML"),
    "a long line": (b"a." * 400_000 + b"b = 1", "more than 4096 characters"),
    "too much": (b"#" * (1 << 20) + b"\n", "are the most"),
    "too deep": (b"a = " + b"[\n" * 100_000, "no TOML"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_followed_is_refused_in_words(name: str) -> None:
    text, message = WRONG[name]
    began = time.monotonic()
    with pytest.raises(PolicyError, match=message):
        Policy.read(text)
    assert time.monotonic() - began < 20


plain = st.text(max_size=8).map(repr) | st.integers().map(str) | st.floats().map(str) | st.sampled_from(["true", "false"])
tomls = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(lambda xs: f"[{', '.join(xs)}]"), max_leaves=6)
names = st.sampled_from(["keys", "limits", "defaults", "signer", "sha256", "tenant", "roles", "edits", "coeff", "max_dose", "inline", "x"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.builds("[[{}]]".format, names), st.builds("[{}]".format, names), st.builds("{} = {}".format, names, tomls),
                          st.sampled_from(key().decode().splitlines())), max_size=12))
def test_any_toml_is_a_policy_or_refused(lines: list[str]) -> None:
    try:
        policy = Policy.read("\n".join(lines).encode("utf-8", "surrogatepass"))
    except PolicyError as error:
        printable(str(error)).encode()
    else:
        assert policy.keys == () or all(key.roles and key.tenant and len(key.sha256) == 64 for key in policy.keys)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_a_policy_or_refused(text: bytes) -> None:
    with contextlib.suppress(PolicyError):
        assert Policy.read(text).key_of(None) is EVERYONE


def test_errors_are_told_by_their_status() -> None:
    own = Refused(413, "too long")
    assert refused(own) is own
    for error, status in ((RoomError("full"), 429), (MissingRowsError("gone"), 409), (EditError("wrong"), 400), (MiaError("other"), 400)):
        assert (refused(error).status, refused(error).message) == (status, str(error))


def test_a_refusal_is_an_answer_that_any_client_can_read() -> None:
    found = Refused(404, "there is no \udcff" + "x" * 5000)
    assert found.body()["error"]["type"] == "NotFoundError" and found.body()["error"]["code"] == 404
    assert len(found.message.encode()) < 1100 and isinstance(found, ValueError) and str(found) == found.message
    with pytest.raises(ValueError, match="no refusal"):
        Refused(200, "fine")
