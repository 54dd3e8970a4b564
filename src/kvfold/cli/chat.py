"""``kvfold chat``: many turns on one growing cache; each turn feeds only its own tokens."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvfold.cli import _options
from kvfold.cli._console import note, progress_bar, seconds, size, stderr
from kvfold.core.errors import ConfigError, KvfoldError

if TYPE_CHECKING:
    from kvfold.cli._answer import Answer
    from kvfold.cli._session import Session

HELP = """\
/stats       what the cache holds
/save PATH   write the cache to a file
/load PATH   go on from a saved cache
/reset       begin again with an empty cache
/help        this list
/quit        leave"""


def command(
    model: _options.Model,
    policy: _options.Policy = "dense",
    max_new_tokens: _options.MaxNewTokens = 256,
    chunk_size: _options.ChunkSize = 512,
    temperature: _options.Temperature = 0.0,
    seed: _options.Seed = 0,
    dtype: _options.Dtype = "auto",
    device: _options.Device = "auto",
    allow_download: _options.AllowDownload = False,
) -> None:
    r"""Talk to a model on one growing cache; one line is one turn, /help lists the commands.

    Ctrl-C ends an answer, Ctrl-D the conversation.

    [bold]Examples[/bold]

      kvfold chat MODEL --policy 'manifoldkv(keep=0.5, every=64)'

      kvfold chat model.gguf --policy 'keydiff(keep=1024)' --temperature 0.7

      printf 'Hello!\n/stats\n/save talk.kv\n' | kvfold chat MODEL
    """
    import kvfold
    from kvfold.cli._answer import Settings
    from kvfold.cli._prompt import next_turn, use_template
    from kvfold.cli._session import Session
    from kvfold.hf.load import load_model

    chosen = kvfold.policy(policy)
    note(f"loading {model}")
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, allow_download=allow_download)
    use_template(tokenizer, True)
    next_turn(tokenizer, ".")  # refuses a template that no cache can follow before anything is typed
    settings = Settings(max_new_tokens=max_new_tokens, chunk_size=chunk_size, temperature=temperature, seed=seed)
    session = Session(loaded, tokenizer, chosen, settings)
    for line in _lines():
        text = line.strip()
        if text == "/quit":
            break
        try:
            if text.startswith("/"):
                _obey(session, text)
            elif text:
                _turn(session, text)
        except KvfoldError as error:
            # One mistake does not end a conversation.
            stderr().print(f"kvfold: {error}", markup=False, soft_wrap=True)


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  (importing it gives input() editing and history)

    note("/help lists the commands")
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def _turn(session: Session, text: str) -> None:
    from kvfold.cli._prompt import first_turn
    from kvfold.cli._streams import check_text

    check_text("a turn", text)
    ids = _next(session, text) if session.seen_tokens else first_turn(session.tokenizer, text)

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    before = session.seen_tokens
    try:
        with progress_bar("reading") as progress, first_interrupt(sys.stdin.isatty()) as is_enough:
            answer = session.answer(ids, [], write, progress, is_enough)
    except KvfoldError:
        if session.seen_tokens != before:
            # refused so late that some layers have read the turn and others not
            session.reset()
            stderr().print("kvfold: the turn was read in part; the cache is empty again", markup=False, soft_wrap=True)
        raise
    write("\n")
    stderr().print(f"[dim]{_one_line(session, answer)}[/dim]", soft_wrap=True)


@contextmanager
def first_interrupt(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end an answer at its next token, so that the conversation is not lost; pressed again, it ends all.

    Args:
        wanted: Whether it shall; otherwise it ends all the first time.

    Yields:
        Tells whether it was pressed.
    """
    usual, pressed = signal.getsignal(signal.SIGINT), False

    def press(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, usual)

    if wanted:
        signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, usual)


def _next(session: Session, text: str) -> list[int]:
    """Ids that continue the cache, less the end mark if the model has already given one."""
    from kvfold.cli._prompt import next_turn

    ids = next_turn(session.tokenizer, text)
    return ids[1:] if session.ended and ids[0] in session.stop_ids else ids


def _one_line(session: Session, answer: Answer) -> str:
    held, dense = size(session.cache.nbytes), size(session.cache.dense_nbytes)
    times = f"ttft {seconds(answer.ttft)} · tpot {seconds(answer.tpot)}"
    return f"{answer.fed_tokens} in · {answer.new_tokens} out · KV {held} of {dense} · {times}"


def _obey(session: Session, text: str) -> None:
    """Carry out one slash command."""
    name, _, argument = text.partition(" ")
    path = argument.strip()
    if name in ("/save", "/load") and not path:
        raise ConfigError(f"{name} needs a path, got none; type e.g. {name} talk.kv")
    match name:
        case "/help":
            print(HELP, flush=True)
        case "/stats":
            _stats(session)
        case "/save":
            _save(session, path)
        case "/load":
            _load(session, path)
        case "/reset":
            session.reset()
            print("empty cache", flush=True)
        case _:
            raise ConfigError(f"a command must be one of /help's list, got {name}; type /help")


def _stats(session: Session) -> None:
    stats = session.cache.stats()
    saved = f" ({stats.compression_ratio:.1%} saved)" if stats.dense_nbytes else ""
    print(f"policy         {stats.policy}")
    print(f"seen tokens    {session.seen_tokens}")
    print(f"stored tokens  {stats.stored_min} to {stats.stored_max} per head")
    print(f"KV bytes       {size(stats.nbytes)} of {size(stats.dense_nbytes)}{saved}", flush=True)


def _save(session: Session, path: str) -> None:
    """Write the cache with its last answer complete, so that it needs nothing beside it."""
    from kvfold.cli._prompt import next_turn

    if not session.seen_tokens:
        raise ConfigError("/save needs a conversation, got an empty cache; say something first")
    end = next_turn(session.tokenizer, ".")[:1]
    closing = [] if session.ended or end[0] not in session.stop_ids else end
    session.feed([*session.pending, *closing])
    session.pending, session.ended = [], True
    session.cache.save(path)
    print(f"saved {session.seen_tokens} tokens, {size(session.cache.nbytes)}, to {path}", flush=True)


def _load(session: Session, path: str) -> None:
    import kvfold

    cache = kvfold.Cache.load(path, session.model)
    session.adopt(cache)
    print(f"loaded {session.seen_tokens} tokens, {size(cache.nbytes)}, from {path}", flush=True)
