"""Makes OpenCV use the same code on every x86-64 CPU with AVX2. Must be imported before OpenCV.

OpenCV's bicubic scaling uses Intel's IPP, which chooses code by CPU, and the variants round some pixels differently. An
image could then get another confidence than on the machine of the certification. A value that the user set is kept.
"""

import os

os.environ.setdefault("OPENCV_IPP", "avx2")
