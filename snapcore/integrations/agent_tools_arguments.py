"""What a model is told of the agent tools, and what it may send to each. Nothing of it names a thread or a place."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from .tool_schemas import Tool

__all__ = [
    "DEFAULT_LISTED",
    "DIFF",
    "FORK",
    "LIST",
    "MAX_ARTIFACTS",
    "MAX_LABEL",
    "MAX_LISTED",
    "PREVIEW",
    "READ",
    "RESTORE",
    "SAVE",
    "Artifact",
    "Compare",
    "List",
    "ReadArtifact",
    "Save",
    "Which",
]

MAX_LABEL: Final = 100  # characters
MAX_ARTIFACTS: Final = 16
MAX_LISTED: Final = 100
DEFAULT_LISTED: Final = 20

_WHICH = "A checkpoint of this thread: its id, its label (the newest that has it), or 'latest'."


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something to keep beside the files."""

    name: Annotated[str, Meta(description=f"A short name, at most {MAX_LABEL} characters.")]
    text: Annotated[str, Meta(description="What to keep.")]


class Save(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `checkpoint_save`."""

    label: Annotated[str | None, Meta(description=f"A name to find it by, at most {MAX_LABEL} characters. Null: none.")] = None
    artifacts: Annotated[
        list[Artifact] | None, Meta(description=f"Notes or results to keep with it, at most {MAX_ARTIFACTS}. Null: none.")
    ] = None


class List(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `checkpoint_list`."""

    limit: Annotated[int | None, Meta(description=f"How many, at most {MAX_LISTED}. Null: {DEFAULT_LISTED}.")] = None


class Compare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `checkpoint_diff`."""

    before: Annotated[str, Meta(description=_WHICH)]
    after: Annotated[str | None, Meta(description="The one to compare it with, named in the same way. Null: the latest.")] = None


class Which(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of tools about one checkpoint."""

    checkpoint: Annotated[str, Meta(description=_WHICH)]


class ReadArtifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of `checkpoint_read_artifact`."""

    checkpoint: Annotated[str, Meta(description=_WHICH)]
    name: Annotated[str, Meta(description="The artifact's name, as checkpoint_list shows it.")]
    offset: Annotated[int | None, Meta(description="Where to begin: next_offset of the call before. Null: at the start.")] = None


SAVE: Final = Tool("checkpoint_save", "Save the files of the workspace as a checkpoint that can be gone back to.", Save)
LIST: Final = Tool("checkpoint_list", "List the checkpoints of this thread, the newest first.", List, read_only=True)
DIFF: Final = Tool("checkpoint_diff", "Say which files differ between two checkpoints.", Compare, read_only=True)
READ: Final = Tool("checkpoint_read_artifact", "Read an artifact that was saved with a checkpoint.", ReadArtifact, read_only=True)
FORK: Final = Tool("checkpoint_fork", "Start another line of work from a checkpoint; this one goes on unchanged.", Which)
PREVIEW: Final = Tool(
    "checkpoint_restore_preview",
    "Say what going back to a checkpoint would remove, add and change in the workspace. Changes nothing.",
    Which,
    read_only=True,
)
RESTORE: Final = Tool(
    "checkpoint_restore", "Bring the workspace back to a checkpoint. Files that are not in it are removed.", Which
)
