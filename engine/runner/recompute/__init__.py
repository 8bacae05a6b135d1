"""Sessions without K and V: each token encodes the newest ones again."""
