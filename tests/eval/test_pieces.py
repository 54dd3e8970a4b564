"""Where an answer stands after each token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.eval.helpers import END, byte_tokenizer

from kvfold.eval.pieces import standing

TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False).input_ids
    return ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("abc", [1, 2, 3]),
        ("a\N{LATIN SMALL LETTER E WITH ACUTE}b", [1, 1, 2, 3]),
        ("\N{SNOWMAN}", [0, 0, 1]),
        (f"a{END}b", [1, 1, 2]),
        (f"a{END}", [1, 1]),
    ],
)
def test_a_character_stands_once_its_last_byte_has_come(text: str, expected: list[int]) -> None:
    ids = ids_of(text)
    assert standing(TOKENIZER, ids, TOKENIZER.decode(ids, skip_special_tokens=True)) == expected


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_tokens_never_take_back_and_end_with_the_whole(ids: list[int]) -> None:
    output = TOKENIZER.decode(ids, skip_special_tokens=True)
    found = standing(TOKENIZER, ids, output)
    assert len(found) == len(ids)
    assert found == sorted(found)
    assert not ids or found[-1] == len(output)


def test_pieces_of_words_are_counted_with_the_spaces_that_their_tokenizer_puts_between() -> None:
    class Words:
        """Puts a space before every word but the first, as tokenizers of pieces do."""

        def decode(self, ids: list[int], **more: Any) -> str:
            return " ".join("abcdefghij"[: one + 1] for one in ids)

    assert standing(Words(), [0, 2, 1], "a abc ab") == [1, 5, 8]
