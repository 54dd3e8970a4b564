"""Entry point of the ``kvfold`` console script."""

import sys


def run() -> None:
    """Run the command line, or say what it needs."""
    try:
        from kvfold.cli.app import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"kvfold: the command line needs {error.name}; pip install 'kvfold[cli,hf]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        # while it is loaded; later the application answers for it
        sys.exit(130)
