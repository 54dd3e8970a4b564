"""The texts that RULER is built on, read from where the user has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvfold.core.errors import ConfigError, DataError, must_be

FILES = {"essays": "PaulGrahamEssays.json", "squad": "squad.json", "hotpotqa": "hotpotqa.json"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about documents.

    Attributes:
        question: The question.
        answers: Accepted answers.
        gold: Numbers of the documents that belong to it.
        related: Numbers of other documents of the same article, which stand in before foreign ones do.
    """

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """Documents, sorted and all different, and what is asked about them."""

    documents: tuple[str, ...]
    asked: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class RulerData:
    """A folder that holds RULER's source files, at any depth.

    The files are those that RULER's own scripts fetch: ``PaulGrahamEssays.json`` (``{"text": ...}``), ``squad.json``
    (SQuAD 2.0 dev) and ``hotpotqa.json`` (HotpotQA dev, distractor). None is part of this package: the essays are
    copyrighted, the questions share-alike.

    Attributes:
        folder: Where to look.
    """

    folder: str | Path

    def essays(self) -> str:
        """Read the essays, all of them as one text."""
        return _essays(self.find("essays"))

    def squad(self) -> Reading:
        """Read SQuAD; impossible questions are left out."""
        return _squad(self.find("squad"))

    def hotpotqa(self) -> Reading:
        """Read HotpotQA."""
        return _hotpotqa(self.find("hotpotqa"))

    def find(self, what: str) -> Path:
        """Find a file below the folder.

        Args:
            what: One of :data:`FILES`.

        Returns:
            Its path; the first in order if there are several.

        Raises:
            ConfigError: If there is no such folder, or no such file in it.
        """
        folder = Path(self.folder).expanduser()
        if not folder.is_dir():
            raise ConfigError(must_be("data", "a folder", str(self.folder), "give the one that holds RULER's files"))
        for path in sorted(folder.rglob(FILES[what])):
            return path
        fix = "fetch it with the scripts of github.com/NVIDIA/RULER, or give another folder"
        raise ConfigError(must_be("data", f"a folder with {FILES[what]} in it", str(self.folder), fix))


def load_json(path: Path) -> Any:
    """Read a JSON file.

    Args:
        path: The file.

    Returns:
        Its content.

    Raises:
        DataError: If it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} must be a JSON file: {error}") from error


@cache
def _essays(path: Path) -> str:
    content = load_json(path)
    if not (isinstance(content, Mapping) and isinstance(content.get("text"), str)):
        raise DataError(f"{path} must hold the essays as one text in the field 'text'")
    return str(content["text"])


@cache
def _squad(path: Path) -> Reading:
    content = load_json(path)
    try:
        articles = [article["paragraphs"] for article in content["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        number = {text: index for index, text in enumerate(documents)}
        asked = []
        for article in articles:
            own = dict.fromkeys(number[paragraph["context"]] for paragraph in article)
            for paragraph in article:
                gold = number[paragraph["context"]]
                related = tuple(index for index in own if index != gold)
                for question in paragraph["qas"]:
                    if not question.get("is_impossible", False):
                        answers = tuple(dict.fromkeys(answer["text"] for answer in question["answers"]))
                        asked.append(Asked(question["question"], answers, (gold,), related))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} must be SQuAD's file, data > paragraphs > context, qas: {error!r}") from error
    return Reading(tuple(documents), tuple(asked))


@cache
def _hotpotqa(path: Path) -> Reading:
    content = load_json(path)
    try:
        own = [tuple(f"{title}\n{''.join(lines)}" for title, lines in entry["context"]) for entry in content]
        documents = sorted({text for texts in own for text in texts})
        number = {text: index for index, text in enumerate(documents)}
        asked = [
            Asked(entry["question"], (entry["answer"],), tuple(dict.fromkeys(number[text] for text in texts)))
            for entry, texts in zip(content, own, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} must be HotpotQA's file, a list of question, answer, context: {error!r}") from error
    return Reading(tuple(documents), tuple(asked))
