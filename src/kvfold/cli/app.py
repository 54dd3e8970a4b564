"""The typer application: commands, ``--version``, and the one-line form of errors."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvfold._version import __version__
from kvfold.cli import bench, chat, demo, env, eval, generate, inspect, methods, plan, report, study
from kvfold.core.errors import KvfoldError


def _refuse(message: str) -> int:
    print(f"kvfold: {' '.join(message.split())}", file=sys.stderr)
    return 2


class OneLineErrors(TyperGroup):
    """A command group that tells a user's mistake in one line on stderr and exits with status 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; see typer for the arguments."""
        standalone = extra.pop("standalone_mode", True)
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except KvfoldError as error:
            status = _refuse(str(error))
        except typer.TyperException as error:
            status = _refuse(f"{error.format_message().rstrip('.')}; see kvfold --help")
        except typer.Abort:
            status = 130
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
