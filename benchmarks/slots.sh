#!/usr/bin/env bash
# Everything there is to test and measure on one GPU, in slots of less than ten minutes, for machines that are lent:
#
#   COMMIT=<hash> bash benchmarks/slots.sh all               as much as one slot holds
#   COMMIT=<hash> DONE="..." bash benchmarks/slots.sh all    the rest, slot by slot
#   COMMIT=<hash> bash benchmarks/slots.sh parts layer glue  only these
#   COMMIT=<hash> bash benchmarks/slots.sh gpus "layer mlp" "tests glue"
#                                                            these on the first GPU, those beside them on the second
#
# What does not fit into a slot is skipped and named, and then the last line of the output is the next command. DONE: parts
# that need not run again. TRAIN_STEPS: 500. BUDGET: seconds of a slot, 580.
# FOLDER (build/slots) gets summary.txt, log.txt, logs.tar.gz, bench.json, tests.json and gpu-kernels-*.json; of several
# GPUs each has a folder of its own in there. Then
#   python -m benchmarks.gpu --take-in build/slots/bench.json build/slots/tests.json && make gpu-docs
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 FOLDER=${FOLDER:-build/slots}
: "${COMMIT:?say which commit this is: COMMIT=<hash>}"
DONE=" ${DONE:-} "
BUDGET=${BUDGET:-580}
TRAIN_STEPS=${TRAIN_STEPS:-500}
PYTHON=${PYTHON:-python3}
LOGS=$(mktemp -d)
mkdir -p "$FOLDER"
SECONDS=0
left_out="" failed=""

say() { printf '%s\n' "$*" | tee -a "$FOLDER/summary.txt"; }

# Seconds that a part takes, and the most that it gets.
estimate() {
  case $1 in
    tests) echo 400 ;; memcheck) echo 260 ;; racecheck) echo 140 ;; layer) echo 185 ;; layer-fp16) echo 130 ;;
    mlp) echo 270 ;; llama) echo 70 ;;
    glue) echo 130 ;; host) echo 60 ;; first-call) echo 100 ;; train) echo $((90 + TRAIN_STEPS / 5)) ;;
    small) echo 170 ;; decoding) echo 200 ;; train-exact) echo 135 ;; stack) echo 70 ;; growth) echo 130 ;;
    presets) echo 200 ;; converted) echo 130 ;; cached) echo 50 ;;
    kernels) echo 60 ;; *) echo 60 ;;
  esac
}

keep() { # a part's log into $FOLDER, whatever comes later
  { printf '\n==== %s\n' "$1"; tail -c 1500000 "$LOGS/$1.log"; } >>"$FOLDER/log.txt"
  tar -czf "$FOLDER/logs.tar.gz" -C "$LOGS" . 2>/dev/null
}

attempt() { # name, most seconds, command...
  local name=$1 most=$2 code=0 begin=$SECONDS rest
  shift 2
  rest=$((BUDGET - SECONDS))
  ((most > rest)) && most=$rest
  timeout -s INT -k 10 "$most" "$@" >"$LOGS/$name.log" 2>&1 </dev/null || code=$?
  say "$(printf '%-14s rc %-3s %4d s  (at %d s)' "$name" "$code" $((SECONDS - begin)) "$SECONDS")"
  tail -n 25 "$LOGS/$name.log"
  return $code
}

install() {
  local sum
  sum=$({ cat csrc/* CMakeLists.txt pyproject.toml te_fuser/codegen/include/te_kernel_abi.h; find te_fuser -name '*.py' | sort; } | sha256sum)
  mkdir -p build
  if [[ -f build/.installed && $(<build/.installed) == "$sum" ]] && $PYTHON -c 'import te_fuser._native' 2>/dev/null; then return 0; fi
  attempt install 240 $PYTHON -m pip install -q --no-build-isolation --no-deps -e . || { keep install; return 1; }
  printf '%s\n' "$sum" >build/.installed
  keep install
}

lane() { # number, parts...: tests beside other lanes, since most of their time is compiling and float64 on the host
  local number=$1 code=0
  shift
  (($#)) || return 0
  $PYTHON -m benchmarks.gpu.tests --part "$@" --limit 400 --commit "$COMMIT" --record "$LOGS/tests-$number.json" \
    >"$LOGS/tests-$number.log" 2>&1 </dev/null || code=$?
  return $code
}

tests() {
  # The longest first; what is new, or needs an optional package, is dealt out to the lanes behind them.
  local lanes=("cuda-kernels-in-plans" "packed-heads attention-in-plans generated-kernels" \
    "matmul matmul-fusions elsewhere capture tune" "attention-structure attention-apart" "own-scales convert" "transformer-layer")
  local name others=0 begin=$SECONDS most
  for name in $($PYTHON -m benchmarks.gpu.tests --part list | awk '{print $1}'); do
    case " ${lanes[*]} memcheck racecheck " in *" $name "*) continue ;; esac
    lanes[3 + others % 3]+=" $name"
    others=$((others + 1))
  done
  most=$((BUDGET - SECONDS))
  export -f lane
  export PYTHON COMMIT LOGS
  timeout -k 10 "$most" bash -c "$(for name in "${!lanes[@]}"; do echo "lane $((name + 1)) ${lanes[name]} &"; done; echo wait)"
  $PYTHON - "$FOLDER/tests.json" "$LOGS"/tests-?.json <<'PYTHON'
import json, os, sys
target, *lanes = sys.argv[1:]
whole = json.load(open(target)) if os.path.exists(target) else {"parts": {}}
for lane in filter(os.path.exists, lanes):
    found = json.load(open(lane))
    whole = {**found, "parts": {**whole["parts"], **found["parts"]}}
json.dump(whole, open(target, "w"), indent=1)
PYTHON
  for name in 1 2 3 4 5 6; do
    [[ -f $LOGS/tests-$name.log ]] || continue
    keep "tests-$name"
    grep -E '^(FAILED|ERROR)|passed|failed|part  ' "$LOGS/tests-$name.log" | tail -n 40
    tail -n 12 "$LOGS/tests-$name.log"
  done
  say "$(printf '%-14s        %4d s  (at %d s)' tests $((SECONDS - begin)) "$SECONDS")"
}

part() {
  local name=$1 options=()
  case $DONE in *" $name "*) return 0 ;; esac
  if ((SECONDS + $(estimate "$name") > BUDGET)); then
    left_out="$left_out $name"
    return 0
  fi
  case $name in
    tests) tests; DONE="$DONE$name "; return 0 ;;
    memcheck | racecheck)
      attempt "$name" 330 $PYTHON -m benchmarks.gpu.tests --part "$name" --commit "$COMMIT" \
        --record "$FOLDER/tests.json" ;;
    kernels)
      attempt kernels 150 $PYTHON -m benchmarks.gpu.kernels --layer --commit "$COMMIT" --record "$FOLDER" ;;
    train) options=(--train-steps "$TRAIN_STEPS") ;;&
    *) attempt "$name" 330 $PYTHON -m benchmarks.gpu --part "$name" --commit "$COMMIT" --record "$FOLDER/bench.json" \
      "${options[@]}" ;;
  esac && DONE="$DONE$name " || failed="$failed $name"
  keep "$name"
}

side_by_side() { # parts of each GPU: the processors are shared out, so that one's host work is not in the other's way
  local number=0 cores=$(($(nproc) / $#)) parts
  install || exit 1
  for parts in "$@"; do
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=$number FOLDER=$FOLDER/gpu-$number BUDGET=$((BUDGET - SECONDS)) \
      taskset -c $((number * cores))-$(((number + 1) * cores - 1)) bash benchmarks/slots.sh parts $parts \
      >"$LOGS/gpu-$number.out" 2>&1 </dev/null &
    number=$((number + 1))
  done
  wait
  tail -n 30 "$FOLDER"/gpu-*/summary.txt
}

case ${1:-} in
  all)
    queue=(tests memcheck racecheck first-call host small decoding cached layer mlp llama converted glue train layer-fp16 train-exact stack growth kernels) ;;
  parts) shift; queue=("$@") ;;
  gpus) shift; side_by_side "$@"; exit ;;
  *) sed -n 2,14p "${BASH_SOURCE[0]}"; exit 2 ;;
esac

say "$1 of commit $COMMIT, $(date -u +%FT%TZ)"
nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.sm --format=csv,noheader 2>&1 | tee -a "$FOLDER/summary.txt"
install || { say "the package does not install: nothing can be measured"; exit 1; }
say "installed at $SECONDS s"
for name in "${queue[@]}"; do part "$name"; done
say "took $SECONDS s; failed:${failed:- nothing}; left out:${left_out:- nothing}"
[[ -z $left_out$failed ]] || say "next: COMMIT=$COMMIT DONE=\"$(echo $DONE)\" bash benchmarks/slots.sh $*"
