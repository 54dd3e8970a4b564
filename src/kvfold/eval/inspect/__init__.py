"""What a model's keys look like on a text, and what that says about methods.

Every figure is measured on one prefill of a dense cache. The last queries of the text are not part of the context: they
play the question that comes after it, so that attention is that of queries which no method has seen.
"""

from kvfold.eval.inspect.advice import Advice, advise
from kvfold.eval.inspect.measure import LayerMeasures, Measurements, inspect_model

__all__ = ["Advice", "LayerMeasures", "Measurements", "advise", "inspect_model"]
