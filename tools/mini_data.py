"""A tokenizer and token batches of a folder of text, one domain a file (``<domain>.train.txt``, ``.eval.txt``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD = "<|pad|>"  # token 0
BPE_BYTES = 1_500_000  # of each domain, to learn the merges from

Tokens = NDArray[np.int32]


class CorpusError(ValueError):
    """A folder that holds no usable text."""


@dataclass(frozen=True)
class Corpus:
    """Token streams by domain, in one order; ``token_bytes`` [vocab] is the UTF-8 length of every token."""

    domains: tuple[str, ...]
    train: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]
    token_bytes: NDArray[np.int64]

    @property
    def vocab(self) -> int:
        return len(self.token_bytes)

    def batch(self, seed: int, step: int, batch: int, length: int) -> torch.Tensor:
        """Random training windows [batch, length], every domain equally likely: a pure function of its arguments."""
        random = np.random.default_rng((seed, step))
        return torch.from_numpy(np.stack([self._window(random, length) for _ in range(batch)]))

    def _window(self, random: np.random.Generator, length: int) -> NDArray[np.int64]:
        tokens = self.train[int(random.integers(len(self.train)))]
        start = int(random.integers(len(tokens) - length))
        return tokens[start : start + length].astype(np.int64)

    def held_out_windows(self, domain: int, windows: int, length: int) -> torch.Tensor:
        """Evenly spread windows [<= windows, length] of one domain's held-out text."""
        tokens = self.held_out[domain]
        windows = min(windows, len(tokens) // length)
        starts = np.linspace(0, len(tokens) - length, windows).astype(int)
        return torch.from_numpy(np.stack([tokens[s : s + length].astype(np.int64) for s in starts]))

    def unigram_nats(self) -> NDArray[np.float64]:
        """-log probability [vocab] of every token by its (add-one) frequency in the training text, domains equal."""
        shares = [np.bincount(t, minlength=self.vocab) / len(t) for t in self.train]
        total = sum(len(t) for t in self.train)
        smoothed: NDArray[np.float64] = (np.mean(shares, axis=0) * total + 1) / (total + self.vocab)
        return -np.log(smoothed)


def domains_of(folder: Path) -> tuple[str, ...]:
    """The domains that have both a ``.train.txt`` and an ``.eval.txt``. Raises CorpusError if there are none."""
    names = sorted(p.name.removesuffix(".train.txt") for p in folder.glob("*.train.txt"))
    complete = tuple(n for n in names if (folder / f"{n}.eval.txt").exists())
    if not complete:
        raise CorpusError(f"{folder}: expected pairs of <domain>.train.txt and <domain>.eval.txt, found none")
    return complete


def train_tokenizer(folder: Path, vocab: int) -> Tokenizer:
    """A byte-level BPE of ``vocab`` tokens, learnt from the head of every training file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_heads(folder), trainer)
    return tokenizer


def load_corpus(folder: Path, tokenizer: Tokenizer) -> Corpus:
    """Tokenize every domain of ``folder``. Raises CorpusError where a text is shorter than a training window."""
    domains = domains_of(folder)
    train = tuple(_tokens(folder / f"{d}.train.txt", tokenizer) for d in domains)
    held_out = tuple(_tokens(folder / f"{d}.eval.txt", tokenizer) for d in domains)
    # A byte-level token is written with one character a byte.
    sizes = [len(tokenizer.id_to_token(t) or "") for t in range(tokenizer.get_vocab_size())]
    return Corpus(domains, train, held_out, np.array(sizes, dtype=np.int64))


def _heads(folder: Path) -> Iterator[str]:
    for domain in domains_of(folder):
        text = (folder / f"{domain}.train.txt").read_text(encoding="utf-8")[:BPE_BYTES]
        yield from text.splitlines(keepends=True)


def _tokens(path: Path, tokenizer: Tokenizer) -> Tokens:
    """All tokens of a file. Encoded in blocks of lines, since a tokenizer's memory grows with its input."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    blocks = ["".join(lines[i : i + 1000]) for i in range(0, len(lines), 1000)]
    ids = [np.asarray(tokenizer.encode(b).ids, dtype=np.int32) for b in blocks]
    tokens = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    if len(tokens) < 512:
        raise CorpusError(f"{path}: expected at least 512 tokens of text, got {len(tokens)}")
    return tokens
