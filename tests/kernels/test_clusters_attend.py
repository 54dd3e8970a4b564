"""Attention over a selection equals attention over the very rows and means that it names, whatever else is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.core.errors import ShapeError
from kvfold.core.retrieve import NOTHING_FITTED, Fitted, Retriever, SelectContext, Selection
from kvfold.kernels.attention import AttentionOutput
from kvfold.kernels.clusters import attend_selected, count_read, summarise_kmeans, summarise_rows
from tests.helpers import laws
from tests.helpers.retrieving import attended, draw, mixed64, moved, step

IMPLS = ("masked", "gathered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance(Retriever):
    """Read, represent and drop clusters by chance: shares of 0 and 1 are all or none."""

    read: float = 0.3
    kept: float = 0.8
    similar: bool = False
    upper: bool = False
    per_query: bool = False

    @property
    def knob(self) -> str:
        return "read"

    @property
    def segments(self) -> tuple[int, ...]:
        return (12,) if self.similar else (4, 12) if self.upper else (4,)

    @property
    def clusters_per_segment(self) -> int:
        return 5 if self.similar else 1

    def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: Fitted = NOTHING_FITTED) -> dict[str, Tensor]:
        if self.similar:
            return summarise_kmeans(keys, values, clusters=5, iterations=2)
        return summarise_rows(keys, values, form="radius", precision="int8", value_radius=False)

    def select(self, ctx: SelectContext) -> Selection:
        source = torch.Generator().manual_seed(7)
        batch, kv_heads, clusters = ctx.exists[0].shape
        heads = ctx.queries.shape[1] if self.per_query else kv_heads
        luck = torch.rand(batch, heads, clusters, generator=source)
        expanded, represented = luck < self.read, (luck >= self.read) & (luck < self.kept)
        if not self.upper:
            return Selection(expanded=expanded, represented=(represented,), scored=(ctx.exists[0].sum(-1),))
        whole = torch.rand(batch, heads, ctx.exists[1].shape[-1], generator=source) < self.kept
        under = torch.zeros_like(expanded)
        for parent in range(whole.shape[-1]):
            under[..., 3 * parent : 3 * parent + 3] = whole[..., parent, None]
        return Selection(
            expanded=expanded & ~under,
            represented=(represented & ~under, whole),
            scored=tuple(exist.sum(-1) for exist in ctx.exists),
        )


@laws.few(80)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    length=st.sampled_from([0, 1, 15, 63, 257]),
    shape=st.sampled_from([{}, {"similar": True}, {"upper": True}]),
    per_query=st.booleans(),
    shares=st.sampled_from([(0.3, 0.8), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.5, 0.5)]),
    room=st.sampled_from([0, 3]),
    absent=st.sampled_from([(), (1,), (0, 1)]),
)
@example(3, 80, torch.bfloat16, 257, {"similar": True}, True, (0.3, 0.8), 3, (1,))
@example(8, 64, torch.float32, 257, {"upper": True}, False, (0.3, 0.5), 3, (0,))
def test_what_is_chosen_is_what_is_read(
    q_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    length: int,
    shape: dict[str, bool],
    per_query: bool,
    shares: tuple[float, float],
    room: int,
    absent: tuple[int, ...],
) -> None:
    method = Chance(read=shares[0], kept=shares[1], per_query=per_query, **shape)
    rows = draw("isotropic", length, q_per_kv=q_per_kv, head_dim=head_dim, dtype=dtype)
    done = step(method, rows, room=room, absent=absent)
    exact = mixed64(done)
    size = mixed64(done, lengths=True).max()
    rounding = (mixed64(done, dtype) - exact).abs().max() + torch.finfo(dtype).eps * size
    for impl in IMPLS:
        found = attended(done, impl, room=room)
        assert found.output.dtype == dtype
        assert torch.isfinite(found.output).all()
        error = (found.output.squeeze(2).double() - exact).abs().max()
        # groups are weighed by a log-sum-exp that is itself a rounded number
        weighing = torch.finfo(found.lse.dtype).eps * found.lse.masked_fill(found.lse == -torch.inf, 0).abs().max()
        bound = 2 * rounding + weighing * size + 1e-14
        assert error <= bound, f"{impl}: error {error:.3g} above {bound:.3g}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("room", [0, 2])
def test_rows_may_be_a_view_of_more_or_of_fewer_than_the_room(impl: str, room: int) -> None:
    done = step(Chance(), draw("isotropic", 45), room=room)
    pairs = [attended(done, impl, room=stored).output for stored in (0, 1, 5)]
    torch.testing.assert_close(pairs[0], pairs[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(pairs[0], pairs[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_empty_rest_does_not_count_whatever_it_holds(impl: str) -> None:
    done = step(Chance(), draw("isotropic", 44))
    assert (done.rest.lse == -torch.inf).all()
    spoiled = AttentionOutput(torch.full_like(done.rest.output, torch.nan), done.rest.lse)
    found = attended(replace(done, rest=spoiled), impl)
    torch.testing.assert_close(found.output, attended(done, impl).output)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_read_at_all_is_zero_and_minus_infinity(impl: str) -> None:
    found = attended(step(Chance(read=0, kept=0), draw("isotropic", 44)), impl)
    assert not found.output.any()
    assert (found.lse == -torch.inf).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("similar", [False, True])
def test_sizes_are_not_rounded_to_half_precision(impl: str, similar: bool) -> None:
    # log 12 in bfloat16 is off by 0.6 %, and so would be the weight of all clusters beside the rest
    rows = draw("constant", 12 * 20 + 11, dtype=torch.bfloat16, head_dim=64)
    rows.keys.zero_()
    found = attended(step(Chance(read=0, kept=1, similar=similar), rows), impl)
    torch.testing.assert_close(found.lse, torch.full_like(found.lse, 251.0).log(), rtol=0, atol=2e-4)


def test_the_automatic_choice_gives_the_same() -> None:
    for share in (0.1, 0.9):
        done = step(Chance(read=share, kept=1), draw("isotropic", 257))
        torch.testing.assert_close(attended(done, "auto").output, attended(done, "masked").output, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [{}, {"similar": True}, {"upper": True}])
@pytest.mark.parametrize("per_query", [False, True])
def test_counts_are_unions_over_a_group(shape: dict[str, bool], per_query: bool) -> None:
    done = step(Chance(per_query=per_query, **shape), draw("isotropic", 100, q_per_kv=3), room=2, absent=(1,))
    counts = count_read(
        done.selection, segments=done.segments, levels=done.ctx.levels, exists=done.ctx.exists, q_per_kv=3
    )
    for row in range(2):
        for head in range(2):
            heads = range(3 * head, 3 * head + 3) if per_query else (head,)
            expect = [0, 0, 0]
            for level, exist in enumerate(done.ctx.exists):
                expect[2] += int(exist[row, head].sum())
                for cluster in exist[row, head].nonzero().flatten().tolist():
                    expect[1] += any(bool(done.selection.represented[level][row, at, cluster]) for at in heads)
                    if level == 0 and any(bool(done.selection.expanded[row, at, cluster]) for at in heads):
                        sizes = done.ctx.levels[0].get("sizes")
                        expect[0] += 4 if sizes is None else int(sizes[row, head, cluster])
            assert [int(count[row, head]) for count in counts] == expect


def test_fixed_shapes_need_no_value() -> None:
    # tensors without data: whatever has to look at one fails
    done = moved(step(Chance(upper=True), draw("isotropic", 100, q_per_kv=3)), "meta")
    assert attended(done, "auto").output.shape == (2, 6, 1, 16)
    counts = count_read(
        done.selection, segments=done.segments, levels=done.ctx.levels, exists=done.ctx.exists, q_per_kv=3
    )
    assert all(count.shape == (2, 2) for count in counts)


@pytest.mark.parametrize("impl", IMPLS)
def test_values_of_another_width_than_keys(impl: str) -> None:
    rows = draw("isotropic", 45)
    rows.values = torch.cat((rows.values, rows.values[..., :3]), -1)
    done = step(Chance(), rows)
    torch.testing.assert_close(attended(done, impl).output.squeeze(2).double(), mixed64(done), rtol=0, atol=1e-5)


BAD = [
    ({"q": torch.zeros(2, 4, 2, 16)}, r"q must be \[batch, q_heads, 1, head_dim\], got \[2, 4, 2, 16\]"),
    ({"keys": torch.zeros(2, 2, 7, 16)}, "keys and values must match q in batch and head_dim and each other in rows"),
    ({"q": torch.zeros(2, 3, 1, 16)}, "q_heads must be a multiple of kv_heads, got 3 and 2"),
    ({"impl": "fast"}, "impl must be 'auto', 'masked', 'gathered' or 'triton', got 'fast'"),
    ({"expanded": torch.zeros(2, 3, 2).bool()}, "a selection must be bool .* with 2 or 4 heads and 2 clusters"),
    ({"expanded": torch.zeros(2, 2, 2)}, r"a selection must be bool .*, got torch.float32 \[2, 2, 2\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    none = torch.zeros(2, 2, 2).bool()
    given = {
        "q": torch.zeros(2, 4, 1, 16),
        "keys": torch.zeros(2, 2, 8, 16),
        "impl": "auto",
        "expanded": none,
    } | changes
    rest = AttentionOutput(torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1))
    with pytest.raises(ShapeError, match=message) as caught:
        attend_selected(
            given["q"],
            given["keys"],
            torch.zeros(2, 2, 8, 16),
            segments=(4,),
            levels=({},),
            exists=(none,),
            selection=Selection(expanded=given["expanded"], represented=(none,), scored=(none.sum(-1),)),
            rest=rest,
            scale=1.0,
            impl=given["impl"],
        )
    assert "\n" not in str(caught.value)
