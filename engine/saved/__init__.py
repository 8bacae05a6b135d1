"""Sessions on disk: whole sessions in one file, and blocks of rows found by content."""
