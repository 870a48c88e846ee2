"""How much work goes into a micro-batch, what it costs, and what becomes of the stages' time.

Owns: the cost of a micro-batch, predicted and learned (`cost.py`, from the sums in `shape.py` and the rates in
`roofline.py`); the size of a chunk (`chunk.py`); which work goes into the next micro-batch and when it is made
(`schedule.py`: begin there); which layers a stage holds (`stages.py`); where time goes (`meter.py`); and a pipeline
without its devices (`simulate.py`, `capacity.py`). Knows tokens, sequences and sizes of layers; no tensors.
"""
