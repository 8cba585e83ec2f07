"""Write the C source of the cffi module from the marked part of smoe.h.

    python binding.py smoe.h out.c

The module is built in cffi's API mode against the stable ABI.  smoe.h is the only place where the
interface is written down.
"""

import re
import sys

from cffi import FFI

BEGIN, END = "/* [cffi: from here] */", "/* [cffi: to here] */"


def main(header: str, out: str) -> None:
    with open(header, encoding="utf-8") as f:
        text = f.read()
    declarations = text.split(BEGIN, 1)[1].split(END, 1)[0]
    declarations = re.sub(r"/\*.*?\*/", "", declarations, flags=re.S)
    ffi = FFI()
    ffi.cdef(declarations)
    ffi.set_source("smoe_mp._smoe", '#include "smoe.h"', py_limited_api=True)
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
