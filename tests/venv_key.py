"""Print a short key of the interpreter and what `make venv` installs, to name an environment."""

import hashlib
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"domino-kit needs Python 3.11 or later; this is {sys.version.split()[0]}")

import tomllib

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = {name: project["optional-dependencies"][name] for name in ("serve", "dev")}
facts = [sys.version, project["dependencies"], extras]
print(hashlib.sha256(repr(facts).encode()).hexdigest()[:12])
