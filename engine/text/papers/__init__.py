"""Documents in other formats, read as text in a process of their own."""
