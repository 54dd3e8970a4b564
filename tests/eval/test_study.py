"""Studies against loops over heads, queries and clusters in float64, and rows against a stock model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.studies import CLUSTER, TOKENS, study
from torch import Tensor

from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.eval.study import (
    Exploration,
    MassFigures,
    RiskFigures,
    StudyRecord,
    SummaryFigures,
    check_layers,
    check_place,
    explore,
    study_mass,
    study_risk,
    study_summaries,
)
from kvfold.eval.study.risk import HEADS, LEAST, SHARES
from kvfold.eval.study.rows import QUERIES, StudyRows, read_rows, spread_positions
from kvfold.eval.study.scores import cluster_scores, contribution_errors, quest_levels
from kvfold.eval.study.sight import FORMS, Sight, sights
from kvfold.eval.study.summaries import TAUS, passing
from kvfold.methods.retrieve.quest import Quest
from kvfold.methods.retrieve.refinekv import RefineKV

POSITIONS = spread_positions(TOKENS)


def rows_of(family: str = "llama", positions: tuple[int, ...] = POSITIONS) -> list[StudyRows]:
    model = tiny.ours(family)
    layers = check_layers(model, None)
    return list(read_rows(model, tiny.ids(TOKENS), positions, layers=layers, chunk_size=48))


class Naive:
    """One query head at one position, from the definitions, float64."""

    def __init__(self, rows: StudyRows, at: int, head: int, cluster: int = CLUSTER):
        position, kv = rows.positions[at], head // rows.q_per_kv
        self.count, self.cluster = position // cluster, cluster
        self.query = rows.queries[0, head, at].double()
        self.keys, self.values = (side[0, kv, : position + 1].double() for side in (rows.keys, rows.values))
        self.scale = rows.scale
        self.logits = self.keys @ self.query * self.scale
        self.longest = float(self.values.norm(dim=-1).max())
        self.sink = math.exp(float(rows.sinks[head])) if rows.sinks is not None else 0.0

    def part(self, at: int) -> slice:
        return slice(at * self.cluster, (at + 1) * self.cluster)

    @property
    def rest(self) -> slice:
        return slice(self.count * self.cluster, None)

    def mean(self, at: int) -> tuple[float, Tensor]:
        return float(self.keys[self.part(at)].mean(0) @ self.query * self.scale), self.values[self.part(at)].mean(0)

    def weights(self, expanded: set[int], represent: bool = True) -> tuple[float, Tensor]:
        total, output = self.sink, torch.zeros(self.values.shape[-1], dtype=torch.float64)
        chosen = [self.part(at) for at in sorted(expanded)] + [self.rest]
        for part in chosen:
            for logit, value in zip(self.logits[part], self.values[part], strict=True):
                total, output = total + math.exp(float(logit)), output + math.exp(float(logit)) * value
        for at in range(self.count) if represent else ():
            if at not in expanded:
                logit, value = self.mean(at)
                total += self.cluster * math.exp(logit)
                output = output + self.cluster * math.exp(logit) * value
        return total, output / total

    def error(self, expanded: set[int], represent: bool = True) -> float:
        exact = self.weights(set(range(self.count)))[1]
        return float((self.weights(expanded, represent)[1] - exact).norm() / exact.norm())

    def importance(self, at: int) -> float:
        return self.cluster * math.exp(self.mean(at)[0]) / self.weights(set())[0]

    def true_share(self, at: int) -> float:
        return float(self.logits[self.part(at)].exp().sum()) / self.weights(set(range(self.count)))[0]

    def reach(self, at: int, form: str) -> tuple[float, float]:
        offsets = self.keys[self.part(at)] - self.keys[self.part(at)].mean(0)
        if form == "exact":
            far = float((offsets @ self.query).abs().max()) * self.scale
            return far, far
        if form == "radius":
            far = float(offsets.norm(dim=-1).max() * self.query.norm()) * self.scale
            return far, far
        up, down = (offsets.amax(0), -offsets.amin(0)) if form == "minmax" else (offsets.abs().amax(0),) * 2
        plus, minus = self.query.clamp_min(0), (-self.query).clamp_min(0)
        return float(plus @ up + minus @ down) * self.scale, float(plus @ down + minus @ up) * self.scale

    def risk(self, reaches: list[tuple[float, float]]) -> list[float]:
        """The published formula, in units of the longest value; the chord where both sides differ."""

        def growth(above: float, below: float) -> float:
            if above + below == 0:
                return 1.0
            return (below * math.exp(above) + above * math.exp(-below)) / (above + below)

        shares = [self.importance(at) for at in range(self.count)]
        grown = [growth(*reach) for reach in reaches]
        total = 1 + sum(share * (big - 1) for share, big in zip(shares, grown, strict=True))
        return [
            2 * share * ((big - 1) / total + math.tanh((above + below) / 4))
            for share, big, (above, below) in zip(shares, grown, reaches, strict=True)
        ]


def each(rows: StudyRows) -> list[tuple[int, int]]:
    return [(at, head) for at in range(len(rows.positions)) for head in range(rows.queries.shape[1])]


def only(rows: StudyRows, cluster: int = CLUSTER) -> Sight:
    (sight,) = sights(rows, cluster)
    return sight


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3_partial", "gpt_oss"])
def test_dense_outputs_are_those_of_a_stock_model(family: str) -> None:
    found = rows_of(family)
    with torch.no_grad():
        output = tiny.stock(family)(tiny.ids(TOKENS), use_cache=True, output_attentions=True)
    for rows in found:
        values = output.past_key_values.layers[rows.layer].values[0].repeat_interleave(rows.q_per_kv, 0)
        expected = output.attentions[rows.layer][0] @ values
        torch.testing.assert_close(only(rows).dense, expected[:, list(POSITIONS)].transpose(0, 1), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_what_a_query_sees_of_clusters(family: str) -> None:
    rows = rows_of(family)[-1]
    sight = only(rows)
    for form in FORMS:
        seen, risk = sight.found(form), sight.risk(form)
        for at, head in each(rows)[::5]:
            naive, place = Naive(rows, at, head), (at, head // rows.q_per_kv, head % rows.q_per_kv)
            count = naive.count
            assert int(sight.exists[at, 0].sum()) == count
            reaches = [naive.reach(one, form) for one in range(count)]
            # a byte per number, rounded up, is a bound that is at most a 255th of the largest too wide
            slack = 1e-4 if form in ("radius", "exact") else 0.15
            for one in range(count):
                for side, exact in zip((seen.above, seen.below), reaches[one], strict=True):
                    assert exact - 1e-4 <= float(side[place][one]) <= exact + slack * max(1.0, exact)
            own = [(float(seen.above[place][one]), float(seen.below[place][one])) for one in range(count)]
            assert risk[place][:count].tolist() == pytest.approx(naive.risk(own), rel=1e-3, abs=1e-9)
            assert float(sight.true_mass[place][0].exp()) == pytest.approx(
                float(naive.logits[naive.part(0)].exp().sum()), rel=1e-4
            )


@pytest.mark.parametrize("represent", [True, False])
def test_errors_of_choices(represent: bool) -> None:
    rows = rows_of()[0]
    sight = only(rows)
    draw = torch.rand(len(POSITIONS), 4, sight.exists.shape[-1]) < 0.3
    found = sight.error(draw, represent=represent)
    for at, head in each(rows)[::3]:
        naive = Naive(rows, at, head)
        expanded = {one for one in range(naive.count) if draw[at, head, one]}
        assert float(found[at, head]) == pytest.approx(naive.error(expanded, represent), rel=1e-3, abs=1e-5)
    everything = torch.ones_like(sight.exists)
    assert float(sight.error(everything).max()) < 1e-5


def test_queries_in_small_batches_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of()[0]
    whole = only(rows)
    monkeypatch.setattr("kvfold.eval.study.sight._TILE_ELEMENTS", 3 * rows.keys.numel())
    parts = list(sights(rows, CLUSTER))
    assert len(parts) == 6
    nothing = torch.zeros_like(whole.exists)
    errors = torch.cat([part.error(torch.zeros_like(part.exists)) for part in parts])
    torch.testing.assert_close(errors, whole.error(nothing))


def test_mass_by_counting() -> None:
    found = study("mass").figures
    assert isinstance(found, MassFigures)
    later = TOKENS // 4
    assert (found.context, found.queries) == (TOKENS - later, later)
    context = found.context
    shares, unions = [], []
    for rows, layer in zip(rows_of(positions=tuple(range(context, TOKENS))), found.layers, strict=True):
        per_head: list[list[set[int]]] = []
        for head in range(rows.queries.shape[1]):
            sets = []
            for at in range(later):
                attention = Naive(rows, at, head).logits[:context].exp()
                order = attention.argsort(descending=True).tolist()
                needed, held = set(), 0.0
                while held < 0.9 * float(attention.sum()):
                    needed.add(order[len(needed)])
                    held = float(attention[list(needed)].sum())
                sets.append(needed)
            per_head.append(sets)
        sizes = [len(one) / context for sets in per_head for one in sets]
        own = sum(len(set.union(*sets)) for sets in per_head) / len(per_head) / context
        pairs = [set.union(*per_head[head], *per_head[head + 1]) for head in range(0, len(per_head), 2)]
        assert layer.share.mean == pytest.approx(sum(sizes) / len(sizes), abs=0.3 / context)
        assert layer.union == pytest.approx(own, abs=2 / context)
        assert layer.group_union == pytest.approx(sum(map(len, pairs)) / len(pairs) / context, abs=2 / context)
        shares.append(layer.share.mean)
        unions.append(layer.union)
    assert found.share.mean == pytest.approx(sum(shares) / len(shares))
    assert found.union == pytest.approx(sum(unions) / len(unions))
    counts, single, group = zip(*found.growth, strict=True)
    assert counts == (1, 2, 4, 8, 16, 32, later)
    assert list(single) == sorted(single)
    assert (single[-1], group[-1]) == (found.union, found.group_union)


def naive_ranks(values: list[float]) -> Tensor:
    return torch.tensor([sum(o < v for o in values) + (sum(o == v for o in values) + 1) / 2 for v in values])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1])


def test_correlations_of_the_published_protocol() -> None:
    found = study("risk").figures
    assert isinstance(found, RiskFigures)
    assert (len(found.heads), len(found.positions)) == (HEADS, QUERIES)
    assert found.layer == 1
    rows = rows_of()[1]
    errors: list[float] = []
    scores: dict[str, list[float]] = {"risk, exact": [], "importance": [], "true mass": []}
    for at in range(len(POSITIONS)):
        for head in found.heads:
            naive = Naive(rows, at, head)
            risk = naive.risk([naive.reach(one, "exact") for one in range(naive.count)])
            total = naive.weights(set(range(naive.count)))[0]
            for one in range(naive.count):
                part, (_, mean) = naive.part(one), naive.mean(one)
                exact = (naive.logits[part].exp()[:, None] * naive.values[part]).sum(0) / total
                errors.append(float((exact - naive.importance(one) * mean).norm()))
                scores["risk, exact"].append(risk[one])
                scores["importance"].append(naive.importance(one))
                scores["true mass"].append(naive.true_share(one))
    assert found.observations == len(errors)
    by_name = {one.score: one for one in found.correlations}
    assert set(by_name) == {*(f"risk, {form}" for form in FORMS), "importance", "true mass"}
    truth = naive_ranks(errors)
    for name, values in scores.items():
        assert by_name[name].spearman == pytest.approx(correlation(naive_ranks(values), truth), abs=2e-3)
        logs = correlation(torch.tensor(values).log(), torch.tensor(errors).log())
        assert by_name[name].log_pearson == pytest.approx(logs, abs=2e-3)


def test_errors_at_an_equal_budget() -> None:
    found = study("risk").figures
    assert isinstance(found, RiskFigures)
    share = SHARES[-1]
    errors: dict[tuple[str, bool], list[float]] = {}
    for rows in rows_of():
        sight = only(rows)
        levels = quest_levels(sight)
        for at, head in each(rows):
            naive = Naive(rows, at, head)
            count = max(LEAST, math.floor(share * naive.count))
            low, high = (levels[name][at, head // rows.q_per_kv].double() for name in ("low_keys", "high_keys"))
            bounds = torch.maximum(naive.query * low, naive.query * high).sum(-1)[: naive.count].tolist()
            rated = {
                ("importance", True): [naive.importance(one) for one in range(naive.count)],
                ("true mass", True): [naive.true_share(one) for one in range(naive.count)],
                ("quest", True): bounds,
                ("quest", False): bounds,
            }
            for (name, represent), values in rated.items():
                best = set(sorted(range(naive.count), key=lambda one: -values[one])[:count])
                errors.setdefault((name, represent), []).append(naive.error(best, represent))
    for (name, represent), values in errors.items():
        (own,) = (o for o in found.matched if (o.score, o.represented, o.share) == (name, represent, share))
        assert own.error.mean == pytest.approx(sum(values) / len(values), rel=5e-3)
        assert own.error.median == pytest.approx(sorted(values)[(len(values) - 1) // 2], rel=2e-2)
    for share in SHARES:
        assert len({round(one.expanded, 6) for one in found.matched if one.share == share}) == 1


def test_quest_reads_as_many_pages_as_the_others() -> None:
    sight = only(rows_of()[0])
    counts = torch.full((len(POSITIONS),), 4)
    amount = (counts * CLUSTER).float()
    chosen = Quest(page=CLUSTER).select(sight.context(quest_levels(sight), amount)).expanded
    assert chosen.sum(-1).eq(4).all()


def test_scores_know_no_cluster_that_is_not_there() -> None:
    sight = only(rows_of()[0])
    there = sight.exists.repeat_interleave(2, 1)
    for score in cluster_scores(sight).values():
        assert score[~there].eq(-torch.inf).all()
        assert score[there].isfinite().all()
    assert contribution_errors(sight)[~there].eq(0).all()


@pytest.mark.parametrize("form", ["radius", "box", "minmax"])
def test_a_threshold_chooses_what_the_method_chooses(form: str) -> None:
    for rows in rows_of():
        sight = only(rows)
        for tau in TAUS:
            method = RefineKV(cluster=CLUSTER, summary=form, tau=tau)  # type: ignore[arg-type]
            amount = torch.full((len(POSITIONS),), tau)
            expanded = method.select(sight.context(sight.summaries[form], amount)).expanded
            assert torch.equal(passing(sight, form, tau), expanded)  # type: ignore[arg-type]


def test_summaries_count_rows_and_errors() -> None:
    found = study("summaries").figures
    assert isinstance(found, SummaryFigures)
    curves = {curve.form: curve for curve in found.curves}
    assert tuple(curves) == FORMS
    rows_read, missed, reaches = [], [], []
    for rows in rows_of():
        for at in range(len(POSITIONS)):
            for kv in range(2):
                group = [Naive(rows, at, head) for head in (2 * kv, 2 * kv + 1)]
                count = group[0].count
                far = [[one.reach(at_c, "exact") for at_c in range(count)] for one in group]
                risks = [one.risk(reach) for one, reach in zip(group, far, strict=True)]
                read = {at_c for at_c in range(count) if max(risk[at_c] for risk in risks) > 0.1}
                seen = POSITIONS[at] + 1
                rows_read.append((len(read) * CLUSTER + seen - count * CLUSTER) / seen)
                missed += [one.error(read) for one in group]
                reaches += [above for one in far for above, _ in one]
    point = next(point for point in curves["exact"].points if point.tau == 0.1)
    assert point.rows == pytest.approx(sum(rows_read) / len(rows_read), abs=2e-3)
    assert point.error.mean == pytest.approx(sum(missed) / len(missed), rel=1e-2)
    assert curves["exact"].delta == pytest.approx(sorted(reaches)[(len(reaches) - 1) // 2], rel=1e-2)
    assert curves["exact"].delta < curves["minmax"].delta
    assert curves["radius"].reach_nbytes == 4
    assert curves["box"].reach_nbytes == 16 + 4
    assert curves["minmax"].reach_nbytes == 2 * 16 + 4
    for curve in found.curves:
        shares = [point.rows for point in curve.points]
        assert shares == sorted(shares)


def test_the_explorer_shows_one_query() -> None:
    found = study("explore").figures
    assert isinstance(found, Exploration)
    rows = rows_of(positions=(TOKENS - 1,))[1]
    naive = Naive(rows, 0, 3)
    assert (found.position, found.kv_head, len(found.clusters)) == (TOKENS - 1, 1, naive.count)
    assert found.rest == TOKENS - naive.count * CLUSTER
    assert found.longest == pytest.approx(naive.longest, rel=1e-5)
    for at, one in enumerate(found.clusters):
        assert one.first == at * CLUSTER
        assert one.importance == pytest.approx(naive.importance(at), rel=1e-3)
        assert one.share == pytest.approx(naive.true_share(at), rel=1e-3)
        assert one.representative == pytest.approx(naive.mean(at)[0], abs=1e-4)
        assert list(one.logits) == pytest.approx(naive.logits[naive.part(at)].tolist(), abs=1e-3)
    exact = next(view for view in found.forms if view.form == "exact")
    assert list(exact.distortion) == pytest.approx([naive.reach(at, "exact")[0] for at in range(naive.count)], abs=1e-3)
    for step in exact.steps[::10]:
        read = {at for at, risk in enumerate(exact.risk) if risk > step.tau}
        assert step.expanded == len(read)
        assert step.error == pytest.approx(naive.error(read), rel=1e-2, abs=1e-5)
        held = sum(naive.true_share(at) for at in read) + found.rest_share
        assert step.mass == pytest.approx(held, abs=1e-3)


def test_every_cluster_stands_on_its_side_of_the_line() -> None:
    found = study("explore").figures
    assert isinstance(found, Exploration)
    for view in found.forms:
        importance, reaches = (torch.tensor(side).log().double().numpy() for side in zip(*view.line, strict=True))
        for cluster, risk, reach in zip(found.clusters, view.risk, view.distortion, strict=True):
            at_one = math.exp(np.interp(math.log(reach), reaches, importance))
            assert cluster.importance / at_one == pytest.approx(risk, rel=1e-3)


def test_what_comes_after_a_token_does_not_matter() -> None:
    model, ids = tiny.ours(), tiny.ids(TOKENS)
    (long,) = read_rows(model, ids, (100,), layers=(0,), chunk_size=64)
    found = explore(model, ids[:, :101], ["x"] * 101, layer=0, head=1, cluster=CLUSTER)
    logits = [logit for one in found.clusters for logit in one.logits]
    assert logits == pytest.approx(Naive(long, 0, 1).logits[: len(logits)].tolist(), abs=1e-3)


@pytest.mark.parametrize("tokens", [2, 3, 17, 33, 160, 4097])
def test_queries_stand_in_the_second_half(tokens: int) -> None:
    found = spread_positions(tokens)
    assert len(set(found)) == len(found) <= QUERIES
    assert tokens // 2 <= found[0] <= found[-1] == tokens - 1


def test_what_is_not_there_is_refused() -> None:
    model, ids = tiny.ours(), tiny.ids(TOKENS)
    for layer in (-1, 2):
        with pytest.raises(ConfigError, match=f"layer must be between 0 and 1, got {layer}"):
            check_layers(model, (0, layer))
    with pytest.raises(ConfigError, match="sees the whole context"):
        check_layers(tiny.ours("gemma3"), (0,))
    with pytest.raises(UnsupportedError, match="caps its attention logits"):
        check_layers(tiny.ours("gemma2"), None)
    assert check_layers(tiny.ours("gemma2"), None, clusters=False) == (1, 3)
    assert check_layers(model, (1, 0, 1)) == (0, 1)
    for layer in (None, 0.0, "0", True):
        with pytest.raises(ConfigError, match="layer must be between 0 and 1"):
            check_layers(model, (layer,))  # type: ignore[arg-type]
    for layers in ((), 1):
        with pytest.raises(ConfigError, match="layers must be a list of at least one"):
            check_layers(model, layers)  # type: ignore[arg-type]
    for head, position in ((None, 0), (1.5, 0), (0, "3"), (0, 1.5)):
        with pytest.raises(ConfigError, match=r"must be (a query head )?between 0 and"):
            check_place(model, head, position, TOKENS)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="nothing to study"):
        check_layers(tiny.ours("mistral_sliding"), None)
    with pytest.raises(ConfigError, match="head must be a query head between 0 and 3, got 4"):
        check_place(model, 4, 0, TOKENS)
    with pytest.raises(ConfigError, match="position must be between 0 and 159"):
        check_place(model, 0, TOKENS, TOKENS)
    for study_of in (study_risk, study_summaries):
        with pytest.raises(ConfigError, match="cluster must be at most 84"):
            study_of(model, ids, layers=(0,), cluster=200)
        with pytest.raises(ConfigError, match="cluster"):
            study_of(model, ids, layers=(0,), cluster=1)
    with pytest.raises(ConfigError, match="cluster must be at most 4"):
        explore(model, ids[:, :5], ["x"] * 5, layer=0, head=0, cluster=8)
    with pytest.raises(ConfigError, match="pieces"):
        explore(model, ids, ["x"], layer=0, head=0)
    with pytest.raises(ConfigError, match="at least 4 tokens"):
        study_mass(model, ids[:, :3], layers=(0,))


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_mass_serves_caps_and_sinks(family: str) -> None:
    model = tiny.ours(family)
    layers = check_layers(model, None, clusters=False)
    found = study_mass(model, tiny.ids(TOKENS), layers=layers)
    assert [one.layer for one in found.layers] == list(layers)


@pytest.mark.parametrize("kind", ["mass", "risk", "summaries", "explore"])
def test_records_are_read_back_as_they_were(kind: str) -> None:
    record = study(kind)
    assert record.figures.study == kind
    assert StudyRecord.model_validate_json(record.model_dump_json()) == record
    assert set(record.versions) == {"kvfold", "torch", "transformers"}
    assert record.settings.tokens == TOKENS


def test_progress_is_told_to_its_end() -> None:
    model, ids = tiny.ours(), tiny.ids(TOKENS)
    for study_of in (study_mass, study_risk, study_summaries):
        read: list[tuple[int, int]] = []
        measured: list[tuple[int, int]] = []
        study_of(
            model,
            ids,
            layers=(0, 1),
            reading=lambda *step, seen=read: seen.append(step),
            measuring=lambda *step, seen=measured: seen.append(step),
        )
        assert read[-1] == (TOKENS, TOKENS)
        assert measured == [(1, 2), (2, 2)]
