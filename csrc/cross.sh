#!/bin/sh
# Compile and link everything in C for another machine: cross.sh TARGET
#
#     aarch64-macos, x86_64-macos   compiled and linked; nothing here can run it
#     aarch64-linux-gnu             and its C tests run under qemu-aarch64: that they run.  Memory order is
#                                   not shown by it, which is ThreadSanitizer's business
#
# The compiler is zig's, which brings every target's headers and libraries along: PyPI package ziglang.
# Builds into build/cross-TARGET: the core, the programs, the library without cffi, the C tests.  (test_ring
# links for macOS too, but its --wrap means nothing to a Mach-O linker.)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$here/..
target=${1:-}
PATH=$root/.venv/bin:$PATH
lack() { # what, package
    echo "missing: $1: $2" >&2
    exit 1
}

case $target in
aarch64-macos) zig=aarch64-macos.14.4 system=Darwin machine=arm64 so=dylib ;;  # 14.4: os_sync_wait_on_address
x86_64-macos) zig=x86_64-macos.14.4 system=Darwin machine=x86_64 so=dylib ;;
aarch64-linux-gnu) zig=aarch64-linux-gnu.2.28 system=Linux machine=aarch64 so=so ;; # 2.28: as manylinux_2_28
*) echo "usage: cross.sh aarch64-macos|x86_64-macos|aarch64-linux-gnu" >&2; exit 2 ;;
esac
build=$root/build/cross-$target

for tool in cmake ninja; do
    command -v $tool >/dev/null || lack $tool "PyPI package $tool: make setup"
done
python=$root/.venv/bin/python
[ -x "$python" ] || lack .venv "make setup"
"$python" -c 'import ziglang' 2>/dev/null ||
    "$python" -m pip install -q --disable-pip-version-check ziglang || lack "zig cc" "PyPI package ziglang"
sysroot=/usr/aarch64-linux-gnu # Debian's; its loader and libc are what the tests run on
if [ $system = Linux ]; then
    command -v qemu-aarch64 >/dev/null || lack qemu-aarch64 "apt-get install qemu-user"
    [ -e $sysroot/lib/ld-linux-aarch64.so.1 ] || lack $sysroot/lib "apt-get install libc6-arm64-cross"
fi

mkdir -p "$build"
tool() { # name, zig's subcommand and options
    printf '#!/bin/sh\nexport ZIG_GLOBAL_CACHE_DIR="%s" ZIG_LOCAL_CACHE_DIR="%s"\nexec "%s" -m ziglang %s "$@"\n' \
        "$root/build/cross-cache" "$root/build/cross-cache" "$python" "$2" >"$build/$1"
    chmod +x "$build/$1"
}
tool cc "cc -target $zig"
tool ar ar
tool ranlib ranlib

set -- -DSMOE_TESTS=ON
[ -e "$root/tests/c/CMakeLists.txt" ] || set --
if [ $system = Linux ]; then
    set -- "$@" -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;$sysroot"
else
    # Nothing is run, and optimising it further would take most of the time.
    set -- "$@" -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_C_FLAGS_DEBUG=-O1 -g"
    # What CMake would ask xcrun and a Mac's tools for; the compiler knows it from its target.
    set -- "$@" -DCMAKE_OSX_SYSROOT= -DCMAKE_OSX_DEPLOYMENT_TARGET= -DCMAKE_INSTALL_NAME_TOOL=true
fi
cmake --no-warn-unused-cli -S "$here" -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=$system -DCMAKE_SYSTEM_PROCESSOR=$machine \
    -DCMAKE_C_COMPILER="$build/cc" -DCMAKE_AR="$build/ar" -DCMAKE_RANLIB="$build/ranlib" \
    -DCMAKE_C_FLAGS="-Wall -Wextra -Werror" "$@" >"$build/configure.log" 2>&1 ||
    { cat "$build/configure.log" >&2; exit 1; }
quietly() {
    "$@" >"$build/build.log" 2>&1 || { cat "$build/build.log" >&2; exit 1; }
}
quietly ninja -C "$build"
quietly "$build/cc" -shared -o "$build/libsmoe.$so" "$build"/CMakeFiles/smoe_core.dir/*.o
# Python's type needs Python's headers alone, which are alike everywhere for the stable ABI.
quietly "$build/cc" -std=c11 -Wall -Wextra -Werror -I"$here" \
    -I"$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" -c -o "$build/held.o" "$here/held.c"
cd "$build"
made=libsmoe.$so
for f in smoe-* tests/*; do
    [ -f "$f" ] && [ -x "$f" ] && made="$made ${f##*/}"
done
echo "$target: linked $made"

[ $system = Linux ] || exit 0
[ -d tests ] || exit 0
# No test has to be left out.  One that starts a program by exec could not run: that needs binfmt_misc.
# Memory faults that a test means to cause are reported by qemu on stderr.
ulimit -c 0
ctest --output-on-failure
