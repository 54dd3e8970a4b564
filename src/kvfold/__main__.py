"""``python -m kvfold``: the command line."""

from kvfold.cli.main import run

if __name__ == "__main__":
    run()
