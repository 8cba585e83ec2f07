#!/bin/sh
# Says what is missing for building, and which package has it.
python=${1:-python3}
fail=0
need() { # what, package on Debian, hint for macOS
    echo "missing: $1: install it, on Debian and Ubuntu: apt-get install $2; on macOS: $3" >&2
    fail=1
}
if ! command -v "$python" >/dev/null 2>&1; then
    need "$python (Python 3.11 or later)" "python3" "brew install python"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "missing: Python 3.11 or later: $python is $("$python" -V 2>&1): make PYTHON=python3.12 ... takes another" >&2
    fail=1
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need "the venv module" "python3-venv" "brew install python"
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
    [ -f "$header" ] || need "$header" "python3-dev" "brew install python"
fi
if ! command -v "${CC:-cc}" >/dev/null 2>&1; then
    need "a C compiler (${CC:-cc})" "gcc libc6-dev" "xcode-select --install"
elif ! printf '#include <stdatomic.h>\n#include <sys/mman.h>\nint main(void) { return 0; }\n' |
    "${CC:-cc}" -std=c11 -x c - -o /dev/null 2>/dev/null; then
    need "the C library's headers" "libc6-dev" "xcode-select --install"
fi
exit $fail
