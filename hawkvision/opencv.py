"""How OpenCV computes, said before it is imported: the same pixels on every x86-64 CPU that has AVX2.

It scales bicubically by Intel's library, which has other code for CPUs with AVX-512, and that rounds some pixels
otherwise: the same picture would have another confidence there than where it was certified. Whoever imports OpenCV
imports this first; a value that the user has set stays.
"""

import os

os.environ.setdefault("OPENCV_IPP", "avx2")
