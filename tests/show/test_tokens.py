"""Tokens and Words: running text whose values and changes are readable without colour."""
from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from show.golden import check
from show.markup import parsed

from mia_lab.show import html, text
from mia_lab.show.marks import marked
from mia_lab.show.parts import Tokens, Words
from mia_lab.show.words import words_between

TEXTS = ("<bos>", "The", "  cat", "\n", " <b>sat</b>", "'\"&", "")
PART = Tokens(TEXTS, (math.nan, 0.25, -1.0, 0.0, 2.0, -0.5, 1.0), "A probe's <reading>", border=4)


def test_tokens_look_as_they_did() -> None:
    check("tokens.html", html.render(PART))
    check("tokens.txt", text.render(PART))


def test_every_token_is_there_once_with_its_value_and_colour() -> None:
    found = parsed(html.render(PART))
    spans = [(attrs.get("title"), attrs.get("style", "")) for tag, attrs in found.tags if tag == "span" and "title" in attrs]
    assert [title for title, _ in spans] == ["–", "0.25", "-1.00", "0.00", "2.00", "-0.50", "1.00"]
    hues = ["" if not style else "orange" if "230,126,34" in style else "blue" for _, style in spans]
    assert hues == ["", "orange", "blue", "", "orange", "blue", "orange"]
    assert [[cell[2] for cell in row] for row in found.rows[1:]] == [
        [str(i), marked(token), title] for i, (token, (title, _)) in enumerate(zip(TEXTS, spans))]


def test_text_holds_the_same_tokens_and_values() -> None:
    said = text.render(PART).split("\n", 1)[1]
    assert said == "<bos>  The (0.25)  ··cat (-1.00)  ⏎ (0.00)  ▌  ·<b>sat</b> (2.00)  '\"& (-0.50)  ∅ (1.00)"


def test_a_line_of_text_is_not_broken_between_a_token_and_its_value() -> None:
    lines = text.render(Tokens(tuple(f" word{i}" for i in range(200)), (0.5,) * 200)).splitlines()[1:]
    assert len(lines) > 10 and max(map(len, lines)) <= 120
    assert all(re.fullmatch(r"(·word\d+ \(0\.50\)(  |$))+", line) for line in lines)


@pytest.mark.parametrize("border", [0, 7])
def test_a_border_at_an_end_is_not_drawn(border: int) -> None:
    part = Tokens(TEXTS, PART.values, border=border)
    assert "▌" not in html.render(part) and "▌" not in text.render(part)


def test_a_long_text_is_cut_in_the_middle_and_says_so() -> None:
    part = Tokens(tuple(f" <t{i}>" for i in range(4000)), tuple(math.sin(i) for i in range(4000)), border=1)
    found = parsed(html.render(part))
    assert "2500 tokens are left out" in found.text and "2500 tokens are left out" in text.render(part)
    rows = [row for row in found.rows[1:] if len(row) == 3]
    assert [int(row[0][2]) for row in rows] == [*range(750), *range(3250, 4000)]
    assert all(row[1][2] == f"·<t{row[0][2]}>" and row[2][2] == f"{math.sin(int(row[0][2])):.2f}".replace("-0.00", "0.00") for row in rows)


def test_tokens_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens have 1 values"):
        Tokens(("a", "b"), (1.0,))


# -- words ------------------------------------------------------------------------------------------------------------

ONE, OTHER = "The cat sat on the mat.\nIt was happy.", "The dog sat on the mat.\nIt was very happy & <ok>."


def test_words_look_as_they_did() -> None:
    part = words_between(ONE, OTHER, "steered against <plain>")
    parsed(html.render(part))
    check("words.html", html.render(part))
    check("words.txt", text.render(part))


def test_a_change_is_told_by_more_than_colour() -> None:
    found = parsed(html.render(words_between("a b", "a c")))
    assert [tag for tag, _ in found.tags if tag in ("ins", "del")] == ["del", "ins"]
    assert text.render(words_between("a b", "a c")) == "a[- b-]{+ c+}"


def test_the_fewest_words_change() -> None:
    assert words_between(ONE, OTHER).pieces[:4] == (
        ("same", "The"), ("removed", " cat"), ("added", " dog"), ("same", " sat on the mat.\nIt was"))
    assert words_between(ONE, ONE).pieces == (("same", ONE),)
    assert words_between("", "").pieces == ()
    assert words_between("", "a b").pieces == (("added", "a b"),)


TEXT = st.text(alphabet="ab \n<", max_size=30)


@given(TEXT, TEXT)
def test_pieces_make_up_both_texts(one: str, other: str) -> None:
    pieces = words_between(one, other).pieces
    assert "".join(piece for kind, piece in pieces if kind != "added") == one
    assert "".join(piece for kind, piece in pieces if kind != "removed") == other


def test_another_kind_of_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'moved'"):
        html.render(Words((("moved", "a"),)))


# -- marks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "said"), [
    ("  a\n", "··a⏎"), ("", "∅"), ("\x1b[2J", "␛[2J"), ("\u202eabc", "<U+202E>abc"), ("\u200b", "<U+200B>"), ("\u2028", "<U+2028>"),
    ("\u0301", "\u0301"), (" שלום", "\u2068·שלום\u2069"), ("سلام", "\u2068سلام\u2069"), ("猫", "猫")])
def test_what_cannot_be_seen_has_a_mark_and_what_runs_leftward_stays_by_itself(token: str, said: str) -> None:
    assert marked(token) == said and marked(marked(token)) == said


def test_running_text_keeps_words_that_run_leftward_together() -> None:
    found = html.render(Tokens(("של", "ום\n"), (0.5, 0.5)))
    assert ">של</span><wbr>" in found and ">ום⏎</span><br>" in found and ">\u2068של\u2069</td>" in found
    assert "\u2068של\u2069 (0.50)" in text.render(Tokens(("של",), (0.5,)))


def test_that_the_prompt_ends_among_what_is_left_out_is_said() -> None:
    for border, ends in ((2000, True), (1, False), (3900, False)):
        assert ("the prompt ends among them" in text.render(Tokens(("a",) * 4000, (0.5,) * 4000, border=border)).replace("\n", " ")) == ends
