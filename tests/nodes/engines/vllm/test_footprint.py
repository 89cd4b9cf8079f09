"""A footprint follows the model's shape and the precision, and leaves the process its share."""

from dataclasses import replace

import pytest

from mesh.domain.model import Task
from mesh_nodes.engines.vllm.footprint import LOGIT_ROWS_MAX, estimate
from tests.support.profiles import SMOL

MIB = 2**20
MEASURED_MIB = 1169
"""Private memory of its engine process on a CPU after a prefill of 2048 tokens."""


def test_on_a_cpu_it_covers_what_was_measured_and_not_much_more() -> None:
    footprint = estimate(SMOL, dtype="float32", block_tokens=32, on_cpu=True)
    assert MEASURED_MIB <= footprint.instance_bytes(0) / MIB < 1.2 * MEASURED_MIB
    assert footprint.kv_block_bytes == 32 * SMOL.kv_bytes_per_token(4)
    assert footprint.block_tokens == 32


def test_on_a_gpu_the_weights_count_once_in_16_bits() -> None:
    small = estimate(SMOL, dtype="auto", block_tokens=16, on_cpu=False)
    large = estimate(
        replace(SMOL, parameters=2 * SMOL.parameters), dtype="auto", block_tokens=16, on_cpu=False
    )
    assert large.weights_bytes - small.weights_bytes == 2 * SMOL.parameters
    assert small.kv_block_bytes == 16 * SMOL.kv_bytes_per_token(2)


def test_on_a_gpu_rows_of_logits_count_by_the_vocabulary() -> None:
    """As a prompt has them whose log-probabilities are asked for: in 16 bits, and twice in f32."""
    small, large = (
        estimate(
            replace(SMOL, vocabulary_tokens=vocabulary), dtype="auto", block_tokens=16, on_cpu=False
        )
        for vocabulary in (1000, 151_000)
    )
    assert large.weights_bytes - small.weights_bytes == LOGIT_ROWS_MAX * 150_000 * (2 + 4 + 4)


def test_on_a_gpu_each_layer_counts_with_what_chunks_hold_beyond_its_blocks() -> None:
    lower, higher = (
        estimate(replace(SMOL, layers=n), dtype="auto", block_tokens=16, on_cpu=False)
        for n in (10, 30)
    )
    assert higher.stays_bytes - lower.stays_bytes == 20 * 6 * MIB


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_embeds_has_no_head_and_an_encoder_no_kv_cache(on_cpu: bool) -> None:
    text, embedder, encoder = (
        estimate(model, dtype="float32", block_tokens=32, on_cpu=on_cpu)
        for model in (SMOL, SMOL.serving(Task.EMBED), replace(SMOL, architecture="bert"))
    )
    head_bytes = 4 * SMOL.vocabulary_tokens * SMOL.hidden_size if on_cpu else 0
    assert embedder.weights_bytes < text.weights_bytes - head_bytes
    assert embedder.kv_block_bytes == text.kv_block_bytes
    assert encoder.kv_block_bytes == 1


def test_what_is_quantised_counts_as_its_files_do() -> None:
    """And with embedding and head in f32 where that is computed in."""
    fp8 = replace(SMOL, quantisation="fp8", disk_bytes=150_000_000)
    plain, quantised = (
        estimate(model, dtype="auto", block_tokens=16, on_cpu=False).weights_bytes
        for model in (SMOL, fp8)
    )
    assert plain - quantised == 2 * SMOL.parameters - fp8.disk_bytes
    short, long = (
        estimate(fp8, dtype=dtype, block_tokens=32, on_cpu=True).weights_bytes
        for dtype in ("float16", "float32")
    )
    assert long - short >= 2 * 2 * SMOL.vocabulary_tokens * SMOL.hidden_size
