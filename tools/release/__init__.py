"""Making what is given to users."""
