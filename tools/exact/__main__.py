"""python -m tools.exact: see the package."""

from tools.exact.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
