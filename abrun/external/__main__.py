"""`python -m abrun.external RUN_DIR`: one run of a foreign trainer, started by a launcher or by hand."""

import sys
from pathlib import Path

from abrun.errors import AbrunError
from abrun.external.run import run
from abrun.processes.output import ignore_output_errors
from abrun.runs.launches import write_ending
from abrun.runs.rundir import RunDir


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.external RUN_DIR", file=sys.stderr)
        return 2
    directory = RunDir(Path(sys.argv[1]))
    try:
        return run(directory.path)
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)
        write_ending(directory, "external", directory.last_attempt, error.reason)
        return 2


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(main())
