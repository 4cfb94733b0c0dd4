# Shared by the scripts in tools/: one virtual environment in .venv, made once and kept current.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "$name"
      return
    fi
  done
  echo "ds4py needs Python 3.11 or newer; none was found as python3 on the PATH" >&2
  exit 1
}

# ensure_venv EXTRAS: EXTRAS is "" or "[dev]". Does nothing if nothing has changed since last time.
ensure_venv() {
  local extras=${1:-} stamp python
  python=$(find_python)
  stamp=$(cat pyproject.toml tools/constraints-cpu.txt | cksum | tr -d ' ')
  if [ -e ".venv/.ready-$stamp$extras" ] || [ -e ".venv/.ready-$stamp[dev]" ]; then
    return
  fi
  echo "setting up .venv (once; takes a minute)" >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  # the pinned CPU build first: an open range would pull a CUDA build of several GB
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r tools/constraints-cpu.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".$extras"
  rm -f .venv/.ready-*
  touch ".venv/.ready-$stamp$extras"
}
