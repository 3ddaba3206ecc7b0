"""How OpenCV computes, said before it is imported: by the same code on every x86-64 CPU that has AVX2.

It scales bicubically by Intel's library, which chooses code by CPU, and its kinds round some pixels differently: an
image could have another confidence than where it was certified. Whoever imports OpenCV imports this first; a value
that the user has set stays. Seen to work for SSE 4.2 and AVX2; no CPU with AVX-512 was at hand.
"""

import os

os.environ.setdefault("OPENCV_IPP", "avx2")
