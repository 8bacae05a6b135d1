"""The passages that an answer read, and the page that shows them."""
