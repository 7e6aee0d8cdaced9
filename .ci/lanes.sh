# Functions of .ci/run and .ci/nightly, which source this file: lanes with budgets, tests with durations, a summary.
# shellcheck shell=bash
#
# A lane is a command with a budget in seconds. One that takes more than half as long again has failed: move what is slow to a lane of
# .ci/nightly, merge tests, or make them faster.

TOOLS="$PWD/target/ci"
UV_VERSION=0.13.9
mkdir -p "$TOOLS"
export CARGO_TERM_COLOR=never
passed=0
failures=()
durations=()
log="$TOOLS/lane.log"
declare -A started=() budgets=()
# What was started ends with the script.
trap 'jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true' EXIT

# lane NAME BUDGET COMMAND... - runs a lane to its end, shows its output and its duration; the script goes on after a failure.
lane() {
    local name=$1 start=$SECONDS status=0
    budgets[$name]=$2
    shift 2
    printf '\n== %s\n' "$name"
    # `set -e` does not hold inside a condition, so each lane is a bash of its own.
    bash -euo pipefail -c "$(declarations); $*" 2>&1 | tee "$log" || status=$?
    report "$name" "$status" $((SECONDS - start))
}

# start NAME BUDGET COMMAND... - starts a lane that mostly downloads or waits, beside the following ones, on what they leave of the
# processors.
start() {
    local name=$1 file="$TOOLS/lane-${1// /-}"
    budgets[$name]=$2
    shift 2
    (
        begun=$SECONDS status=0
        nice -n 10 bash -euo pipefail -c "$(declarations); $*" >"$file.log" 2>&1 || status=$?
        echo "$status $((SECONDS - begun))" >"$file.status"
    ) &
    started[$name]=$!
}

# finish NAME... - waits for lanes that were started, and shows each.
finish() {
    local name file status took
    for name in "$@"; do
        file="$TOOLS/lane-${name// /-}"
        printf '\n== %s, started earlier\n' "$name"
        wait "${started[$name]}" || true
        cat "$file.log"
        read -r status took <"$file.status"
        rm "$file.log" "$file.status"
        report "$name" "$status" "$took"
    done
}

# report NAME STATUS SECONDS - shows and counts the outcome of a lane.
report() {
    local name=$1 status=$2 took=$3 budget=${budgets[$1]}
    durations+=("$(printf '%5d s of %4d  %s' "$took" "$budget" "$name")")
    if [[ $status -eq 0 && $took -gt $((budget * 3 / 2)) ]]; then
        failures+=("$name: $took s exceed its budget of $budget s by more than half")
        printf '== %s: FAILED, passed in %d s, more than half as long again as its budget of %d s\n' "$name" "$took" "$budget"
    elif [[ $status -eq 0 ]]; then
        passed=$((passed + 1))
        printf '== %s: passed in %d s, budget %d s\n' "$name" "$took" "$budget"
    else
        failures+=("$name")
        printf '== %s: FAILED with status %d after %d s\n' "$name" "$status" "$took"
    fi
}

# declarations - what each lane's bash knows: all functions, and all variables in capitals.
declarations() {
    declare -f
    declare -p | grep -E '^declare -- [A-Z_]+='
}

# packages FOLDER ARGUMENT... - installs packages of Python in a virtual environment, which pip can use, too. uv takes seconds of the
# processors where pip takes minutes, on the cores that compile meanwhile.
packages() {
    local folder=$1
    shift
    [[ -x "$folder/bin/python" ]] || python3 -m venv "$folder"
    [[ -x "$folder/bin/uv" ]] || "$folder/bin/pip" install --quiet --disable-pip-version-check "uv==$UV_VERSION"
    UV_CACHE_DIR="$TOOLS/uv-cache" UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}" \
        "$folder/bin/uv" pip install --quiet --python "$folder/bin/python" "$@"
}

# The CUDA compiler and its disassembler come as wheels and need no GPU; all are needed.
install_nvcc() {
    packages "$TOOLS/nvcc" nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 \
        nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 \
        nvidia-cuda-nvdisasm==13.2.51 nvidia-cuda-nvcc-cu12==12.9.86
}

# tested COMMAND... - runs `cargo test` with .ci/test-runner around each test binary.
tested() {
    local host
    host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
    env "CARGO_TARGET_${host}_RUNNER=$PWD/.ci/test-runner" "$@"
}

# slowest COUNT - the slowest tests of the output of .ci/test-runner on standard input, with their binaries.
slowest() {
    awk '$1 == "Running" { sub(/^.*\/deps\//, "", $NF); sub(/-[0-9a-f]*\)$/, "", $NF); binary = $NF }
         $1 == "test" && $NF ~ /^<[0-9.]+s>$/ { seconds = substr($NF, 2, length($NF) - 3); printf "%9.3f s  %s %s\n", seconds, binary, $2 }' |
        sort -rn | awk -v count="$1" 'NR <= count' # not head, which would end sort by a closed pipe
}

# summary - the durations of all lanes, and what failed; returns 1 if anything did.
summary() {
    printf '\ndurations:\n'
    printf '%s\n' "${durations[@]}"
    local name
    for name in "${failures[@]}"; do
        echo "failed: $name"
    done
    echo "lanes: $passed passed, ${#failures[@]} failed, in $SECONDS s"
    [[ ${#failures[@]} -eq 0 ]]
}
