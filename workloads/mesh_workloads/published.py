"""Length distributions of published workloads, by name.

Azure's are fitted to the traces of 2023 (P. Patel et al., "Splitwise", ISCA '24; CC-BY): means
within 2 % of the traces' and a Kolmogorov distance of at most 0.033. The others interpolate the
percentiles (25 to 99) of "PolyServe: Efficient Multi-SLO Serving at Scale", Table 1, which names
neither the shortest nor the longest request: the ends of those tables are chosen here.
"""

from mesh_workloads.lengths import Lengths, Quantiles

_FITTED = (
    *(0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    *(0.75, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0),
)
_STATED = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def _fitted(*tokens: int) -> Quantiles:
    return Quantiles(shares=_FITTED, tokens=tokens)


def _stated(*tokens: int) -> Quantiles:
    return Quantiles(shares=_STATED, tokens=tokens)


def _uniform(most: int) -> Quantiles:
    """From 1 to `most`; in the first of 64 equal parts shorter ones are likelier."""
    shares = tuple([n / 64 for n in range(65)])
    return Quantiles(shares=shares, tokens=tuple([max(round(most * of), 1) for of in shares]))


AZURE_CONVERSATION = Lengths(
    name="azure-conversation",
    input=_fitted(
        *(2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130),
        *(1189, 1315, 1877, 2735, 4083, 4090, 4098, 4142, 4831, 6212, 14050),
    ),
    output=_fitted(
        *(7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384),
        *(395, 400, 411, 424, 451, 509, 540, 601, 644, 954, 1000),
    ),
)
"""19,366 requests; means 1154.7 and 211.1 tokens. LLM-Mesh §8.1 draws from this trace."""

AZURE_CODE = Lengths(
    name="azure-code",
    input=_fitted(
        *(3, 17, 75, 147, 232, 385, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433),
        *(2745, 3193, 3923, 5194, 7315, 7435, 7436, 7436, 7436, 7437, 7437),
    ),
    output=_fitted(
        *(6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20),
        *(24, 29, 39, 55, 90, 128, 172, 252, 361, 831, 1899),
    ),
)
"""8,819 requests; means 2047.8 and 27.9 tokens."""

SHAREGPT = Lengths(
    name="sharegpt",
    input=_stated(4, 16, 36, 158, 818, 1613, 3421, 8192),
    output=_stated(8, 131, 280, 445, 682, 846, 1001, 2048),
)
"""Conversations of users with ChatGPT (ShareGPT_Vicuna_unfiltered)."""

LMSYS = Lengths(
    name="lmsys",
    input=_stated(4, 12, 28, 82, 301, 430, 750, 4096),
    output=_stated(4, 39, 140, 338, 512, 519, 853, 2048),
)
"""Conversations in the Chatbot Arena (LMSYS-Chat-1M)."""

LONG_CONTEXT = Lengths(
    name="long-context",
    input=_stated(512, 2320, 6923, 15400, 27571, 39583, 85401, 131072),
    output=_stated(8, 159, 350, 472, 597, 698, 1136, 2048),
)
"""Mooncake's conversation trace: chats about long documents."""

TOOL_AGENT = Lengths(
    name="tool-agent",
    input=_stated(512, 3228, 6346, 7468, 16818, 26175, 61824, 131072),
    output=_stated(4, 12, 30, 355, 506, 600, 890, 2048),
)
"""Mooncake's trace of agents that call tools."""

MOONCAKE_SYNTHETIC = Lengths(
    name="mooncake-synthetic",
    input=_stated(32, 277, 11587, 23286, 38737, 49009, 66458, 131072),
    output=_stated(2, 10, 68, 250, 390, 522, 768, 2048),
)
"""Mooncake's synthetic trace of several long-context data sets."""

UNIFORM_512 = Lengths(name="uniform-512-512", input=_uniform(1024), output=_uniform(1024))
UNIFORM_4096 = Lengths(name="uniform-4096-1024", input=_uniform(8192), output=_uniform(2048))
"""Even lengths from 1 on, whose means are in their names."""

PUBLISHED = {
    lengths.name: lengths
    for lengths in (
        *(AZURE_CONVERSATION, AZURE_CODE, SHAREGPT, LMSYS, LONG_CONTEXT, TOOL_AGENT),
        *(MOONCAKE_SYNTHETIC, UNIFORM_512, UNIFORM_4096),
    )
}
