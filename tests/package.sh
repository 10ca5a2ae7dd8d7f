#!/usr/bin/env bash
# The built package, as a user gets it: the sdist builds the wheel, the wheel goes into an empty environment, and the
# command captures, restores and verifies there. Only `snapcore` may appear at the top level.
set -euo pipefail
python=$(realpath -s "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }

# `pip install .` builds the wheel straight from the checkout: the links in snapcore/ must not confuse it
"$python" -m build --wheel --outdir "$work/direct" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
listed() { "$python" -m zipfile -l "$1" | awk '{ print $1 }' | grep -v dist-info | sort; }
diff <(listed "$work"/dist/*.whl) <(listed "$work"/direct/*.whl)

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check install -q "$work"/dist/*.whl >"$work/install.log" 2>&1 ||
    { cat "$work/install.log"; exit 1; }

cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import importlib.metadata
import importlib.util

files = importlib.metadata.files("snapcore")
top = {file.parts[0] for file in files} - {"..", "__pycache__"}
extra = {name for name in top if name != "snapcore" and not name.endswith(".dist-info")}
assert not extra, f"installed beside snapcore: {sorted(extra)}"
names = {str(file) for file in files}
for needed in ("snapcore/py.typed", "snapcore/cli/main.py", "snapcore/stores/local.py", "snapcore/providers/local.py"):
    assert needed in names, f"{needed} is not in the wheel"
for foreign in ("stores", "providers", "cli", "tests", "benchmarks"):
    assert importlib.util.find_spec(foreign) is None, f"{foreign} can be imported at the top level"
PYTHON

mkdir -p tree/folder
printf 'hello\n' >tree/folder/file
ln -s folder/file tree/link
export SNAPCORE_REPO="$work/repo"
snapcore="$work/venv/bin/snapcore"
"$snapcore" --version
"$snapcore" init --quiet
"$snapcore" capture tree --thread t --quiet
rm -rf tree
"$snapcore" restore tree --thread t --quiet
[ "$(cat tree/link)" = hello ]
"$snapcore" verify --read-data --quiet
echo "package: the wheel installs snapcore alone, and its command works"
