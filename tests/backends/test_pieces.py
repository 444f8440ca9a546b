"""What a rank's file says of the parts that it holds."""

import pytest

from abrun.backends.pieces import METADATA, Held, Piece, as_metadata, held_in

HELD = Held.one("weights/a", Piece((4, 2), (slice(0, 2), slice(0, 2))))


def test_what_is_written_is_read() -> None:
    assert held_in(as_metadata({"a": HELD}, ["a"])) == {"a": HELD}


@pytest.mark.parametrize("content", ['{"a": [[4, 2], [[0, 2], [0, 2]]]}', "[]", "{", '{"a": {"pieces": 3}}'])
def test_what_another_version_wrote_is_refused_as_that(content: str) -> None:
    with pytest.raises(ValueError, match="version of abrun"):
        held_in({METADATA: content})
