"""Needles: facts hidden at spread depths of real prose, each asked for afterwards.

Each fact is a sentence of its own kind with a value drawn by chance, so that nobody knows it who did not read the
document. A question ends with the beginning of the sentence, as in RULER (Hsieh et al. 2024, arXiv 2404.06654).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from kvfold.core.errors import ConfigError, must_be
from kvfold.eval.quiz import Encode, Question, Quiz, draw, shuffled
from kvfold.eval.sample import check_least
from kvfold.eval.texts import load_text, sentences


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of fact.

    Attributes:
        question: What is asked.
        stem: The sentence up to its value.
        values: Words to choose the value from, or how many digits it has.
    """

    question: str
    stem: str
    values: tuple[str, ...] | int

    def value(self, seed: int) -> str:
        """Draw a value."""
        if isinstance(self.values, int):
            least = 10 ** (self.values - 1)
            return str(least + draw(seed, self.stem, 9 * least))
        return self.values[draw(seed, self.stem, len(self.values))]


_INSTRUMENTS = ("flute", "cello", "trumpet", "harp", "piano", "guitar", "drum", "violin", "clarinet", "banjo")
_WORDS = ("dolphin", "hammer", "velvet", "walnut", "copper", "jungle", "rocket", "pepper", "marble", "falcon")
_FRUITS = ("mango", "cherry", "banana", "lemon", "peach", "coconut", "melon", "apricot", "orange", "pear")
_COLOURS = ("purple", "yellow", "scarlet", "orange", "green", "silver", "violet", "brown", "golden", "pink")
_TOWNS = ("Lisbon", "Vienna", "Cairo", "Oslo", "Havana", "Naples", "Athens", "Boston", "Dublin", "Prague")
_ANIMALS = ("camel", "parrot", "donkey", "tiger", "monkey", "peacock", "tortoise", "elephant", "goat", "zebra")

FORMS = (
    Form("What is the special magic number for lanterns?", "The special magic number for lanterns is:", 5),
    Form("What is the telephone number of the bakery?", "The telephone number of the bakery is", 6),
    Form("What is the password of the northern gate?", "The password of the northern gate is", _WORDS),
    Form("What is the code of the iron safe?", "The code of the iron safe is", 5),
    Form("Which instrument does the doctor play?", "The instrument that the doctor plays is the", _INSTRUMENTS),
    Form("What is the favourite fruit of the gardener?", "The favourite fruit of the gardener is the", _FRUITS),
    Form("What is the colour of the new carriage?", "The colour of the new carriage is", _COLOURS),
    Form("What is the number of the winning lottery ticket?", "The number of the winning lottery ticket is", 4),
    Form("Which city is on the museum's oldest map?", "The city on the museum's oldest map is", _TOWNS),
    Form("Which animal is on the sign of the inn?", "The animal on the sign of the inn is the", _ANIMALS),
    Form("What is the passenger limit of the steamship?", "The passenger limit of the steamship is", 4),
    Form("What is the secret word of the chess club?", "The secret word of the chess club is", _WORDS[::-1]),
)  # fmt: skip

_HEAD = "Read the following text carefully. Some facts are hidden in it, and questions about them follow."
_NEEDLE = " {stem} {value}."
_QUESTION = "\n\nQuestion: {question}\nAnswer: {stem}"
_LEAST_PROSE = 8
"""Tokens of prose per fact without which facts would not be hidden."""


def build_needles(
    encode: Encode,
    *,
    tokens: int = 4096,
    facts: int = 8,
    seed: int = 0,
    text: str = "emma",
    start_ids: tuple[int, ...] = (),
) -> Quiz:
    """Build a document of exactly ``tokens`` tokens in which facts are hidden.

    Fact ``i`` of ``n`` stands at the sentence end nearest to ``(i + 1/2) / n`` of the prose. A document longer than the
    text goes through the text again.

    Args:
        encode: The model's tokenizer.
        tokens: Tokens of the document.
        facts: How many facts are hidden, at most one of each form.
        seed: Chooses the facts, and the paragraph at which the prose begins.
        text: Name of the prose.
        start_ids: Ids that the model wants before everything, such as a begin-of-text token.

    Returns:
        The document and one question per fact, in order of depth.

    Raises:
        ConfigError: If ``facts`` is out of range, or they do not fit into ``tokens``.
    """
    check_least("tokens", tokens, 1, "give the length of a prompt, e.g. 4096")
    if type(facts) is not int or not 1 <= facts <= len(FORMS):
        raise ConfigError(must_be("facts", f"1 to {len(FORMS)}", facts, "hide that many"))
    order = shuffled(seed, "forms", tuple(form.stem for form in FORMS))[:facts]
    forms = sorted((form for form in FORMS if form.stem in order), key=lambda form: order.index(form.stem))
    values = [form.value(seed) for form in forms]
    head = [*start_ids, *encode(_HEAD)]
    needles = [encode(_NEEDLE.format(stem=form.stem, value=value)) for form, value in zip(forms, values, strict=True)]
    prose = tokens - len(head) - sum(map(len, needles))
    if prose < _LEAST_PROSE * facts:
        least = tokens - prose + _LEAST_PROSE * facts
        raise ConfigError(
            must_be("tokens", f"at least {least} to hide {facts} facts", tokens, "raise it, or hide fewer")
        )
    pieces = _prose(encode, load_text(text), seed, prose)
    places = _places(pieces, facts)
    context, questions = head, []
    for index, piece in enumerate([[], *pieces]):
        context.extend(piece)
        for form, value, needle, place in zip(forms, values, needles, places, strict=True):
            if place == index:
                asked = _QUESTION.format(question=form.question, stem=form.stem)
                questions.append(Question(text=asked, expected=value, depth=len(context) / tokens))
                context.extend(needle)
    return Quiz(task="needles", context=tuple(context), questions=tuple(questions))


def _prose(encode: Encode, text: str, seed: int, tokens: int) -> list[list[int]]:
    """Cut exactly ``tokens`` tokens of sentences out of a text; the last sentence may break off."""
    found = sentences(text)
    starts = [index for index, sentence in enumerate(found) if sentence.startswith("\n")]
    start = starts[draw(seed, "start", len(starts))]
    pieces: list[list[int]] = []
    left = tokens
    for sentence in cycle([*found[start:], *found[:start]]):
        if left <= 0:
            break
        pieces.append(encode(sentence)[:left])
        left -= len(pieces[-1])
    return pieces


def _places(pieces: list[list[int]], facts: int) -> list[int]:
    """Say after how many sentences each fact stands; never after the last, which may be broken off."""
    ends = [0]
    for piece in pieces[:-1]:
        ends.append(ends[-1] + len(piece))
    total = ends[-1] + len(pieces[-1])
    wanted = [(fact + 0.5) / facts * total for fact in range(facts)]
    return [min(range(len(ends)), key=lambda index: abs(ends[index] - target)) for target in wanted]
