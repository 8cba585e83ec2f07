#!/usr/bin/env bash
# Check the model with spin: run.sh [-l] [-b] [NAME ...]
#   no NAME    all configurations of CI: each must pass, and each mutation must be found
#   NAME ...   only those, also from the list of larger ones
#   -l         list the names
#   -b         bit-state search (supertrace) in 1 GB instead of a full one: for the larger ones
# One verifier at a time, 8 GB at most.  What it builds lies in build/model.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${MODEL_BUILD:-$here/../../build/model}

# name | expected: pass, assert or hang | [model] definitions.  README.md says what each is for.
CI='
crash              | pass   | -DC=2 -DW=2 -DREALQ -DCRASHES=1
failed-read        | pass   | -DC=2 -DW=1 -DREALQ -DCRASHES=1 -DFAILS=1 -DRESTART
full-queue         | pass   | -DC=2 -DW=1 -DREALQ -DQ=2 -DCRASHES=1
eviction           | pass   | -DC=2 -DW=1 -DCRASHES=1 -DFAILS=1 -DRESTART -DWARM -DNE=3
lost-home          | pass   | -DC=3 -DW=1 -DSTALE
recovery           | pass   | -DC=2 -DW=1 -DCRASHES=2
recovery-reserve   | pass   | -DC=2 -DW=1 -DB=2 -DRESERVE -DCRASHES=2
threads            | pass   | -DC=1 -DT=2 -DW=1 -DROUNDS=2 -DRESERVE -DCRASHES=1
promotion          | pass   | -DC=1 -DW=1 -DGUESSES=2 -DCRASHES=1 -DFAILS=1
promotion-two      | pass   | -DC=2 -DW=1 -DGUESSES=1 -DSTALE -DFAILS=1
abandoned          | pass   | -DC=1 -DW=2 -DGUESSES=1 -DCRASHES=1 -DFAILS=1 -DGIVEUPS=1
reserve            | pass   | -DC=2 -DW=1 -DB=2 -DNE=3 -DRESERVE -DCRASHES=1 -DFAILS=1
reserve-three      | pass   | -DC=2 -DW=1 -DB=2 -DS=3 -DRESERVE -DCRASHES=1
stopped            | pass   | -DC=2 -DW=2 -DREALQ -DSTOPS=1 -DFAILS=1
stopped-reserve    | pass   | -DC=2 -DW=2 -DB=2 -DRESERVE -DSTOPS=1
guess-limit        | pass   | guess.pml -DG=3
bug-giveback-any   | assert | -DBUG_GIVEBACK_ANY -DC=3 -DW=1 -DSTALE
bug-guess-giveback | assert | -DBUG_GIVEBACK_ANY -DC=2 -DW=1 -DGUESSES=1 -DSTALE
bug-free-first     | hang   | -DBUG_FREE_FIRST -DC=2 -DW=1 -DCRASHES=2
bug-free-early     | assert | -DBUG_FREE_EARLY -DC=2 -DW=1 -DCRASHES=2
bug-vyukov-killed  | hang   | -DBUG_VYUKOV -DC=2 -DW=2 -DREALQ -DCRASHES=1
bug-vyukov-stopped | hang   | -DBUG_VYUKOV -DC=2 -DW=2 -DREALQ -DSTOPS=1
bug-no-help        | hang   | -DBUG_NO_HELP -DC=2 -DW=2 -DREALQ -DSTOPS=1
bug-no-lockbit     | assert | -DBUG_NO_LOCKBIT -DC=1 -DT=2 -DW=1 -DROUNDS=2 -DRESERVE
bug-take-reading   | assert | -DBUG_TAKE_READING -DC=1 -DW=2 -DGUESSES=1
bug-fail-empties   | assert | -DBUG_FAIL_EMPTIES -DC=2 -DW=1 -DFAILS=1
bug-check-first    | assert | -DBUG_RESERVE_CHECK_FIRST -DC=2 -DW=1 -DB=2 -DNE=3 -DRESERVE
bug-one-by-one     | hang   | -DBUG_RESERVE_ONE_BY_ONE -DC=2 -DW=1 -DB=2 -DRESERVE
bug-guess-recount  | assert | guess.pml -DBUG_GUESS_NO_RECOUNT -DG=2
bug-guess-bits     | assert | guess.pml -DBUG_GUESS_BITS -DG=3
'
LARGER='
crash-fail         | pass   | -DC=2 -DW=2 -DREALQ -DCRASHES=1 -DFAILS=1
crash-restart      | pass   | -DC=2 -DW=2 -DREALQ -DCRASHES=1 -DFAILS=1 -DRESTART
two-crashes        | pass   | -DC=2 -DW=2 -DREALQ -DCRASHES=2
three-clients      | pass   | -DC=3 -DW=2 -DREALQ -DCRASHES=1 -DNE=3 -DWARM
threads-fail       | pass   | -DC=1 -DT=2 -DW=1 -DROUNDS=2 -DRESERVE -DCRASHES=1 -DFAILS=1
threads-two        | pass   | -DC=2 -DT=2 -DW=1 -DRESERVE -DCRASHES=1
promotion-crash    | pass   | -DC=2 -DW=1 -DGUESSES=1 -DCRASHES=1
promotion-real     | pass   | -DC=2 -DW=2 -DREALQ -DGUESSES=2 -DCRASHES=1 -DFAILS=1
reserve-giveup     | pass   | -DC=2 -DW=2 -DB=2 -DNE=3 -DRESERVE -DCRASHES=1 -DGIVEUPS=1
reserve-sum        | pass   | -DC=3 -DW=1 -DB=2 -DNE=3 -DS=3 -DRESERVE -DCRASHES=1
stopped-killed     | pass   | -DC=2 -DW=2 -DREALQ -DSTOPS=1 -DCRASHES=1
guess-limit-four   | pass   | guess.pml -DG=4
'

bits=
list=
while getopts lb flag; do
    case $flag in
        l) list=1 ;;
        b) bits=1 ;;
        *) sed -n '2,7s/^# *//p' "$0"; exit 2 ;;
    esac
done
shift $((OPTIND - 1))

if [ $# = 0 ]; then chosen=$CI; else chosen=$CI$LARGER; fi
if [ -n "$list" ]; then
    echo "CI:$CI"
    echo "larger:$LARGER"
    exit 0
fi
for tool in spin gcc; do
    if ! command -v $tool >/dev/null; then
        echo "model: skipped: $tool is missing (apt-get install $tool)"
        exit 0
    fi
done

options=(-w -DSAFETY -DMEMLIM=8000 -DVECTORSZ=512)
if [ -n "$bits" ]; then
    options+=(-DBITSTATE)
    table=(-w33 -k3) # 2^33 bits
else
    # Uncompressed states take twice the memory (4 GB for the largest of CI) and half the time.
    [ $# = 0 ] || options+=(-DCOLLAPSE)
    table=(-w25)
fi

# One configuration: prints its line, returns whether it is as expected.
check() {
    local name=$1 expected=$2 dir=$out/$1 began=$SECONDS found states verdict=FAILED
    local level=-O2
    [ "$expected" = pass ] || level=-O0 # found at once: compiling takes longer
    local model=ring.pml
    shift 2
    case $1 in *.pml) model=$1 && shift ;; esac
    rm -rf "$dir"
    mkdir -p "$dir"
    cd "$dir" || return 1
    if ! spin -a "$@" "$here/$model" >spin.log 2>&1 || ! gcc $level "${options[@]}" -o pan pan.c >gcc.log 2>&1; then
        echo "FAILED $name: it does not compile: $dir"
        return 1
    fi
    ./pan -m100000 "${table[@]}" >pan.log 2>&1
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log)
    if grep -q 'max search depth too small\|reached -DMEMLIM\|out of memory' pan.log; then
        found=incomplete
    elif grep -q 'pan:1: invalid end state' pan.log; then
        found=hang
    elif grep -q 'pan:1: assertion violated' pan.log; then
        found=assert
    elif grep -q 'errors: 0' pan.log; then
        found=pass
    else
        found=crashed
    fi
    [ "$found" = "$expected" ] && verdict=ok
    printf '%-6s %-18s %9s states %4d s  %s\n' "$verdict" "$name" "${states:--}" $((SECONDS - began)) \
        "$([ $found = pass ] && echo 'no error' || echo "$found: $(grep -m1 '^pan:' pan.log | cut -c1-90)")"
    [ "$verdict" = ok ] && rm -f pan pan.?
    [ "$verdict" = ok ]
}

passed=0
failed=0
known=" "
while IFS='|' read -r name expected definitions; do
    name=${name// /}
    [ -n "$name" ] || continue
    known+="$name "
    if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
    # shellcheck disable=SC2086
    if check "$name" ${expected// /} $definitions; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done <<<"$chosen"
for name in "$@"; do
    if [[ $known != *" $name "* ]]; then
        echo "FAILED $name: no such configuration (run.sh -l lists them)"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
