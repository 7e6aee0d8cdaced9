#!/bin/sh
# Installs the program of a release for this machine, without root: install.sh [--base-url URL] [--prefix FOLDER]
#
#   --base-url URL   folder of a release, https:// or file://; default: INFLIGHT_BASE_URL, else the folder of this script if it is that of a
#                    release, else what whoever published this script wrote below
#   --prefix FOLDER  the program becomes FOLDER/bin/inflight; default: INFLIGHT_PREFIX, else ~/.local
#
# It reads SHA256SUMS of the release, downloads the archive of this machine, and unpacks it only if its checksum is the one that stands
# there. A program that is installed already is replaced in one step. Nothing else is written.
set -eu

# Where the release lies that this script is part of: deploy/release/build --base-url writes it. Empty: no place is known.
DEFAULT_BASE_URL=""

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# fetch URL FILE - downloads a file, or copies it.
fetch() {
    case $1 in
    file://*)
        [ -f "${1#file://}" ] || fail "${1#file://} is missing: is this the folder of a release?"
        cp "${1#file://}" "$2" || fail "cannot copy ${1#file://} to $2"
        ;;
    https://*)
        if command -v curl >/dev/null 2>&1; then
            curl --fail --silent --show-error --location --proto '=https' --tlsv1.2 --retry 3 --output "$2" "$1" ||
                fail "cannot download $1: check the address and the connection"
        elif command -v wget >/dev/null 2>&1; then
            wget -q -O "$2" "$1" || fail "cannot download $1: check the address and the connection"
        else
            fail "neither curl nor wget is installed: install one of them, or give a folder of files by --base-url file:///FOLDER"
        fi
        ;;
    *) fail "$1 is neither https:// nor file://: give the folder of a release by one of them" ;;
    esac
}

# checksum FILE - the SHA-256 of a file.
checksum() {
    if command -v sha256sum >/dev/null 2>&1; then
        sum=$(sha256sum <"$1")
    elif command -v shasum >/dev/null 2>&1; then
        sum=$(shasum -a 256 <"$1")
    elif command -v openssl >/dev/null 2>&1; then
        sum=$(openssl dgst -sha256 -r <"$1")
    else
        fail "none of sha256sum, shasum and openssl is installed, so the download cannot be checked: install one of them"
    fi
    echo "${sum%% *}"
}

# machine - the name of this machine's architecture in archives.
machine() {
    [ "$(uname -s)" = Linux ] ||
        fail "releases have programs for Linux, and this is $(uname -s): build it from the sources with cargo build --release"
    case $(uname -m) in
    x86_64 | amd64) echo x86_64 ;;
    aarch64 | arm64) echo aarch64 ;;
    *) fail "releases have programs for x86_64 and aarch64, and this is $(uname -m): build it from the sources with cargo build --release" ;;
    esac
}

# Everything is in functions, so that a script that is cut off on its way to a shell does nothing.
main() {
    base=${INFLIGHT_BASE_URL:-}
    prefix=${INFLIGHT_PREFIX:-}
    while [ $# -gt 0 ]; do
        case $1 in
        --base-url | --prefix)
            [ $# -gt 1 ] || fail "$1 needs a value"
            if [ "$1" = --prefix ]; then prefix=$2; else base=$2; fi
            shift 2
            ;;
        --help | -h)
            echo "install.sh [--base-url URL] [--prefix FOLDER]: installs inflight from the folder of a release, URL or INFLIGHT_BASE_URL, as"
            echo "FOLDER/bin/inflight (FOLDER or INFLIGHT_PREFIX, else ~/.local)"
            exit 0
            ;;
        *) fail "unknown argument $1; known are --base-url URL, --prefix FOLDER and --help" ;;
        esac
    done
    if [ -z "$base" ] && [ -f "$0" ] && [ -f "$(dirname "$0")/SHA256SUMS" ]; then
        base="file://$(cd "$(dirname "$0")" && pwd)"
    fi
    base=${base:-$DEFAULT_BASE_URL}
    [ -n "$base" ] ||
        fail "no release is known: there is no public place of releases yet, so give the folder of one by --base-url or INFLIGHT_BASE_URL, such as https://example.com/inflight/1.0.0 or file:///srv/inflight"
    base=${base%/}
    if [ -z "$prefix" ]; then
        [ -n "${HOME:-}" ] || fail "HOME is not set: give a folder by --prefix"
        prefix=$HOME/.local
    fi
    machine=$(machine)
    bin=$prefix/bin
    mkdir -p "$bin" 2>/dev/null || fail "cannot make the folder $bin: give one that you may write to by --prefix"
    [ -w "$bin" ] || fail "$bin cannot be written: give another folder by --prefix"
    bin=$(cd "$bin" && pwd)

    work=$(mktemp -d) || fail "cannot make a temporary folder: set TMPDIR to a folder that you may write to"
    new=$bin/.inflight-$$
    trap 'rm -rf "$work" "$new"' EXIT
    trap 'exit 1' HUP INT TERM

    fetch "$base/SHA256SUMS" "$work/SHA256SUMS"
    archives=$(sed -n "s/^[0-9a-f]\{64\}  \(inflight-[A-Za-z0-9._+-]*-$machine-linux\.tar\.gz\)\$/\1/p" "$work/SHA256SUMS")
    case $(printf '%s' "$archives" | grep -c .) in
    1) ;;
    0) fail "$base/SHA256SUMS has no archive inflight-VERSION-$machine-linux.tar.gz: is this the folder of a release?" ;;
    *) fail "$base/SHA256SUMS has several archives for $machine: give the folder of one release" ;;
    esac
    archive=$archives
    fetch "$base/$archive" "$work/$archive"
    expected=$(sed -n "s/^\([0-9a-f]\{64\}\)  $archive\$/\1/p" "$work/SHA256SUMS")
    found=$(checksum "$work/$archive")
    [ "$found" = "$expected" ] ||
        fail "$base/$archive has the SHA-256 $found, and SHA256SUMS says $expected: it was damaged or changed, so nothing was installed"

    name=${archive%.tar.gz}
    tar -xzf "$work/$archive" -C "$work" "$name/inflight" || fail "cannot unpack $name/inflight of $archive"
    cp "$work/$name/inflight" "$new" || fail "cannot write to $bin: is its file system full?"
    chmod 755 "$new"
    version=$("$new" --version 2>&1) || fail "the program of $archive does not run on this machine, so nothing was installed: $version"
    mv -f "$new" "$bin/inflight" || fail "cannot replace $bin/inflight"

    echo "$version is installed as $bin/inflight"
    case ":${PATH:-}:" in
    *":$bin:"*) ;;
    *) printf 'It is not on PATH: export PATH="%s:$PATH"\n' "$bin" ;;
    esac
    echo "A router and two workers with the demo model:  inflight up"
    echo "Then, in another terminal:                     inflight generate \"What is continuous batching?\""
}

main "$@"
