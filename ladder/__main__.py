"""The `ladder` command, also as `python -m ladder`."""

import sys


def main() -> int:
    """Run `ladder.cli.main`; an interrupt during the imports, too, gives one line."""
    try:
        from ladder.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
