"""Small files in the form of RULER's sources, and a tokenizer that any text can be counted with."""

from __future__ import annotations

import json
import re
from pathlib import Path

_SUBJECTS = (
    "the river",
    "a teacher",
    "the old mill",
    "my neighbour",
    "the long winter",
    "her letter",
    "the town clerk",
)
_VERBS = ("changed", "remembered", "crossed", "built", "forgot", "painted", "sold", "watched")


def count_tokens(text: str) -> int:
    """Words and signs; parts add up, so a length can be checked by hand."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def essays() -> str:
    return "  \n".join(
        f"In year {n} {_SUBJECTS[n % 7]} {_VERBS[n % 8]} {_SUBJECTS[(n * 3 + 1) % 7]}." for n in range(1000, 1400)
    )


def squad(articles: int = 6, paragraphs: int = 5) -> dict[str, object]:
    return {
        "version": "v2.0",
        "data": [
            {
                "title": f"Article {a}",
                "paragraphs": [
                    {
                        "context": f"Paragraph {p} of article {a}: the code of hall {a}-{p} is K{a}{p}Q. "
                        + "It rained. " * 9,
                        "qas": [
                            {
                                "question": f"What is the code of hall {a}-{p}?",
                                "id": f"{a}.{p}",
                                "answers": [{"text": f"K{a}{p}Q"}, {"text": f"K{a}{p}Q"}, {"text": f"code K{a}{p}Q"}],
                                "is_impossible": False,
                            },
                            {"question": "Why?", "id": "no", "answers": [], "is_impossible": True},
                        ],
                    }
                    for p in range(paragraphs)
                ],
            }
            for a in range(articles)
        ],
    }


def hotpotqa(count: int = 20) -> list[dict[str, object]]:
    return [
        {
            "_id": str(n),
            "question": f"Where was the maker of engine {n} born?",
            "answer": f"Town{n}",
            "context": [
                [f"Engine {n}", [f"Engine {n} was made by Maker{n}.", " It ran well."]],
                [f"Maker{n}", [f"Maker{n} was born in Town{n}.", " She liked trains."]],
            ],
        }
        for n in range(count)
    ]


def write(folder: Path) -> Path:
    """Write the three files somewhere below a folder."""
    inside = folder / "data" / "json"
    inside.mkdir(parents=True)
    (inside / "PaulGrahamEssays.json").write_text(json.dumps({"text": essays()}), encoding="utf-8")
    (inside / "squad.json").write_text(json.dumps(squad()), encoding="utf-8")
    (inside / "hotpotqa.json").write_text(json.dumps(hotpotqa()), encoding="utf-8")
    return folder
