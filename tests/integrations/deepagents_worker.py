"""Goes on with the agent of a thread in another process and another folder.

python -m tests.integrations.deepagents_worker FOLDER
"""

import sys
from pathlib import Path
from typing import Any

from deepagents import create_deep_agent
from deepagents.backends import LocalShellBackend

from snapcore import blocking
from snapcore.integrations.deepagents import sandbox_of
from snapcore.integrations.langgraph import GraphFiles

from .deepagents_scripted import execute, scripted
from .langgraph_worker import CONFIG, FileSaver

folder = Path(sys.argv[1])
backend = LocalShellBackend(folder / "second", env={"PATH": "/usr/bin:/bin"})
saver = FileSaver(folder / "saver")
with blocking.open_repository(folder / "repository") as repo:
    files = GraphFiles(repo, sandbox_of(backend), saver)
    restored = files.restore_for(CONFIG)
    model = scripted([execute("cat notes.txt >>copy; rm notes.txt")], "done")
    agent: Any = create_deep_agent(model, backend=backend, checkpointer=saver, middleware=[files.middleware()])
    print(agent.invoke({"messages": [("user", "go on")]}, restored.config)["messages"][-1].content)
