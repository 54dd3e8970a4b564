"""One word per row: a code of how a row's key lies around the mean of its cluster, and attention logits from codes."""

from kvfold.kernels.codes.api import RowChoice, choose_by_code
from kvfold.kernels.codes.choose import choose_rows, left_over
from kvfold.kernels.codes.encode import summarise_codes
from kvfold.kernels.codes.fit import fit_frame
from kvfold.kernels.codes.score import RowEstimate, estimate_rows, row_risk

__all__ = [
    "RowChoice",
    "RowEstimate",
    "choose_by_code",
    "choose_rows",
    "estimate_rows",
    "fit_frame",
    "left_over",
    "row_risk",
    "summarise_codes",
]
