"""Checks that a text can pass by rule alone: its language, length and form. `mia.dataset("instruction_prompts")` names them."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ...errors import EditError

# The commonest function words of each language. Those that it shares with another count for both.
_WORDS = {
    "en": "the and of to in is that it for was on are as with his they be at this have from or had by but what some we can out were all "
          "your there when up use how which their if will an you i he she not my me her",
    "fr": "le la les de des du un une et est en que qui dans pour pas sur au avec ce il je ne se vous nous sont par plus mais ou elle son "
          "cette aux tout on ses leur être c'est a fait",
    "de": "der die das und ist in den von zu mit sich des auf für nicht ein eine als auch es an werden aus er hat dass sie nach wird bei "
          "einer um am sind noch wie einem ich oder aber wir man kann im dem",
    "es": "el la los las de y que en un una es por con no para su al lo como más del se pero sus le ya o este sí porque esta entre cuando "
          "muy sin sobre también me hay son está ser yo",
    "pt": "o a os as de e que em um uma é por com não para se na no do da dos das mais como mas ao ele seu sua ou quando muito nos já "
          "também eu pelo pela são foi isso está ser você",
    "it": "il lo la i gli le di e che in un una è per con non si da del della sono al alla anche come più ma nel dei nella questo ha su "
          "delle se io mi ci quando molto o essere",
    "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als dan maar bij door naar uit nog wel over of heeft ik je "
          "hij wordt deze die kan worden we was dit",
}
LANGUAGES = {code: frozenset(words.split()) for code, words in _WORDS.items()}


def words(text: str) -> list[str]:
    """The words of a text, in lower case, with their apostrophes."""
    return re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text.lower())


def language_of(text: str) -> str | None:
    """The language whose commonest words a text has most of; None for fewer than three of them, or a tie."""
    found = words(text)
    counts = sorted(((sum(word in known for word in found), code) for code, known in LANGUAGES.items()), reverse=True)
    return counts[0][1] if counts[0][0] >= 3 and counts[0][0] > counts[1][0] else None


def _is_json(text: str) -> bool:
    inner = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip())
    try:
        return isinstance(json.loads(inner), (dict, list))
    except ValueError:
        return False


def _lines(text: str, mark: str) -> int:
    return sum(bool(re.match(rf"\s*(?:{mark})\s+\S", line)) for line in text.splitlines())


def _sentences(text: str) -> int:
    return len([part for part in re.split(r"[.!?]+(?:[\"'”’)]*)(?:\s+|$)", text.strip()) if part.strip()])


def _letters(text: str) -> str:
    return "".join(c for c in text if c.isalpha())


def _quoted(text: str) -> bool:
    inner = text.strip()
    return len(inner) > 2 and inner[0] in "\"“„«" and inner[-1] in "\"”“»"


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "max_words": lambda text, n: len(text.split()) <= n, "min_words": lambda text, n: len(text.split()) >= n,
    "max_sentences": lambda text, n: _sentences(text) <= n, "language": lambda text, code: language_of(text) == code,
    "bullets": lambda text, n: _lines(text, r"[-*•]") == n, "numbered": lambda text, n: _lines(text, r"\d+[.)]") == n,
    "json": lambda text, _: _is_json(text), "quoted": lambda text, _: _quoted(text), "no_commas": lambda text, _: "," not in text,
    "uppercase": lambda text, _: bool(_letters(text)) and _letters(text).isupper(),
    "lowercase": lambda text, _: bool(_letters(text)) and _letters(text).islower(),
}


def passes(text: str, check: dict[str, Any]) -> bool:
    """Whether a text passes a check `{"kind": ..., "value": ...}`; an empty text passes none. EditError for an unknown kind."""
    if check.get("kind") not in CHECKS:
        raise EditError(f"there is no check {check.get('kind')!r}; there are {', '.join(CHECKS)}")
    if check["kind"] == "language" and check.get("value") not in LANGUAGES:
        raise EditError(f"the language {check.get('value')!r} is not known; there are {', '.join(LANGUAGES)}")
    return bool(text.strip()) and CHECKS[check["kind"]](text, check.get("value"))
