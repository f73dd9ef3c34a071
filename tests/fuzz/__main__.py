"""Random modules on simulated ranks: `python -m tests.fuzz --count 2000`; see tests/fuzz/run.py."""

from .run import main

if __name__ == "__main__":
    raise SystemExit(main())
