"""Records of studies of a tiny model."""

from __future__ import annotations

import functools

import torch

from kvfold.eval.study import StudyRecord, check_layers, explore, make_record, study_mass, study_risk, study_summaries
from tests.helpers import tiny

TOKENS, CLUSTER = 160, 8


@functools.cache
def study(kind: str) -> StudyRecord:
    """Give the record of one study."""
    model, ids = tiny.ours("llama"), tiny.ids(TOKENS)
    layers = check_layers(model, None)
    if kind == "mass":
        found = study_mass(model, ids, layers=layers)
    elif kind == "risk":
        found = study_risk(model, ids, layers=layers, cluster=CLUSTER)
    elif kind == "summaries":
        found = study_summaries(model, ids, layers=layers, cluster=CLUSTER)
    else:
        pieces = [f" <w{int(one)}>&" for one in ids[0]]
        found = explore(model, ids, pieces, layer=1, head=3, cluster=CLUSTER)
    return make_record(model, "a<b>/tiny", "emma", ids[0].tolist(), 512, found)


def ids() -> torch.Tensor:
    """Give the tokens that were read."""
    return tiny.ids(TOKENS)
