"""The typer application: commands, ``--version``, and the one-line form of errors."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvfold._version import __version__
from kvfold.cli import bench, chat, demo, env, eval, generate, inspect, methods, plan, report, study
from kvfold.cli._streams import abandon_stdout, prepare_streams
from kvfold.core.errors import KvfoldError

_Mistake: Any = typer.BadParameter.mro()[2]
"""What is raised for every usage mistake; older versions of typer have no name of their own for it."""


def _refuse(message: str) -> int:
    print(f"kvfold: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _given(error: BaseException) -> str:
    """Name the value that was refused, which typer leaves out where pydantic checked it."""
    checked: Any = getattr(error.__cause__, "errors", None)
    return "" if checked is None else f", got {checked()[0]['input']!r}"


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell what torch raises on a GPU and on a CPU, without importing it."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


class OneLineErrors(TyperGroup):
    """A command group that tells a user's mistake in one line on stderr and exits with status 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; see typer for the arguments."""
        standalone = extra.pop("standalone_mode", True)
        prepare_streams()
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except KvfoldError as error:
            status = _refuse(str(error))
        except _Mistake as error:
            status = _refuse(f"{error.format_message().rstrip('.')}{_given(error)}; see kvfold --help")
        except typer.Abort:
            status = 130
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = (str(error).strip().splitlines() or ["no room"])[0]
            status = _refuse(f"memory ran out: {reason}; take fewer tokens, a smaller --chunk-size or another --dtype")
        except OSError as error:
            abandon_stdout()
            if error.errno == errno.EPIPE:
                status = 1
            else:
                place = "input or output" if error.filename is None else repr(str(error.filename))
                status = _refuse(f"{place} failed: {error.strerror or error}; check the place and the room on it")
        if standalone:
            sys.exit(status or 0)
        return status


app = typer.Typer(
    name="kvfold",
    cls=OneLineErrors,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("eval")(eval.command)
app.command("inspect")(inspect.command)
app.add_typer(study.app, name="study")
app.add_typer(bench.app, name="bench")
app.command("plan")(plan.command)
app.command("report")(report.command)
app.command("methods")(methods.command)
app.command("env")(env.command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvfold {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Smaller KV caches for language models, by published training-free methods.

    [bold]Examples[/bold]

      kvfold generate MODEL --file report.txt --question "What changed?" --policy 'manifoldkv(keep=0.25)'

      kvfold chat MODEL --policy 'keydiff(keep=1024)'

      kvfold methods

      kvfold env --json
    """
    del version
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
