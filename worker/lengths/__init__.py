"""Output lengths, predicted from the traffic that a replica has served.

Lengths can hardly be predicted, but their order can ("Efficient LLM Scheduling by Learning to Rank", arXiv 2408.15792).
There a second model of 125 million parameters ranks the prompts. Here it is a linear model of hashed features that
learns on line. So there is nothing to train before.

This room owns features, bounds, predictions, their measured accuracy, and the file in which they are kept. It knows no
scheduler. Read `predictor.py` first.
"""

from worker.lengths.features import arrival_features
from worker.lengths.predictor import LengthEstimate, OutputLengthPredictor, PredictedLength, kendall_tau
from worker.lengths.store import LengthStore

__all__ = [
    "LengthEstimate",
    "LengthStore",
    "OutputLengthPredictor",
    "PredictedLength",
    "arrival_features",
    "kendall_tau",
]
