"""How much work goes into a micro-batch, and what it costs.

Owns: the cost of a micro-batch, predicted and learned (`cost.py`, from the sums in `shape.py` and the rates in
`roofline.py`), the size of a chunk (`chunk.py`), which layers a stage holds (`stages.py`). Knows tokens, sequences and
sizes of layers; no tensors, no requests. Begin with `shape.py`.
"""
