"""What differs between systems in Python: `system` is the module of this one.

platform_linux.py and platform_macos.py define the same names, and no other file asks which system it is (the
C core has platform.h for what it needs).  The one for macOS is imported by its tests on Linux too, which give
it fakes of the calls that only a Mac has.
"""

from __future__ import annotations

import sys

if sys.platform == "darwin":
    from smoe_mp import platform_macos as system
else:
    from smoe_mp import platform_linux as system

__all__ = ["system"]
