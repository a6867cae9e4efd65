"""Subjects beside the timeline: how a file reaches their readers, and what a reader's failure costs."""

from pathlib import Path

from precisionlint.source.project import Project
from precisionlint.subjects import File, Subject


def test_a_file_is_wanted_by_its_name_and_a_word_of_each_group():
    subject = Subject("unused", (".py",), ((b"triton",), (b"tl.dot", b"tl.sum")))
    assert subject.wants("kernels.py", b"import triton\ntl.sum(x)")
    assert not subject.wants("kernels.py", b"import triton\n")
    assert not subject.wants("kernels.py", b"tl.dot(a, b)")
    assert not subject.wants("kernels.json", b"import triton\ntl.dot(a, b)")


def test_places_count_characters_where_ast_counts_bytes():
    source = "# \N{GREEK SMALL LETTER ALPHA}\r\nx = '\N{GREEK SMALL LETTER BETA}\N{GREEK SMALL LETTER GAMMA}' + y\r\n"
    file = File("a.py", Path("a.py"), b"\xef\xbb\xbf" + source.encode(), Project(Path.cwd()))
    name = file.syntax.body[0].value.right
    place = file.place(name)
    assert (place.path, place.line, place.column, place.end_line, place.end_column) == ("a.py", 2, 12, 2, 13)
    assert file.lines[1][place.column - 1 : place.end_column - 1] == "y"
