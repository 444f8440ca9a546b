"""Record the golden corpus, or compare it with what the code does now."""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.golden.case import all_cases
from tests.golden.recorder import record
from tests.golden.snapshot import differences, write_recording


def recording_of(name: str) -> dict[str, str]:
    return record(all_cases()[name])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="Cases; default: all.")
    parser.add_argument("--allow-added", action="store_true", help="Accept keys that JSON has gained.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    asked = parser.parse_args()
    if unknown := set(asked.names) - all_cases().keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(all_cases())}")
    names = asked.names or [*all_cases()]
    num_differing = 0
    with ProcessPoolExecutor(asked.jobs) as pool:
        for name, recording in zip(names, pool.map(recording_of, names), strict=True):
            if asked.action == "record":
                write_recording(name, recording)
            elif lines := differences(name, recording, allow_added=asked.allow_added):
                num_differing += 1
                print(f"=== {name}", *lines, "", sep="\n")
    print(f"{len(names)} recorded" if asked.action == "record" else f"{num_differing} of {len(names)} differ")
    return 1 if num_differing else 0


if __name__ == "__main__":
    sys.exit(main())
