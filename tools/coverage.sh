#!/bin/sh
# Which lines of C and Python run in the tests: coverage.sh PYTHON TESTS...
#
# In an environment of its own, with a C module and a worker that count (gcov).  Reports, as text and as HTML, go
# into build/coverage.  C's figures are of the C tests and of the Python tests together.
#
# A process that is killed writes no figures, and many tests kill: what stands as not covered may have run.
# Python's figures are of lines.  Two tests run at a time, as in `make pytest`.
set -eu
cd "$(dirname "$0")/.."
out=$PWD/build/coverage
python=$1
shift
[ -x "$out/venv/bin/python" ] || "$python" -m venv "$out/venv"
PATH=$out/venv/bin:$PATH
pip install -q --disable-pip-version-check -e '.[dev,coverage]' \
    -C cmake.define.SMOE_COVERAGE=ON -C cmake.build-type=Debug -C build-dir="$out/ext"
pip install -q --disable-pip-version-check --retries 1 --extra-index-url "${TORCH_INDEX:-https://pypi.org/simple}" -r .ci/torch.txt ||
    echo "note: no torch here (.ci/torch.txt): tests/torch are skipped"
cmake -S csrc -B "$out/ctest" -DSMOE_TESTS=ON -DSMOE_COVERAGE=ON -DCMAKE_BUILD_TYPE=Debug >/dev/null
cmake --build "$out/ctest" -j 2 >/dev/null
find "$out" -name '*.gcda' -delete
rm -f "$out"/data*

status=0
ctest --test-dir "$out/ctest" --output-on-failure || status=1
export COVERAGE_FILE="$out/data"
# Left out: a library that counts has more symbols, processes of other users and in containers of their own cannot
# write figures and say so where a test wants silence, and chaos wants the machine for itself.
coverage run -m pytest -q -n 2 -k "not library_shows and not another_user and not in_another_container" \
    --ignore=tests/process/test_access.py --ignore=tests/process/test_chaos_short.py "$@" || status=1 # the figures are wanted all the same
coverage combine -q 2>/dev/null # which warns of each that was killed while it wrote
coverage html -q -d "$out/python"
mkdir -p "$out/c"
gcovr --root . --filter csrc/ --exclude csrc/bench_main.c --gcov-ignore-errors=all --txt "$out/c.txt" \
    --html-details "$out/c/index.html" "$out/ext" "$out/ctest"
coverage report | tee "$out/python.txt"
cat "$out/c.txt"
exit $status
