"""What reads the pages: it notices when a page says what is not so."""

from pathlib import Path

import pytest

from ..docs_examples import Reader, blocks  # noqa: TID252  # the tests are no package that could be named


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACE", str(tmp_path))  # put back in the end, as is the folder


def read(text: str) -> Reader:
    """Do what a page says."""
    Path("page.md").write_text(text)
    reader = Reader(changes=[("my-name", "another")])
    reader.read(blocks(str(Path("page.md").absolute())))
    return reader


def commands(code: str, before: str = "") -> str:
    return f"{before}\n\n```console\n{code}\n```\n"


def output(text: str) -> str:
    return f"\n```output\n{text}\n```\n"


def test_commands_that_fail_are_noticed() -> None:
    with pytest.raises(AssertionError, match=r"page\.md:4 \(console\) ended with 1"):
        read(commands("false\necho on"))
    with pytest.raises(AssertionError, match="ended with 1"):
        read(commands("false | cat"))
    with pytest.raises(AssertionError, match="unbound"):
        read(commands("echo $NOT_THERE"))


def test_a_page_says_with_which_code_commands_end() -> None:
    read(commands("exit 3", "<!-- exit 3 -->"))
    with pytest.raises(AssertionError, match="ended with 0"):
        read(commands("true", "<!-- exit 3 -->"))


def test_variables_and_the_folder_hold_for_later_blocks() -> None:
    names = read(
        commands("mkdir inner\ncd inner\nexport PLACE='a b'")
        + commands('[ "$(basename "$PWD") $PLACE" = "inner a b" ]')
        + "```python\nimport os\nfound = os.environ['PLACE'], os.path.basename(os.getcwd())\n```\n"
    ).names
    assert names["found"] == ("a b", "inner")


def test_python_blocks_share_names_and_may_await() -> None:
    page = (
        "```python\nimport asyncio\ntask = asyncio.create_task(asyncio.sleep(0, 7))\n```\n\n```python\nfound = await task\n```\n"
    )
    assert read(page).names["found"] == 7
    with pytest.raises(ZeroDivisionError):
        read("```python\n1 / 0\n```\n")


def test_a_whole_program_is_run_as_one() -> None:
    program = "```python\nimport asyncio\n\n\nasync def main():\n    print('ran')\n\n\nasyncio.run(main())\n```\n"
    assert read(program + output("ran")).printed == "ran\n"


def test_a_block_with_a_title_is_a_file() -> None:
    assert read('```toml title="here/a.toml"\nkey = 1\n```\n' + commands("cat here/a.toml")).printed == "key = 1\n"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("one two", "one   two"),
        ("made 0123456789abcdef0123456789abcdef in 0.25 s", "made fedcba9876543210fedcba9876543210 in 1.5 s"),
        ("at 2026-11-30T02:19:03Z", "at 2025-01-01T00:00:00Z"),
        ("a long line", "a ... line"),
        ("another", "my-name"),
        ("first\nsecond\nthird", "first\n..."),
        ("first\nsecond\nthird", "...\nthird"),
    ],
)
def test_output_may_differ_where_it_does_each_time(printed: str, shown: str) -> None:
    read(commands(f"printf '{printed}\\n'") + output(shown))


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("3 files", "4 files"),
        ("first\nsecond", "first"),
        ("first\nsecond", "second\nfirst"),
        ("made abc", "made abd"),
        ("", "more"),
    ],
)
def test_other_output_is_noticed(printed: str, shown: str) -> None:
    with pytest.raises(AssertionError, match="but it was"):
        read(commands(f"printf '{printed}\\n'") + output(shown))


def test_blocks_without_a_fence_are_seen() -> None:
    Path("page.md").write_text("text\n\n    indented\n\n- a point\n\n  ```\n  none\n  ```\n")
    assert [block.language for block in blocks(str(Path("page.md").absolute()))] == ["indented", ""]
