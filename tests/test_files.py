"""Which files a run reads, on real folders, links and git repositories."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precisionlint import files

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*names: str, text: str = "") -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def git(*arguments: str, cwd: str = ".") -> str:
    command = ["git", "-c", "core.excludesFile=", *arguments]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def names(*paths: str) -> list[str]:
    return [display for display, _ in files.find(paths, kinds=files.Kinds((".py", *files.CONFIGURATIONS)))[0]]


def errors(*paths: str) -> list[tuple[str, str]]:
    return [(error.path, error.message) for error in files.find(paths)[1]]


def test_a_folder_gives_its_python_files_sorted_and_nothing_else():
    write("p/b.py", "p/a.py", "p/sub/c.py", "p/notes.txt", "p/script")
    assert names("p") == ["p/a.py", "p/b.py", "p/sub/c.py"]
    assert files.find(["p"])[0][0][1] == Path("p/a.py")


def test_a_folder_gives_its_configurations_too_but_not_its_data():
    write("p/ds_config.json", "p/run.yaml", "p/run.yml", "p/.hidden.json", "p/notes.toml")
    write("p/large.json", text=" " * (files.LARGEST + 1))
    write(*(f"p/annotations/{n}.json" for n in range(files.MOST + 1)), "p/annotations/loader.py")
    assert names("p") == ["p/annotations/loader.py", "p/ds_config.json", "p/run.yaml", "p/run.yml"]
    assert names("p/large.json") == ["p/large.json"]
    assert len(names("p/annotations", "p/annotations/0.json")) == 2


def test_a_link_to_nothing_is_no_configuration():
    Path("p").mkdir()
    Path("p/dead.json").symlink_to("nothing")
    assert (names("p"), errors("p")) == ([], [])
    assert errors("p/dead.json") == [("p/dead.json", "link to nothing")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("p", "p/a.py"),
        ("p/", "p/a.py"),
        ("./p", "./p/a.py"),
        ("./p//", "./p/a.py"),
        ("p/a.py", "p/a.py"),
        ("./p/a.py", "./p/a.py"),
        ("p/../p", "p/../p/a.py"),
    ],
)
def test_paths_are_as_given(given: str, expected: str):
    write("p/a.py")
    assert names(given) == [expected]


def test_the_current_folder_leaves_no_prefix():
    write("a.py", "p/b.py")
    assert names(".") == names("./") == ["a.py", "p/b.py"]


def test_an_absolute_path_stays_absolute(tmp_path: Path):
    write("p/a.py")
    assert names(str(tmp_path / "p")) == [f"{tmp_path.as_posix()}/p/a.py"]


@pytest.mark.parametrize(
    "skipped",
    [
        "build/a.py",
        "dist/a.py",
        "node_modules/a.py",
        "__pycache__/a.py",
        "lib/site-packages/a.py",
        "thing.egg-info/a.py",
        ".hidden/a.py",
        ".#locked.py",
        "._fork.py",
    ],
)
def test_what_others_wrote_and_tools_made_is_skipped_unless_it_is_named(skipped: str):
    write(f"p/{skipped}", "p/own.py")
    assert names("p") == ["p/own.py"]
    assert names(f"p/{skipped}") == [f"p/{skipped}"]
    if "/" in skipped:
        folder = f"p/{skipped}".rpartition("/")[0]
        assert names(folder) == [f"p/{skipped}"]


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_environments_are_known_by_what_they_hold_not_by_their_name(mark: str):
    write("own.py", "venv/own.py", f"myenv/{mark}", "myenv/lib/a.py")
    assert names(".") == ["own.py", "venv/own.py"]
    assert names("myenv") == ["myenv/lib/a.py"]


def test_a_named_file_is_read_whatever_its_suffix():
    write("train")
    assert names("train") == ["train"]


def test_one_file_reached_in_several_ways_is_read_once_under_its_shortest_name():
    write("p/sub/a.py")
    os.symlink("sub/a.py", "p/link.py")
    assert names("p/sub/a.py", "p", "./p/sub/a.py", "p/sub", "p/link.py") == ["p/link.py"]


def test_the_order_of_arguments_does_not_matter():
    write("p/a.py", "q/b.py", "c.py")
    arguments = ["q", "./p", "p", "c.py", "gone", "also gone"]
    assert files.find(arguments) == files.find(arguments[::-1])
    assert errors(*arguments) == [("also gone", "no such file or folder"), ("gone", "no such file or folder")]


def test_a_dead_link_is_an_error_where_it_is_named():
    write("p/a.py")
    os.symlink("nowhere.py", "p/dead.py")
    os.symlink("a.py/below.py", "p/deeper.py")
    assert errors("p/dead.py") == [("p/dead.py", "link to nothing")]
    assert errors("p/deeper.py") == [("p/deeper.py", "not a directory")]
    assert errors("p") == []
    assert names("p") == ["p/a.py"]


def test_links_in_circles_end():
    write("p/a.py")
    os.symlink("self.py", "p/self.py")
    os.symlink("..", "p/up")
    os.symlink(".", "p/package.py")
    assert names("p") == ["p/a.py"]
    assert errors("p/self.py") == [("p/self.py", "too many levels of symbolic links")]
    assert errors("p") == []


def test_a_link_to_a_folder_is_followed_where_it_is_named_only():
    write("real/a.py")
    Path("p").mkdir()
    os.symlink("../real", "p/link")
    assert names("p") == []
    assert names("p/link") == ["p/link/a.py"]


def test_what_is_no_regular_file_is_never_opened_and_an_error_where_it_is_named():
    write("p/a.py")
    os.mkfifo("p/pipe.py")
    os.symlink("pipe.py", "p/to_pipe.py")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("p/socket.py")
        for name in ("p/pipe.py", "p/to_pipe.py", "p/socket.py"):
            assert errors(name) == [(name, "not a regular file")]
        assert (names("p"), errors("p")) == (["p/a.py"], [])


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user who can be refused")
def test_a_link_into_a_folder_that_may_not_be_entered_is_an_error():
    write("closed/a.py")
    Path("p").mkdir()
    os.symlink("../closed/a.py", "p/a.py")
    Path("closed").chmod(0)
    try:
        assert errors("p") == [("p/a.py", "permission denied")]
    finally:
        Path("closed").chmod(0o755)


@pytest.mark.parametrize("given", ["", "a.py/x", "x" * 5000])
def test_an_impossible_path_is_one_error(given: str):
    write("a.py")
    assert [path for path, _ in errors(given)] == [given]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user who can be refused")
def test_a_folder_that_may_not_be_read_is_one_error():
    write("p/closed/a.py", "p/b.py")
    Path("p/closed").chmod(0)
    try:
        assert names("p") == ["p/b.py"]
        assert errors("p") == [("p/closed", "permission denied")]
    finally:
        Path("p/closed").chmod(0o755)


def test_a_folder_1500_levels_deep_is_walked(inside: Path):
    depth = 1500
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    write("a.py")
    os.chdir(inside)
    assert names(".") == ["d/" * depth + "a.py"]
    os.chdir("d/" * depth)
    os.remove("a.py")
    for _ in range(depth):  # by hand: shutil.rmtree would recurse too deep
        os.chdir("..")
        os.rmdir("d")


@needs_git
class TestGit:
    @pytest.fixture(autouse=True)
    def repository(self, inside: Path) -> None:
        git("init", "-q")

    def test_what_git_ignores_is_skipped_unless_it_is_named(self):
        write("own.py", "out/a.py", "gen_x.py")
        write(".gitignore", text="out/\ngen_*.py\n")
        assert names(".") == ["own.py"]
        assert names("gen_x.py") == ["gen_x.py"]
        assert names("out") == ["out/a.py"]

    def test_ignore_files_count_from_the_root_of_the_repository_down(self):
        write("p/q/a.py", "p/q/b.py", "p/q/c.py", "p/q/d.py")
        write(".gitignore", text="/p/q/a.py\nb.py\n")
        write("p/.gitignore", text="!b.py\n/q/c.py\n")
        write("p/q/.gitignore", text="d.py\n")
        assert names("p/q") == ["p/q/b.py"]

    def test_the_repositorys_own_exclude_file_counts(self):
        write("a.py", "b.py")
        write(".git/info/exclude", text="b.py\n")
        assert names(".") == ["a.py"]

    def test_a_repository_within_knows_its_own_ignores_only(self):
        write("inner/a.py", "inner/b.py", "outer_a.py")
        write(".gitignore", text="*a.py\n")
        write("inner/.gitignore", text="b.py\n")
        git("init", "-q", cwd="inner")
        assert names(".") == names("inner") == ["inner/a.py"]

    def test_a_worktree_obeys_the_exclude_file_of_its_repository(self):
        write("a.py", "b.py")
        git("add", ".")
        git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m")
        git("worktree", "add", "-q", "tree")
        write(".git/info/exclude", text="b.py\n")
        assert names("tree") == ["tree/a.py"]

    def test_lines_that_are_no_patterns_do_no_harm(self):
        write("a.py", "b.py")
        Path(".gitignore").write_bytes(b"!\n\\\n\xff\xfe\n\nb.py\r\n# a.py\n")
        assert names(".") == ["a.py"]

    def test_a_link_into_the_repository_obeys_its_ignores(self, tmp_path_factory: pytest.TempPathFactory):
        write("p/a.py", "p/b.py")
        write(".gitignore", text="b.py\n")
        link = tmp_path_factory.mktemp("elsewhere") / "link"
        link.symlink_to(Path("p").resolve())
        assert names(str(link)) == [f"{link.as_posix()}/a.py"]


def test_without_a_repository_ignore_files_in_the_folder_still_count():
    write("p/a.py", "p/b.py")
    write("p/.gitignore", text="b.py\n")
    assert names("p") == ["p/a.py"]


GLOBS = r"a b ab a] a- * a* ? ** *** **a ! # \a \! \# [ab] [a-b] [b-a] [!a] [^b-z] []] [!]a] [\]] [\a-b] [] [a"
GLOB = st.sampled_from([*GLOBS.split(), "", "a ", r"a\ ", "a  b", "\\"])
PATTERN = st.builds(
    lambda negated, anchored, parts, end: f"{negated}{anchored}{'/'.join(parts)}{end}",
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(GLOB, min_size=1, max_size=3),
    st.sampled_from(["", "", "/", ".py", "*.py", "/*", " ", "\r"]),
)
TREE = [
    f"{folder}{name}.py"
    for folder in ("", "a/", "b/", "a/b/", "ab/", "a/b/a/", "]/a/", "!/", "#/a/", "a /", "b/a  b/", "a-/")
    for name in ("a", "b", "ab", "]", "#a", "!a", "a ")
]


@needs_git
def test_it_agrees_with_git_on_any_ignore_files():
    git("init", "-q")
    write(*TREE)

    @settings(max_examples=200, deadline=None)
    @given(top=st.lists(PATTERN, max_size=4), nested=st.lists(PATTERN, max_size=3))
    def agrees(top: list[str], nested: list[str]) -> None:
        write(".gitignore", text="\n".join(top))
        write("a/.gitignore", text="\n".join(nested))
        listed = git("ls-files", "-z", "--others", "--exclude-standard").split("\0")
        assert names(".") == sorted(name for name in listed if name.endswith(".py"))

    agrees()
