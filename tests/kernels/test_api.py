"""What the kernels refuse, and scores against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.core.errors import ShapeError, UnsupportedError
from kvfold.kernels.attention import attend
from kvfold.kernels.scores import received_attention, window_attention
from tests.helpers import laws
from tests.helpers.oracle import attention64, causal

Q, K = torch.zeros(2, 4, 3, 16), torch.zeros(2, 2, 7, 16)

BAD = [
    ({"q": Q[0]}, r"q, k, v must be \[batch, heads, len, dim\], got \[4, 3, 16\]"),
    ({"k": K[:, :, :5]}, "k and v must match q in batch and head_dim and each other in rows"),
    ({"q": Q[:1]}, "k and v must match q in batch"),
    ({"q": Q[..., :8]}, "k and v must match q in batch and head_dim"),
    ({"q": torch.zeros(2, 3, 3, 16)}, "q_heads must be a multiple of kv_heads, got 3 and 2"),
    ({"k": K[:, :0], "v": K[:, :0]}, "q_heads must be a multiple of kv_heads, got 4 and 0"),
    ({"k": K.double()}, r"q, k, v must share one dtype, got torch.float32, torch.float64"),
    ({"mask": torch.ones(2, 3, 7)}, r"mask must be bool \[batch, q_len, kv_len\], got torch.float32"),
    ({"mask": torch.ones(2, 7, dtype=torch.bool)}, r"mask must be bool .* \[2, 7\]"),
    ({"bias": torch.zeros(2, 7)}, r"bias must be \[batch, kv_heads, kv_len\] = \[2, 2, 7\], got \[2, 7\]"),
    ({"impl": "fast"}, "impl must be 'auto', 'reference' or 'flash', got 'fast'; leave it out for the fastest"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_shapes(changes: dict[str, object], message: str) -> None:
    given = {"q": Q, "k": K, "v": K, "scale": 1.0, **changes}
    with pytest.raises(ShapeError, match=message) as caught:
        attend(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q": torch.zeros(2, 4, 7, 16), "bias": torch.zeros(2, 2, 7), "causal": True}, "a causal group with a bias"),
        ({"softcap": 3.0}, "softcap"),
        ({"mask": torch.ones(2, 3, 7, dtype=torch.bool)}, "a mask"),
        ({"causal": True}, "a causal group whose queries and keys differ in number"),
        ({"v": K[..., :8]}, "keys and values of unequal width"),
        ({"k": K[:, :, :0], "v": K[:, :, :0]}, "an empty group"),
        (
            {"q": Q.to(torch.float8_e5m2), "k": K.to(torch.float8_e5m2), "v": K.to(torch.float8_e5m2)},
            "dtype torch.float8_e5m2",
        ),
        ({"q": Q.to("meta"), "k": K.to("meta"), "v": K.to("meta")}, "device meta"),
    ],
)
def test_an_explicit_choice_never_falls_back(changes: dict[str, object], why: str) -> None:
    given = {"q": Q, "k": K, "v": K, "scale": 1.0, "impl": "flash", **changes}
    with pytest.raises(UnsupportedError, match=f"impl='flash' cannot serve {why}; use impl='reference' or 'auto'"):
        attend(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@laws.few(30)
@given(
    q_per_kv=laws.Q_PER_KV,
    q_len=st.sampled_from([1, 5, 40]),
    kv_len=st.sampled_from([1, 15, 63]),
    is_causal=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    reduce=st.sampled_from(["sum", "max"]),
    dtype=laws.DTYPES,
)
def test_received_attention(
    q_per_kv: int, q_len: int, kv_len: int, is_causal: bool, softcap: float | None, reduce: str, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(q_len * kv_len)
    q, k = (torch.randn(2, h, n, 16, generator=draw).to(dtype) for h, n in ((2 * q_per_kv, q_len), (2, kv_len)))
    visible = causal(q_len, kv_len) if is_causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    # one-hot values turn the output into the weights themselves
    eye = torch.eye(kv_len).expand(2, 2, kv_len, kv_len)
    weights, lse = attention64(q, k, eye, 0.4, visible, softcap=softcap)
    grouped = weights.unflatten(1, (2, q_per_kv))
    expected = grouped.mean(2).sum(2) if reduce == "sum" else grouped.amax((2, 3))
    lse = lse.float().masked_fill(lse == -torch.inf, 0.0)
    found = received_attention(q, k, lse, scale=0.4, softcap=softcap, causal=is_causal, reduce=reduce)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_received_attention_of_parts_adds_up() -> None:
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 30, 16)
    _, lse = attention64(q, k, k, 0.4)
    whole = received_attention(q, k, lse.float(), scale=0.4)
    parts = [received_attention(q, part, lse.float(), scale=0.4) for part in k.split([4, 1, 25], 2)]
    torch.testing.assert_close(torch.cat(parts, -1), whole)
    torch.testing.assert_close(whole.sum(-1), torch.full((1, 2), 9.0))


@laws.few(30)
@given(
    q_per_kv=laws.Q_PER_KV,
    window=st.sampled_from([1, 4, 8]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    gaps=st.booleans(),
)
def test_window_attention(q_per_kv: int, window: int, softcap: float | None, sinks: bool, gaps: bool) -> None:
    draw = torch.Generator().manual_seed(window)
    q, k = torch.randn(2, 2 * q_per_kv, window, 16, generator=draw), torch.randn(2, 2, 20, 16, generator=draw)
    positions = (
        torch.rand(2, 2, 40, generator=draw).argsort(-1)[..., :20].sort(-1).values
        if gaps
        else torch.arange(20).expand(2, 2, 20)
    )
    positions = positions.clone()
    positions[..., 0] = 0
    first = (40 if gaps else 20) - window
    logits = torch.randn(2 * q_per_kv, generator=draw) if sinks else None
    at = torch.arange(first, first + window)
    visible = (positions[:, :, None] <= at[:, None]).repeat_interleave(q_per_kv, 1)
    expected, _ = attention64(q, k, torch.eye(20).expand(2, 2, 20, 20), 0.4, visible, softcap=softcap, sinks=logits)
    found = window_attention(q, k, positions, first, scale=0.4, softcap=softcap, sinks=logits)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_scores_refuse_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"lse must be \[batch, q_heads, q_len\] = \[2, 4, 3\], got \[2, 4\]"):
        received_attention(Q, K, torch.zeros(2, 4), scale=1.0)
    with pytest.raises(ShapeError, match=r"positions must be \[batch, kv_heads, kv_len\] = \[2, 2, 7\], got \[7\]"):
        window_attention(Q, K, torch.arange(7), 0, scale=1.0)


def test_tiles_of_queries_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.kernels.attention import reference
    from kvfold.kernels.scores import reference as scores

    q, k = torch.randn(1, 4, 33, 16), torch.randn(1, 2, 33, 16)
    whole = attend(q, k, k, scale=0.3, causal=True, impl="reference")
    mass = received_attention(q, k, whole.lse, scale=0.3, causal=True)
    monkeypatch.setattr(reference, "_TILE_ELEMENTS", 4 * 33 * 5)
    monkeypatch.setattr(scores, "_TILE_ELEMENTS", 4 * 33 * 5)
    tiled = attend(q, k, k, scale=0.3, causal=True, impl="reference")
    torch.testing.assert_close(tiled.output, whole.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(received_attention(q, k, whole.lse, scale=0.3, causal=True), mass, rtol=1e-5, atol=1e-6)
