# Commands of everyday work; `just` (https://just.systems) lists them. Everything here is plain cargo and scripts.

# Tests in `test` and `e2e` run under nextest where it is installed: side by side, each in a process of its own.
nextest := `cargo nextest --version >/dev/null 2>&1 && echo yes || echo no`

# Lists the commands.
default:
    @just --list --unsorted

# Format, lints, tests of the pure crates: what every commit should pass. At most 75 seconds warm on 2 cores.
check:
    cargo fmt --all --check
    cargo clippy --locked --workspace --all-targets -- -D warnings
    cargo test --locked --package inflight-contract --package inflight-router-core --package inflight-worker-core

# All tests; arguments select some: `just test fair_queue`.
test *arguments:
    {{ if nextest == "yes" { "cargo nextest run --workspace" } else { "cargo test --workspace" } }} {{ arguments }}

# Whole clusters of real processes only.
e2e *arguments:
    {{ if nextest == "yes" { "cargo nextest run --workspace --test cluster" } else { "cargo test --workspace --test cluster" } }} {{ arguments }}

# What CI runs.
ci:
    .ci/run

# What runs at night and before a release: all lanes, or those that are named; `.ci/nightly --list` lists them.
nightly *lanes:
    .ci/nightly {{ lanes }}

# Fuzzes the parsers of untrusted input, each for so many seconds: all of them, or those that are named.
fuzz seconds *targets:
    tests/fuzz/run {{ seconds }} {{ targets }}

# Everything that the GPU suite needs, in target/gpu-bundle.tar.xz; unpack it on a machine with a GPU and start `first` there.
gpu:
    tests/gpu/bundle

# A container image without Docker, in target/image/out: `just image`, or `just image gpu` with the libraries for GPUs.
image variant="cpu":
    cargo build --release --locked
    deploy/image/build --variant {{ variant }} --output target/image/out --packages target/ci/image/packages

# The CPU runtime against the limits of the machine, measured beside it; the router's own cost per token.
bench:
    cargo bench --package inflight-worker --bench shares
    cargo bench --package inflight-router --bench overhead

# Everything that a release consists of, in target/release-VERSION; arguments go to deploy/release/build (see its --help).
release *arguments:
    deploy/release/build {{ arguments }}

# Dependencies: licences, bans, sources, unused ones (needs cargo-deny and cargo-machete).
dependencies:
    cargo deny check bans licenses sources
    cargo machete

# Makes the picture of README anew, of the program that is built; needs puppeteer-core and Chromium as .ci/run installs them.
picture:
    NODE_PATH=target/ci/npm/node_modules INFLIGHT_TEST_BROWSER=target/ci/browser/chromium-with-libraries \
        node tests/clients/node/page/picture.cjs target/debug/inflight docs/images/live-page.png
