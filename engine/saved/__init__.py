"""What a session has read, on disk: whole sessions in one file, and blocks found by content."""
