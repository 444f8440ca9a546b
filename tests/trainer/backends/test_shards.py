"""What a rank's file says of the parts that it holds."""

import pytest

from abrun.trainer.backends.shards import METADATA, Piece, ShardSpec, specs_from_metadata, specs_to_metadata

HELD = ShardSpec.from_piece("weights/a", Piece((4, 2), (slice(0, 2), slice(0, 2))))


def test_what_is_written_is_read() -> None:
    assert specs_from_metadata(specs_to_metadata({"a": HELD}, ["a"])) == {"a": HELD}


@pytest.mark.parametrize("content", ['{"a": [[4, 2], [[0, 2], [0, 2]]]}', "[]", "{", '{"a": {"pieces": 3}}'])
def test_what_another_version_wrote_is_refused_as_that(content: str) -> None:
    with pytest.raises(ValueError, match="version of abrun"):
        specs_from_metadata({METADATA: content})
