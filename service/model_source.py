"""What ``--model`` stands for: a directory, the default model, or a hub id."""

import re
from pathlib import Path

from engine.errors import ModelError

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = "smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_directory(name: str) -> str:
    """The directory to load. Downloads a hub id. Raises `ModelError`, one line."""
    if name == DEFAULT_MODEL:
        return _default_model()
    if Path(name).is_dir():
        return name
    if name.startswith((".", "/")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"--model {name}: there is no such directory")
    return _from_hub(name)


def _default_model() -> str:
    directory = ROOT / "models" / DEFAULT_MODEL
    if not (directory / "config.json").exists():
        if not (ROOT / "Makefile").exists():  # installed, so there is no make to tell of
            raise ModelError(
                f"--model {DEFAULT_MODEL} works in a clone of picovllm only, after make models; name a directory"
            )
        raise ModelError(f"--model {DEFAULT_MODEL}: {directory} does not exist yet; make it with: make models")
    return str(directory)


def _from_hub(hub_id: str) -> str:
    """Weights as safetensors, configuration and tokenizer; nothing else of the repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "*.safetensors"]
    try:
        return snapshot_download(hub_id, allow_patterns=patterns)
    except HFValidationError as error:
        raise ModelError(f"--model {hub_id}: is neither a directory nor a hub id: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"--model {hub_id}: no such directory, and it could not be downloaded: {reason}") from error
