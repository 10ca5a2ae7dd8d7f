"""`export` and `import`: files, pipes, formats by name, exit codes, signals."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from .conftest import Run, spawn


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


def test_a_checkpoint_goes_out_and_comes_back(made: Run, tmp_path: Path) -> None:
    said = made("export", "--thread", "t", "-o", str(tmp_path / "x.tar.zst")).text
    assert "application/zstd" in said
    assert f"digest  sha256:{hashlib.sha256((tmp_path / 'x.tar.zst').read_bytes()).hexdigest()}" in said
    back = made("import", str(tmp_path / "x.tar.zst"), "--thread", "back", "--label", "L", "--json").json
    shown = made("show", "two", "--json").json
    assert (back["message_type"], back["label"], back["content_id"]) == ("import", "L", shown["content_id"])
    assert "nothing new" in made("import", str(tmp_path / "x.tar.zst"), "-t", "back", "--skip-unchanged").text


def test_stdout_takes_the_archive_and_nothing_else(made: Run) -> None:
    done = made("export", "label:first", "--thread", "t", "-v")
    assert names(done.stdout) == [".", "./link", "./notes.txt", "./src", "./src/main.py"]
    assert "diff id" in done.stderr
    assert made("export", "one", "-o", "-").stderr == ""
    assert json.loads(made("export", "one", "--json").stderr)["files"] == 2


@pytest.mark.parametrize(
    ("name", "magic"), [("x.tar", b"./"), ("x.tgz", b"\x1f\x8b"), ("x.tar.gz", b"\x1f\x8b"), ("x.tar.zst", b"\x28\xb5\x2f\xfd")]
)
def test_the_name_of_a_file_says_its_format(made: Run, tmp_path: Path, name: str, magic: bytes) -> None:
    made("export", "one", "-o", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_layer_has_its_digests(made: Run, tmp_path: Path) -> None:
    path = tmp_path / "layer"
    options = ("--format", "oci-layer", "--prefix", "app", "--paths", "src", "--json")
    report = made("export", "one", "-o", str(path), *options).json
    assert report["media_type"] == "application/vnd.oci.image.layer.v1.tar+gzip"
    assert report["digest"] == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert names(path.read_bytes()) == ["app", "app/src", "app/src/main.py"]


def test_what_an_import_leaves_out_is_told(made: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    subprocess.run(["tar", "-cf", tmp_path / "x.tar", "-C", tmp_path, "fifo"], check=True)
    assert "UNSUPPORTED_ENTRY" in made("import", str(tmp_path / "x.tar"), "--thread", "u", code=1).stderr
    assert "left out" in made("import", str(tmp_path / "x.tar"), "-t", "u", "--on-unsupported", "skip", code=3).text


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (("export", "latest"), 2, "INVALID_REQUEST"),
        (("export", "nonesuch"), 1, "MISSING_CHECKPOINT"),
        (("export", "one", "--format", "zip"), 2, "INVALID_REQUEST"),
        (("export", "one", "-o", "/nonesuch/x"), 1, "INVALID_REQUEST"),
        (("import", "/nonesuch", "--thread", "u"), 1, "INVALID_REQUEST"),
        (("import", "/dev/null", "--thread", "u"), 1, "INVALID_ARCHIVE"),
        (("import", "/dev/null", "--thread", "u", "--max-unpacked-bytes", "0"), 2, "INVALID_REQUEST"),
        (("import", "/dev/null", "--thread", "u", "--on-unsupported", "maybe"), 2, "INVALID_REQUEST"),
    ],
)
def test_failures_have_a_code(made: Run, args: tuple[str, ...], code: int, error: str) -> None:
    done = made(*args, "--json", code=code)
    assert (done.stdout, done.error["code"]) == (b"", error)


def test_help_has_examples(run: Run) -> None:
    for name in ("export", "import"):
        assert f"snapcore {name}" in run(name, "--help").text.partition("Examples:")[2]


def test_a_pipe_leads_from_one_command_to_the_other(made: Run) -> None:
    command = [sys.executable, "-m", "snapcore.cli"]
    with subprocess.Popen([*command, "export", "two"], stdout=subprocess.PIPE) as out:
        done = subprocess.run([*command, "import", "-", "--thread", "piped"], stdin=out.stdout, capture_output=True, check=False)
    assert (out.returncode, done.returncode) == (0, 0), done.stderr
    contents = {thread: made("show", "latest", "--thread", thread, "--json").json["content_id"] for thread in ("t", "piped")}
    assert contents["t"] == contents["piped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_export_whose_reader_stands_still(run: Run, tree: Path, number: signal.Signals) -> None:
    (tree / "large").write_bytes(os.urandom(4 << 20))
    run("init")
    run("capture", str(tree), "--thread", "t", "--id", "one")
    process = spawn("export", "one")
    try:
        assert process.stdout is not None
        assert len(process.stdout.read(512)) == 512
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_goes_away_is_no_noise(run: Run, tree: Path) -> None:
    (tree / "large").write_bytes(os.urandom(4 << 20))
    run("init")
    run("capture", str(tree), "--thread", "t", "--id", "one")
    process = spawn("export", "one")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(512)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
