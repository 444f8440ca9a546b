"""`python -m abrun.external RUN_DIR`: one run of a foreign trainer, started by a launcher or by hand."""

import sys
from pathlib import Path

from abrun.errors import AbrunError
from abrun.external.run import run
from abrun.processes.output import outlive_output


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m abrun.external RUN_DIR", file=sys.stderr)
        return 2
    try:
        return run(Path(sys.argv[1]))
    except AbrunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    outlive_output()
    sys.exit(main())
