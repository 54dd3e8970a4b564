"""What a run writes: one file of settings, one file per sample, each whole or absent."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvfold.core.errors import DataError

_Model = TypeVar("_Model", bound=BaseModel)

SCHEMA: Literal[2] = 2
"""Version of the records; another one is refused, never mixed in."""
PART = ".part"
"""Suffix of files that are being written."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSetting(_Strict):
    """A task of a run: its name, parameters and version."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    version: int = 1


class RunSettings(_Strict):
    """Everything that decides the records of a run.

    Attributes:
        model: As the user named it.
        fingerprint: Of config and weights.
        dtype: Of weights and cache.
        policies: As text; dense is always among them, as the reference of every comparison.
        tasks: What is asked.
        lengths: Tokens of context, question and answer prefix together.
        count: Samples per task and length.
        seed: Of the samples.
        query_aware: Whether a policy sees the question before it compresses; both may be asked for.
        max_new_tokens: Upper bound on answers, below the tasks' own if set.
        template: ``chat`` wraps prompts in the model's chat template.
        mode: ``stacked``: one dense prefill serves all policies of a sample and answers are decoded in batches, so
            there are no times; ``alone``: each policy fills and answers by itself, and is timed.
        chunk_size: Prompt tokens per forward call.
        versions: Of kvfold, torch and transformers.
        device: Name of the device.
    """

    schema_version: Literal[2] = SCHEMA
    model: str
    fingerprint: str
    dtype: str
    policies: tuple[str, ...]
    tasks: tuple[TaskSetting, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int
    query_aware: tuple[bool, ...]
    max_new_tokens: int | None
    template: Literal["none", "chat"]
    mode: Literal["stacked", "alone"]
    chunk_size: int | None
    versions: dict[str, str]
    device: str


class PolicyResult(_Strict):
    """One policy's answer to one sample.

    Attributes:
        policy: As text.
        output: What was generated; nothing where a text was scored.
        score: By the record's metric.
        nbytes: Bytes held after compression, before the question; in a conversation before the first one.
        dense_nbytes: Bytes of an uncompressed cache for the same tokens.
        stored_tokens: Mean rows held per compressed layer and KV head.
        rows_read: Rows read per decoded token as a share of the rows seen; equals the share stored for methods that
            evict.
        bytes_read: Bytes read per decoded token, summaries included, as a share of what dense would read: see
            :class:`kvfold.hf.retrieve.ReadShares`. Without a retriever, or where nothing was decoded, the share of the
            bytes of rows that is held. ``None`` in records that were made before it was measured.
        rows_scored: Clusters looked at per decoded token as a share of the rows seen; ``None`` without a retriever.
        prefill_s: Seconds to fill the cache and compress it, 0 in a later turn of a conversation; ``None`` where it was
            not measured alone.
        ttft_s: Seconds from the empty cache to the first answer token; from the question in a later turn of a
            conversation, whose cache is filled already.
        tpot_s: Seconds per further token.
        arrivals: For each token, the seconds to it from the start of ``ttft_s``, and how many characters of the output
            stand then. The token that ends the text is one of them.
        peak_nbytes: Peak of device memory over the weights, where the device counts it.
    """

    policy: str
    output: str
    score: float
    nbytes: int
    dense_nbytes: int
    stored_tokens: float
    rows_read: float
    bytes_read: float | None = None
    rows_scored: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    arrivals: tuple[tuple[float, int], ...] | None = None
    peak_nbytes: int | None = None


class SampleRecord(_Strict):
    """All policies' answers to one sample.

    Attributes:
        uid: Of the sample.
        task: Its task.
        length: Tokens that it was made for.
        index: Its number.
        query_aware: Whether policies saw the question; in a conversation the first one alone.
        prompt_tokens: Tokens that were compressed, and those of the question and the answer prefix.
        metric: How answers are scored: one of :func:`kvfold.eval.metrics.names`, from 0 to 1 and higher is better; or
            ``nll``, nats per token of a text, and lower is better.
        answers: Accepted or required strings, or the text that was scored.
        facts: Of the sample.
        results: By policy, in the order of the run.
    """

    schema_version: Literal[2] = SCHEMA
    uid: str
    task: str
    length: int
    index: int
    query_aware: bool
    prompt_tokens: int
    metric: str
    answers: tuple[str, ...]
    facts: dict[str, Any]
    results: tuple[PolicyResult, ...]


class RunFolder:
    """A run on disk: ``run.json`` and ``records/TASK/LENGTH[-aware]/INDEX.json``.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str | Path):
        """Name the folder; nothing is touched."""
        self.path = Path(path)

    def open(self, settings: RunSettings) -> None:
        """Begin a run, or go on with the same one.

        Args:
            settings: What is to be run.

        Raises:
            DataError: If the folder holds a run with other settings; the message names the first that differs.
        """
        if not _exists(self.path / "run.json"):
            if self.path.exists() and not self.path.is_dir():
                raise DataError(f"{str(self.path)!r} is a file; name a folder")
            # a run that was killed while it wrote its settings left a part of them and nothing else
            if self.path.exists() and any(entry.suffix != PART for entry in self.path.iterdir()):
                raise DataError(f"{str(self.path)!r} is not empty and holds no run; name another folder")
            self._write(self.path / "run.json", settings)
            return
        before = self.settings()
        for name in RunSettings.model_fields:
            old, new = getattr(before, name), getattr(settings, name)
            if old != new:
                raise DataError(
                    f"{str(self.path)!r} holds a run with {name}={_plain(old)}, asked for {_plain(new)}; use another "
                    "folder, or the same settings to resume"
                )

    def settings(self) -> RunSettings:
        """Read the settings.

        Returns:
            The settings.

        Raises:
            DataError: If there are none, or they are damaged or of another version.
        """
        return _read(self.path / "run.json", RunSettings)

    def record_path(self, task: str, length: int, query_aware: bool, index: int) -> Path:
        """Return where a sample's record lies; a slash in the name of a task makes no folder."""
        return (
            self.path
            / "records"
            / task.replace("/", "__")
            / f"{length}{'-aware' if query_aware else ''}"
            / f"{index:05d}.json"
        )

    def write(self, record: SampleRecord) -> None:
        """Write a record, whole or not at all."""
        self._write(self.record_path(record.task, record.length, record.query_aware, record.index), record)

    def read(self, path: Path) -> SampleRecord:
        """Read one record; raises :class:`DataError` as :meth:`records` does."""
        return _read(path, SampleRecord)

    def records(self) -> list[SampleRecord]:
        """Read all records, in order of task, length and index.

        Returns:
            The records.

        Raises:
            DataError: If one is damaged or of another version.
        """
        found = [_read(path, SampleRecord) for path in (self.path / "records").glob("*/*/*.json")]
        return sorted(found, key=lambda one: (one.task, one.length, one.query_aware, one.index))

    @staticmethod
    def _write(path: Path, value: BaseModel) -> None:
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PART}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            with part.open("x", encoding="utf-8", newline="\n") as file:
                file.write(value.model_dump_json(indent=1))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as error:
            raise _unwritable(path, error) from error
        finally:
            part.unlink(missing_ok=True)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or error
    return DataError(f"{str(path)!r} cannot be written: {reason}; free some room or name another folder")


def _plain(value: Any) -> str:
    """Write a setting for people: without names of classes."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_plain, value))})"
    return json.dumps(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)


def _read(path: Path, kind: type[_Model]) -> _Model:
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing; give the folder of a run made by kvfold eval")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("schema_version") != SCHEMA:
            version = found.get("schema_version") if isinstance(found, dict) else None
            raise DataError(f"{str(path)!r} has schema version {version}, this kvfold reads {SCHEMA}; run it again")
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(f"{str(path)!r} is damaged: {reason}; delete it and resume the run") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{str(path)!r} is damaged: {reason}; delete it and resume the run") from error
