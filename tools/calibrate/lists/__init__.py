"""What commands share that find whose lists of tokens are alike."""
