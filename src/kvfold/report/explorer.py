"""The explorer: one self-contained page of the clusters of one query, by importance and distortion."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from kvfold._version import __version__
from kvfold.core.errors import DataError
from kvfold.eval.study.explore import TAUS, Exploration
from kvfold.eval.study.record import StudyRecord
from kvfold.report.explorer_data import FORM_NAMES, explorer_data
from kvfold.report.page_markup import Child, Markup, select, tag
from kvfold.report.page_shell import write_document
from kvfold.report.page_tables import box, plain_table

TITLES = {
    "clusters": "Importance and distortion",
    "keys": "One cluster, key by key",
    "numbers": "All clusters",
    "setup": "Configuration",
}
_EXCERPT = 60


def explorer_page(record: StudyRecord) -> str:
    """Write the page.

    Args:
        record: Of ``study explore``.

    Returns:
        The whole document.

    Raises:
        DataError: If the record is of another study.
        MissingExtraError: If plotly is not installed.
    """
    found = record.figures
    if not isinstance(found, Exploration):
        raise DataError(f"the explorer shows a record of study explore, got one of study {found.study}")
    name = PurePath(record.model).name or record.model
    where = f"layer {found.layer}, query head {found.head}, position {found.position:,}"
    return write_document(
        f"kvfold explorer: {name}, {where}",
        _header(record, found, name, where),
        tag("nav", [tag("a", title, href=f"#{key}") for key, title in TITLES.items()], aria_label="Sections"),
        tag(
            "main",
            tag("noscript", tag("p", "Figures need scripts; all numbers stand in the table.")),
            _clusters(found),
            _keys(found),
            _numbers(found),
            _setup(record, found),
            id="content",
        ),
        tag(
            "footer", tag("p", f"Written by kvfold {__version__}. Every number was measured on the query named above.")
        ),
        data=explorer_data(found),
        codes=("explorer.js",),
        sheets=("page.css", "explorer.css"),
    )


def _header(record: StudyRecord, found: Exploration, name: str, where: str) -> Markup:
    facts = {
        "Model": record.model,
        "Data type": record.dtype,
        "Layer": str(found.layer),
        "Query head": f"{found.head} (KV head {found.kv_head})",
        "Position": f"{found.position:,}",
        "Clusters": f"{len(found.clusters):,} of {found.cluster} keys",
        "Keys in no cluster": f"{found.rest} (read as they are)",
        "Text": record.settings.text,
    }
    items = [tag("div", tag("dt", key), tag("dd", value)) for key, value in facts.items()]
    before = "".join(found.pieces[-_EXCERPT // 4 :])[-_EXCERPT:]
    return tag(
        "header",
        tag("p", "kvfold explorer", class_="kicker"),
        tag("h1", f"{name}: {where}"),
        tag("p", "What one query sees of the keys before it: which clusters it must read, and why.", class_="lead"),
        tag("dl", items),
        tag("p", "The query stands at the end of: \u201c\u2026", tag("code", before), "\u201d", class_="quiet"),
    )


def _section(key: str, *children: Child) -> Markup:
    heading = tag("h2", TITLES[key], id=f"{key}-title")
    return tag("section", heading, children, id=key, aria_labelledby=f"{key}-title")


def _plot(key: str) -> Markup:
    return tag(
        "figure",
        tag("div", id=f"plot-{key}", class_="plot", role="img", aria_label="Drawn when scripts run."),
        tag("figcaption", id=f"plot-{key}-name"),
    )


def _clusters(found: Exploration) -> Markup:
    text = (
        "Each mark is a cluster of consecutive keys. Importance is the share of the attention that its mean key "
        "would get for all of them; distortion bounds how far the logit of a key may lie from that of the mean. A "
        "cluster is read key by key where the risk R, which grows with both, is above tau; the others stand for their "
        "keys by their means. The line is R = tau: a larger tau moves it to the right."
    )
    slider = tag(
        "div",
        tag("label", "Threshold tau, times the longest value", for_="tau"),
        tag("input", type="range", id="tau", min=0, max=len(TAUS) - 1, step=1, value=0),
        tag("output", id="tau-shown", for_="tau"),
        class_="player",
    )
    form = select("form", "Distortion by", [(view.form, FORM_NAMES[view.form]) for view in found.forms])
    return _section(
        "clusters",
        tag("p", text),
        tag("div", form, class_="controls"),
        slider,
        tag("p", id="said", role="status", class_="said"),
        tag("ul", [tag("li", tag("span", class_=f"mark {key}", aria_hidden="true"), name) for key, name in _MARKS],
            class_="marks"),
        _plot("clusters"),
        tag("p", "Click a mark, or choose a cluster below, to see its keys.", class_="quiet"),
    )  # fmt: skip


_MARKS = (("stands", "represented by its mean"), ("reads", "read key by key"), ("chosen", "shown below"))


def _keys(found: Exploration) -> Markup:
    names = [(str(at), _cluster_name(found, at)) for at in range(len(found.clusters))]
    choice = tag(
        "div",
        select("cluster", "Cluster", names),
        tag("button", "Previous", id="before", type="button"),
        tag("button", "Next", id="after", type="button"),
        class_="controls",
    )
    text = (
        "Logits of the query with each key; the dashed line is the logit of the mean key that represents them. The "
        "band is what the distortion allows: the wider it is than the marks lie apart, the looser the bound."
    )
    heads = ["Position", "Token", "Logit", "To the mean", "Share of the attention"]
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in heads]))
    table = tag("table", tag("caption", id="keys-caption"), head, tag("tbody", id="keys-rows"), class_="plain")
    return _section("keys", tag("p", text), choice, _plot("keys"), box("Keys of the cluster", table))


def _cluster_name(found: Exploration, at: int) -> str:
    first = found.clusters[at].first
    return f"{at}: keys {first:,} to {first + found.cluster - 1:,}"


def _numbers(found: Exploration) -> Markup:
    heads = ["Cluster", "Text", "Importance", "True share"]
    for view in found.forms:
        heads += [f"Distortion, {view.form}", f"R, {view.form}"]
    rows: list[list[Child]] = []
    for at, cluster in enumerate(found.clusters):
        words = "".join(found.pieces[cluster.first : cluster.first + found.cluster])
        cells: list[Child] = [_cluster_name(found, at), words, f"{cluster.importance:.3g}", f"{cluster.share:.3g}"]
        for view in found.forms:
            cells += [f"{view.distortion[at]:.3g}", f"{view.risk[at]:.3g}"]
        rows.append(cells)
    caption = "Shares of this query's attention; R as a multiple of the longest value"
    fold = tag("summary", f"The numbers of all {len(rows):,} clusters as a table")
    return _section("numbers", tag("details", fold, plain_table(caption, heads, rows)))


def _setup(record: StudyRecord, found: Exploration) -> Markup:
    facts: dict[str, Any] = {
        "Model": record.model,
        "Fingerprint": record.fingerprint,
        "Data type": f"{record.dtype}; figures in float32",
        "Device": record.device,
        "Text": record.settings.text,
        "Tokens read": f"{record.settings.tokens:,}",
        "Digest of the tokens": record.settings.digest,
        "Longest value": f"{found.longest:.4g}",
        "Attention on keys in no cluster": f"{found.rest_share:.3g}",
    }
    facts |= {f"Version of {name}": version for name, version in record.versions.items()}
    note = (
        "This head chooses for itself here; in a cache the query heads of a KV head read the same clusters. "
        "R = 2 p [(cosh d - 1) / D + tanh(d / 2)], with importance p, distortion d, and D the sum of p cosh d."
    )
    table = plain_table("How these numbers were made", ["Setting", "Value"], [[key, facts[key]] for key in facts])
    return _section("setup", tag("p", note), table)
