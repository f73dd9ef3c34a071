"""`autotp serve`: an OpenAI-compatible server over ranks of this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from autotp.errors import InputError

from .command import FINE
from .screen import Screen

FILES = "config.json", "adapter_config.json"
PARTS, KEY = ("transformers", "fastapi", "uvicorn", "openai"), "AUTOTP_API_KEY"


def serve(
    folders: list[Path], screen: Screen, tp: int = 1, dp: int = 1, dtype: str | None = None, host: str = "127.0.0.1",
    port: int = 8000, api_key: str | None = None, origin: list[str] | None = None, max_tokens: int = 1024,
    concurrent: int = 256, pool: int | None = None, cluster: str | None = None,
) -> int:  # fmt: skip
    """Serve a folder of transformers, and adapters of PEFT to it, over ranks of this machine, as OpenAI's API.

    Chat and plain completions, models and health. It starts the ranks itself, and ends by Ctrl-C, after the answers
    that are under way.

    Args:
        folders: Of the model, its weights and tokenizer, as save_pretrained writes them, and of adapters to it, each a
            further model; no code in them is run.
        tp: Ranks that share the model.
        dp: Replicas of the model, over tp ranks each; a request goes to the one with the fewest.
        dtype: Of the weights, such as bfloat16. Default: the config's.
        host: Address to listen on.
        port: Port to listen on.
        api_key: Key that clients must show. Default: the variable AUTOTP_API_KEY, or none.
        origin: Origin of pages whose scripts may ask, such as https://chat.example.com. Repeatable.
        max_tokens: New tokens of an answer at most, and where a request does not say how many.
        concurrent: Answers at once; who asks for more is told to come again (429).
        pool: Tokens of all requests whose keys and values are kept. Default: as memory allows.
        cluster: To plan for: a preset or file; of unlike devices one that says them rank by rank. Default: h100.
    """
    if missing := [name for name in PARTS if importlib.util.find_spec(name) is None]:
        raise InputError(f"serving needs {', '.join(missing)}: pip install 'autotp[serve]'.")
    from autotp.serving.rank import Options, model_name  # noqa: PLC0415
    from autotp.serving.rank import serve as launch  # noqa: PLC0415  torch and the server, only where they are used

    from .models import read_dtype  # noqa: PLC0415

    key = api_key if api_key is not None else os.environ.get(KEY, "")
    kind, origins = read_dtype(dtype), tuple(origin or ())
    for at, folder in enumerate(folders):
        if not (folder / FILES[at > 0]).is_file():
            raise InputError(f"{folder} holds no {FILES[at > 0]}. Give the model's folder, then those of adapters.")
    if len({*map(model_name, folders)}) < len(folders):
        raise InputError("two folders have one name, by which requests ask for a model. Rename one.")
    launch(Options(folders, tp, dp, kind, host, port, key, origins, max_tokens, concurrent, pool, cluster))
    screen.say("stopped")
    return FINE
