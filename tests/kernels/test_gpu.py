"""On a CUDA device: fused attention against float64, and whole caches in half and single precision."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.hf.compat import cache_kwarg
from kvfold.hf.stack import StackedCache
from kvfold.kernels.attention import AttentionOutput, attend, merge
from kvfold.kernels.runs import attend_ragged

pytestmark = pytest.mark.gpu


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> AttentionOutput:
    return attend(q.double().cpu(), k.double().cpu(), v.double().cpu(), scale=scale, causal=causal, impl="reference")


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("q_per_kv", [1, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_attention_is_as_exact_as_eager(head_dim: int, q_per_kv: int, dtype: torch.dtype) -> None:
    for q_len, kv_len, causal in [
        (1, 257, False),
        (1, 1, False),
        (15, 63, False),
        (63, 63, True),
        (257, 257, True),
    ]:
        q = torch.randn(2, 2 * q_per_kv, q_len, head_dim, device="cuda", dtype=dtype)
        k, v = (torch.randn(2, 2, kv_len, head_dim, device="cuda", dtype=dtype) for _ in range(2))
        scale = head_dim**-0.5
        found = attend(q, k, v, scale=scale, causal=causal, impl="flash")
        true = oracle(q, k, v, scale, causal)
        group = q_per_kv
        logits = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)) * scale
        if causal:
            logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf)
        eager = logits.softmax(-1) @ v.repeat_interleave(group, 1)
        bound = 2 * (
            (eager.double().cpu() - true.output).abs().max() + torch.finfo(dtype).eps * true.output.abs().max()
        )
        assert (found.output.double().cpu() - true.output).abs().max() <= bound
        assert (found.lse.double().cpu() - true.lse).abs().max() < 1e-2


def test_ragged_rows_with_empty_heads_and_poisoned_slack() -> None:
    keys, values = (torch.full((96, 64), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    starts, lengths = [[0, 32, 64]], [[17, 0, 30]]
    for start, length in zip(starts[0], lengths[0], strict=True):
        keys[start : start + length].normal_()
        values[start : start + length].normal_()
    q = torch.randn(1, 9, 1, 64, device="cuda", dtype=torch.bfloat16)
    found = attend_ragged(q, keys, values, starts, lengths, scale=0.125)
    assert torch.isfinite(found.output).all()
    assert (found.output[:, 3:6] == 0).all()
    assert (found.lse[:, 3:6] == -torch.inf).all()


def test_a_split_group_merges_to_the_whole() -> None:
    q = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 500, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    whole = attend(q, k, v, scale=0.1)
    parts = merge([attend(q, k[:, :, a:b], v[:, :, a:b], scale=0.1) for a, b in itertools.pairwise([0, 1, 130, 500])])
    torch.testing.assert_close(parts.output.float(), whole.output.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(parts.lse, whole.lse, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=200,
        max_position_embeddings=4096,
    )
    made = LlamaForCausalLM(config).eval().cuda()
    made.generation_config.eos_token_id = None
    return made


@pytest.mark.parametrize("name", [entry.name for entry in kvfold.methods("evict")])
def test_every_method_on_the_device(model: LlamaForCausalLM, name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    ids = torch.randint(3, 200, (2, 300), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    policy = kvfold.policy(name, keep=0.5)
    with kvfold.attach(model, policy):
        batch = model.generate(ids, attention_mask=mask, **options)
        alone = model.generate(ids[:1, 37:], **options)
        chunks = model.generate(ids, attention_mask=mask, prefill_chunk_size=64, **options)
    assert torch.equal(batch[0, 300:], alone[0, 263:])
    assert torch.equal(batch, chunks)
    cache = kvfold.Cache(model, policy).prefill(ids, mask, chunk_size=64)
    cache.check()
    cache.save(tmp_path / "talk.kv")
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", model)
    token, seen = ids[:, :1], torch.cat((mask, mask[:, -1:]), dim=1)
    with torch.no_grad():
        first = model(token, attention_mask=seen, **{cache_kwarg(): cache}).logits
        again = model(token, attention_mask=seen, **{cache_kwarg(): loaded}).logits
    assert torch.equal(first, again)


def test_evicted_bytes_return_to_the_device(model: LlamaForCausalLM) -> None:
    ids = torch.randint(3, 200, (1, 4096), device="cuda")
    cache = kvfold.Cache(model, "dense").prefill(ids)
    torch.cuda.synchronize()
    before, held = torch.cuda.memory_allocated(), cache.nbytes
    tensors = sum(1 for view in cache.views for _ in view.core.tensors())
    cache.compress("keydiff(keep=0.25, allocator=ada)")
    freed = before - torch.cuda.memory_allocated()
    # the allocator rounds each tensor up to 512 bytes; positions are held from now on
    assert abs(freed - (held - cache.nbytes)) <= 512 * (2 * tensors)
    assert 0.73 <= freed / held <= 0.77


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bias_per_row_is_served_by_the_fused_operator(dtype: torch.dtype) -> None:
    q = torch.randn(3, 14, 1, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(3, 2, 333, 64, device="cuda", dtype=dtype) for _ in range(2))
    bias = torch.zeros(3, 2, 333, device="cuda", dtype=dtype)
    bias[0, 0, 7:] = -torch.inf
    bias[1, 1] = -torch.inf
    bias[2] = torch.randn(2, 333)
    found = attend(q, k, v, scale=0.125, bias=bias, impl="flash")
    plain = attend(q, k, v, scale=0.125, bias=bias, impl="reference")
    torch.testing.assert_close(found.output.float(), plain.output.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.lse, plain.lse, atol=2e-2, rtol=2e-2)
    assert (found.output[1, 7:] == 0).all()
    assert (found.lse[1, 7:] == -torch.inf).all()


def test_a_stack_of_caches_answers_as_each_alone(model: LlamaForCausalLM) -> None:
    names = ["manifoldkv(keep=0.25)", "snapkv(keep=0.5, allocator=ada)", "kvzip(keep=0.5)"]
    ids, question = torch.randint(3, 200, (1, 300), device="cuda"), torch.randint(3, 200, (1, 7), device="cuda")
    dense = kvfold.Cache(model, "dense", observe=names).prefill(ids)
    caches = [dense.fork(), *(dense.fork().compress(name) for name in names)]
    stack = StackedCache(caches)
    rows = question.expand(len(caches), -1)
    together = stack.feed(rows, torch.ones_like(rows, dtype=torch.bool))
    for row, cache in enumerate(caches):
        with cache.hold(), torch.no_grad():
            alone = model(question, **{cache_kwarg(): cache}).logits[0, -1]
        torch.testing.assert_close(together[row], alone, atol=1e-3, rtol=1e-3)


def test_layers_on_several_devices(model: LlamaForCausalLM, tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("accelerate")
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 200, (1, 200), device="cuda")
    policy = "keydiff(keep=0.5, allocator=ada)"
    spread = LlamaForCausalLM.from_pretrained(
        tmp_path,
        device_map={
            "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": 0, "model.norm": 0,
            "model.rotary_emb": 0, "lm_head": 0,
        },
    )  # fmt: skip
    cache, alone = kvfold.Cache(spread, policy).prefill(ids, chunk_size=64), kvfold.Cache(model, policy).prefill(ids)
    for layer in range(3):
        for head in range(2):
            found, wanted = cache.positions(layer, 0, head).cpu(), alone.positions(layer, 0, head).cpu()
            assert len(set(found.tolist()) ^ set(wanted.tolist())) <= 4
    cache.save(tmp_path / "talk.kv")
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", spread)
    with torch.no_grad():
        first = spread(ids[:, :1], **{cache_kwarg(): cache}).logits
        again = spread(ids[:, :1], **{cache_kwarg(): loaded}).logits
    assert torch.equal(first, again)
