"""The checkpoints of models: their files, their formats, and where their tensors go.

Owns the reading of safetensors and of GGUF files, the names of tensors in all families, the formats of quantized
checkpoints, and the parameters that keep such a format. Knows no steps and no ranks but this one's part of the model.
Read `formats.py` first, then `destinations.py`.
"""
