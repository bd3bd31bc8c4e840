"""Words of a command line, each with what it does: for llama.cpp, ik_llama.cpp and SGLang with kt-kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_MEANINGS = {
    "llama-server": "the program: a server with a web page and an API, at http://localhost:8080",
    "-m": "the file of the model, in this format",
    "-ngl": "layers on the GPU: 99 is all of them, 0 leaves all to the CPU",
    "--n-cpu-moe": "the experts of so many layers stay in the host's memory, where the CPU computes them",
    "-ot": "tensors that match stay in the host's memory: here the experts of the first layers",
    "-c": "tokens for which the KV cache has room: prompts, answers and the conversation so far",
    "-fa": "flash attention: attention in less memory and time",
    "-b": "tokens of a prompt that are handed over at once",
    "-ub": "tokens of a prompt that are computed at once: larger pieces copy experts to the GPU less often, and need "
           "more memory",
    "-t": "threads of the CPU",
    "-ctk": "format of the keys in the KV cache: q8_0 takes half of the memory of f16",
    "-ctv": "format of the values in the KV cache",
    "--load-mode": "none reads the file into pinned memory in place of mapping it: copies to the GPU are quicker",
    "-np": "sequences that are served at once; the KV cache is divided among them",
    "-dev": "none: no GPU is used",
    "CUDA_VISIBLE_DEVICES": "empty: the program sees no GPU",
    "--no-repack": "weights stay in the order of the file, which is mapped",
    "-lzm": "on: rows of tables such as that of n-grams are read from the file when they are used",
    "-rtr": "weights are put into the CPU's order of rows when they are loaded",
    "-sm": "how the model is divided over several GPUs: by layers, with a part of every layer on each, or not at all",
    "-ts": "layers of each GPU, the quickest first, with the output layer; or proportions of every layer",
    "-mg": "the GPU that is used where layers are not divided",
    "-fmoe": "products of a mixture are fused",
    "-mla": "the latent KV cache is used",
    "--moe-cache-mib": "GPU memory for a cache of experts (experimental)",
    "--spec-type": "drafts by the model's own layers, which further tokens verify",
    "python": "the program: SGLang with kt-kernel",
    "--model": "the folder of the model",
    "--kt-weight-path": "the folder of the experts' weights for the CPU",
    "--kt-method": "the format of these weights",
    "--kt-cpuinfer": "threads that compute experts",
    "--kt-threadpool-count": "pools of threads: one for each socket",
    "--kt-num-gpu-experts": "experts of each layer on the GPU",
    "--context-length": "tokens of prompt and answer",
    "--chunked-prefill-size": "tokens of a prompt that are computed at once",
}


class ExplainedWord(NamedTuple):
    """An argument with its value, and what it does; "" for one that speaks for itself."""

    text: str
    about: str


def explained(words: Iterable[str]) -> list[ExplainedWord]:
    """The words of a command line, each argument with its value."""
    return [ExplainedWord(word, about_word(word)) for word in words]


def about_word(word: str) -> str:
    """Words for what an argument does, by its first word; of several arguments, one after the other."""
    names = [name.partition("=")[0] for name in word.split() if name.partition("=")[0] in _MEANINGS]
    return "; ".join(_MEANINGS[name] for name in names)
