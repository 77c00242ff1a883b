"""What the scripts that make model directories share."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "models"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` when the block ends and vanishes when it raises.

    ``target`` is therefore whole or absent. One made meanwhile by another process is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp and save_file write for the owner alone
        for path in draft.iterdir():
            path.chmod(0o644)
        if not target.exists():
            os.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
