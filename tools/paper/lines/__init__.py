"""Lines of papers that no other program of tools measures, each a function of one text."""
