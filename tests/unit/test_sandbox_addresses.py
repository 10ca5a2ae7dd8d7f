"""Addresses of sandboxes behind a command, and of providers that other packages add."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import snapcore
from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.providers.exec_address import SSH, parse_exec, parse_ssh


@pytest.mark.parametrize(
    ("address", "prefix", "quoted", "root"),
    [
        ("exec:ssh dev@host /srv/app", ("ssh", "dev@host"), True, "/srv/app"),
        ("exec:/usr/bin/ssh -F conf host /w", ("/usr/bin/ssh", "-F", "conf", "host"), True, "/w"),
        ("exec:kubectl exec -i pod -c main -- /w", ("kubectl", "exec", "-i", "pod", "-c", "main", "--"), False, "/w"),
        ("exec:podman exec -i box '/with space'", ("podman", "exec", "-i", "box"), False, "/with space"),
        ("exec: env  -i\t/w/../x//y/", ("env", "-i"), False, "/x/y"),
        ("exec:gcloud compute ssh box --command {} /w", ("gcloud", "compute", "ssh", "box", "--command"), True, "/w"),
        ("exec:'a program' '$(x)' '' /w", ("a program", "$(x)", ""), False, "/w"),
        ("exec:docker run -i alpine:3@sha256:0123 /w", ("docker", "run", "-i", "alpine:3@sha256:0123"), False, "/w"),
        ("exec:kubectl --token-file=/t exec -i secret /w", ("kubectl", "--token-file=/t", "exec", "-i", "secret"), False, "/w"),
    ],
)
def test_words_are_split_as_a_shell_does_and_the_last_is_the_folder(
    address: str, prefix: tuple[str, ...], quoted: bool, root: str
) -> None:
    target = parse_exec(address)
    assert (target.prefix, target.quoted, target.root) == (prefix, quoted, root)
    assert parse_exec(target.address).prefix == prefix
    assert root not in target.sandbox_id or root == "/w"


@pytest.mark.parametrize(
    "address",
    [
        "exec:",
        "exec:/w",
        "exec:ssh host",
        "exec:ssh host relative",
        "exec:-x host /w",
        "exec:{} /w",
        "exec:a {} b /w",
        "exec:'' /w",
        "exec:'unclosed /w",
        "exec:a b\x1b[0m /w",
        "exec:a 'b\nc' /w",
    ],
)
def test_other_words_are_refused(address: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_exec(address)
    assert caught.value.code == Code.INVALID_REQUEST
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "address",
    [
        "exec:curl http://dev:hunter2@host /w",
        "exec:ssh dev:hunter2@host /w",
        "exec:env TOKEN=hunter2 tool /w",
        "exec:env MY_API_KEY=hunter2 tool /w",
        "exec:kubectl --token=hunter2 exec -i pod /w",
        "exec:kubectl --token hunter2 exec -i pod /w",
        "exec:tool --db-password hunter2 /w",
        "exec:sshpass -p hunter2 ssh host /w",
        "exec:sshpass -phunter2 ssh host /w",
        "exec:curl -H 'Authorization: Basic aHVudGVyMg==' /w",
        "exec:curl -H 'X-Auth: Bearer hunter2' /w",
        "ssh://dev:hunter2@host/w",
        "ssh://:hunter2@host/w",
        "ssh://dev:hunter2@host:port/w",
        "ssh://dev:hunter2@[::1/w",
        "ssh://dev@hunter2@host/w",
    ],
)
async def test_an_address_that_holds_a_credential_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        await snapcore.connect(address)
    assert caught.value.code == Code.INVALID_REQUEST
    assert "hunter2" not in f"{caught.value!r} {caught.value}"


@pytest.mark.parametrize(
    ("address", "last", "sandbox_id", "root"),
    [
        ("ssh://host", ("--", "host"), "ssh://host", "/workspace"),
        ("ssh://host/", ("--", "host"), "ssh://host", "/workspace"),
        ("ssh://dev@host:2222/srv/a%20b/", ("-p", "2222", "--", "dev@host"), "ssh://dev@host:2222", "/srv/a b"),
        ("ssh://dev@[2001:db8::1]:22/w", ("-p", "22", "--", "dev@2001:db8::1"), "ssh://dev@[2001:db8::1]:22", "/w"),
        ("ssh://my_alias/caf%E9", ("--", "my_alias"), "ssh://my_alias", "/caf\udce9"),
        ("ssh://host/a/../b", ("--", "host"), "ssh://host", "/b"),
    ],
)
def test_ssh_addresses(address: str, last: tuple[str, ...], sandbox_id: str, root: str) -> None:
    target = parse_ssh(address)
    assert (target.prefix, target.quoted) == ((*SSH, *last), True)
    assert (target.sandbox_id, target.root) == (sandbox_id, root)
    assert parse_ssh(target.address) == target


@pytest.mark.parametrize(
    "address",
    [
        "ssh://",
        "ssh:///w",
        "ssh://-oProxyCommand=x/w",
        "ssh://-oProxyCommand=x@host/w",
        "ssh://@host/w",
        "ssh://host:port/w",
        "ssh://host:99999/w",
        "ssh://ho st/w",
        "ssh://host;id/w",
        "ssh://$(id)/w",
        "ssh://host/~/w",
        "ssh://host/w?config=x",
        "ssh://host/a%00b",
        "ssh://[::1/w",
    ],
)
def test_other_hosts_are_refused(address: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_ssh(address)
    assert caught.value.code == Code.INVALID_REQUEST


async def test_a_folder_may_be_called_like_a_command() -> None:
    assert (await snapcore.connect("./exec:x")).workspace_root.endswith("/exec:x")


# ---- other packages


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a distribution with one module and one entry point on the path, as pip leaves it."""

    def installed(scheme: str, code: str) -> None:
        name = f"snapcore_{scheme}"
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[snapcore.providers]\n{scheme} = {name}:connect\n")
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return installed


@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_a_package_adds_addresses_by_an_entry_point(
    install: Callable[[str, str], None], tmp_path: Path, keyword: str
) -> None:
    (tmp_path / "box" / "a").mkdir(parents=True)
    install(
        "boxes",
        "from snapcore.providers.local import LocalSandbox\n"
        f"{keyword} connect(address):\n    return LocalSandbox({str(tmp_path)!r} + '/' + address.removeprefix('boxes://'))\n",
    )
    async with snapcore.open_repository("memory://") as repo:
        checkpoint = await repo.capture("boxes://box", thread_id="t")
    assert checkpoint.totals.folders == 1


async def test_a_package_cannot_take_an_address_that_is_built_in(install: Callable[[str, str], None], tmp_path: Path) -> None:
    install("ssh", "def connect(address):\n    raise AssertionError\n")
    assert (await snapcore.connect("ssh://host/w")).sandbox_id == "ssh://host"


async def test_the_schemes_that_are_known_are_named() -> None:
    with pytest.raises(ProviderError) as caught:
        await snapcore.connect("nosuch://sandbox")
    for scheme in ("docker", "e2b", "exec", "file", "ssh"):
        assert scheme in caught.value.hint
