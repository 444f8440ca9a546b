"""The golden corpus: whatever the command line prints and writes of small experiments is what is recorded.

A change that is meant is recorded: `python -m tests.golden record`.
"""

import pytest

from tests.golden.case import all_cases
from tests.golden.recorder import record
from tests.golden.snapshot import differences

pytestmark = pytest.mark.usefixtures("trainer_installed")


@pytest.mark.parametrize("name", all_cases())
def test_the_recording_is_what_the_command_line_does(name: str) -> None:
    lines = differences(name, record(all_cases()[name]))
    assert not lines, "\n".join([f"{name} differs (python -m tests.golden record {name}):", *lines])
