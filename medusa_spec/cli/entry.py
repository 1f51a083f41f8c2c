"""Starts the command; turns what the user can mend into one message. Knows no command's work."""

import sys
from collections.abc import Sequence

from medusa_spec.errors import MedusaError

# 2, as for wrong usage: the caller can mend it.
USER_ERROR = 2
EXTRA = "pip install 'medusa-spec[cli]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `medusa-spec` with the arguments given (else the process's), and exit."""
    try:
        from medusa_spec.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        _fail(f"the command needs the package {error.name!r}, which is not installed: {EXTRA}")
    try:
        app(args=arguments if arguments is None else list(arguments), prog_name="medusa-spec")
    except MedusaError as error:
        _fail(str(error))
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again when it flushes.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that may not be written, a file that is in the way
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"medusa-spec: {message}", file=sys.stderr)
    sys.exit(USER_ERROR)
