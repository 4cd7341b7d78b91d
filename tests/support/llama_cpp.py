"""llama.cpp, from the package xllamacpp: log-probabilities of a GGUF file, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_RUN = """
import json, sys
import xllamacpp as xl
path, ids, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
params = xl.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = path, 512, 1, False, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
if len(sys.argv) > 4 and sys.argv[4] != "embedding":
    params.lora_adapters = [xl.CommonAdapterLoraInfo(sys.argv[4])]
if "embedding" in sys.argv:
    params.embedding, params.pooling_type = True, xl.llama_pooling_type(1)
    server = xl.Server(params)
    answer = server.handle_embeddings({"input": ids})
    print("ANSWER" + json.dumps(answer["data"][0]["embedding"]))
else:
    server = xl.Server(params)
    # The chosen token is one whose text is complete; log-probabilities do not count the bias.
    question = {"prompt": ids, "max_tokens": 1, "logprobs": count, "temperature": 0, "logit_bias": [[33, 1000]]}
    answer = server.handle_completions(question)
    print("ANSWER" + json.dumps(answer["choices"][0]["logprobs"]))
"""


def _answer(*arguments: str):
    done = subprocess.run([sys.executable, "-c", _RUN, *arguments], capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert lines, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return json.loads(lines[-1].removeprefix("ANSWER"))


def log_probabilities(path: Path, ids: list[int], count: int, adapters: Path | None = None) -> dict[int, float]:
    """The ``count`` highest log-probabilities of the token after ``ids``, by its number."""
    more = () if adapters is None else (str(adapters),)
    rows = _answer(str(path), json.dumps(ids), str(count), *more)["content"][0]["top_logprobs"]
    return {row["id"]: row["logprob"] for row in rows}


def embedding(path: Path, ids: list[int]) -> list[float]:
    """The normalized mean of the last hidden states."""
    return _answer(str(path), json.dumps(ids), "0", "embedding")
