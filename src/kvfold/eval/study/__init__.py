"""What a model's own keys say about reading by query: where attention lies, what risk is worth, what summaries cost.

Every study reads a text once without compression, and looks at queries of it one position after the other: before each
lie the rows that a decode step would have before it, cut into clusters as the product cuts them. All is computed in
float32 from rows as the model made them.
"""

from kvfold.eval.study.explore import Exploration, explore
from kvfold.eval.study.mass import MassFigures, study_mass
from kvfold.eval.study.record import StudyRecord, StudySettings, make_record
from kvfold.eval.study.risk import RiskFigures, study_risk
from kvfold.eval.study.rows import check_layers, check_place
from kvfold.eval.study.summaries import SummaryFigures, study_summaries

__all__ = [
    "Exploration",
    "MassFigures",
    "RiskFigures",
    "StudyRecord",
    "StudySettings",
    "SummaryFigures",
    "check_layers",
    "check_place",
    "explore",
    "make_record",
    "study_mass",
    "study_risk",
    "study_summaries",
]
