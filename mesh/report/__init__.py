"""What decisions and outcomes mean, in words and numbers for people."""
