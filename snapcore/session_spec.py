"""What a session's sandboxes are made from, and what the ledger keeps of that."""

from collections.abc import Sequence

from .errors import Code, SnapshotError, printable
from .ledger import Event, SpecRecord
from .redaction import Redactor
from .sandboxes import Binding, SandboxProvider, SandboxSpec
from .session_options import SessionOptions

__all__ = ["choose_spec", "is_of", "recorded_spec", "refuse_binding", "refuse_secrets", "spec_record"]


def is_of(made: Event, provider: SandboxProvider) -> bool:
    return made.binding is not None and made.binding.provider == provider.name


def choose_spec(
    options: SessionOptions, provider: SandboxProvider, made: Event | None, warnings: list[str]
) -> tuple[SandboxSpec, SpecRecord]:
    """What the new sandbox is made from, and what the ledger keeps of that."""
    before = made.spec if made is not None and made.spec is not None else SpecRecord()
    if options.spec is not None:
        spec = options.spec
    elif made is None or is_of(made, provider):
        spec = recorded_spec(before, warnings)
    else:
        spec = SandboxSpec(workspace_root=before.workspace_root)
        warnings.append(f"The sandbox is made as {provider.name} does by itself: the recorded spec is another provider's.")
    return spec, spec_record(spec, options, before)


def spec_record(spec: SandboxSpec, options: SessionOptions, before: SpecRecord | None = None) -> SpecRecord:
    """What the ledger keeps of a spec. `before` says which roots the thread has, unless the options do."""
    scrub = options.redactor.scrub_text
    roots = options.roots if options.roots is not None else (before.roots if before is not None else {})
    return SpecRecord(
        image=None if spec.image is None else scrub(spec.image),
        workspace_root=spec.workspace_root,
        user=spec.user,
        environment=tuple(sorted(scrub(name) for name in spec.environment)),
        cpus=spec.cpus,
        memory_bytes=spec.memory_bytes,
        labels={scrub(name): scrub(value) for name, value in spec.labels.items()},
        timeout=spec.timeout,
        options=tuple(sorted(scrub(name) for name in spec.options)),
        roots=dict(roots),
    )


def recorded_spec(record: SpecRecord, warnings: list[str]) -> SandboxSpec:
    """A sandbox like one that was made before. Raises `SnapshotError` `INVALID_REQUEST` when what it was made with is not all in
    the ledger."""
    if record.options:
        raise SnapshotError(
            f"The sandbox was made with options that are not recorded: {printable(', '.join(record.options))}.",
            code=Code.INVALID_REQUEST,
            hint="Say again what it is to be made from: spec=SandboxSpec(..., options=...).",
        )
    if record.environment:
        warnings.append(
            f"The environment is not recorded: {printable(', '.join(record.environment))}. Pass spec= to set it again."
        )
    return SandboxSpec(
        image=record.image,
        workspace_root=record.workspace_root,
        user=record.user,
        cpus=record.cpus,
        memory_bytes=record.memory_bytes,
        labels=record.labels,
        timeout=record.timeout,
    )


def refuse_secrets(options: SessionOptions, thread_id: str) -> None:
    """What is stored as it is must hold no secret."""
    spec = options.spec
    _refuse(options.redactor, "the thread id", [thread_id])
    _refuse(options.redactor, "a root's name or path", [text for item in (options.roots or {}).items() for text in item])
    if spec is not None:
        _refuse(
            options.redactor, "the spec's name, user or workspace root", [spec.name or "", spec.user or "", spec.workspace_root]
        )


def _refuse(redactor: Redactor, what: str, texts: Sequence[str]) -> None:
    found = redactor.names_with_secrets([(text.encode("utf-8", "surrogateescape"), b"") for text in texts])
    for name in found.values():
        raise SnapshotError(f"The secret {name} is part of {what}.", code=Code.SECRET_IN_NAME, hint="Choose another.")


def refuse_binding(redactor: Redactor, binding: Binding) -> None:
    """Raise `SnapshotError` `SECRET_IN_NAME` for a binding that holds a secret: it is stored as it is."""
    texts = [binding.provider, binding.sandbox_id, binding.workspace_root, *binding.details, *binding.details.values()]
    _refuse(redactor, "the binding of the sandbox", texts)
