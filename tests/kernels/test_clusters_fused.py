"""The fused step of clusters chosen by risk: kernels and plain torch against float64 over what the latter chooses."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError
from kvfold.kernels.clusters import summarise_rows
from kvfold.kernels.clusters.fused import (
    Clustered,
    Refined,
    Settings,
    Threshold,
    attend_refined,
    reference,
    settings_for,
    step,
    unserved,
)
from kvfold.kernels.clusters.layout import means_of
from tests.helpers.oracle import attention64
from tests.helpers.retrieving import poisoned
from tests.laws.test_05_fast_equals_reference import eager_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
IMPLS = ["reference", pytest.param("triton", marks=needs_triton)]
SMALL = Settings(
    score_splits=2, score_tile=16, score_warps=4, score_stages=2, tail_splits=2, tail_tile=16, programs=2,
    warps=4, mean_tile=16, mean_stages=2, row_tile=16, row_stages=2,
)  # fmt: skip
"""Small tiles: short runs then have several of everything."""
NAN = float("nan")


@dataclass
class Case:
    """One step: queries, what is held, and the newest rows that are yet to be written."""

    q: Tensor
    held: Clustered
    new: tuple[Tensor, Tensor]
    scale: float

    def run(self, impl: str, rule: Threshold, **given: Any) -> Refined:
        settings = {} if impl == "reference" else {"settings": given.pop("settings", SMALL)}
        given.pop("settings", None)
        held = replace(self.held, keys=self.held.keys.clone(), values=self.held.values.clone())
        return attend_refined(self.q, held, rule, scale=self.scale, new=self.new, impl=impl, **settings, **given)


def case(
    lengths: list[list[int]],
    *,
    q_per_kv: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    segment: int = 4,
    dtype: torch.dtype = torch.float32,
    form: Any = "box",
    precision: Any = "int8",
    means: Any = "half",
    spread: float = 1.0,
    fits: list[bool] | None = None,
    room: int = 3,
    seed: int = 0,
) -> Case:
    """Lay runs into pools whose every other row is not a number, and summarise the clusters of each."""
    source = torch.Generator().manual_seed(seed)
    batch, kv_heads, value_dim = len(lengths), len(lengths[0]), value_dim or head_dim
    most = max(max(line) for line in lengths)
    entries = max(most - 1, 0) // segment + room
    starts, at = [], 3
    for line in lengths:
        starts.append([at + sum(n + 5 for n in line[:head]) for head in range(kv_heads)])
        at += sum(n + 5 for n in line)
    keys, values = torch.full((at, head_dim), NAN), torch.full((at, value_dim), NAN)
    new = [torch.zeros(batch, kv_heads, 1, width) for width in (head_dim, value_dim)]
    found: dict[str, Tensor] = {}
    for row, line in enumerate(lengths):
        for head, length in enumerate(line):
            first = starts[row][head]
            # runs of similar keys: the means of some clusters are close to their rows
            centre = torch.randn(length // 9 + 1, head_dim, generator=source).repeat_interleave(9, 0)[:length]
            own = [
                spread * (centre + 0.3 * torch.randn(length, head_dim, generator=source)),
                torch.randn(length, value_dim, generator=source),
            ]
            own = [side.to(dtype) for side in own]
            count = max(length - 1, 0) // segment
            cut = [side[: count * segment].view(1, 1, count, segment, side.shape[1]) for side in own]
            kept = summarise_rows(*cut, form=form, precision=precision, value_radius=True, means=means)
            for name, part in kept.items():
                part = poisoned(part, entries - count)
                held = found.setdefault(name, part.new_zeros(batch, kv_heads, *part.shape[2:]))
                held[row, head] = part[0, 0]
            for pool, side, last in zip((keys, values), own, new, strict=True):
                pool[first : first + max(length - 1, 0)] = side[:-1].float() if length else side.float()
                if length:
                    last[row, head, 0] = side[-1].float()
    fit = [True] * batch if fits is None else fits
    tails = [n if not fit[row] else n - max(n - 1, 0) // segment * segment for row, s in enumerate(lengths) for n in s]
    q = torch.randn(batch, kv_heads * q_per_kv, 1, head_dim, generator=source)
    held = Clustered(
        keys=keys.to(DEVICE, dtype),
        values=values.to(DEVICE, dtype),
        starts=torch.tensor(starts, device=DEVICE),
        lengths=torch.tensor(lengths, device=DEVICE),
        fits=torch.tensor(fit, device=DEVICE),
        summaries={name: tensor.to(DEVICE) for name, tensor in found.items()},
        segment=segment,
        tail_rows=max(1, *tails),
    )
    return Case(q.to(DEVICE, dtype), held, (new[0].to(DEVICE, dtype), new[1].to(DEVICE, dtype)), head_dim**-0.5)


def by_tau(tau: float | list[float], batch: int, **rule: Any) -> Threshold:
    given = tau if isinstance(tau, list) else [tau] * batch
    return Threshold(amounts=torch.tensor(given, device=DEVICE), **rule)


def choice(given: Case, rule: Threshold, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which clusters the reference finds to be there, and which it reads."""
    held = replace(given.held, keys=given.held.keys.clone(), values=given.held.values.clone())
    reference.append(held, given.new)
    lse, longest = torch.full(given.q.shape[:2], -torch.inf), torch.zeros(held.starts.shape)
    covered = reference.clusters(held) * held.segment
    group = given.q.shape[1] // held.starts.shape[1]
    for row in range(held.starts.shape[0]):
        for head in range(held.starts.shape[1]):
            first = int(held.starts[row, head] + covered[row, head])
            stop = int(held.starts[row, head] + held.lengths[row, head])
            heads = slice(head * group, (head + 1) * group)
            k, v = held.keys[first:stop][None, None].cpu(), held.values[first:stop][None, None].cpu()
            one = None if sinks is None else sinks[heads].cpu()
            lse[row, heads] = attention64(given.q[row : row + 1, heads].cpu(), k, v, given.scale, sinks=one)[1][
                0, :, 0
            ].float()
            longest[row, head] = v.float().norm(dim=-1).amax() if stop > first else 0
    return reference.choose(given.q, held, rule, lse.to(DEVICE), longest.to(DEVICE), given.scale)


def halfway(given: Case, **rule: bool) -> Threshold:
    """A threshold that some clusters pass and others do not, far from most risks."""
    low, high = -12.0, 4.0
    for _ in range(30):
        found = by_tau(10 ** ((low + high) / 2), given.q.shape[0], **rule)
        exists, expanded = choice(given, found)
        share = expanded.sum() / exists.sum()
        if 0.2 <= share <= 0.6:
            return found
        low, high = ((low + high) / 2, high) if share > 0.6 else (low, (low + high) / 2)
    raise AssertionError("no threshold tells these clusters apart")


def assert_exact(found: Refined, given: Case, rule: Threshold, sinks: Tensor | None = None) -> None:
    """Against attention in float64 over what the reference chooses, within law 5's bound."""
    held = replace(given.held, keys=given.held.keys.clone(), values=given.held.values.clone())
    exists, expanded = choice(given, rule, sinks)
    if given.new is not None:
        reference.append(held, given.new)
    assert torch.equal(found.expanded.long(), expanded.sum(-1))
    assert torch.isfinite(found.output).all()
    group, dtype = given.q.shape[1] // held.starts.shape[1], given.q.dtype
    error, bound = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for row in range(held.starts.shape[0]):
        for head in range(held.starts.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            start, length = int(held.starts[row, head]), int(held.lengths[row, head])
            there, read = exists[row, head].cpu(), expanded[row, head].cpu()
            rows = torch.arange(length) // held.segment
            tail = rows >= there.sum()
            own = (tail | read[rows.clamp_max(len(read) - 1)]).nonzero()[:, 0] + start
            stands = there & ~read
            kept = held.summaries
            mean_keys, mean_values = (mean[row, head].cpu()[stands] for mean in means_of(kept, dtype))
            k = torch.cat((held.keys[own.to(DEVICE)].cpu(), mean_keys))
            v = torch.cat((held.values[own.to(DEVICE)].cpu(), mean_values))
            bias = torch.cat((torch.zeros(len(own)), torch.full((int(stands.sum()),), math.log(held.segment))))
            one = given.q[row : row + 1, heads].cpu()
            k, v, bias = k[None, None], v[None, None], bias[None, None]
            sink = None if sinks is None else sinks[heads].cpu()
            exact, lse = attention64(one, k, v, given.scale, bias=bias, sinks=sink)
            output, found_lse = found.output[row, heads].cpu(), found.lse[row, heads].cpu()
            if not k.shape[2]:
                assert (output == 0).all()
                if sinks is None:
                    assert (found_lse == -torch.inf).all()
                continue
            error = torch.maximum(error, (output.double() - exact[0]).abs().max())
            size = attention64(one, k, v.abs(), given.scale, bias=bias, sinks=sink)[0].max()
            plain = attention64(one, k, v, given.scale)[0]
            rounding = eager_error(one, k, v, given.scale, None, plain, None) + torch.finfo(dtype).eps * size
            # parts are weighed by a log-sum-exp that is itself a rounded number
            weighing = torch.finfo(torch.float32).eps * lse.abs().max() * size
            bound = torch.maximum(bound, 2 * rounding + weighing)
            close = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found_lse.double(), lse[0], rtol=close, atol=close)
    assert error <= bound, f"error {float(error):.3g} above {float(bound):.3g}"


SHAPES = [(1, 64), (3, 80), (5, 96), (6, 128), (7, 64), (8, 256)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("q_per_kv", "head_dim"), SHAPES)
def test_runs_of_any_length(impl: str, dtype: torch.dtype, q_per_kv: int, head_dim: int) -> None:
    given = case([[257, 0], [15, 63]], q_per_kv=q_per_kv, head_dim=head_dim, segment=16, dtype=dtype)
    rule = halfway(given)
    assert_exact(given.run(impl, rule), given, rule)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("tau", "rule"),
    [
        (0.0, {}),
        (1e9, {"absolute": True}),
        ([0.03, 0.3], {}),
        ([0.03, 0.3], {"mean": True}),
        ([0.03, 0.3], {"absolute": True}),
        ([0.03, 0.3], {"value_radius": True}),
    ],
    ids=str,
)
def test_all_none_and_some_are_read(impl: str, tau: Any, rule: dict[str, bool]) -> None:
    given = case([[101, 3], [2, 40]], q_per_kv=3, value_dim=24, segment=5)
    threshold = by_tau(tau, 2, **rule)
    assert_exact(given.run(impl, threshold), given, threshold)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "kept",
    [
        {"form": "radius"},
        {"precision": "half"},
        {"precision": "half", "dtype": torch.bfloat16},
        {"means": "int8"},
        {"means": "int8", "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_other_summaries(impl: str, kept: dict[str, Any]) -> None:
    given = case([[120, 50]], **kept)
    rule = halfway(given)
    assert_exact(given.run(impl, rule), given, rule)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0, 4000.0])
def test_risks_of_any_size(impl: str, spread: float) -> None:
    # reaches up to 1e4: cosh has long overflowed
    given = case([[90, 61]], spread=spread, q_per_kv=3)
    for tau in (1e-9, 0.05):
        rule = by_tau(tau, 1)
        assert_exact(given.run(impl, rule), given, rule)


@pytest.mark.parametrize("impl", IMPLS)
def test_sequences_without_clusters_and_sinks(impl: str) -> None:
    given = case([[70, 33], [50, 81]], fits=[True, False], q_per_kv=3)
    sinks = torch.tensor([0.5, -2.0, 8.0, 1.0, 0.0, -30.0], device=DEVICE)
    rule = by_tau(0.05, 2)
    assert_exact(given.run(impl, rule, sinks=sinks), given, rule, sinks)


@pytest.mark.parametrize("impl", IMPLS)
def test_thresholds_by_rows_and_counts_of_living_sequences(impl: str) -> None:
    given = case([[70, 33], [50, 81], [20, 21]])
    table = torch.full((100,), 1e9, device=DEVICE)
    # means of 51.5, 65.5 and 20.5 rows, to the even one
    table[[52, 66, 20]] = torch.tensor([0.05, 0.0, 1e9], device=DEVICE)
    rule = Threshold(amounts=table, by_rows=True)
    plain = by_tau([0.05, 0.0, 1e9], 3)
    read, alive = torch.ones(2, dtype=torch.int64, device=DEVICE), torch.tensor([True, True, False], device=DEVICE)
    assert_exact(given.run(impl, rule, read=read, alive=alive), given, plain)
    exists, expanded = (side[:2].sum((1, 2)) for side in choice(given, plain))
    tails = given.held.lengths[:2].sum(1) - 4 * exists
    assert read.tolist() == [1 + int((4 * expanded + exists - expanded + tails).sum()), 1 + 70 + 33 + 50 + 81]
    every = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    given.run(impl, rule, read=every)
    assert int(every[1]) == 70 + 33 + 50 + 81 + 20 + 21


@pytest.mark.parametrize("impl", IMPLS)
def test_the_newest_row_is_written_once_and_nothing_else_is_touched(impl: str) -> None:
    given = case([[33, 32], [1, 17]])
    before = given.held.keys.clone(), given.held.values.clone()
    kept = {"settings": SMALL} if impl == "triton" else {}
    attend_refined(given.q, given.held, by_tau(0.1, 2), scale=0.25, new=given.new, impl=impl, **kept)
    slots = (given.held.starts + given.held.lengths - 1).flatten()
    for pool, then, new in zip((given.held.keys, given.held.values), before, given.new, strict=True):
        then[slots] = new.flatten(0, 2)
        assert torch.equal(pool.nan_to_num(7.0), then.nan_to_num(7.0))
    # and a step whose newest row is there already is the same
    rule = by_tau(0.1, 2)
    again = attend_refined(given.q, given.held, rule, scale=given.scale, impl=impl, **kept)
    torch.testing.assert_close(again.output, given.run(impl, rule).output, rtol=0, atol=0)


@needs_triton
@pytest.mark.parametrize("programs", [1, 3, 7, 40])
def test_the_number_of_programs_changes_nothing(programs: int) -> None:
    # several tiles in each of few programs, or none in some of many
    given = case([[157, 1], [0, 90]], segment=2)
    cut = replace(SMALL, programs=programs, score_splits=3, tail_splits=1)
    for rule in (by_tau(0.0, 2), halfway(given)):
        assert_exact(given.run("triton", rule, settings=cut), given, rule)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("means", ["half", "int8"])
def test_tiles_end_within_the_room_and_lists_close_up_in_pieces(
    means: str, extra: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 50 and 37 clusters: the last tiles of 16 would reach beyond the room, or hold what others score
    given = case([[201, 150], [99, 0]], room=extra, means=means, dtype=dtype)
    monkeypatch.setattr(step, "CHUNK", 4)
    for rule in (by_tau(0.0, 2), halfway(given)):
        assert_exact(given.run("triton", rule, settings=SMALL), given, rule)


@needs_triton
def test_the_settings_of_the_table_serve() -> None:
    given = case([[300, 200]], segment=16, head_dim=64)
    cut = settings_for(
        runs=2, room=20, tail_rows=16, head_dim=64, value_dim=64, itemsize=4, device=torch.device(DEVICE)
    )  # fmt: skip
    rule = by_tau(0.05, 1)
    assert_exact(given.run("triton", rule, settings=replace(cut, programs=3)), given, rule)


@pytest.mark.parametrize("size", [0.0, 1e-9, 0.3, 126.6, 127.0, 1e4])
def test_means_in_whole_numbers_are_the_same_in_every_type(size: float) -> None:
    source = torch.Generator().manual_seed(1)
    rows = torch.rand(1, 2, 5, 3, 8, generator=source) * size
    rows[..., 0] = size
    kept = summarise_rows(rows, -rows, form="box", precision="int8", value_radius=True, means="int8")
    exact = means_of(kept, torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for found, wanted in zip(means_of(kept, dtype), exact, strict=True):
            assert torch.equal(found.double(), wanted)
    off = rows.double() - exact[0].unsqueeze(3)
    reach = kept["box"].double() * kept["reach_step"].double().unsqueeze(-1)
    assert (off.abs().amax(3) <= reach).all()
    assert (off.mean(3).norm(dim=-1) <= kept["key_shift"]).all()
    assert ((-rows.double() - exact[1].unsqueeze(3)).norm(dim=-1).amax(3) <= kept["value_radius"]).all()


def test_rules_and_refusals() -> None:
    given = case([[20, 20]], form="minmax")
    assert "minmax" in str(unserved(given.q, given.held))
    with pytest.raises(UnsupportedError, match="impl='triton' cannot serve summaries without a box"):
        given.run("triton", by_tau(0.1, 1))
    half = case([[20, 20]], precision="half", dtype=torch.float16)
    assert "float16" in str(unserved(half.q, half.held))
    wide = case([[20, 20]], q_per_kv=65)
    assert "65 query heads" in str(unserved(wide.q, wide.held))
    assert "float64" in str(unserved(given.q.double(), given.held))
    plain = case([[20, 20]])
    call: dict[str, Any] = {"scale": 1.0}
    rule = by_tau(0.1, 1)
    with pytest.raises(ShapeError, match="impl must be"):
        attend_refined(plain.q, plain.held, rule, impl="cuda", **call)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"q must be \[batch, q_heads, 1, head_dim\]"):
        attend_refined(plain.q[..., :8], plain.held, rule, **call)
    with pytest.raises(ShapeError, match="multiple of kv_heads, got 3 and 2"):
        attend_refined(plain.q[:, :3], plain.held, rule, **call)
    with pytest.raises(ShapeError, match="share one dtype"):
        attend_refined(plain.q.half(), plain.held, rule, **call)
    with pytest.raises(ShapeError, match="starts, lengths must be"):
        attend_refined(plain.q, replace(plain.held, lengths=plain.held.lengths[0]), rule, **call)
    cut = {name: part[:, :1] for name, part in plain.held.summaries.items()}
    with pytest.raises(ShapeError, match="summaries must be"):
        attend_refined(plain.q, replace(plain.held, summaries=cut), rule, **call)
    with pytest.raises(ShapeError, match="new must be"):
        attend_refined(plain.q, plain.held, rule, new=(plain.new[0][:, :1], plain.new[1]), **call)
