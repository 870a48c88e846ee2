"""The range of float8_e4m3fn values and of their scales (https://arxiv.org/abs/2209.05433)."""

LARGEST = 448.0  # the largest finite e4m3 value
LEAST_SCALE = 1e-12  # the scale of rows that are zero
GROUP = 128  # columns of a group, where a row has a scale for each group
