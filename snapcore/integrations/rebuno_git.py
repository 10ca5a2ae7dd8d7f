"""Git checkouts as resources of Rebuno executions: each sandbox on a branch of its own, and a token that is in none of them.

    driver = GitDriver(repo, provider, "https://github.com/owner/name.git", token=current_token)
    checkout = await rebuno.resource("workspace", driver=driver, checkpoints=rebuno.CheckpointPolicy(every_steps=5))
    await checkout.git("push", "-u", "origin", "HEAD")

The sandbox needs git 2.31 or later. `token` is asked each time: it goes into the environment of the one command that needs it,
where what runs as the same user meanwhile can read it. Where a provider can add it to requests on their way out of the sandbox
(E2B's `network`), leave it out here and give it there.
"""

import base64
import os
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack

from snapcore.errors import Code, ProviderError, SnapshotError
from snapcore.model import Kind
from snapcore.redaction import Redactor
from snapcore.repository import Repository, Secrets
from snapcore.sandboxes import ExecResult, SandboxHandle, SandboxProvider
from snapcore.selection import FilePolicy, Selection

from .rebuno import DriverOptions, SandboxDriver
from .rebuno_sandbox import RebunoSandbox

__all__ = ["GitDriver", "GitSandbox"]

Token = Callable[[], str]

TOKEN_NAME: Final = "git-token"  # noqa: S105
MAX_WORDS: Final = 500
_NOT_FOUND: Final = 127


class GitSandbox(RebunoSandbox):
    """A checkout: see `RebunoSandbox`."""

    def __init__(self, provider: SandboxProvider, handle: SandboxHandle, thread_id: str, credentials: "_Credentials") -> None:
        super().__init__(provider, handle, thread_id)
        self._credentials = credentials

    async def git(self, *arguments: str, stdin: bytes = b"", timeout: float | None = None) -> ExecResult:
        """Run git in the workspace root, with the token that the worker holds now, for this command alone, and without the hooks
        of the checkout. A non-zero exit is a result. The token is taken out of what it writes."""
        environment, redactor = self._credentials.now()
        done = await self.exec(["git", *arguments], stdin=stdin, environment=environment, timeout=timeout)
        texts = [redactor.scrub_text(text.decode("utf-8", "surrogateescape")) for text in (done.stdout, done.stderr)]
        out, err = (text.encode("utf-8", "surrogateescape") for text in texts)
        return ExecResult(done.exit_code, out, err, done.truncated)


class GitDriver(SandboxDriver):
    """A driver whose new sandboxes are clones of `url`, of its branch or tag `start` if one is named, each on the new branch
    `rebuno/EXECUTION`. A fork has the files and the history that its checkpoint has, and its own branch from there.

    `token` returns what the worker may use now, `username` is who uses it. `author` (name, address) is set for commits. The other
    options are those of `SandboxDriver`; the policy keeps `.git` in any case. Tracked files that the policy excludes come back
    from git's index when a sandbox starts from a checkpoint.
    """

    driver_id = "snapcore.git.v1"

    def __init__(
        self,
        repo: Repository,
        provider: SandboxProvider,
        url: str,
        *,
        token: Token | None = None,
        username: str = "x-access-token",
        start: str | None = None,
        author: tuple[str, str] | None = None,
        **options: Unpack[DriverOptions],
    ) -> None:
        self._credentials = _Credentials(url, token, username)
        self._url = url
        self._start = start
        self._author = author
        options["policy"] = (options.get("policy") or FilePolicy.with_rebuildable()).with_git()
        options["configuration"] = {**(options.get("configuration") or {}), "url": url, "start": start}
        super().__init__(repo, provider, **options)

    async def prepare(self, sandbox: RebunoSandbox, *, execution_id: str, restored: bool) -> None:
        """Clone, or put back what a checkpoint does not hold; then the branch."""
        if restored:
            await self._put_back(sandbox)
        else:
            start = ["--branch", self._start] if self._start else []
            await _git(sandbox, "clone", "--quiet", *start, "--", self._url, ".")
        await _git(sandbox, "checkout", "--quiet", "-B", f"rebuno/{execution_id}")
        for name, value in zip(("user.name", "user.email"), self._author or (), strict=False):
            await _git(sandbox, "config", name, value)

    def _sandbox(self, handle: SandboxHandle, thread_id: str) -> GitSandbox:
        return GitSandbox(self._provider, handle, thread_id, self._credentials)

    def _secrets(self) -> Secrets:
        given, tokens = super()._secrets(), self._credentials.known()
        if given is None:
            return tokens
        return {**given, **tokens} if isinstance(given, Mapping) else [*given, *tokens.values()]

    async def _put_back(self, sandbox: RebunoSandbox) -> None:
        """Tracked files that no checkpoint of this policy could hold: without them they would count as deleted."""
        missing = (await _git(sandbox, "ls-files", "--deleted", "-z")).stdout.split(b"\0")
        selection = self._policy.compile()
        excluded = [path for path in missing if path and _excludes(selection, path)]
        if excluded:
            await _git(sandbox, "checkout-index", "-z", "--stdin", stdin=b"\0".join((*excluded, b"")))


class _Credentials:
    """The token, by what git reads from its environment; and all that were handed out, to be kept out of checkpoints."""

    def __init__(self, url: str, token: Token | None, username: str) -> None:
        parts = urllib.parse.urlsplit(url)
        by_http = parts.scheme in ("http", "https")
        if token is not None and not by_http:
            raise SnapshotError("A token is for an https:// address.", code=Code.INVALID_REQUEST, hint="Leave out token.")
        if parts.password is not None or (by_http and parts.username is not None):
            raise SnapshotError(
                "The address of the git repository holds a login, which git would write into the checkout.",
                code=Code.INVALID_REQUEST,
                hint="Pass it as token=.",
            )
        self._origin = f"{parts.scheme}://{parts.netloc}/"
        self._token = token
        self._username = username
        self._used: list[str] = []

    def __repr__(self) -> str:
        return f"_Credentials({self._origin!r})"

    def now(self) -> tuple[dict[str, str], Redactor]:
        """The environment of a command, and what takes its token out of texts."""
        settings = [("credential.helper", ""), ("core.hooksPath", os.devnull)]
        token = self._ask()
        if token is not None:
            login = base64.b64encode(f"{self._username}:{token}".encode()).decode()
            settings.append((f"http.{self._origin}.extraHeader", f"Authorization: Basic {login}"))
        environment = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_COUNT": str(len(settings))}
        for number, (name, value) in enumerate(settings):
            environment |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
        return environment, Redactor.build(self.known() or None, allow_short=True)

    def known(self) -> dict[str, str]:
        """The tokens of this driver by name, the present one among them."""
        self._ask()
        return {f"{TOKEN_NAME}-{number}" if number else TOKEN_NAME: token for number, token in enumerate(self._used)}

    def _ask(self) -> str | None:
        if self._token is None:
            return None
        token = self._token()
        if token not in self._used:
            self._used.append(token)
        return token


def _excludes(selection: Selection, path: bytes) -> bool:
    parts = path.split(b"/")
    folders = (b"/".join(parts[:count]) for count in range(1, len(parts)))
    return any(selection.excludes(folder, Kind.DIR) for folder in folders) or selection.excludes(path, Kind.FILE)


async def _git(sandbox: RebunoSandbox, *arguments: str, **options: Any) -> ExecResult:
    """Run git, which has to succeed."""
    assert isinstance(sandbox, GitSandbox)
    done = await sandbox.git(*arguments, **options)
    if done.exit_code == _NOT_FOUND:
        raise ProviderError("The sandbox has no git.", code=Code.MISSING_TOOL, hint="Take an image that has git 2.31 or later.")
    if done.exit_code:
        words = done.stderr.decode(errors="replace").strip()[-MAX_WORDS:]
        raise SnapshotError(
            f"git {arguments[0]} ended with {done.exit_code}: {words}",
            code=Code.INVALID_WORKSPACE,
            hint="The workspace root has to be empty, and the repository within reach, when a checkout is made.",
        )
    return done
