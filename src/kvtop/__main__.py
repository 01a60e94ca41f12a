"""The `kvtop` command: answers `--version` at once, and loads the command line for anything else."""

import sys

from kvtop import __version__


def main() -> None:
    """Run the command line with this process's arguments."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        sys.stdout.write(f"kvtop {__version__}\n")
        return
    from kvtop.console.cli import main as run  # noqa: PLC0415 - `--version` must not wait for this

    run()


if __name__ == "__main__":
    main()
