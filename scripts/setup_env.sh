# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and .ci/run: `setup_env EXTRAS` makes .venv in the repository if it is missing and installs
# tpattn into it (editable), with these extras of pyproject.toml ("", "test" or "test,dev"). It sets REPO and VENV. When the same
# pyproject.toml is installed already it returns at once; what a killed run left half made is made anew.
#
#   PYTHON=python3.12     the interpreter to make .venv with, 3.11 or later (default: the first that fits of python3, python3.14, ...)
#   TPATTN_TORCH=2.13.0   the torch to install when .venv has none: a version, and after it any arguments for pip, such as
#                           TPATTN_TORCH="2.13.0 --index-url URL"   (a small build without CUDA, or another version of CUDA: the
#                                                                   page "Get Started" of PyTorch gives the URL of each)
#                         or a requirement, such as TPATTN_TORCH="torch>=2.13,<2.15". Set later, it changes the torch of .venv.
#
# A .venv that you made yourself is used as it is, with the torch that is in it, and never removed.

TORCH_DEFAULT=2.13.0
REPO="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$REPO/.venv"

_say() { printf '%s\n' "$*"; }
_who() { id -un 2> /dev/null || id -u; }
_fail() { printf '%s\n' "$@" >&2; exit 1; }

setup_env() {
    local extras="$1"
    # What the caller's shell has set for other Pythons does not concern this one.
    unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
    if [ ! -d "${HOME:-}" ] || [ ! -w "${HOME:-}" ]; then       # pip and matplotlib would complain, and write elsewhere
        export HOME="$VENV/home" PIP_NO_CACHE_DIR=1
    fi
    if ! _is_installed "$extras"; then
        _take_turns
        if ! _is_installed "$extras"; then _install "$extras"; fi       # another run may have done it while this one waited
        exec 9>&-
    fi
    [ -d "$HOME" ] || mkdir -p "$HOME"
}

# launch_local N SCRIPT ARGUMENTS...: SCRIPT in N processes on this machine, one thread each, silent but for what they print.
launch_local() {
    local loopback=lo
    [ "$(uname -s)" != Darwin ] || loopback=lo0
    # One thread each, and saying so keeps torchrun from printing a banner about it. All processes are here, so they meet over
    # the loopback device: by this machine's name, which a laptop or a container may not resolve, torchrun waits for minutes and
    # then fails, and gloo warns. torch also logs a warning for each socket whose address has no name: only errors are shown.
    OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$loopback}" \
        TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" \
        "$VENV/bin/python" -P -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$@"
}

# The stamp says what is installed: line 1 pyproject.toml's checksum and the repository's place (an editable install names it),
# line 2 the extras, line 3 the value of TPATTN_TORCH.
_is_installed() {
    local head extras torch extra
    [ -x "$VENV/bin/python" ] && [ -f "$VENV/tpattn-installed" ] && [ ! -e "$VENV/tpattn-unfinished" ] || return 1
    { IFS= read -r head && IFS= read -r extras && IFS= read -r torch; } < "$VENV/tpattn-installed" || return 1
    [ "$head" = "$(_stamp_head)" ] || return 1
    [ -z "${TPATTN_TORCH:-}" ] || [ "$torch" = "$TPATTN_TORCH" ] || return 1
    for extra in ${1//,/ }; do
        case ",$extras," in *",$extra,"*) ;; *) return 1 ;; esac
    done
}

_stamp_head() { printf '%s %s' "$(cksum < "$REPO/pyproject.toml")" "$REPO"; }

_install() {
    local extras="$1" known wanted
    _make_venv
    wanted="${TPATTN_TORCH:-}"
    if [ -n "$wanted" ] || ! "$VENV/bin/python" -P -c 'import torch' > /dev/null 2>&1; then
        _install_torch "${wanted:-$TORCH_DEFAULT}"
    fi
    if [ -f "$VENV/tpattn-installed" ]; then                    # keep what an earlier run added
        known="$(sed -n 2p "$VENV/tpattn-installed")"
        extras="$(printf '%s' "$extras,$known" | tr ',' '\n' | sed '/^$/d' | sort -u | paste -s -d , -)"
        [ -n "$wanted" ] || wanted="$(sed -n 3p "$VENV/tpattn-installed")"
    fi
    _say "installing tpattn${extras:+ with the packages for $extras} ..."
    (cd "$REPO" && _pip "tpattn and what it needs" -e ".${extras:+[$extras]}") || exit 1
    printf '%s\n%s\n%s\n' "$(_stamp_head)" "$extras" "$wanted" > "$VENV/tpattn-installed.new"
    mv "$VENV/tpattn-installed.new" "$VENV/tpattn-installed"
}

_install_torch() {
    local words
    set -f      # split into words, but take * and [ as they are
    # shellcheck disable=SC2206
    words=($1)
    set +f
    case "${words[0]}" in [0-9]*) words[0]="torch==${words[0]}" ;; esac
    _say "installing ${words[0]} (a download of 0.2 GB without CUDA, 3 GB with it; TPATTN_TORCH chooses, see scripts/setup_env.sh) ..."
    _pip torch "${words[@]}"
}

# Make .venv unless a usable one is there.
_make_venv() {
    local python version
    if [ -e "$VENV/tpattn-unfinished" ] && [ -e "$VENV/tpattn-made" ]; then
        _say "an earlier run was interrupted: making .venv anew ..."
        rm -rf "$VENV"
    elif [ -e "$VENV/pyvenv.cfg" ] && ! "$VENV/bin/python" -c '' > /dev/null 2>&1; then
        [ -e "$VENV/tpattn-made" ] || _fail "$VENV has no Python that runs, and was not made by this script." \
            "Repair or remove it, then run this again."
        _say "the Python of .venv is gone: making it anew ..."
        rm -rf "$VENV"
    fi
    if [ -e "$VENV/pyvenv.cfg" ]; then
        _new_enough "$VENV/bin/python" || _fail "$VENV has Python $(_version "$VENV/bin/python"); tpattn needs 3.11 or later." \
            "Remove the folder, and this script makes it again with a Python that fits (PYTHON=... chooses one)."
        "$VENV/bin/python" -m pip --version > /dev/null 2>&1 || "$VENV/bin/python" -m ensurepip > /dev/null 2>&1 ||
            _fail "$VENV has no pip, and ensurepip cannot add it. Install pip there, or remove the folder."
        return
    fi
    python="$(_find_python)" || exit 1
    version="$(_version "$python")"
    "$python" -c 'import venv, ensurepip' > /dev/null 2>&1 || _fail \
        "Python $version ($python) has no venv module, which makes .venv." \
        "Debian and Ubuntu keep it in a package of its own: sudo apt install python3-venv" \
        "(or python${version%.*}-venv). Or name another Python: PYTHON=/path/to/python3 \"$0\""
    _say "making .venv with Python $version ..."
    mkdir -p "$VENV" 2> /dev/null || _fail "cannot make $VENV:" \
        "the folder is not writable for $(_who), or the disk is full"
    : > "$VENV/tpattn-unfinished"
    : > "$VENV/tpattn-made"
    "$python" -m venv "$VENV" > "$VENV/tpattn-pip.log" 2>&1 || _explain "python -m venv"
    rm "$VENV/tpattn-unfinished"
}

_find_python() {
    local python
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" > /dev/null 2>&1 && [ -n "$(_version "$PYTHON")" ] || _fail "PYTHON=$PYTHON: no Python runs by this name"
        _new_enough "$PYTHON" || _fail "PYTHON=$PYTHON is Python $(_version "$PYTHON"); tpattn needs 3.11 or later"
        command -v "$PYTHON"
        return
    fi
    for python in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if _new_enough "$python"; then
            command -v "$python"
            return
        fi
    done
    _fail "tpattn needs Python 3.11 or later; here is: $(_version python3 | sed 's/^/python3 = /;s/^$/none/')" \
        "Install one (Debian, Ubuntu: sudo apt install python3 python3-venv), or name it: PYTHON=/path/to/python3 \"$0\""
}

_version() { "$1" -c 'import platform; print(platform.python_version())' 2> /dev/null || echo; }
_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; }

# _pip WHAT ARGUMENTS...: pip install, silent unless it fails.
_pip() {
    local what="$1"
    shift
    : > "$VENV/tpattn-unfinished"
    [ -d "$HOME" ] || mkdir -p "$HOME"
    "$VENV/bin/python" -P -m pip install --quiet --no-input --disable-pip-version-check "$@" > "$VENV/tpattn-pip.log" 2>&1 < /dev/null ||
        _explain "installing $what"
    rm "$VENV/tpattn-unfinished"
}

# The output of what failed, and what it means.
_explain() {
    local log="$VENV/tpattn-pip.log"
    printf '\n' >&2
    cat "$log" >&2 2> /dev/null
    printf '\n%s failed; the output is above.\n' "$1" >&2
    if grep -qi 'No space left on device\|Errno 28\|Disk quota exceeded\|Errno 122' "$log" || _disk_is_full; then
        _fail "The disk is full: torch needs about 1.5 GB without CUDA and 8 GB with it, in $VENV and, while installing," \
            "in ${TMPDIR:-/tmp} (TMPDIR=... names another place)."
    fi
    # pip gave up by itself, before it changed anything: the next run may go on from here.
    [ "$1" = "python -m venv" ] || rm -f "$VENV/tpattn-unfinished"
    if grep -qi 'name resolution\|Name or service not known\|nodename nor servname\|Failed to establish\|NewConnectionError\|Network is unreachable\|Connection refused\|ConnectTimeout\|timed out\|ProxyError\|Connection reset' "$log"; then
        _fail "The package index did not answer: is there a network, and does a proxy or mirror need PIP_INDEX_URL or HTTPS_PROXY?"
    elif grep -qi 'No matching distribution found for torch\|Could not find a version that satisfies the requirement torch' "$log"; then
        _fail "No such torch for Python $(_version "$VENV/bin/python") on $(uname -s) $(uname -m): TPATTN_TORCH=... chooses another version or index," \
            "PYTHON=... another Python (remove .venv first)."
    fi
    exit 1
}

_disk_is_full() { [ "$(df -Pk "$VENV" 2> /dev/null | awk 'NR == 2 { print $4 }')" = 0 ]; }

# One set-up at a time, where the system can lock; a lock ends with the processes that hold it.
_take_turns() {
    : 2> /dev/null >> "$REPO/.venv.lock" || _fail "cannot write to $REPO, where .venv is made:" \
        "the folder is not writable for $(_who), or the disk is full"
    exec 9>> "$REPO/.venv.lock"
    if command -v flock > /dev/null 2>&1 && ! flock -n 9; then
        _say "another run is setting up .venv: waiting for it ..."
        flock 9
    fi
}
