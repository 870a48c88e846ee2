"""Output lengths, predicted from the traffic that a replica has served.

Lengths can hardly be predicted, but their order can ("Efficient LLM Scheduling by Learning to Rank", arXiv 2408.15792).
There a second model of 125 million parameters ranks the prompts. Here it is a linear model of hashed features that
learns on line. So there is nothing to train or to load.

This room owns features, predictions and their measured accuracy. It knows no scheduler. Read `predictor.py` first.
"""

from worker.lengths.features import arrival_features
from worker.lengths.predictor import LengthEstimate, OutputLengthPredictor, PredictedLength, kendall_tau

__all__ = ["LengthEstimate", "OutputLengthPredictor", "PredictedLength", "arrival_features", "kendall_tau"]
