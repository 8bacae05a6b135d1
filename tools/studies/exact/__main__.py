"""python -m tools.studies.exact: see the package."""

from tools.studies.exact.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
