"""Numbers that others published, to stand beside ours; each with its source. Nothing here was measured by this project.

Source: DeFT, arXiv 2404.00242 (ICLR 2025), tables 5, 6, 7, 16, 17, 19, 21, on one A100 80GB with Llama-3-8B (few-shot:
a prompt of 4000 tokens and 400 new ones) unless said otherwise; where a table is confirmed by, or known only from, the
result files that the authors publish (github.com/LINs-lab/DeFT, experiments/), that is said.
"""

from __future__ import annotations

COLUMNS = ("b20", "b30", "b50", "sorting", "document", "keyword", "set", "t32", "t64", "t128", "t256")

Row = tuple[float | None, ...]

# Table 5: decode latency, seconds.
DECODE_SECONDS: dict[str, Row] = {
    "Flash-Decoding (unpaged)": (78.96, 131.19, 191.09, 429.65, 241.20, 32.75, 51.76, 574.50, 1128.45, None, None),
    "TreeAttn-Medusa (unpaged)": (52.58, 103.90, 144.07, 380.87, 236.86, 33.52, 50.10, 263.40, 483.35, 924.97, 1881.51),
    "Radix (paged)": (12.37, 14.08, 16.54, 104.79, 69.61, 11.25, 17.03, 54.66, 69.75, 108.56, 188.66),
    "DeFT-Flatten": (9.98, 10.99, 12.48, 94.67, 66.95, 10.90, 16.10, 42.23, 46.60, 56.96, 84.27),
}

# Table 6: attention latency, seconds. At t = 256 the authors' result files give DeFT-Node 40.56 and DeFT-Flatten 41.78:
# the table has the two swapped. Those of the columns t32 to t256 are confirmed by the files, the others are in no file.
ATTENTION_SECONDS: dict[str, Row] = {
    "Radix": (5.99, 7.30, 9.96, 39.37, 24.69, 3.11, 5.13, 25.73, 40.47, 76.10, 145.43),
    "DeFT-Node": (10.59, 10.62, 10.85, 42.96, 33.29, 6.16, 9.58, 34.59, 34.41, 34.96, 41.78),
    "DeFT-Node-Chunk": (8.52, 9.69, 13.45, 49.63, 36.37, 4.77, 7.40, 14.54, 20.28, 32.57, 57.26),
    "DeFT-Flatten": (3.47, 4.07, 5.87, 28.41, 21.45, 2.57, 3.83, 13.15, 16.79, 24.46, 40.56),
}
SWAPPED_AT_T256 = {"DeFT-Node": 40.56, "DeFT-Flatten": 41.78}

# Table 16, as far as the result files carry it: attention of the dense-mask baseline, without its management of KV.
MEDUSA_ATTENTION_SECONDS: Row = (None,) * 7 + (23.4, 24.3, 37.6, 63.0)

# Table 7: sorting with longer prompts, a slower machine; attention seconds and KV terabytes, from result files.
PROMPT_LENGTHS = (1000, 5000, 8000, 10000)
PROMPT_SECONDS: dict[str, tuple[float, ...]] = {"Radix": (73.6, 148, 206, 244), "DeFT-Flatten": (63.0, 91, 112, 126)}
PROMPT_KV_TERABYTES: dict[str, tuple[float, ...]] = {"Radix": (181, 408, 583, 701), "DeFT-Flatten": (37, 63, 82, 95)}

# Table 17: bytes of KV, terabytes, from result files (few-shot and reasoning: Llama-3.1-8B, prompts of 4000).
KV_TERABYTES: dict[str, Row] = {
    "Radix": (17.57, 26.36, 43.93, 55.44, 53.46, 12.65, 6.01, 93.74, 187.5, 374.9, 749.9),
    "DeFT-Node": (1.67, 2.09, 3.77, None, None, None, None, 2.95, 5.91, 11.81, 23.63),
    "DeFT-Flatten": (1.67, 2.09, 2.93, 8.11, 8.70, 1.39, 0.82, 2.95, 2.98, 3.03, 3.13),
}

# Table 19: one RTX 4090, few-shot; attention seconds at b = 20, 30, 50, from result files, first iteration left out.
RTX4090_SECONDS: dict[str, tuple[float, float, float]] = {
    "Radix": (3.61, 4.36, 6.37),
    "DeFT-Flatten": (2.47, 3.00, 4.78),
    "DeFT-Node": (2.61, 3.13, 4.83),
    "TreeAttn-Medusa": (3.65, 5.39, 10.87),
}

# Table 21: CodeLlama (7B by its KV bytes), few-shot b = 30; attention seconds from the result files.
CODELLAMA_SECONDS = {"Radix": 12.68, "DeFT-Flatten": 8.37}

# Table 15: relative error of attention outputs, in words of the paper.
RELATIVE_ERROR = 0.004

OURS_FOR = {
    "Radix": "q-guided",
    "DeFT-Node": "deft-node",
    "DeFT-Node-Chunk": "deft-node-chunk",
    "DeFT-Flatten": "deft-flatten",
    "TreeAttn-Medusa": "dense-mask",
}
