"""Where kernels are tested: on a GPU where there is one, and else on the CPU, in Triton's interpreter."""

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Of 16 bits. The interpreter has no bfloat16.
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
