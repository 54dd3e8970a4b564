"""What a study writes: one record with everything needed to make its figures again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from kvfold._version import __version__
from kvfold.eval.study.explore import Exploration
from kvfold.eval.study.mass import MassFigures
from kvfold.eval.study.risk import RiskFigures
from kvfold.eval.study.summaries import SummaryFigures
from kvfold.hf.compat import versions
from kvfold.hf.load import Model
from kvfold.hf.models import fingerprint

Figures = Annotated[MassFigures | RiskFigures | SummaryFigures | Exploration, Field(discriminator="study")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StudySettings(_Strict):
    """What was read, and how.

    Attributes:
        text: Name of the text.
        digest: SHA-256 of the tokens that were read, as text.
        tokens: How many they are.
        chunk_size: Tokens per forward call.
    """

    text: str
    digest: str
    tokens: int
    chunk_size: int


class StudyRecord(_Strict):
    """A study.

    Attributes:
        model: As the user named it.
        fingerprint: Of config and weights.
        dtype: Of weights and cache; figures are computed in float32.
        device: Name of the device.
        versions: Of kvfold, torch and transformers.
        settings: What was read.
        figures: What was measured, and with which parameters.
    """

    schema_version: Literal[1] = 1
    model: str
    fingerprint: str
    dtype: str
    device: str
    versions: dict[str, str]
    settings: StudySettings
    figures: Figures


def make_record(model: Model, name: str, text: str, ids: Sequence[int], chunk_size: int, figures: Any) -> StudyRecord:
    """Put figures together with what they were made from.

    Args:
        model: The model.
        name: As the user named it.
        text: Name of the text.
        ids: Tokens that were read.
        chunk_size: Tokens per forward call.
        figures: Of one study.

    Returns:
        The record.
    """
    first = next(model.parameters())
    return StudyRecord(
        model=name,
        fingerprint=fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(first.device) if first.is_cuda else "cpu",
        versions={"kvfold": __version__, **versions()},
        settings=StudySettings(
            text=text,
            digest=hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest(),
            tokens=len(ids),
            chunk_size=chunk_size,
        ),
        figures=figures,
    )
