"""Files are whole or not at all; a folder has one writer; JSON is checked field by field."""

import pytest
from pydantic import BaseModel

from kvalign.errors import UserError
from kvalign.files import checked, locked, read_json, write_json, write_whole


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write(partial):
        partial.write_text("half")
        raise RuntimeError("the stream writer failed")

    with pytest.raises(OSError, match="cannot write .*file: the stream writer failed"):
        write_whole(path, write)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    with locked(tmp_path / "out"), pytest.raises(UserError, match="another run is writing to"):
        locked(tmp_path / "out").__enter__()
    with locked(tmp_path / "out"):
        pass


def test_json_is_read_as_it_was_written_and_checked_by_field(tmp_path):
    class Point(BaseModel):
        x: int
        y: int

    path = tmp_path / "point.json"
    write_json(path, {"x": 1, "y": 2})
    assert checked(Point, read_json(path), path) == Point(x=1, y=2)
    write_json(path, {"x": "left"})
    with pytest.raises(UserError, match=r"point\.json: x: .*got 'left'; y: Field required$"):
        checked(Point, read_json(path), path)
    write_json(path, [])
    with pytest.raises(UserError, match=r"point\.json must hold a JSON object, found list"):
        read_json(path)
