"""A tokenizer with the tokens of chats, trained on the spot, and rows written to files."""

import json
import random

import pytest
import tokenizers

from megablocks_core.data.instructions import CHATML

WORDS = ["the", "of", "model", "data", "naïve", "Straße", "数据", "\U0001f600", "x = 1\n", "42"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The same layout as CHATML, without marks of what is generated.
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def some_text(draw, most=12):
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, most)))


def some_chat(draw, turns=3):
    """Messages of a conversation, of a few turns and sometimes a system message."""
    messages = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": some_text(draw)})
    for _ in range(draw.randrange(1, turns + 1)):
        messages.append({"role": "user", "content": some_text(draw)})
        messages.append({"role": "assistant", "content": some_text(draw)})
    return messages


def some_chats(count, seed=0):
    draw = random.Random(seed)
    return [some_chat(draw) for _ in range(count)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A folder with a tokenizer.json of byte-level BPE and its configuration."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random(9)
    tokenizer.train_from_iterator([some_text(draw) for _ in range(300)], trainer)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
