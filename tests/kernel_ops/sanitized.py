"""A plugin of pytest that builds the C kernels so that they find their own overruns; `make sanitize`.

Under AddressSanitizer every tensor is an allocation of its own: a kernel that reads or writes past one ends
the run with a report. The fast build does not check, and a stray read need not show in any result.
"""

from __future__ import annotations

from kernels import native

# The fingerprint of a build holds its flags, so nobody takes this one for the fast one.
native._FLAGS += (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover",
)
