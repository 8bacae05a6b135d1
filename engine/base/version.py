"""The version, in one place: `--version`, the package and reports read it here."""

VERSION = "0.1.0"
