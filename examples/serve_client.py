"""Serve a model over ranks of this machine by `autotp serve`, and chat with it through the `openai` client.

    python examples/serve_client.py --tp 2
    python examples/serve_client.py --tp 4 --folder path/of/save_pretrained --say "Why is the sky blue?"

Without --folder it makes a small Llama with random weights, whose tokens are bytes.
Needs `pip install 'autotp[serve]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def small_model(folder: Path, heads: int = 6) -> LlamaForCausalLM:
    """Save a Llama with random weights, with two heads of keys and values, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16 * heads, intermediate_size=192, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))  # as they come, random weights repeat one token
    model.generation_config = GenerationConfig()  # type: ignore[assignment]
    model.save_pretrained(folder)
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokens.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return model


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server of a folder, which ends as Ctrl-C would end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "autotp", "serve", str(folder), "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="")
                if line.startswith("serving "):
                    yield line.split()[3]
                    break
            else:
                raise RuntimeError("the server has ended, for what it said above")
        finally:
            process.send_signal(signal.SIGINT)


def main() -> None:
    """Serve, chat, and stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="a folder of transformers; default: a small model made on the spot")
    parser.add_argument("--say", default="def main() -> int:")
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        if args.folder is None:
            small_model(folder)
        with server(folder, "--tp", str(args.tp)) as address:
            client = OpenAI(base_url=address, api_key="none")
            model = client.models.list().data[0].id
            asked: Any = {
                "model": model,
                "messages": [{"role": "user", "content": args.say}],
                "max_tokens": args.tokens,
            }
            text = ""
            for chunk in client.chat.completions.create(**asked, stream=True):
                text += chunk.choices[0].delta.content or ""
            print(repr(text))
            whole = client.chat.completions.create(**asked)
            print(f"{whole.usage}\nRight" if whole.choices[0].message.content == text else "Wrong")


if __name__ == "__main__":
    main()
