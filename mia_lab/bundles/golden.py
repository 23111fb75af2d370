"""Golden outputs: what edits made a model say when they were exported, replayed one at a time wherever they are loaded."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..edits import Edit

if TYPE_CHECKING:
    from ..session import Session

PROMPTS = ("The weather this morning was", "I opened the letter and read", "Two things about our town:")
_CANDIDATES = 20  # log-probabilities kept of each step


@dataclass(frozen=True, slots=True)
class Said:
    """Greedy tokens after one prompt, and their log-probabilities, which are of the model's full distribution."""

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt, and what the model says after it with the edits and without."""

    prompt: tuple[int, ...]
    steered: Said
    plain: Said

    @classmethod
    def of(cls, found: dict[str, Any]) -> Golden:
        """From the JSON of one; ValueError, KeyError or TypeError where it is another thing."""
        said = {side: Said(tuple(map(int, found[side]["tokens"])), tuple(map(float, found[side]["log_probabilities"])))
                for side in ("steered", "plain")}
        return cls(tuple(map(int, found["prompt"])), **said)


@dataclass(frozen=True, slots=True)
class Replay:
    """How far a replay is from what was said: tokens that agreed before the first that did not, of how many; the worst
    difference of a log-probability among these; and, at a first other token, how far the golden one is behind it, in nats."""

    agreed: int
    tokens: int
    worst: float
    behind: float

    @property
    def exact(self) -> bool:
        """Whether every token is the golden one."""
        return self.agreed == self.tokens


def record(session: Session, edits: Sequence[Edit], prompts: Sequence[Any], max_tokens: int) -> list[Golden]:
    """Say each prompt's continuation, with the edits and without, one request at a time."""
    found = []
    for prompt in prompts:
        ids = session._read(prompt).ids[0]
        sides = [_say(session, ids, mine, max_tokens) for mine in (edits, [])]
        steered, plain = (Said(tokens, tuple(step[token] for token, step in zip(tokens, steps))) for tokens, steps in sides)
        found.append(Golden(tuple(ids), steered, plain))
    return found


def replay(session: Session, edits: Sequence[Edit], golden: Golden) -> tuple[Replay, Replay]:
    """Say it again, with the edits and without."""
    found = []
    for said, mine in ((golden.steered, edits), (golden.plain, [])):
        tokens, steps = _say(session, golden.prompt, mine, len(said.tokens))
        agreed = next((i for i, (a, b) in enumerate(zip(tokens, said.tokens)) if a != b), min(len(tokens), len(said.tokens)))
        worst = max((abs(steps[i][said.tokens[i]] - said.log_probabilities[i]) for i in range(agreed)), default=0.0)
        behind = 0.0
        if agreed < len(tokens) and agreed < len(said.tokens):
            behind = steps[agreed][tokens[agreed]] - steps[agreed].get(said.tokens[agreed], float("-inf"))
        found.append(Replay(agreed, len(said.tokens), worst, behind))
    return found[0], found[1]


def _say(session: Session, ids: Sequence[int], edits: Sequence[Edit], max_tokens: int) -> tuple[tuple[int, ...], list[dict[int, float]]]:
    """Greedy tokens, and the log-probabilities at each step by token. Nothing is read from the prefix cache."""
    with session.unsteered():
        output = session.completions(list(ids), max_tokens=max_tokens, edits=list(edits) or None, logprobs=_CANDIDATES,
                                     skip_reading_prefix_cache=True).outputs[0]
    return tuple(output.token_ids), [{token: found.logprob for token, found in step.items()} for step in output.logprobs]


def environment(session: Session) -> dict[str, str]:
    """What decides whether a replay can be exact: device, types, versions, and how the model is compiled."""
    return session._engine.settings.environment


def tokenizer_hash(tokenizer: Any) -> str:
    """Identity of a tokenizer: its vocabulary, its special tokens and its chat template."""
    text = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids), getattr(tokenizer, "chat_template", None)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def as_json(golden: Sequence[Golden]) -> list[dict[str, Any]]:
    """Goldens as `steer.json` holds them."""
    return [asdict(one) for one in golden]
