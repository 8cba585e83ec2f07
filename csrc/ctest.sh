#!/bin/sh
# Build and run the C tests: ctest.sh BUILD_FOLDER [SANITIZER]
set -e
here=$(dirname "$0")
root=$here/..
PATH=$root/.venv/bin:$PATH
for tool in cmake ctest; do
    command -v $tool >/dev/null || { echo "missing: $tool: apt-get install cmake" >&2; exit 1; }
done
cmake -S "$here" -B "$root/$1" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSMOE_TESTS=ON -DSMOE_SANITIZE="$2" >/dev/null
cmake --build "$root/$1" -j 2 | grep -E 'warning|error|FAILED' || true
cmake --build "$root/$1" >/dev/null
ctest --test-dir "$root/$1" --output-on-failure
